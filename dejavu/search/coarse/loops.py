"""The loops of `coarse`, compiled or loaded from numba's cache, before a clock starts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from dejavu.plans import Plan, Stage
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.search._base import Incumbent
from dejavu.search.coarse.clusters import refined
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.relaxation import Windowed
from dejavu.search.coarse.relaxed import Relaxed
from dejavu.search.shared.compiling import tiny_problem
from dejavu.search.shared.stage_table import StageTable

_LAYERS = 4


@cache
def load_compiled_loops() -> None:
    """Move cuts, bound and look for plans once, so near to the best plan that something is left to be proved."""
    ones_CL, ones_C = np.ones((1, _LAYERS)), np.ones(1)
    costs = AdditiveCosts(ones_CL, ones_CL, ones_C, ones_CL, ones_CL, ones_CL, 100.0 * ones_C)
    problem = replace(tiny_problem(_LAYERS), costs=costs, num_microbatches=2)
    best, configuration = Incumbent(problem, "loops", np.inf), problem.configurations[0]
    stages = tuple(Stage(k, k + 1, configuration) for k in range(_LAYERS))
    plan = Plan(stages, problem.schedule, problem.num_microbatches)
    best.offer(plan)
    list(refined(problem, plan, 1, StageTable.of(problem)))
    relaxed, limit = Relaxed(problem, best), 2.0 * best.step_seconds
    windowed = Windowed(relaxed)
    known = windowed.tightened(windowed.everything(), limit, np.inf)
    windowed.tightened(windowed.everything(), limit, known.sum_seconds + 0.05 * best.step_seconds)
    for leveled in (Leveled(relaxed), Leveled(relaxed, num_levels=1)):
        known = leveled.tightened(leveled.everything(), limit, np.inf)
        leveled.plan_under(known, limit, known.sum_seconds + 0.05 * best.step_seconds, 1)
