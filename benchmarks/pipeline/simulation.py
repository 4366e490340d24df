"""Simulated against measured steps, and the schedules' efficiency: small models, ranks pinned to the cores.

Stage costs come from a fresh cost database: every distinct layer is measured alone, as `dejavu profile` does, at each
microbatch size, and so are messages and what the runtime takes of a core. Where there are more ranks than cores, rank r
sits on core r mod the number of cores, the simulator lets the ranks of a core share it equally, and layers are measured
with as many processes on each core: they take turns with its caches, too.
A machine that others share is disturbed for seconds at a time (`dejavu.timing.interference`): such repeats and such
steps do not count, and the table says how many did. `all_steps_percent` is the error against all steps, disturbed or
not. Costs are measured before and after the trainings that they are to foretell; what is simulated is the mean.
The efficiency is the schedule's own bound over the measured step: the same action list simulated with the passes'
measured medians, without any message or overhead.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import typer

from benchmarks.pipeline.plans import by_hand, even_bounds, job_of, one_device
from benchmarks.pipeline.ranks import LEAST_STEPS, Trained, train_all
from dejavu.cluster import Cluster, this_machine
from dejavu.foundation.registry import named
from dejavu.graphs.capture import capture
from dejavu.parallelism import Parallelism
from dejavu.planning.prices import price_workload
from dejavu.plans import Plan
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES as EVERY
from dejavu.plans.schedule import allowed_microbatches
from dejavu.profiles import ProfileDatabase
from dejavu.profiling.layers import Conditions, measure_layers
from dejavu.profiling.profiler import Profiler
from dejavu.runtime.job import TrainingJob
from dejavu.simulation import StageSeconds, simulate, simulate_plan
from dejavu.timing.training_times import StageTimes
from dejavu.workload import OptimizerSettings, SyntheticSettings, TrialSettings, Workload

STEPS = 24  # of a training at most; it ends when enough were undisturbed
LEAST_FOR_EFFICIENCY = 8  # microbatches
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zbv")
BASE = {"batch_size": 32, "num_microbatches": 8, "trials": TrialSettings(count=0)}
MODELS = {
    "gpt": Workload(
        model="gpt",
        model_options={"num_blocks": 8, "width": 192, "num_heads": 6},
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=256),
        sequence_length=128,
        **BASE,
    ),
    "cnn": Workload(
        model="cnn",
        model_options={"num_blocks": 8, "width": 96},
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=10, image_shape=(1, 28, 28)),
        optimizer=OptimizerSettings(name="sgd", learning_rate=0.05),
        **BASE,
    ),
}
QUICK: dict[str, Any] = {"ranks": (2,), "microbatches": (8,), "schedules": ("1f1b", "gpipe", "zbv")}


@dataclass(frozen=True)
class Setting:
    """One training of the table."""

    model: str
    num_ranks: int
    schedule: str
    cuts: str
    bounds: tuple[int, ...]
    num_microbatches: int

    @property
    def workload(self) -> Workload:
        return MODELS[self.model].model_copy(update={"num_microbatches": self.num_microbatches})


def table(
    *,
    ranks: tuple[int, ...] = (2, 4),
    microbatches: tuple[int, ...] = (4, 8, 16, 32),
    schedules: tuple[str, ...] = SCHEDULES,
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every model × ranks × schedule × cuts × microbatches."""
    cluster = this_machine()
    rows: list[dict[str, Any]] = []
    (name,) = cluster.device_counts
    core = replace(one_device(), device_type=name)
    with tempfile.TemporaryDirectory(prefix="dejavu-costs-") as folder:
        groups = _groups(_settings(ranks, microbatches, schedules))
        for (model, num_ranks, count), group in groups.items():
            total = sum(map(len, groups.values()))
            typer.echo(f"{len(rows)} of {total}: {model}, {num_ranks} ranks, {count} microbatches", err=True)
            # Before and after they are used: the two differ where the machine itself became slower or faster.
            workload, database = group[0].workload, Path(folder) / f"{model}-{num_ranks}-{count}"
            plans = [by_hand(s.schedule, s.bounds, [core] * s.num_ranks, count) for s in group]
            jobs = [job_of(s.workload, one, STEPS) for s, one in zip(group, plans, strict=True)]
            before = _costs(workload, cluster, num_ranks, database / "before")
            found = _train_in_quiet(jobs)
            costs = (before, _costs(workload, cluster, num_ranks, database / "after"))
            rows += [_row(s, one.plan, costs, run) for s, one, run in zip(group, plans, found, strict=True)]
    errors = [abs(row["error_percent"]) for row in rows]
    efficient = [row["efficiency_percent"] for row in rows if row["microbatches"] >= LEAST_FOR_EFFICIENCY]
    summary = {
        "simulation_median_error_percent": median(errors),
        "simulation_worst_error_percent": max(errors),
        "simulation_rows": len(rows),
        "median_efficiency_percent": median(efficient) if efficient else None,
        "worst_efficiency_percent": min(efficient, default=None),
        "cores": os.cpu_count(),
    }
    return "Simulated against measured steps", rows, summary


