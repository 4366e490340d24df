"""Processes that do not outlive their parent, and their place on the machine."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from contextlib import suppress

import torch

PARENT = "DEJAVU_PARENT_PID"
ATTEMPT = "DEJAVU_ATTEMPT"
MEASURING = -20  # the priority of what measures
GRACE_SECONDS = 15.0  # an agent that takes longer to end its ranks is killed, and they with it
_NOT_FOR_RANKS = ("MLFLOW_RUN_ID", "PREFECT__FLOW_RUN_ID")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


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


def name_process(name: str) -> None:
    """What `ps -e`, `top` and psutil are to call this process; at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def go_first() -> None:
    """Ask to come before other programs on the same core, for seconds of measuring; not every user may.

    With this priority they keep about a hundredth of the core (Linux's weights, 1.25 a step), and its caches stay this
    process's. With half of it (−10) they keep a tenth, and small passes were measured a third too long at worst.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, MEASURING)


def attempt_number() -> int:
    """How often the ranks of this launch were started again before this start; the same number on every host.

    torchrun's own count is not: where a rank of another host failed, it starts this host's again without counting.
    """
    return int(os.environ.get(ATTEMPT, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


# By default glibc gives freed memory back to the kernel and takes it again page by page: training a convolutional model
# took a quarter longer with many microbatches in flight. Ranks need their memory again in the next step.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(16 * 2**30), "MALLOC_MMAP_THRESHOLD_": str(16 * 2**30)}


def rank_environment(interface: str = "lo") -> dict[str, str]:
    """The environment of a rank: gloo's network interface, one compute thread, nothing of the flow's own run."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_RANKS}
    own = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**kept, **own, **KEEPS_MEMORY}


def end_agent(agent: subprocess.Popen[bytes]) -> None:
    """End the agent, which ends its ranks; if it will not, its ranks go with it by the kernel's signal."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def claim_device(index: int) -> torch.device:
    """The device with this index on this host: a GPU, or one CPU core to which the process is pinned."""
    if torch.cuda.is_available():
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    torch.set_num_threads(1)
    return torch.device("cpu")
