"""The planner's best plan for each published training beside its source's own: the same shape, or what it has more of.

Twice: with what the source's software could do (Megatron-LM of 2021 and 2022: replicas that hold all, no split
sequence, all recomputed, attention written out, 1F1B, interleaved or not; torchtitan's rows: one stage, FSDP, and
tensor parallelism with a split sequence; NVIDIA's of 2024, Llama 3's own and whatever has pipelines: interleaved stages
too, replicas that share examples, and what of weights, gradients and moments the source's replicas shared), and with
all that this project can.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.published.predicting import SCHEDULE_OF, as_it_was, workload_of
from benchmarks.published.trainings import Training
from dejavu.parallelism import Parallelism
from dejavu.planning import Choice, Planner, PlanRequest
from dejavu.planning.prices import Prices
from dejavu.plans import NoPlanError, Plan

BUDGET_SECONDS = 10.0
THEIRS, EVERYTHING = "what the source could do", "everything"


def rows_of(training: Training) -> list[dict[str, Any]]:
    """Plan one training twice."""
    found = [_planned(training, limited=limited) for limited in (True, False)]
    theirs = (training.tensor_parallel, training.pipeline_parallel, training.data_parallel)
    rows = []
    for limited, choice in zip((True, False), found, strict=True):
        row = {
            "training": training.name,
            "devices": f"{training.num_devices} {training.device.name}",
            "allowed": THEIRS if limited else EVERYTHING,
            "source_tp_pp_dp": _degrees(*theirs, training.zero_level),
        }
        if choice is None:
            rows.append(row | {"ours_tp_pp_dp": "none fits", "same_shape": False})
            continue
        shape = shape_of(choice.plan)
        tokens = training.batch_size * training.model.sequence_length / choice.simulated_seconds / training.num_devices
        rows.append(
            row
            | {
                "ours_tp_pp_dp": _degrees(*shape, max(s.configuration.zero_level for s in choice.plan.stages)),
                "same_shape": shape == theirs,
                "schedule": choice.plan.schedule,
                "microbatches": choice.plan.num_microbatches,
                "step_s": choice.simulated_seconds,
                "mfu_percent": training.utilization_percent(tokens),
                "gap_percent": None if choice.gap is None else 100.0 * choice.gap,
            }
        )
    return rows


def shape_of(plan: Plan) -> tuple[int, int, int]:
    """Return tensor, pipeline and data parallel degree, of the stage with the most devices; the ranks of a pipeline."""
    widest = max((stage.configuration for stage in plan.stages), key=lambda one: one.num_devices)
    return widest.tensor_parallel, len(plan.ranks), widest.data_parallel


def _degrees(tensor: int, pipeline: int, data: int, zero_level: int) -> str:
    return f"{tensor}·{pipeline}·{data}" + (f" ZeRO-{zero_level}" if zero_level and data > 1 else "")


def _planned(training: Training, *, limited: bool) -> Choice | None:
    workload = workload_of(training, num_microbatches=1)
    spread, schedules = None, tuple[str, ...]()
    if limited and training.zero_level:
        spread = Parallelism(zero_levels=(training.zero_level,), context_parallel=training.pipelines)
        schedules = tuple(SCHEDULE_OF.values()) if training.pipelines else ("1f1b",)
    elif limited:
        spread = Parallelism(
            zero_levels=(0,), sequence_parallel=(False,), recompute=(True,), context_parallel=False, also_unsplit=True
        )
        schedules = ("1f1b", "interleaved_1f1b")
    request = PlanRequest(
        workload, training.cluster(), parallelism=spread, schedules=schedules, budget_seconds=BUDGET_SECONDS
    )
    was = limited and training.attention != "fused"
    graph_at = partial(as_it_was, request, training) if was else None
    planner = Planner(forks=True)
    try:
        beside = limited and training.beside_products
        prices = Prices(request, graph_at=graph_at, num_forks=planner.num_workers, sends_beside_products=beside)
        return planner.plan(request, prices)
    except NoPlanError:
        return None