def _train_in_quiet(jobs: Sequence[TrainingJob]) -> list[Trained]:
    """All jobs; those that were disturbed nearly all the while a second time."""
    found = train_all(jobs, only_undisturbed=True)
    again = [k for k, run in enumerate(found) if run.num_undisturbed < LEAST_STEPS]
    for k, run in zip(again, train_all([jobs[k] for k in again], only_undisturbed=True), strict=True):
        found[k] = max(found[k], run, key=lambda run: run.num_undisturbed)
    return found


def _settings(ranks: tuple[int, ...], microbatches: tuple[int, ...], schedules: tuple[str, ...]) -> Iterator[Setting]:
    for model, workload in MODELS.items():
        num_layers = len(capture(workload).layers)
        for num_ranks in ranks:
            for name in schedules:
                num_stages = num_ranks * named(EVERY, name).stages_per_rank
                even = even_bounds(num_layers, num_stages)
                for cuts, bounds in (("even", even), ("uneven", _uneven(even))):
                    for count in microbatches:
                        if num_stages <= num_layers and allowed_microbatches(name, num_stages, count):
                            yield Setting(model, num_ranks, name, cuts, bounds, count)


def _groups(settings: Iterator[Setting]) -> dict[tuple[str, int, int], list[Setting]]:
    found: dict[tuple[str, int, int], list[Setting]] = {}
    for setting in settings:
        found.setdefault((setting.model, setting.num_ranks, setting.num_microbatches), []).append(setting)
    return found


def _uneven(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Move every second cut one layer downstream, where that leaves a layer to the next stage."""
    moved = list(bounds)
    for k in range(1, len(bounds) - 1, 2):
        if moved[k] + 1 < bounds[k + 1]:
            moved[k] += 1
    return tuple(moved)


def _costs(workload: Workload, cluster: Cluster, num_ranks: int, folder: Path) -> PricedProblem:
    """Measured now, as the product measures and prices; layers by as many processes at once as there are ranks."""
    graph, database = capture(workload), ProfileDatabase(folder)
    (name,) = cluster.device_counts
    signatures = list(dict.fromkeys(layer.signature for layer in graph.layers))
    rows = measure_layers(workload, graph, signatures, name, Conditions(num_ranks))
    database.append(list(rows))
    Profiler(graph, workload, cluster, database).run(("transfers", "passes"))
    return price_workload(workload, cluster, folder, Parallelism.one_device())


def stage_seconds(times: StageTimes) -> StageSeconds:
    """A stage as it was measured: the step as its passes alone would make it."""
    parts = (times.backward_input_seconds, times.backward_weight_seconds)
    split = parts if any(parts) else (None, None)
    return StageSeconds(
        times.forward_seconds,
        times.backward_seconds or sum(parts),
        times.optimizer_seconds,
        backward_input_seconds=split[0],
        backward_weight_seconds=split[1],
    )


def _cores(plan: Plan) -> list[int]:
    count = len(os.sched_getaffinity(0))
    return [rank % count for rank in range(len(plan.ranks))]


def _row(setting: Setting, plan: Plan, costs: Sequence[PricedProblem], found: Trained) -> dict[str, Any]:
    """Simulated beside measured."""
    played_twice = [simulate_plan(priced, plan, _cores(plan)) for priced in costs]
    before, after = (one.step_seconds for one in played_twice)
    simulated, measured = (before + after) / 2, found.median_step_seconds
    own = simulate(plan, [stage_seconds(times) for times in found.stages], devices=_cores(plan))
    spread = np.percentile(found.step_seconds, (10, 90))
    return {
        "model": setting.model,
        "ranks": setting.num_ranks,
        "schedule": setting.schedule,
        "cuts": setting.cuts,
        "microbatches": setting.num_microbatches,
        "measured_ms": 1e3 * measured,
        "measured_10_to_90_ms": f"{1e3 * spread[0]:.0f}–{1e3 * spread[1]:.0f}",
        "simulated_ms": 1e3 * simulated,
        "error_percent": 100.0 * (simulated / measured - 1.0),
        "all_steps_percent": 100.0 * (simulated / median(found.all_step_seconds) - 1.0),
        "undisturbed_steps": f"{found.num_undisturbed} of {len(found.all_step_seconds)}",
        "costs_drift_percent": 100.0 * (after / before - 1.0),
        "simulated_bubble_percent": 100.0 * played_twice[0].bubble_fraction,
        "efficiency_percent": 100.0 * own.step_seconds / measured,
    }
