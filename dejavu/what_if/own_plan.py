"""A plan of one's own: what it is predicted to take and to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dejavu.binding import BindError, Binding
from dejavu.cluster import Cluster
from dejavu.cost.priced_problem import split_into
from dejavu.cost.ranges import Range, memory_range
from dejavu.cost.trainings.steps import NO_FACTOR
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.foundation.units import plural
from dejavu.parallelism import NotPossibleError, Parallelism
from dejavu.planning import PlanRequest, Prices
from dejavu.planning.candidates import bind_by_steps, messages_of, sums_of
from dejavu.planning.sentences import links_cost
from dejavu.plans import Plan, Price, Problem, price
from dejavu.plans.priced_problem import Away, PricedProblem
from dejavu.plans.schedule import CHIMERA, SCHEDULES
from dejavu.plans.stage_costs import HAIR, AdditiveCosts, PlanError
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
from dejavu.workload.models import layers_of
from dejavu.workload.slices import slice_lengths

_ANY_BYTES = 2.0**80  # of a device, where a plan is priced that may not fit
FEW = "fewer microbatches than stages, which torch's 1F1B rejects: simulated as DeepSpeed's, whose messages block"
SHARED = "stages share a pipeline rank's devices, whose memory is that of all of them; no formula has their step"
FOUND_HERE = "the plan's splits are not priced: layers that declare none have those that are found here"
BLOCKING = "messages block both of their ends, as DeepSpeed's"


@dataclass(frozen=True)
class OwnPlan:
    """What a plan is predicted to take and to hold.

    Attributes:
        formula_seconds: a step by the searches' formula, over the fastest links between devices of its types; None:
            ranks run several stages, which it does not price.
        simulated_seconds: a step, simulated.
        range_seconds: its 90 % range, without what trainings taught.
        is_blocking: messages were simulated as blocking.
        accumulate: how often the schedule runs in a step.
        stage_seconds_S: one microbatch forward and backward, in one run of the schedule.
        peak_bytes_S, capacity_bytes_S: on a device of each stage, with all other stages that it runs.
        away_S: what such a device keeps in its node.
        notes: what a reader should know of the simulation and the prices.
    """

    plan: Plan
    formula_seconds: float | None
    simulated_seconds: float
    range_seconds: Range
    is_blocking: bool
    accumulate: int
    stage_seconds_S: tuple[float, ...]
    peak_bytes_S: tuple[float, ...]
    capacity_bytes_S: tuple[float, ...]
    away_S: tuple[Away, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no stage holds more than its device has, and its device's part of the node."""
        rooms = [capacity * (1 + HAIR) for capacity in self.capacity_bytes_S]
        on_devices = all(held <= room for held, room in zip(self.peak_bytes_S, rooms, strict=True))
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
            "accumulate": self.accumulate,
            "stages": [
                {
                    "start": stage.start,
                    "stop": stage.stop,
                    "configuration": str(stage.configuration),
                    "seconds": self.stage_seconds_S[s],
                    "peak_bytes": self.peak_bytes_S[s],
                    "peak_bytes_range": list(memory_range(self.plan, self.peak_bytes_S[s])),
                    "capacity_bytes": self.capacity_bytes_S[s],
                    **(self.away_S[s]._asdict() if stage.configuration.offload else {}),
                }
                for s, stage in enumerate(self.plan.stages)
            ],
            "notes": list(self.notes),
        }


