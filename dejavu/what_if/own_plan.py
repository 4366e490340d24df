"""A plan of one's own: what it is predicted to take and to hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dejavu.cost.ranges import Range, memory_range
from dejavu.cost.trainings.steps import NO_FACTOR
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest, Prices
from dejavu.plans import Plan, price
from dejavu.plans.plan import Stage, StageConfiguration
from dejavu.plans.priced_problem import Away, PricedProblem
from dejavu.plans.schedule import CHIMERA, SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts, PlanError
from dejavu.runtime.both_ways import check_both_ways
from dejavu.runtime.splits.sliceable import check_slices, check_stages_of_slices
from dejavu.simulation import (
    Simulation,
    StageSeconds,
    both_ways_seconds,
    price_of_simulated,
    simulate_plan,
    simulate_plan_blocking,
)
from dejavu.workload import Workload
from dejavu.workload.slices import slice_lengths

_ANY_BYTES = 2.0**80  # of a device, where a plan is priced that may not fit
FEW = "fewer microbatches than stages, which torch's 1F1B rejects: simulated as DeepSpeed's, whose messages block"
BLOCKING = "messages block both of their ends, as DeepSpeed's"


@dataclass(frozen=True)
class OwnPlan:
    """What a plan is predicted to take and to hold.

    Attributes:
        formula_seconds: a step by the searches' formula.
        simulated_seconds: a step, simulated.
        range_seconds: its 90 % range, without what trainings taught.
        is_blocking: messages were simulated as blocking.
        stage_seconds_S: one microbatch forward and backward, in all runs of the schedule.
        peak_bytes_S, capacity_bytes_S: on a device of each stage, which may hold one of another copy as well.
        away_S: what such a device keeps in its node.
        notes: what a reader should know of the simulation and the prices.
    """

    plan: Plan
    formula_seconds: float
    simulated_seconds: float
    range_seconds: Range
    is_blocking: bool
    stage_seconds_S: tuple[float, ...]
    peak_bytes_S: tuple[float, ...]
    capacity_bytes_S: tuple[float, ...]
    away_S: tuple[Away, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no stage holds more than its device has, and its device's part of the node."""
        on_devices = all(held <= room for held, room in zip(self.peak_bytes_S, self.capacity_bytes_S, strict=True))
        return on_devices and all(one.fits for one in self.away_S)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: seconds and bytes by name."""
        return {
            "step_seconds": self.formula_seconds,
            "simulated_step_seconds": self.simulated_seconds,
            "predicted_step_seconds_range": list(self.range_seconds),
            "blocking": self.is_blocking,
            "fits": self.fits,
            "schedule": CHIMERA if self.plan.both_ways else self.plan.schedule,
            "slices": list(self.plan.slices),
            "microbatches": self.plan.num_microbatches,
            "stages": [
                {
                    "start": stage.start,
                    "stop": stage.stop,
                    "configuration": str(stage.configuration),
                    "seconds": self.stage_seconds_S[s],
                    "peak_bytes": self.peak_bytes_S[s],
                    "peak_bytes_range": list(memory_range(self.peak_bytes_S[s])),
                    "capacity_bytes": self.capacity_bytes_S[s],
                    **(self.away_S[s]._asdict() if stage.configuration.offload else {}),
                }
                for s, stage in enumerate(self.plan.stages)
            ],
            "notes": list(self.notes),
        }


def read_plan(path: Path) -> Plan:
    """Read a plan: what `dejavu plan --json` wrote, or stages with `start`, `stop` (not included) and `configuration`.

    Raises:
        InputError: it cannot be read, or is no plan; the message names the stage.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), list) or not content["stages"]:
        raise InputError(f"{path}: wanted an object with `stages`, a list of one stage or more")
    count = content.get("num_microbatches", content.get("microbatches"))
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"{path}: num_microbatches is {count!r}; wanted a whole number, 1 or more")
    stages = tuple(_stage(f"{path}: stage {s}", row) for s, row in enumerate(content["stages"]))
    _check_layers(path, stages)
    schedule, slices = content.get("schedule", "1f1b"), content.get("slices", [])
    if not isinstance(slices, list) or not all(isinstance(one, int) and one > 0 for one in slices):
        raise InputError(f"{path}: slices are {slices!r:.60}; wanted a list of positions, each 1 or more")
    if schedule == CHIMERA or content.get("both_ways"):
        return Plan(stages, "1f1b", count, slices=tuple(slices), both_ways=True)
    named(SCHEDULES, schedule)
    return Plan(stages, schedule, count, slices=tuple(slices))


def _stage(place: str, row: Any) -> Stage:
    if not isinstance(row, Mapping):
        raise InputError(f"{place} is {row!r:.60}; wanted an object")
    span = row.get("layers", row)
    ends = [span.get(name) if isinstance(span, Mapping) else None for name in ("start", "stop")]
    if any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
        raise InputError(f"{place}: start and stop are {ends[0]!r} and {ends[1]!r}; wanted whole numbers")
    try:
        configuration = StageConfiguration.from_dict(row.get("configuration", {}))
    except TypeError as error:
        fields = ", ".join(StageConfiguration.__dataclass_fields__)
        raise InputError(f"{place}: configuration: {error}; wanted an object of {fields}") from error
    except PlanError as error:
        raise InputError(f"{place}: {error}") from error
    return Stage(int(ends[0] or 0), int(ends[1] or 0), configuration)


