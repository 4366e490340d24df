"""What orchestration costs: successive halving on Dask against plain training, and trials that do nothing.

Drawing the weights of each trial once and the steps that all of them train together, at the pace of plain trainings
that keep all cores busy, are the work; what the search takes longer is orchestration: tasks, files between rungs,
building the model again after a rung, waiting at rungs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import distributed
import numpy as np
from torch import nn

from benchmarks.initialization.gains import FIRST_SEED
from benchmarks.initialization.runs import workload_of
from dejavu.foundation.registry import named
from dejavu.init import PROPOSERS, Draw, space_of
from dejavu.runtime.single import train_single
from dejavu.trials import TrialSpec, local_client, run_trials, search_initialization
from dejavu.workload import SyntheticSettings, TrialSettings, Workload

ROUNDS, QUICK_ROUNDS = 3, 1
PLAIN_STEPS = 60  # of a plain training beside the others
WARMUP_STEPS = 5
NUM_DRAWN = 10
NUM_TRIVIAL = 1000


def trivial_model() -> nn.Sequential:
    """The least that can be trained."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))


def measure(names: Sequence[str], *, quick: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each task and round, one for the trivial trials; the summary has each task's median."""
    workers, rows = len(os.sched_getaffinity(0)), list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory(prefix="dejavu-overhead-") as folder,
        local_client(workers, Path(folder) / "dask") as client,
    ):
        for name in names:
            for number in range(QUICK_ROUNDS if quick else ROUNDS):
                rows.append(_halving(client, name, workers, FIRST_SEED + number, Path(folder) / f"{name}-{number}"))
        trivial = _trivial(client, workers, Path(folder) / "trivial")
    tasks = {
        name: {"overhead_percent": median(r["overhead_percent"] for r in rows if r["task"] == name)} for name in names
    }
    return [*rows, trivial], {"tasks": tasks, "trivial_trial_ms": trivial["ms_each"]}


def plain_seconds(task: str, seed: int) -> tuple[float, float]:
    """A step, and drawing a model, of trainings without any orchestration, in a worker's process."""
    began, drew = list[float](), list[float]()
    workload = workload_of(task, seed)
    train_single(workload, Draw(seed=seed), range(PLAIN_STEPS), on_loss=lambda loss: began.append(time.perf_counter()))
    for draw in named(PROPOSERS, "mixed").propose(space_of(workload), NUM_DRAWN, seed=seed):
        before = time.perf_counter()
        train_single(workload, draw, range(0))
        drew.append(time.perf_counter() - before)
    steps = zip(began[WARMUP_STEPS:], began[WARMUP_STEPS + 1 :], strict=False)
    return mean(b - a for a, b in steps), mean(drew)


def _halving(client: distributed.Client, task: str, workers: int, seed: int, folder: Path) -> dict[str, Any]:
    def plain() -> np.ndarray:
        futures = [client.submit(plain_seconds, task, seed, pure=False) for _ in range(workers)]
        return np.mean(client.gather(futures), axis=0)

    before = plain()
    began = time.perf_counter()
    found = search_initialization(client, workload_of(task, seed), folder)
    seconds = time.perf_counter() - began
    step_seconds, draw_seconds = map(float, (before + plain()) / 2)  # the speed of a shared machine drifts
    work = (found.total_steps * step_seconds + len(found.results) * draw_seconds) / workers
    return {
        "task": task,
        "seed": seed,
        "trials": len(found.results),
        "steps": found.total_steps,
        "plain_step_ms": 1e3 * step_seconds,
        "plain_draw_ms": 1e3 * draw_seconds,
        "plain_training_s": len(found.winner.losses) * step_seconds,
        "work_s": work,
        "halving_s": seconds,
        "overhead_percent": 100.0 * (seconds - work) / seconds,
    }


def _trivial(client: distributed.Client, workers: int, folder: Path) -> dict[str, Any]:
    workload = Workload(
        model=f"{__name__}:trivial_model",
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=2, image_shape=(1, 2, 2)),
        batch_size=1,
        num_microbatches=1,
        trials=TrialSettings(count=NUM_TRIVIAL),
    )
    run_trials(client, [TrialSpec(workload, Draw(seed=NUM_TRIVIAL + k), 1) for k in range(workers)], folder)  # imports
    began = time.perf_counter()
    results = run_trials(client, [TrialSpec(workload, Draw(seed=k), 1) for k in range(NUM_TRIVIAL)], folder)
    seconds = time.perf_counter() - began
    assert not any(result.failure or result.remembered for result in results)
    return {"task": "trivial", "trials": NUM_TRIVIAL, "halving_s": seconds, "ms_each": 1e3 * seconds / NUM_TRIVIAL}
