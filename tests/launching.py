"""What tests of launches share: jobs on this machine, and the processes that a launch started."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil

from dejavu.init import Draw
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.single import train_single
from dejavu.workload import Workload
from dejavu.workload.models import layers_of
from tests.conftest import local_binding

TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
DRAW = Draw("xavier", seed=7)


def job_of(
    workload: Workload, folder: Path, cuts: tuple[int, ...] = (2,), hosts: Iterable[str] = ("localhost",)
) -> TrainingJob:
    """Stages cut there, stage s on the s-th of the hosts in turn."""
    binding = local_binding(workload, cuts, len(layers_of(workload)))
    placements = (
        replace(placement, device=replace(placement.device, host=host))
        for placement, host in zip(binding.placements, itertools.cycle(hosts), strict=False)
    )
    binding = replace(binding, placements=tuple(placements))
    return TrainingJob(
        workload=workload,
        binding=binding,
        draw=DRAW,
        start_from=None,
        first_step=0,
        last_step=workload.num_steps,
        folder=str(folder),
    )


def largest_difference(workload: Workload, losses: Iterable[float]) -> float:
    """Between these losses and those of one process that trains the same steps."""
    expected = _single(workload.model_dump_json())
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


@cache
def _single(workload: str) -> tuple[float, ...]:
    """The losses of one process, which several tests compare with."""
    found = Workload.model_validate_json(workload)
    return tuple(train_single(found, DRAW, range(found.num_steps)))


RANK_ROOMS = ("dejavu.runtime.", "dejavu.launch.", "dejavu.profiling.")


def runtime_processes() -> list[psutil.Process]:
    """Agents and ranks of these tests; others may run on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if environment.get("DEJAVU_TESTED_BY") != os.environ["DEJAVU_TESTED_BY"]:
            continue
        if any(word.startswith(RANK_ROOMS) for word in words) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def ranks() -> list[psutil.Process]:
    """The ranks of these tests, by their numbers in the plan."""
    return sorted((p for p in runtime_processes() if is_rank(p)), key=lambda p: int(p.name().split()[1]))


def is_rank(process: psutil.Process) -> bool:
    """Whether it is a rank, and no agent or zygote: ranks call themselves so."""
    return process.name().startswith("rank ")


def dask_workers(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of the processes that are workers of a local client: forks of Python's forkserver."""
    servers = {p.pid for p in processes if "forkserver" in " ".join(p.cmdline())}
    return [process for process in processes if process.pid in servers and process.ppid() in servers]


def once(action: Callable[[], object], at_step: int) -> Callable[[int, float], None]:
    """An `on_step` that acts the first time the step is reached."""
    counter = itertools.count()

    def on_step(step: int, loss: float) -> None:
        if step >= at_step and next(counter) == 0:
            action()

    return on_step
