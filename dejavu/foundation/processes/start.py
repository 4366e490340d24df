"""When a process started, by a clock that nobody sets: with its pid it names the process, because pids are reused."""

from __future__ import annotations

import psutil

SLACK_SECONDS = 2.0  # the kernel gives the boot time in whole seconds


def start_seconds(process: psutil.Process) -> float:
    """Return seconds from the machine's boot to the process's start.

    psutil's own `create_time` moves with the clock: after a jump, a process that runs would not be recognized.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    started: float = process.create_time() - psutil.boot_time()
    return started


def started_at(process: psutil.Process, seconds: float) -> bool:
    """Return whether the process is the one that started `seconds` after the machine's boot."""
    return abs(start_seconds(process) - seconds) < SLACK_SECONDS
