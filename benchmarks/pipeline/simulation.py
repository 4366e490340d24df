"""Simulated against measured steps, and the schedules' efficiency: small models, ranks pinned to the cores.

Stage costs come from a fresh cost database: every distinct layer is measured alone, as `dejavu profile` does, at each
microbatch size, and so are messages and what the runtime takes of a core. Where there are more ranks than cores, rank r
sits on core r mod the number of cores, and the simulator lets the ranks of a core share it equally.
The efficiency is the schedule's own bound over the measured step: the same action list played with the passes' measured
medians, without any message or overhead.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.pipeline.plans import by_hand, even_bounds, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_all
from dejavu.cluster import this_machine
from dejavu.cost import CostTable, TransferCost, cost_table, sources, transfer_cost
from dejavu.cost.passes import PassCost, pass_cost
from dejavu.graph import Graph, capture
from dejavu.plan import Plan
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.campaign import Campaign
from dejavu.runtime.job import StageTimes
from dejavu.schedule import allowed_microbatches, schedule_named
from dejavu.simulate import Message, Simulation, StageSeconds, simulate
from dejavu.workload import OptimizerSettings, SyntheticSettings, TrialSettings, Workload

STEPS = 9  # of each training, the first two without a clock
LEAST_FOR_EFFICIENCY = 8  # microbatches
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zbv")
BASE = {"batch_size": 32, "num_microbatches": 8, "trials": TrialSettings(count=0)}
MODELS = {
    "gpt": Workload(
        model="gpt",
        model_options={"num_blocks": 8, "width": 128, "num_heads": 4},
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=256),
        sequence_length=128,
        **BASE,
    ),
    "cnn": Workload(
        model="cnn",
        model_options={"num_blocks": 8, "width": 24},
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=10, image_shape=(1, 16, 16)),
        optimizer=OptimizerSettings(name="sgd", learning_rate=0.05),
        **BASE,
    ),
}
QUICK: dict[str, Any] = {"ranks": (2,), "microbatches": (8,), "schedules": ("1f1b", "gpipe", "zbv")}


@dataclass(frozen=True, eq=False)
class Costs:
    """What the database says of one model at one microbatch size."""

    graph: Graph
    table: CostTable
    transfer: TransferCost
    overhead: PassCost


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
    rows = []
    with tempfile.TemporaryDirectory(prefix="dejavu-costs-") as folder:
        for (model, count), group in _groups(_settings(ranks, microbatches, schedules)).items():
            # Just before they are used: the speed of a machine that others share drifts within minutes.
            costs = _costs(model, count, ProfileDatabase(Path(folder)))
            jobs = [
                job_of(s.workload, by_hand(s.schedule, s.bounds, [one_device()] * s.num_ranks, count), STEPS)
                for s in group
            ]
            found = train_all(jobs)
            rows += [_row(s, job.binding.plan, costs, one) for s, job, one in zip(group, jobs, found, strict=True)]
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


def _settings(ranks: tuple[int, ...], microbatches: tuple[int, ...], schedules: tuple[str, ...]) -> Iterator[Setting]:
    for model, workload in MODELS.items():
        num_layers = len(capture(workload).layers)
        for num_ranks in ranks:
            for name in schedules:
                num_stages = num_ranks * schedule_named(name).stages_per_rank
                even = even_bounds(num_layers, num_stages)
                for cuts, bounds in (("even", even), ("uneven", _uneven(even))):
                    for count in microbatches:
                        if num_stages <= num_layers and allowed_microbatches(name, num_stages, count):
                            yield Setting(model, num_ranks, name, cuts, bounds, count)


def _groups(settings: Iterator[Setting]) -> dict[tuple[str, int], list[Setting]]:
    found: dict[tuple[str, int], list[Setting]] = {}
    for setting in settings:
        found.setdefault((setting.model, setting.num_microbatches), []).append(setting)
    return found


def _uneven(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Every second cut one layer further on, where that leaves a layer to the stage behind."""
    moved = list(bounds)
    for k in range(1, len(bounds) - 1, 2):
        if moved[k] + 1 < bounds[k + 1]:
            moved[k] += 1
    return tuple(moved)


def _costs(model: str, num_microbatches: int, database: ProfileDatabase) -> Costs:
    workload = MODELS[model].model_copy(update={"num_microbatches": num_microbatches})
    graph, cluster = capture(workload), this_machine()
    Campaign(graph, workload, cluster, database).run()
    (name,) = cluster.device_counts
    return Costs(
        graph,
        cost_table(graph, cluster, sources(database, workload.optimizer)),
        transfer_cost(cluster, database, name, name),
        pass_cost(database, name),
    )


def predicted(plan: Plan, costs: Costs) -> Simulation:
    """One step of a plan of one core a rank, from the database alone."""
    table, overhead, graph = costs.table, costs.overhead, costs.graph
    stages = []
    for stage in plan.stages:
        span = slice(stage.start, stage.stop)
        forward, backward, once = (
            float(grid.seconds_LD[span, 0].sum()) for grid in (table.forward, table.backward, table.optimizer)
        )
        stages.append(StageSeconds(forward + overhead.pass_seconds, backward + overhead.pass_seconds, once))
    messages = []
    for cut in plan.cuts:
        size = float(graph.layers[cut - 1].output_bytes)
        each = overhead.of_message(size)
        both = costs.transfer.latency_seconds + costs.transfer.seconds_per_byte * size
        messages.append(Message(0.0, max(0.0, both - 2 * each), each, each))
    return simulate(plan, stages, messages=messages, devices=_cores(plan))


def played(times: StageTimes) -> StageSeconds:
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


def _row(setting: Setting, plan: Plan, costs: Costs, found: Trained) -> dict[str, Any]:
    simulated, measured = predicted(plan, costs), found.median_step_seconds
    own = simulate(plan, [played(times) for times in found.stages], devices=_cores(plan))
    spread = np.percentile(found.step_seconds, (10, 90))
    return {
        "model": setting.model,
        "ranks": setting.num_ranks,
        "schedule": setting.schedule,
        "cuts": setting.cuts,
        "microbatches": setting.num_microbatches,
        "measured_ms": 1e3 * measured,
        "measured_10_to_90_ms": f"{1e3 * spread[0]:.0f}–{1e3 * spread[1]:.0f}",
        "simulated_ms": 1e3 * simulated.step_seconds,
        "error_percent": 100.0 * (simulated.step_seconds / measured - 1.0),
        "simulated_bubble_percent": 100.0 * simulated.bubble_fraction,
        "efficiency_percent": 100.0 * own.step_seconds / measured,
    }