def price_own_plan(request: PlanRequest, plan: Plan, *, is_blocking: bool = False) -> OwnPlan:
    """Price the plan on the request's cluster, also if it does not fit its memory.

    Args:
        is_blocking: simulate messages that block both of their ends; so they are where there are fewer microbatches
            than stages.

    Raises:
        InputError: the model cannot be captured.
        PlanError: the plan does not go with the workload, the cluster or the model; the message names a stage where one
            is wrong. So it is where messages block under another schedule than 1F1B.
        CostError: a number is missing.
    """
    try:
        split_into(request.workload, plan.num_microbatches)
        workload, plan = _told(request.workload, plan)
    except InputError as error:
        raise PlanError(str(error)) from error
    plan = _with_groups_as_in(request.cluster, plan)
    _check_stages(plan, len(layers_of(workload)))
    for s, stage in enumerate(plan.stages):
        if misfit := workload.gradients.misfit(stage.configuration):
            raise PlanError(f"stage {s}: {misfit}")
    count, P = plan.num_microbatches, len(plan.ranks)
    few = count * plan.num_slices < P
    is_blocking = is_blocking or few
    if is_blocking and (plan.schedule != "1f1b" or plan.slices or plan.both_ways):
        found = f"{plural(count, 'microbatch')} on {plural(P, 'pipeline rank')}" if few else "blocking messages"
        raise PlanError(f"{found} under {plan.schedule_name}; wanted schedule 1f1b of whole sequences")
    configurations = tuple(dict.fromkeys(stage.configuration for stage in plan.stages))
    spread = Parallelism(only=configurations, also_unsplit=True)
    schedules, counts = (CHIMERA if plan.both_ways else plan.schedule,), (count,)
    prices = Prices(replace(request, workload=workload, parallelism=spread, schedules=schedules, microbatches=counts))
    priced = _priced(prices, plan)
    binding = _binding(priced, plan, request.cluster, is_blocking=is_blocking)
    messages, sums = (of(priced, binding, request.cluster) for of in (messages_of, sums_of))
    beside = partial(_beside_computing, sum_seconds=sums)
    step_of = partial(simulate_plan_blocking if is_blocking else beside, message_seconds=messages)
    simulated = step_of(priced, plan, None).step_seconds
    fastest = simulate_plan_blocking(priced, plan) if is_blocking else simulate_plan(priced, plan)
    waits = links_cost(simulated / fastest.step_seconds - 1 if fastest.step_seconds > 0 else 0.0)
    parts, formula_seconds, in_flight = _parts(priced, plan)
    errors = prices.errors.step_range(priced, plan, NO_FACTOR, simulated, request.seed, step_of, sums)
    host = prices.assumed_host(plan, simulated)
    costs, rank_S = priced.problem.costs, {s: rank for rank, own in enumerate(plan.ranks) for s in own}
    assert isinstance(costs, AdditiveCosts)
    rooms = [costs.capacity_bytes_C[priced.problem.index(stage.configuration)] for stage in plan.stages]
    away = [priced.away(stage, in_flight[s]) for s, stage in enumerate(plan.stages)]
    return OwnPlan(
        plan=plan,
        formula_seconds=formula_seconds,
        simulated_seconds=simulated,
        range_seconds=errors,
        is_blocking=is_blocking,
        accumulate=priced.accumulate,
        stage_seconds_S=tuple(plan.num_slices * seconds / priced.accumulate for seconds in parts.stage_seconds),
        peak_bytes_S=tuple(parts.peak_bytes[rank_S[s]] for s in range(len(plan.stages))),
        capacity_bytes_S=tuple(map(float, rooms)),
        away_S=tuple(_together([away[t] for t in plan.ranks[rank_S[s]]]) for s in range(len(plan.stages))),
        notes=(
            *((FEW if few else BLOCKING,) if is_blocking else ()),
            *((FOUND_HERE,) if plan.splits else ()),
            *((SHARED,) if len(plan.ranks) < len(plan.stages) else ()),
            *((str(host),) if host else ()),
            *((waits,) if waits else ()),
        ),
    )


def _parts(priced: PricedProblem, plan: Plan) -> tuple[Price, float | None, Sequence[int]]:
    """Return the plan's price, its step by a formula where there is one, and what each stage has in flight."""
    problem, S = priced.problem, len(plan.stages)
    if plan.both_ways or len(plan.ranks) < S:
        simulated = simulate_plan(priced, plan)
        by_formula = both_ways_seconds(priced, plan) if plan.both_ways else None
        return price_of_simulated(priced, plan, simulated), by_formula, simulated.in_flight
    found = price(_roomy(problem), plan)
    return found, found.step_seconds, [problem.in_flight(s, S) for s in range(S)]


def _together(away: Sequence[Away]) -> Away:
    """Return what a device keeps in its node of all stages that it runs."""
    in_memory, on_disk = sum(one.host_bytes for one in away), sum(one.disk_bytes for one in away)
    return away[0]._replace(host_bytes=in_memory, disk_bytes=on_disk)


