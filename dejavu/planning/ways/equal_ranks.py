"""Plans of equal pipeline ranks under schedules that run several stages on each.

Searches count the memory of one stage on each rank. Several hold more microbatches, and where the backward pass runs in
two parts, what it recomputes is kept between them. So what searches find may fit under no such schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.planning.candidates import Candidate, Simulator, least_seconds, ranked
from dejavu.planning.choice import Considered
from dejavu.planning.schedules import cut_evenly, fits, most_ranks, under
from dejavu.plans import Plan, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.simulation import order_of, simulate_plan

EQUAL_RANKS = "equal ranks"


def plans_of_equal_ranks(
    problems: Iterable[PricedProblem], schedules: Iterable[str], simulator: Simulator
) -> list[Considered]:
    """Return, for each problem and each of these schedules that runs several stages on a rank, the fastest that fits.

    Each rank has the same configuration, and there are as many ranks as devices and schedule allow. Deterministic.
    """
    looped = [name for name in schedules if named(SCHEDULES, name).stages_per_rank > 1]
    rows = []
    for priced in problems:
        found = [one for name in looped if (one := _fastest(priced, name, simulator)) is not None]
        if found:
            rows.append(Considered(EQUAL_RANKS, priced, None, tuple(ranked(found))))
    return rows


def _fastest(priced: PricedProblem, name: str, simulator: Simulator) -> Candidate | None:
    """Return the fastest of these plans that fits, looked for in the order of the least that each can take."""
    widest = (_widest(priced, one, name) for one in priced.problem.configurations)
    plans = [plan for plan in widest if plan is not None]
    least_of = {plan: least_seconds(priced, plan) for plan in plans}
    best, best_seconds = None, math.inf
    for plan in sorted(plans, key=least_of.__getitem__):
        if least_of[plan] >= best_seconds:
            break
        simulation = simulate_plan(priced, plan)
        if simulation.step_seconds < best_seconds and fits(priced, plan, simulation):
            best, best_seconds = plan, simulation.step_seconds
    return None if best is None else simulator.candidate(priced, best)


def _widest(priced: PricedProblem, configuration: StageConfiguration, name: str) -> Plan | None:
    """Return the plan with the most ranks of this configuration that the schedule runs; None: it runs none."""
    problem = priced.problem
    there_are = problem.device_counts[configuration.kind] // configuration.num_devices
    for ranks in range(min(there_are, most_ranks(problem, [name])), 0, -1):
        try:
            stages = cut_evenly(priced, (configuration,) * ranks)
            plan = under(priced, Plan(stages, problem.schedule, problem.num_microbatches), name)
            order_of(plan)
        except InputError:  # as torch does not run every number of ranks with so many microbatches
            continue
        return plan
    return None
