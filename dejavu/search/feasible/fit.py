"""Looking for any plan that fits: the questions to `feasible.fitting`, asked of a problem.

Letters: C = configurations, T = device types, J = levels of stages after a cut.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from dejavu.plans import Plan, Problem
from dejavu.plans.stage_costs import UNBOUNDED, AdditiveCosts
from dejavu.search._base import TooLargeError
from dejavu.search.feasible import fitting
from dejavu.search.shared.compiling import tiny_problem
from dejavu.search.shared.options import Ints, most_stages, needs_of, usable
from dejavu.search.shared.stage_table import StageTable, plan_of

_WORK_PER_SECOND = 2e7  # stages looked at
_LEAST_SECONDS = 0.05  # even a search without time left looks for so long
_MOST_STATES, _MOST_BYTES = 1e7, 2.0**30  # numbers of stages × vectors of devices; and for the cuts of all of them


class Fit(NamedTuple):
    """What came of looking for a plan that fits.

    Attributes:
        is_settled: where there is no plan, whether it is proved that there is none.
    """

    plan: Plan | None
    is_settled: bool


def fit(problem: Problem, seconds: float) -> Fit:
    """A plan that fits, looked for so long.

    Raises:
        TooLargeError: there are too many numbers of stages and devices.
    """
    configuration_C = usable(problem)
    if not len(configuration_C):
        return Fit(None, True)
    need_J, stride_T, num_vectors = _levels(problem, configuration_C), *_strides(problem)
    is_sum = isinstance(problem.costs, AdditiveCosts)
    keep_all = problem.use_all_devices or not is_sum
    num_states = float(len(need_J)) * num_vectors
    if num_states > _MOST_STATES or keep_all * num_states * problem.num_layers > _MOST_BYTES:
        raise TooLargeError(
            f"feasible search takes at most {_MOST_STATES:.2g} numbers of stages × vectors of devices, and "
            f"{_MOST_BYTES:.2g} bytes for their cuts; found {num_states:.2g} of {problem.num_layers} layers"
        )
    table, types = StageTable.of(problem), list(problem.device_counts)
    type_C = [types.index(problem.configurations[c].kind) for c in configuration_C]
    taken_C = np.array([problem.configurations[c].num_devices for c in configuration_C], dtype=np.int64)
    counts_T = np.array(list(problem.device_counts.values()), dtype=np.int64)
    least_message_C, until_L1 = np.zeros(len(configuration_C)), np.zeros(problem.num_layers + 1, dtype=np.int64)
    if isinstance(problem.costs, AdditiveCosts):
        least_message_C = problem.costs.message_bytes_CL1[configuration_C].min(axis=1)
        until_L1 = fitting.spared_until(table.costs[0], configuration_C, least_message_C, int(need_J[0]))
    uses = fitting.Uses(
        configuration_C=configuration_C,
        offset_C=taken_C * stride_T[type_C],
        block_C=(stride_T * (counts_T + 1))[type_C],
        least_message_C=least_message_C,
    )
    full = int(counts_T @ stride_T) if problem.use_all_devices else -1
    space = fitting.Space(need_J, stride_T, num_vectors, full, keep_all)
    max_work = _WORK_PER_SECOND * max(seconds, _LEAST_SECONDS)
    state, stages_S2 = fitting.search(table.costs, uses, space, until_L1, max_work)
    if state == fitting.FOUND:
        return Fit(plan_of(problem, stages_S2[:, 0], stages_S2[:, 1]), True)
    return Fit(None, state == fitting.NONE)


def is_feasible(problem: Problem, seconds: float) -> bool | None:
    """Whether any plan of the problem fits; None: that could not be settled in time, or the problem is too large."""
    try:
        plan, is_settled = fit(problem, seconds)
    except TooLargeError:
        return None
    return plan is not None if is_settled else None


def _levels(problem: Problem, configuration_C: Ints) -> Ints:
    """Microbatches in flight by the stages after, to where all that follow are alike; none fits a limit's last."""
    room = most_stages(problem, configuration_C)
    most = min(room, problem.most_stages)
    need = needs_of(problem, most)
    if most < room:
        return np.append(need, UNBOUNDED + 1)
    length = len(need)
    while length > 1 and need[length - 2] == need[-1]:
        length -= 1
    return need[:length]


def _strides(problem: Problem) -> tuple[Ints, int]:
    """Of the digits of a vector of devices, and how many vectors there are."""
    sizes = [count + 1 for count in problem.device_counts.values()]
    strides = [math.prod(sizes[:t]) for t in range(len(sizes))]
    num_vectors = math.prod(sizes)
    if num_vectors > 2**31:
        raise TooLargeError(f"feasible search takes at most {2**31:,} vectors of devices; found {num_vectors:.2g}")
    return np.array(strides, dtype=np.int64), num_vectors


@cache
def load_compiled_loops() -> None:
    """Compile, or load from the cache, on a problem of one layer."""
    fit(tiny_problem(), 1.0)
