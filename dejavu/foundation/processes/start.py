"""When a process started, and in which boot, by a clock that nobody sets: with its pid this names the process, because
pids are reused.
"""

from __future__ import annotations

from pathlib import Path

import psutil

SLACK_SECONDS = 2.0  # the kernel gives the boot time in whole seconds
BOOT = Path("/proc/sys/kernel/random/boot_id")


def start_seconds(process: psutil.Process) -> float:
    """Return seconds from the machine's boot to the process's start.

    psutil's own `create_time` moves with the clock: after a jump, a process that runs would not be recognized.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    started: float = process.create_time() - psutil.boot_time()
    return started


def boot_id() -> str:
    """Return the kernel's name for the time since the machine's last boot; empty: it gives none."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def started_at(process: psutil.Process, seconds: float, boot: str = "") -> bool:
    """Return whether the process is the one that started `seconds` after the machine's boot.

    Args:
        boot: the boot's id; empty: not known, as in records of older versions, so any is taken for it.

    Raises:
        psutil.NoSuchProcess: the process has ended.
    """
    return boot in ("", boot_id()) and abs(start_seconds(process) - seconds) < SLACK_SECONDS