def _check_layers(path: Path, stages: Sequence[Stage]) -> None:
    at = 0
    for s, stage in enumerate(stages):
        if stage.stop <= stage.start:
            raise InputError(
                f"{path}: stage {s} is layers {stage.start} to {stage.stop}, not included; wanted one or more"
            )
        if stage.start != at:
            twice = f"layer {stage.start} stands twice" if stage.start < at else f"layer {at} is in no stage"
            raise InputError(f"{path}: stage {s} starts at layer {stage.start}; wanted {at}: {twice}")
        at = stage.stop


def price_own_plan(request: PlanRequest, plan: Plan, *, is_blocking: bool = False) -> OwnPlan:
    """Price the plan on the request's cluster, also if it does not fit its memory.

    Args:
        is_blocking: simulate messages that block both of their ends; so they are where there are fewer microbatches
            than stages.

    Raises:
        InputError: the cluster, the batch or the model does not allow a stage; blocking, and another schedule.
        PlanError: the layers are not the model's, or there are too few devices.
        CostError: a number is missing.
    """
    if named(SCHEDULES, plan.schedule).stages_per_rank > 1:
        raise InputError(f"schedule {plan.schedule} runs several stages on a rank; wanted 1f1b, gpipe or chimera")
    workload, plan = _told(request.workload, plan)
    few = plan.num_microbatches * plan.num_slices < len(plan.stages)
    is_blocking = is_blocking or few
    if is_blocking and (plan.schedule != "1f1b" or plan.slices or plan.both_ways):
        found = f"{plan.num_microbatches} microbatches on {len(plan.stages)} stages" if few else "blocking messages"
        raise InputError(f"{found} under {plan.schedule_name}; wanted schedule 1f1b of whole sequences")
    configurations = tuple(dict.fromkeys(stage.configuration for stage in plan.stages))
    spread = Parallelism(only=configurations, also_unsplit=True)
    schedules, counts = (CHIMERA if plan.both_ways else plan.schedule,), (plan.num_microbatches,)
    prices = Prices(replace(request, workload=workload, parallelism=spread, schedules=schedules, microbatches=counts))
    priced = prices.priced(plan.num_microbatches)
    costs = priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    any_bytes_C = np.full(len(configurations), _ANY_BYTES)
    roomy = replace(costs, capacity_bytes_C=any_bytes_C, host_capacity_bytes_C=any_bytes_C)
    problem = replace(priced.problem, costs=roomy, max_stages=None)
    step_of = simulate_plan_blocking if is_blocking else _beside_computing
    simulated = step_of(priced, plan, None).step_seconds
    if plan.both_ways:
        by_formula = price_of_simulated(priced, plan, simulate_plan(priced, plan))
        by_formula = replace(by_formula, step_seconds=both_ways_seconds(priced, plan))
    else:
        by_formula = price(problem, plan)
    errors = prices.errors.step_range(priced, plan, NO_FACTOR, simulated, request.seed, step_of)
    host = prices.assumed_host(plan, simulated)
    rooms = [costs.capacity_bytes_C[problem.index(stage.configuration)] for stage in plan.stages]
    return OwnPlan(
        plan=plan,
        formula_seconds=by_formula.step_seconds,
        simulated_seconds=simulated,
        range_seconds=errors,
        is_blocking=is_blocking,
        stage_seconds_S=tuple(plan.num_slices * seconds for seconds in by_formula.stage_seconds),
        peak_bytes_S=by_formula.peak_bytes,
        capacity_bytes_S=tuple(map(float, rooms)),
        away_S=tuple(priced.away(stage, problem.in_flight(s, len(plan.stages))) for s, stage in enumerate(plan.stages)),
        notes=(*((FEW if few else BLOCKING,) if is_blocking else ()), *((str(host),) if host else ())),
    )


def _told(workload: Workload, plan: Plan) -> tuple[Workload, Plan]:
    """Return both with the slices and directions that either of them names.

    Raises:
        InputError: they name other slices, or the model or the plan cannot be trained so.
    """
    told = workload.model_copy(update={"slices": plan.slices}) if plan.slices and not workload.in_slices else workload
    both = plan.both_ways or workload.both_ways
    told = told.model_copy(update={"both_ways": both, "schedule": CHIMERA if both else plan.schedule})
    if both and told.in_slices:
        raise InputError("chimera runs whole sequences; wanted no slices, or another schedule")
    found = replace(plan, slices=plan.slices or slice_lengths(told), both_ways=both)
    check_slices(told)
    check_stages_of_slices(told, found)
    check_both_ways(told, found)
    return told, found


def _beside_computing(priced: PricedProblem, plan: Plan, stages: Sequence[StageSeconds] | None) -> Simulation:
    return simulate_plan(priced, plan, stages=stages)
