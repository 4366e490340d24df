"""Peak memory of pipeline ranks: as plans count it, against torch's CPU allocator in real training.

`planned` is the very number that plans hold against a device's memory (`configuration_memory`, `Simulation`);
`moments` is the referee of `benchmarks.cost.stage_memory`, which no plan uses, because it is no sum over layers.

Each case trains a pipeline of four ranks by the project's own runtime (gloo, torch's 1F1B schedule), so that its stages
hold 4, 3, 2 and 1 microbatches at once, or two stages of two replicas each, at every ZeRO level, or two stages on each
rank under every schedule that has them; recompute is torch's checkpointing of every layer. A rank's allocator tells
every allocation from before its weights are drawn to the end of the third step; of a stage's replicas the one that
takes most counts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost.stage_memory import StagePlace, fixed_bytes, stage_memory
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.cluster import this_machine
from dejavu.cost.memory import configuration_memory, example_bytes
from dejavu.foundation.registry import named
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph, Layer
from dejavu.launch.torchrun import torchrun_words
from dejavu.parallelism import ZERO_LEVELS
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.runtime.process import rank_environment
from dejavu.simulation import StageSeconds, simulate
from dejavu.workload import OptimizerSettings, Workload

NUM_RANKS, NUM_STEPS = 4, 3  # optimizer state exists from the second step on
SECONDS_FOR_A_CASE = 300
ALLOCATED_DATA = ("text",)  # other data stays where numpy made it, and the allocator does not know of it
WORKLOADS = {
    "gpt": Workload(
        model="gpt",
        model_options={"num_blocks": 8, "width": 192, "num_heads": 6},
        sequence_length=128,
        batch_size=32,
        num_microbatches=8,
    ),
    "bert": Workload(
        model="bert",
        model_options={"num_blocks": 8, "width": 192, "num_heads": 6},
        sequence_length=128,
        batch_size=32,
        num_microbatches=8,
    ),
    "cnn": Workload(
        model="cnn",
        model_options={"num_blocks": 10, "width": 48},
        data="digits",
        batch_size=512,
        num_microbatches=8,
    ),
    "gpt in bfloat16, float32 masters": Workload(
        model="gpt",
        model_options={"num_blocks": 8, "width": 192, "num_heads": 6},
        sequence_length=64,
        batch_size=16,
        num_microbatches=8,
        dtype="bfloat16",
        optimizer=OptimizerSettings(master_weights=True),
    ),
}


@dataclass(frozen=True)
class Case:
    """One pipeline that is trained for real.

    Attributes:
        configuration: of each stage.
    """

    name: str
    workload: Workload
    configuration: StageConfiguration
    schedule: str = "1f1b"

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks, of one process or of several replicas."""
        return NUM_RANKS // self.configuration.num_devices

    @property
    def num_stages(self) -> int:
        return self.num_ranks * SCHEDULES[self.schedule].stages_per_rank

    @property
    def of_a_replica(self) -> Workload:
        return self.workload.model_copy(
            update={"batch_size": self.workload.batch_size // self.configuration.example_parts}
        )


TWO_ON_A_RANK = tuple(name for name, schedule in SCHEDULES.items() if schedule.stages_per_rank == 2)
REPLICATED = ("gpt", "gpt in bfloat16, float32 masters")


def cases() -> list[Case]:
    """Every workload in four stages, kept and recomputed; some in two of two replicas, or two on each of four ranks."""
    alone = [one_device(recompute=again) for again in (False, True)]
    sharing = [one_device(2, zero_level=level) for level in ZERO_LEVELS]
    return [
        *(Case(name, workload, one) for name, workload in WORKLOADS.items() for one in alone),
        *(Case(name, WORKLOADS[name], one) for name in REPLICATED for one in sharing),
        *(Case("gpt", WORKLOADS["gpt"], one, name) for name in TWO_ON_A_RANK for one in alone),
    ]


def run() -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """All cases; a row for each pipeline rank."""
    rows = [row for case in cases() for row in case_rows(case)]
    return "Peak memory of a pipeline rank: as plans count it, and the CPU allocator's", rows, summary_of(rows)


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far off predictions are, of ranks with one stage and, where it is said, with two."""

    def errors(column: str, num_stages: int = 1) -> list[float]:
        return [row[column] for row in rows if row[column] is not None and row["stages"] == num_stages]

    def mean(column: str) -> float:
        return statistics.mean(abs(error) for error in errors(column))

    planned, shared = errors("planned_percent"), errors("planned_percent", 2)
    return {
        "planned_least_percent": min(planned),
        "planned_median_percent": statistics.median(planned),
        "planned_worst_percent": max(planned),
        "moments_mape_percent": mean("moments_percent"),
        "moments_worst_percent": max(abs(error) for error in errors("moments_percent")),
        "outputs_mape_percent": mean("outputs_percent"),
        "megatron_mape_percent": mean("megatron_percent"),
        "zero_least_percent": min(row["planned_percent"] for row in rows if row["zero_level"]),
        "zero_worst_percent": max(row["planned_percent"] for row in rows if row["zero_level"]),
        "two_stages_least_percent": min(shared),
        "two_stages_median_percent": statistics.median(shared),
        "two_stages_worst_percent": max(shared),
        "two_stages_alone_median_percent": statistics.median(errors("alone_percent", 2)),
        "rows": len(rows),
    }


def case_rows(case: Case) -> list[dict[str, Any]]:
    """Predict every rank, then train the pipeline and compare."""
    graph = capture(case.of_a_replica)
    plan = even_plan(len(graph.layers), case)
    predicted = predicted_bytes(case, graph, plan)
    rows = []
    for rank, (found, real) in enumerate(zip(predicted, real_peaks(case, plan), strict=True)):
        off = {name: 100 * (size / real - 1) if size is not None else None for name, size in found.items()}
        rows.append(
            {
                "model": case.name,
                "schedule": case.schedule,
                "rank": rank,
                "stages": len(plan.ranks[rank]),
                "recompute": case.configuration.recompute,
                "replicas": case.configuration.data_parallel,
                "zero_level": case.configuration.zero_level,
                "real_bytes": real,
                "planned_bytes": round(found["planned"] or 0),
                "planned_percent": off["planned"],
                "alone_percent": off["alone"],
                "moments_bytes": None if found["moments"] is None else round(found["moments"]),
                "moments_percent": off["moments"],
                "outputs_percent": off["outputs"],
                "megatron_percent": off["megatron"],
            }
        )
    return rows


def even_plan(num_layers: int, case: Case) -> Plan:
    """As many layers for each stage."""
    cuts = [round(s * num_layers / case.num_stages) for s in range(case.num_stages + 1)]
    stages = tuple(Stage(start, stop, case.configuration) for start, stop in pairwise(cuts))
    return Plan(stages, case.schedule, case.workload.num_microbatches)


def predicted_bytes(case: Case, graph: Graph, plan: Plan) -> list[dict[str, float | None]]:
    """What plans, the sum of their stages alone, the referee and two usual formulas say of each pipeline rank.

    The last three of one stage, of one replica, alone.
    """
    costs = planned_costs(case.workload, graph, case.configuration)
    needed = [costs.stage_bytes(stage.start, stage.stop, 0) for stage in plan.stages]
    splits = SCHEDULES[plan.schedule].splits_backward
    rows = [
        StageSeconds(
            1.0,
            2.0,
            0.0,
            activation_bytes=one.each,
            fixed_bytes=one.always,
            passing_bytes=one.in_parts if splits else one.passing,
            stepping_bytes=one.stepping,
            retained_bytes=one.retained,
            waiting_bytes=one.waiting,
        )  # how long passes take changes nothing of what ranks hold
        for one in needed
    ]
    simulated, found = simulate(plan, rows), list[dict[str, float | None]]()
    for rank, stages in enumerate(plan.ranks):
        spans = [(plan.stages[s].start, plan.stages[s].stop, 0) for s in stages]
        alone = sum(costs.peak_bytes(*span, simulated.in_flight[s]) for s, span in zip(stages, spans, strict=True))
        said = {"planned": simulated.peak_bytes[rank], "alone": alone}
        is_plain = len(stages) == 1 and case.configuration.data_parallel == 1
        others = formulas(case, graph, plan, rank) if is_plain else dict.fromkeys(("moments", "outputs", "megatron"))
        found.append({**said, **others})
    return found


def formulas(case: Case, graph: Graph, plan: Plan, stage: int) -> dict[str, float | None]:
    """What the referee and two usual formulas say of one stage."""
    workload, span = case.workload, plan.stages[stage]
    layers = graph.layers[span.start : span.stop]
    depth = named(SCHEDULES, plan.schedule).in_flight(stage, case.num_stages, plan.num_microbatches)
    examples = example_bytes(workload) if workload.data in ALLOCATED_DATA else 0
    memory = stage_memory(
        layers,
        case.configuration,
        StagePlace(depth, plan.num_microbatches, stage == 0, stage == case.num_stages - 1, examples),
        workload.optimizer,
    )
    fixed = fixed_bytes(sum(layer.parameter_bytes for layer in layers), workload.optimizer)
    return {
        "moments": memory.peak_bytes,
        "outputs": fixed + depth * outputs_bytes(layers, recompute=case.configuration.recompute),
        "megatron": megatron_bytes(case, layers, fixed, depth),
    }


def planned_costs(workload: Workload, graph: Graph, configuration: StageConfiguration) -> AdditiveCosts:
    """The costs that a search is given for such stages, of which only memory is looked at.

    Args:
        workload: and its graph, of the examples of one replica.
    """
    (device,) = this_machine().device_types.values()
    memory = configuration_memory(configuration, graph, workload, device, example_bytes(workload))
    nothing = np.zeros((1, len(graph.layers)))
    return AdditiveCosts(
        seconds_CL=nothing,
        per_step_seconds_CL=nothing,
        per_step_latency_seconds_C=np.zeros(1),
        fixed_bytes_CL=memory.fixed_bytes_L[None],
        activation_bytes_CL=memory.activation_bytes_L[None],
        temporary_bytes_CL=memory.temporary_bytes_L[None],
        capacity_bytes_C=np.array([memory.capacity_bytes]),
        message_bytes_CL1=memory.message_bytes_L1[None],
        step_bytes_CL=memory.step_bytes_L[None],
        retained_bytes_CL=memory.retained_bytes_L[None],
        waiting_bytes_CL=memory.waiting_bytes_L[None],
        in_parts_bytes_CL=memory.in_parts_bytes_L[None],
    )


def outputs_bytes(layers: Sequence[Layer], *, recompute: bool) -> float:
    """A plain count: everything that operators write in forward; with recompute the layers' outputs only."""
    if recompute:
        return sum(layer.output_bytes for layer in layers)
    return sum(op.written_bytes for layer in layers for op in layer.operators if op.direction == "forward")


def megatron_bytes(case: Case, layers: Sequence[Layer], fixed: float, depth: int) -> float | None:
    """The usual formula, s·b·h·(34 + 5·a·s/h) bytes a transformer block in 16 bits, twice that in 32.

    Korthikanti et al., MLSys 2023, eq. 1, and 2·s·b·h a block with full recompute (section 5); embedding and head are
    left out there and here. None for models that are no transformers.
    """
    options = case.workload.model_options
    if "num_heads" not in options:
        return None
    s, b, h, a = case.workload.sequence_length, case.workload.microbatch_size, options["width"], options["num_heads"]
    blocks = sum(layer.name.startswith("block") for layer in layers)
    whole, kept = s * b * h * (34 + 5 * a * s / h), 2 * s * b * h
    in_32_bits = 2
    held = depth * blocks * (kept if case.configuration.recompute else whole)
    held += min(blocks, 1) * whole * case.configuration.recompute
    return fixed + in_32_bits * held


def real_peaks(case: Case, plan: Plan) -> list[int]:
    """Train the pipeline; the allocator's peak of every pipeline rank."""
    with tempfile.TemporaryDirectory(prefix="dejavu-memory-") as folder:
        bounds = (*(stage.start for stage in plan.stages), plan.stages[-1].stop)
        binding = by_hand(plan.schedule, bounds, [case.configuration] * case.num_ranks, plan.num_microbatches)
        path = replace(job_of(case.workload, binding, NUM_STEPS), folder=folder).write()
        words = [word for word in torchrun_words(NUM_RANKS, path) if not word.startswith("--max-restarts")]
        words[words.index("dejavu.runtime.worker")] = "benchmarks.cost._memory_rank"
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--max-restarts=0", *words],
            env=rank_environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS_FOR_A_CASE,
        )
        if done.returncode:
            raise RuntimeError(f"the ranks of {case.name} failed:\n{done.stderr}")
        peaks = [
            json.loads((Path(folder) / f"peak-{rank}.json").read_text())["peak_bytes"] for rank in range(NUM_RANKS)
        ]
        rank_of = [place.pipeline_rank for place in binding.placements]
        return [
            max(peak for peak, r in zip(peaks, rank_of, strict=True) if r == rank) for rank in range(case.num_ranks)
        ]
