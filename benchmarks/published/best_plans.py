"""The planner's best plan for each published training beside its source's own: the same shape, or why not.

Twice: with what the source's software could do (Megatron-LM of 2021 and 2022: replicas that hold all, no split
sequence, all recomputed, attention written out, 1F1B, interleaved or not; torchtitan's rows: one stage, FSDP, and
tensor parallelism with a split sequence; NVIDIA's of 2024, Llama 3's own and whatever has pipelines: interleaved stages
too, replicas that share examples, and what of weights, gradients and moments the source's replicas shared), and with
all that this project can. With what the source could do, its own plan is priced in the same way beside: how much faster
the best plan is predicted to be, and where the two differ.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.published.predicting import SCHEDULE_OF, Prediction, as_it_was, predict, workload_of
from benchmarks.published.trainings import Training
from dejavu.parallelism import Parallelism
from dejavu.planning import Choice, Planner, PlanRequest
from dejavu.planning.prices import Prices
from dejavu.plans import Infeasible, NoPlanError, NotFound, Plan, StageConfiguration

BUDGET_SECONDS = 10.0
THEIRS, EVERYTHING = "what the source could do", "everything"
OFF_PERCENT = 6.0  # by about so much predictions of published trainings are off in the median


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
        if not isinstance(choice, Choice):
            rows.append(row | {"same_shape": False} | without_plan(training, choice))
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
            | (_beside_the_sources(training, choice) if limited else {})
        )
    return rows


def _beside_the_sources(training: Training, choice: Choice) -> dict[str, Any]:
    """The source's own plan, priced in the same way, and why the best one is another."""
    theirs = _the_sources(training)
    return {
        "source_step_s": theirs.step_seconds,
        "faster_percent": 100.0 * (theirs.step_seconds / choice.simulated_seconds - 1.0),
        "why": why(training, choice, theirs),
    }


def _the_sources(training: Training) -> Prediction:
    return min(predict(training, hides_sums=True), key=lambda one: (not one.fits, one.step_seconds))


def without_plan(training: Training, answer: Infeasible | NotFound) -> dict[str, Any]:
    """Whether none fits or none was met, and what is predicted of the source's own plan."""
    said = "none fits" if isinstance(answer, Infeasible) else "none was met"
    theirs = _the_sources(training)
    why = f"{said}; " + ("the source's is predicted to fit" if theirs.fits else shortage(theirs))
    return {"ours_tp_pp_dp": said, "source_step_s": theirs.step_seconds, "why": why}


def shortage(theirs: Prediction) -> str:
    return f"the source's is predicted not to fit: {theirs.memory_gib:.0f} GiB on the fullest device"


def why(training: Training, choice: Choice, theirs: Prediction) -> str:
    """Why the best plan has another shape than the source's, in what is predicted of both; nothing where it has not."""
    plan, way = choice.plan, widest(choice.plan)
    if shape_of(plan) == (training.tensor_parallel, training.pipeline_parallel, training.data_parallel):
        return ""
    if not theirs.fits:
        return shortage(theirs)
    faster_percent = 100.0 * (theirs.step_seconds / choice.simulated_seconds - 1.0)
    if faster_percent < 0:
        return f"the source's is predicted {-faster_percent:.1f} % faster, and was not met"
    if faster_percent < OFF_PERCENT:
        return f"predicted {faster_percent:.1f} % faster, less than predictions are off by"
    recomputed = sum(stage.configuration.recompute for stage in plan.stages) / len(plan.stages)
    partly = " (in the source in part)" if training.recompute == "selective" else ""
    microbatches = plan.num_microbatches * choice.priced.accumulate
    size = training.batch_size / (microbatches * way.example_parts)
    pairs = {
        "tensor parallelism of": (f"{way.tensor_parallel}", f"{training.tensor_parallel}"),
        "pipelines of": (f"{len(plan.ranks)}", f"{training.pipeline_parallel}"),
        "context parallelism of": (f"{way.context_parallel}", f"{training.context_parallel}"),
        "bubble": (f"{choice.chosen.simulation.bubble_fraction:.0%}", f"{theirs.bubble_fraction:.0%}"),
        "stages recomputed": (f"{recomputed:.0%}", f"{float(theirs.recompute):.0%}{partly}"),
        "examples of a microbatch": (f"{size:g}", f"{theirs.microbatch_size}"),
    }
    said = [f"{name} {ours} in place of {other}" for name, (ours, other) in pairs.items() if ours != other]
    return f"predicted {faster_percent:.0f} % faster: {', '.join(said)}"


def shape_of(plan: Plan) -> tuple[int, int, int]:
    """Return tensor, pipeline and data parallel degree, of the stage with the most devices; the ranks of a pipeline."""
    way = widest(plan)
    return way.tensor_parallel, len(plan.ranks), way.data_parallel


def widest(plan: Plan) -> StageConfiguration:
    """Return how the stage with the most devices is spread."""
    return max((stage.configuration for stage in plan.stages), key=lambda one: one.num_devices)


def _degrees(tensor: int, pipeline: int, data: int, zero_level: int) -> str:
    return f"{tensor}·{pipeline}·{data}" + (f" ZeRO-{zero_level}" if zero_level and data > 1 else "")


def _planned(training: Training, *, limited: bool) -> Choice | Infeasible | NotFound:
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
    except NoPlanError as error:
        return error.answer
