"""Chimera's plans: every even number of ranks, cut so that the slowest stage is as fast as can be."""

from __future__ import annotations

from dejavu.planning.candidates import Candidate, Simulator, least_seconds, ranked
from dejavu.planning.choice import BOTH_WAYS, Considered
from dejavu.planning.prices import Prices
from dejavu.planning.request import PlanRequest
from dejavu.planning.schedules import cut_evenly
from dejavu.plans import Plan
from dejavu.plans.priced_problem import PricedProblem
from dejavu.runtime.both_ways import is_one_device


def plans_both_ways(request: PlanRequest, prices: Prices, simulator: Simulator) -> list[Considered]:
    """Return the plans that may be the fastest, for each number of microbatches those of each number of ranks.

    On devices alike the closed formula (`simulation.both_ways_seconds`) has as its only part that cuts change the
    slowest rank's, and messages; so these cuts are its best but for messages. Devices of several kinds are taken as
    the searches' plans have them (`schedules.under`).
    """
    rows = []
    for count in request.counts:
        priced = prices.problems(count)[0]  # on most devices
        found = [one for plan in _plans(priced) if (one := _candidate(priced, plan, simulator)) is not None]
        if found:
            rows.append(Considered(BOTH_WAYS, priced, None, tuple(ranked(found))))
    return rows


def _plans(priced: PricedProblem) -> list[Plan]:
    problem, B = priced.problem, priced.problem.num_microbatches
    found = []
    for configuration in problem.configurations if B % 2 == 0 else ():
        if is_one_device(configuration):
            most = min(problem.device_counts[configuration.kind], problem.num_layers, B)
            for ranks in range(2, most + 1, 2):
                stages = cut_evenly(priced, (configuration,) * ranks)
                found.append(Plan(stages, "1f1b", B, both_ways=True))
    return found


def _candidate(priced: PricedProblem, plan: Plan, simulator: Simulator) -> Candidate | None:
    """Simulate the plan, unless its busiest rank's work alone takes longer than the best plan known."""
    best = simulator.best
    if best is not None and least_seconds(priced, plan) >= best.simulated_seconds:
        return None
    return simulator.candidate(priced, plan)
