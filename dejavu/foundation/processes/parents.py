"""Processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT = "DEJAVU_PARENT_PID"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


def named_parent() -> dict[str, str]:
    """Return environment variables for a child that is to die with this process."""
    return {PARENT: str(os.getpid())}


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel for this signal when the parent ends, however it ends; send it at once if it already has.

    The latter is detected only if the parent passed `named_parent`.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    named = os.environ.get(PARENT)
    if named and os.getppid() != int(named):
        os.kill(os.getpid(), number)


def name_process(name: str) -> None:
    """Set the name that `ps -e`, `top` and psutil show for this process; at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
