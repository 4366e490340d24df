"""The same devices under other schedules: each pipeline rank's layers are cut into the stages of the new schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.foundation.units import plural
from dejavu.plans import Plan, Problem, Stage, StageConfiguration
from dejavu.plans.cutting import fastest_cuts
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import CHIMERA, OF_FEW, SCHEDULES
from dejavu.plans.stage_costs import HAIR, AdditiveCosts
from dejavu.runtime.both_ways import is_one_device
from dejavu.simulation import Simulation


def under(priced: PricedProblem, plan: Plan, name: str) -> Plan:
    """Return the plan's devices and microbatches under this schedule; of sequences in slices, as it is run.

    Raises:
        InputError: too few layers for so many stages, or none that a device can run, or the schedule does not run so
            many microbatches.
    """
    if name == CHIMERA:
        return _in_both_directions(priced, plan)
    schedule, problem = named(SCHEDULES, name), priced.problem
    num_stages = schedule.stages_per_rank * len(plan.stages)
    L = plan.stages[-1].stop
    if num_stages > L:
        ranks = plural(len(plan.stages), "pipeline rank")
        raise InputError(f"{name} wants {num_stages} stages on {ranks}; the model has {plural(L, 'layer')}")
    B = problem.num_microbatches if name in OF_FEW else problem.whole_microbatches
    least = schedule.microbatches_per_rank * len(plan.stages)
    if least > B:
        what = "slices" if problem.num_slices > 1 and name in OF_FEW else "microbatches"
        ranks = plural(len(plan.stages), "pipeline rank")
        raise InputError(f"{name} on {ranks} wants {least} {what} or more; found {B}")
    if _parts_a_pass(plan, name):
        raise InputError(
            f"{name} runs the backward pass in two parts; what is offloaded comes back for one, and ZeRO levels 2 and "
            "3 reduce gradients after the first"
        )
    if schedule.stages_per_rank == 1:
        return priced.as_run(Plan(plan.stages, name, B))
    configuration = [plan.stages[schedule.rank_of(s, num_stages)].configuration for s in range(num_stages)]
    return priced.as_run(Plan(cut_evenly(priced, configuration), name, B))


def most_ranks(problem: Problem, schedules: Iterable[str]) -> int:
    """Return how many pipeline ranks, each with a stage of the searches' plans, one of these schedules can have.

    A schedule of several stages for each rank has fewer ranks than the model has layers; one that wants several
    microbatches for each, fewer than a step has of these.
    """
    most = problem.most_stages

    def of(name: str) -> int:
        schedule = named(SCHEDULES, "1f1b" if name == CHIMERA else name)
        by_batch = most if name in OF_FEW else problem.whole_microbatches // schedule.microbatches_per_rank
        return min(most, problem.num_layers // schedule.stages_per_rank, by_batch)

    return max(1, *map(of, schedules))


def _in_both_directions(priced: PricedProblem, plan: Plan) -> Plan:
    stages, B = len(plan.stages), priced.problem.num_microbatches
    if stages % 2 or B % 2 or stages > B or priced.problem.num_slices > 1:
        raise InputError(
            f"chimera on {stages} pipeline ranks with {B} microbatches; wanted even numbers of both, as many "
            "microbatches as ranks or more, and whole sequences"
        )
    for stage in plan.stages:
        if not is_one_device(stage.configuration):
            raise InputError(f"chimera with a stage on {stage.configuration}; wanted one device for each")
    return Plan(plan.stages, "1f1b", B, both_ways=True)


def cut_evenly(priced: PricedProblem, configurations: Sequence[StageConfiguration]) -> tuple[Stage, ...]:
    """Return all layers as stages of these configurations, in order, cut so that the slowest is as fast as can be.

    Raises:
        InputError: in every cut a stage has a layer that it cannot run.
    """
    seconds_CL = priced.forward_seconds_CL + priced.backward_seconds_CL
    bounds = fastest_cuts(np.stack([seconds_CL[priced.problem.index(c)] for c in configurations]))
    return tuple(Stage(a, b, c) for (a, b), c in zip(itertools.pairwise(bounds), configurations, strict=True))


def _parts_a_pass(plan: Plan, schedule: str) -> bool:
    """Return whether the schedule runs a backward pass in two parts of a stage that has it in one."""
    can = all(stage.configuration.runs_in_parts for stage in plan.stages)
    return SCHEDULES[schedule].splits_backward and not can


def fits(priced: PricedProblem, plan: Plan, simulated: Simulation) -> bool:
    """Return whether every pipeline rank has the memory for what its stages hold in the simulation.

    So on its devices and, where something is offloaded, in their nodes; under a schedule that can bring it back.
    """
    problem = priced.problem
    if _parts_a_pass(plan, plan.schedule):
        return False
    seats = plan.seats
    for rank, stages in enumerate(plan.seats_of_ranks):
        index = [problem.index(seats[s].configuration) for s in stages]
        spans = [(seats[s].start, seats[s].stop, c) for s, c in zip(stages, index, strict=True)]
        held = [simulated.in_flight[s] for s in stages]
        away = [priced.away(seats[s], count) for s, count in zip(stages, held, strict=True)]
        if sum(one.disk_bytes for one in away) > away[0].disk_capacity_bytes * (1 + HAIR):
            return False
        if sum(problem.costs.host_share(*span, count) for span, count in zip(spans, held, strict=True)) > 1 + HAIR:
            return False
        if len(spans) == 1:
            if problem.costs.max_in_flight(*spans[0]) < simulated.in_flight[stages[0]]:
                return False
            continue
        assert isinstance(problem.costs, AdditiveCosts)
        if simulated.peak_bytes[rank] > problem.costs.room_bytes_C[index[0]]:
            return False
    return True
