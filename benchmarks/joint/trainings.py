"""Real ranks over gloo, two hosts of one core each: planned with wrong prices, and as if they were equally fast."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.joint.problems import CORE, cluster_of, scaled
from benchmarks.joint.simulated import JOINT, ONCE, SEARCH
from benchmarks.pipeline.emulation import EmulationError, enter, slowed
from benchmarks.pipeline.plans import job_of
from dejavu.cluster import this_machine
from dejavu.init import Draw
from dejavu.launch.warm import LocalHost, WarmHosts
from dejavu.launch.warm.board import SEAT
from dejavu.migration import ClusterNow, RunningProblem
from dejavu.migration.replanning import best_on
from dejavu.migration.training import ChangingTraining
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest, Prices
from dejavu.runtime.job import TrainingResult
from dejavu.runtime.single import train_single
from dejavu.workload import ReplanSettings, SyntheticSettings, TrialSettings, Workload

HOSTS = ("alpha", "beta")
SHARES = (0.4, 0.15)  # of a core for each host, planned as if they were equal; less than other work here leaves them
SPREAD = 0.5  # standard deviation of the logarithm of each layer's price over the roofline's
READY_SECONDS = 180.0
IMPROVE = {ONCE: "never", SEARCH: "search", JOINT: "joint"}
WORKLOAD = Workload(
    model="gpt",
    model_options={"num_blocks": 8, "width": 64, "num_heads": 4},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=64),
    sequence_length=32,
    batch_size=8,
    num_microbatches=4,
    num_steps=90,
    checkpoint_every=90,
    trials=TrialSettings(count=0),
    schedule="1f1b",
)


@dataclass
class _Steps:
    """When steps were first reported."""

    at: dict[int, float] = field(default_factory=dict)

    def add(self, step: int, loss: float) -> None:
        self.at.setdefault(step, time.monotonic())

    @property
    def per_second(self) -> float:
        first, last = min(self.at), max(self.at)
        return (last - first) / (self.at[last] - self.at[first])


def roofline() -> RunningProblem:
    """Price the workload's layers by the roofline, on hosts of one core: nothing was measured."""
    (kind,) = this_machine().device_types.values()
    cluster = cluster_of(HOSTS, replace(kind, name=CORE))
    with tempfile.TemporaryDirectory(prefix="dejavu-costs-") as folder:
        counts = (WORKLOAD.num_microbatches,)
        spread = Parallelism.one_device()
        request = PlanRequest(WORKLOAD, cluster, Path(folder), spread, schedules=("1f1b",), microbatches=counts)
        return RunningProblem.of(Prices(request), WORKLOAD.num_microbatches)


def all_trained(seeds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Train once planned, improved by the exact search and by A, in turn, for each seed's wrong prices.

    Returns:
        Rows, and what has to be said of them.
    """
    expected, right = train_single(WORKLOAD, Draw(), range(WORKLOAD.num_steps)), roofline()
    rows, notes = list[dict[str, Any]](), list[str]()
    with ExitStack() as stack:
        groups: tuple[Path, ...] = ()
        try:
            groups = tuple(stack.enter_context(slowed(f"joint-{share}", share)) for share in SHARES)
        except EmulationError as error:
            notes.append(f"devices are whole cores: {error}")
        for seed in range(seeds):
            factor_L = np.random.default_rng(seed).lognormal(0.0, SPREAD, right.priced.problem.num_layers)
            planned = scaled(right, factor_L)
            ways = list(IMPROVE)
            for way in (*ways[seed % len(ways) :], *ways[: seed % len(ways)]):
                rows.append(_row(way, seed, *train(planned, way, groups), expected))
    return rows, notes


def train(planned: RunningProblem, way: str, groups: Sequence[Path]) -> tuple[_Steps, TrainingResult, ChangingTraining]:
    """Train the workload from the plan that these prices make best."""
    now = ClusterNow(planned.cluster)
    binding, steps = best_on(planned, now).binding, _Steps()
    settings = ReplanSettings.model_validate({"action": "migrate", "improve": IMPROVE[way]})
    workload = WORKLOAD.model_copy(update={"replan": settings})
    with tempfile.TemporaryDirectory(prefix="dejavu-joint-") as folder:
        job = replace(job_of(workload, binding, workload.num_steps), folder=folder)
        warm = WarmHosts(Path(folder))
        with _closed(warm):
            warm.add({name: LocalHost() for name in HOSTS})
            warm.wait(HOSTS, READY_SECONDS)
            _take_seats(groups, folder)
            training = ChangingTraining(job, planned, warm, now, watches=False, on_step=steps.add)
            return steps, training.run(), training


@contextmanager
def _closed(warm: WarmHosts) -> Iterator[None]:
    try:
        yield
    finally:
        warm.close()


def _take_seats(groups: Sequence[Path], folder: str) -> None:
    """Give each host's agent, and what it forks from now on, a share of a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    for agent in psutil.Process().children():
        seat = _environment(agent).get(SEAT)
        known = json.loads(seat) if seat else {}
        if known.get("folder") != folder:
            continue
        for process in (agent, *agent.children(recursive=True)):
            number = HOSTS.index(known["host"])
            process.cpu_affinity([cores[number % len(cores)]])
            if groups:
                enter(groups[number], process.pid)


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        found: Mapping[str, str] = process.environ()
    except psutil.Error:
        return {}
    return found


def _row(
    way: str, seed: int, steps: _Steps, result: TrainingResult, training: ChangingTraining, expected: list[float]
) -> dict[str, Any]:
    gains = [one.gain for one in result.migrations if one.gain is not None]
    measured = [gain for gain in gains if gain.after_seconds is not None]
    return {
        "what": "real ranks",
        "seed": seed,
        "way": way,
        "steps_per_second": steps.per_second,
        "changes": len(gains),
        "steps_lost": sum(one.steps_lost for one in result.migrations),
        "change_seconds": sum(one.seconds for one in result.migrations),
        "step_before_ms": 1e3 * gains[0].before_seconds if gains else None,
        "step_predicted_ms": 1e3 * measured[-1].predicted_seconds if measured else None,
        "step_after_ms": 1e3 * (measured[-1].after_seconds or 0.0) if measured else None,
        "decided_cpu_ms": 1e3 * training.improving_seconds,
        "worst_loss_difference": max(abs(a - b) for a, b in zip(result.losses, expected, strict=True)),
        "last_plan": " ".join(str(stage.stop - stage.start) for stage in training.job.binding.plan.stages),
    }