def _check_stages(plan: Plan, num_layers: int) -> None:
    """Check that the stages are the model's layers, and that those of a pipeline rank can share its devices.

    Raises:
        PlanError: they are not, or cannot; the message names the stage.
    """
    s = next((s for s, stage in enumerate(plan.stages) if stage.stop > num_layers), len(plan.stages) - 1)
    if (stop := plan.stages[s].stop) != num_layers:
        has = plural(num_layers, "layer")
        raise PlanError(f"stage {s}: stop is {stop}; the model has {has}, where the last stage stops")
    for rank in range(len(plan.ranks)):
        plan.rank_configuration(rank)
    for s, stage in enumerate(plan.stages):
        if named(SCHEDULES, plan.schedule).splits_backward and not stage.configuration.comes_back_in_parts:
            raise PlanError(
                f"stage {s}: {plan.schedule} runs the backward pass in two parts, and what is offloaded comes back for "
                "one; wanted another schedule, or offload false"
            )
        if named(SCHEDULES, plan.schedule).splits_backward and stage.configuration.reduces_in_passes:
            raise PlanError(
                f"stage {s}: {plan.schedule} runs the backward pass in two parts, and ZeRO level "
                f"{stage.configuration.zero_level} reduces gradients after the first; wanted another schedule, or "
                "zero_level 0 or 1"
            )


def _with_groups_as_in(cluster: Cluster, plan: Plan) -> Plan:
    """Return the plan with each stage's groups of nodes once, in the cluster's order: equal ones are equal."""
    order = {group.name: number for number, group in enumerate(cluster.groups)}
    stages = []
    for stage in plan.stages:
        groups = sorted(set(stage.configuration.groups), key=lambda name: (order.get(name, len(order)), name))
        stages.append(replace(stage, configuration=replace(stage.configuration, groups=tuple(groups))))
    return replace(plan, stages=tuple(stages))


def _priced(prices: Prices, plan: Plan) -> PricedProblem:
    """Return the problem of the plan's configurations, on devices that the cluster has.

    Raises:
        PlanError: a stage is not possible, or there are too few devices, in all or together on nodes.
    """
    try:
        priced = prices.priced(plan.num_microbatches)
    except NotPossibleError as error:
        s = [stage.configuration for stage in plan.stages].index(error.configuration)
        raise PlanError(f"stage {s}: {error}") from error
    problem = priced.problem
    for s, stage in enumerate(plan.stages):
        if not np.isfinite(problem.costs.stage_seconds(stage.start, stage.stop, problem.index(stage.configuration))):
            raise PlanError(f"stage {s}: {stage}: not all of these layers can run so")
    for name, count in plan.device_counts.items():
        if count > (have := problem.device_counts[name]):
            raise PlanError(f"the plan uses {count} × {name}; the cluster has {have}")
    return priced


def _binding(priced: PricedProblem, plan: Plan, cluster: Cluster, *, is_blocking: bool) -> Binding:
    """Bind the plan, also one that does not fit its memory, to the types of devices that it names.

    Raises:
        PlanError: there are too few devices together on nodes.
    """
    roomy = replace(priced, problem=_roomy(priced.problem))
    try:
        return bind_by_steps(roomy, plan, cluster, moves=False, is_blocking=is_blocking)
    except BindError as error:
        raise PlanError(str(error)) from error


def _roomy(problem: Problem) -> Problem:
    """Return the problem on devices that hold anything."""
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    any_bytes_C = np.full(costs.num_configurations, _ANY_BYTES)
    roomy = replace(costs, capacity_bytes_C=any_bytes_C, host_capacity_bytes_C=any_bytes_C)
    return replace(problem, costs=roomy, max_stages=None)


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


def _beside_computing(
    priced: PricedProblem,
    plan: Plan,
    stages: Sequence[StageSeconds] | None,
    message_seconds: Sequence[float],
    sum_seconds: Sequence[float],
) -> Simulation:
    return simulate_plan(priced, plan, stages=stages, message_seconds=message_seconds, sum_seconds=sum_seconds)
