"""A problem's unit of time: some tolerances in searches and in solvers are absolute, the unit of what is asked is free.

Units are powers of two, so that scaling rounds nothing: prices, ties and what just fits stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dejavu.plans import Problem
from dejavu.plans.stage_costs import AdditiveCosts, DenseCosts


def unit_seconds(problem: Problem) -> float:
    """The power of two nearest to what all layers take where each is fastest, devices and links aside.

    Where that is nothing, the one nearest to the longest that anything takes; 1 where nothing takes time. A problem
    that was scaled by it has the unit 1.
    """
    unit = _least_sum(problem)
    if not 0 < unit < np.inf:
        every = [problem.link_latency_seconds_CC, problem.link_seconds_per_byte_CC * problem.cut_bytes_L1.max()]
        costs = problem.costs
        if isinstance(costs, AdditiveCosts):
            every += [costs.seconds_CL, costs.per_step_seconds_CL, costs.per_step_latency_seconds_C]
        else:
            every += [costs.seconds_CLL1, costs.per_step_seconds_CLL1]
        unit = max(float(np.max(table, where=np.isfinite(table), initial=0.0)) for table in every)
    return 2.0 ** round(math.log2(unit)) if unit > 0 else 1.0


def _least_sum(problem: Problem) -> float:
    costs = problem.costs
    if isinstance(costs, AdditiveCosts):
        return float(costs.least_seconds_L.sum())
    least_LL1 = costs.seconds_CLL1.min(axis=0)
    upto = np.full(problem.num_layers + 1, np.inf)
    upto[0] = 0.0
    for stop in range(1, problem.num_layers + 1):
        upto[stop] = (upto[:stop] + least_LL1[:stop, stop]).min()
    return float(upto[-1])


def in_units(problem: Problem, unit: float) -> Problem:
    """The same problem with every time divided by the unit."""
    costs = problem.costs
    scaled: AdditiveCosts | DenseCosts
    if isinstance(costs, AdditiveCosts):
        scaled = replace(
            costs,
            seconds_CL=costs.seconds_CL / unit,
            per_step_seconds_CL=costs.per_step_seconds_CL / unit,
            per_step_latency_seconds_C=costs.per_step_latency_seconds_C / unit,
        )
    else:
        scaled = replace(
            costs, seconds_CLL1=costs.seconds_CLL1 / unit, per_step_seconds_CLL1=costs.per_step_seconds_CLL1 / unit
        )
    return replace(
        problem,
        costs=scaled,
        link_latency_seconds_CC=problem.link_latency_seconds_CC / unit,
        link_seconds_per_byte_CC=problem.link_seconds_per_byte_CC / unit,
    )
