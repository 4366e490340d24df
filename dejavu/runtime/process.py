"""Processes that do not outlive their parent, and their place on the machine."""

from __future__ import annotations

import ctypes
import os
import signal

import torch

PARENT = "DEJAVU_PARENT_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def named_parent() -> dict[str, str]:
    """For the environment of a child that is to die with this process."""
    return {PARENT: str(os.getpid())}


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel for this signal when the parent ends, however it ends; act at once if it already has.

    Whether it has is known where the parent named itself (`named_parent`).
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    named = os.environ.get(PARENT)
    if named and os.getppid() != int(named):
        os.kill(os.getpid(), number)


def claim_device(index: int) -> torch.device:
    """The device with this index on this host: a GPU, or one CPU core to which the process is pinned."""
    if torch.cuda.is_available():
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    torch.set_num_threads(1)
    return torch.device("cpu")
