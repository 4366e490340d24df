"""Plans near those that were found, by their simulated step: simulated annealing over cuts and ranks' configurations.

Searches price a formula of plans with one stage on each rank; what the order of a schedule's actions and its messages
cost is in its simulation alone.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import replace

from dejavu.planning.candidates import least_seconds, moved_cut
from dejavu.planning.questions import Posed
from dejavu.planning.schedules import fits
from dejavu.plans import Plan, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.simulation import simulate_plan

_HOTTEST = 0.05  # of the first plan's step: so much slower a next one may be at first
_MOST_MOVES = 2000  # of one walk
_FURTHEST = 2  # layers by which a cut is moved at once
_CUT, _CHANGE = 0.4, 0.35  # shares of the moves; the others exchange two ranks' configurations
_TWICE = 0.3  # so often two moves are made at once
NUM_MET = 8  # plans that are returned


def annealed(posed: Posed, plan: Plan, seconds: float, seed: int) -> list[Plan]:
    """Walk from a plan by Metropolis' rule, colder and colder; return the fastest plans that were met and fit.

    All have the schedule, the ranks and the microbatches of the first. Messages go over the fastest links that the
    types of two stages may have.

    Args:
        seconds: of processor time, at most.
    """
    priced, drawn, began = posed.priced, random.Random(seed), time.thread_time()
    here = replace(plan, splits=())
    here_seconds = simulate_plan(priced, here).step_seconds
    hottest, met = _HOTTEST * here_seconds, dict[Plan, float]()
    for k in range(_MOST_MOVES):
        done = max(k / _MOST_MOVES, (time.thread_time() - began) / seconds if seconds > 0 else 1.0)
        if done >= 1:
            break
        limit = here_seconds - hottest * (1 - done) ** 2 * math.log(1.0 - drawn.random())
        there = _moved(priced, here, drawn)
        if there == here or least_seconds(priced, there) >= limit:
            continue
        simulation = simulate_plan(priced, there)
        if simulation.step_seconds < limit and fits(priced, there, simulation):
            here, here_seconds = there, simulation.step_seconds
            met[here] = here_seconds
    return sorted(met, key=met.__getitem__)[:NUM_MET]


def _moved(priced: PricedProblem, plan: Plan, drawn: random.Random) -> Plan:
    """Return a neighbour that needs no more devices than there are; the plan itself where none was drawn."""
    there = plan
    for _ in range(2 if drawn.random() < _TWICE else 1):
        there = _neighbour(priced, there, drawn) or there
    return there if there is plan or _has_devices(priced, there) else plan


def _neighbour(priced: PricedProblem, plan: Plan, drawn: random.Random) -> Plan | None:
    kind, ranks = drawn.random(), range(len(plan.ranks))
    if kind < _CUT:
        distance = drawn.randint(1, _FURTHEST) * drawn.choice((-1, 1))
        return moved_cut(plan, drawn.randrange(len(plan.cuts)), distance) if plan.cuts else None
    if kind < _CUT + _CHANGE:
        return _with(plan, {drawn.choice(ranks): drawn.choice(priced.problem.configurations)})
    if len(ranks) < 2:
        return None
    one, other = drawn.sample(ranks, 2)
    return _with(plan, {one: plan.rank_configuration(other), other: plan.rank_configuration(one)})


def _with(plan: Plan, configurations: dict[int, StageConfiguration]) -> Plan:
    """Return the plan with other configurations of some ranks."""
    stages = list(plan.stages)
    for rank, configuration in configurations.items():
        for s in plan.ranks[rank]:
            stages[s] = replace(stages[s], configuration=configuration)
    return replace(plan, stages=tuple(stages))


def _has_devices(priced: PricedProblem, plan: Plan) -> bool:
    """Return whether there are as many devices of each type, and none is left where all are to be used."""
    used, there_are = plan.device_counts, Counter(priced.problem.device_counts)
    return used == there_are if priced.problem.use_all_devices else used <= there_are
