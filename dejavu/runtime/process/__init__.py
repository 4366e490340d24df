"""Processes that do not outlive their parent, and their place on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import torch

from dejavu.foundation.processes.parents import PARENT, die_with_parent, name_process, named_parent
from dejavu.runtime.process.group import shares_gpus

__all__ = [
    "ATTEMPT",
    "GRACE_SECONDS",
    "KEEPS_MEMORY",
    "MEASURING",
    "PARENT",
    "attempt_number",
    "claim_device",
    "die_with_parent",
    "end_agent",
    "go_first",
    "is_launched_by_hand",
    "name_process",
    "named_parent",
    "rank_environment",
    "rank_settings",
]

ATTEMPT = "DEJAVU_ATTEMPT"
MEASURING = -20  # the priority of measuring processes
GRACE_SECONDS = 15.0  # an agent that takes longer to end its ranks is killed together with them
_NOT_FOR_RANKS = ("MLFLOW_RUN_ID", "PREFECT__FLOW_RUN_ID")


def go_first() -> None:
    """Raise this process's priority for some seconds of measuring, if the user is permitted to.

    Other programs then get about a hundredth of the core (Linux's weights, 1.25 a step), and the caches stay this
    process's. At half of it (−10) they get a tenth, and small passes were measured up to a third too long.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, MEASURING)


def attempt_number() -> int:
    """Return how often the ranks of this launch were restarted before; the same number on every host.

    torchrun's own count is not: where a rank of another host failed, it restarts this host's without counting.
    """
    return int(os.environ.get(ATTEMPT, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def is_launched_by_hand() -> bool:
    """Return whether torchrun's own agent started this rank: of ours, a launcher reads what ranks write."""
    return ATTEMPT not in os.environ


# By default glibc returns freed memory to the kernel and gets it back page by page: training a convolutional model took
# a quarter longer with many microbatches in flight. Ranks need their memory again in the next step.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(16 * 2**30), "MALLOC_MMAP_THRESHOLD_": str(16 * 2**30)}


def rank_settings(interface: str = "lo") -> dict[str, str]:
    """Return the environment variables that a rank has of ours: also what a line to start it by hand has to set.

    Args:
        interface: the network interface that gloo uses; empty: it takes that of the host's name.
    """
    own = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return {**own, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **KEEPS_MEMORY}


def rank_environment(interface: str = "lo") -> dict[str, str]:
    """Return the environment of a rank: gloo's network interface, one compute thread, nothing of the flow's own run."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_RANKS}
    return {**kept, **rank_settings(interface)}


def end_agent(agent: subprocess.Popen[bytes]) -> None:
    """Terminate the agent, which ends its ranks; if it does not end, kill it, and the kernel kills its ranks."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def claim_device(index: int) -> torch.device:
    """Return the device with this index on this host: a GPU, or one CPU core, to which this process is then pinned.

    Cores are shared where there are fewer; GPUs only if `group.SHARE_GPUS` says so.

    A rank shares its core with gloo's threads. If one of them is woken and takes the core while the rank's own thread
    holds the lock of a connection, it asks for that lock until its time is up: a message of 35 us then takes 4 ms. As
    batch work, which the threads inherit, they wait until the rank waits.
    """
    if torch.cuda.is_available():
        index = index % torch.cuda.device_count() if shares_gpus() else index
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    with suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    return torch.device("cpu")
