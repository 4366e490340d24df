"""Compiled loops over plans whose devices have prices: bounds, and which options a better plan can still have.

With a price λ on each device of a type, the cheapest Σ + λ · devices over all plans, less λ · counts, bounds Σ of every
plan that keeps to the counts (Lagrangian relaxation; Handler and Zang, Networks 10, 1980, for paths with resources).
The counts are then no part of a state, so that a table has layers × stages after × link classes entries.

Letters: N = options, sorted by start; L1 = cut positions, J = levels of stages after a cut, A = link classes. See
`shared.suffix_table`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.shared.rules import Rules

_NONE = -1

Ints = NDArray[np.int64]


class Stages(NamedTuple):
    """The stages that a plan may have, none busier than the limit.

    Attributes:
        start_N, stop_N, class_N, fits_N: layers, link class and microbatches in flight.
        cost_N: seconds, and the price of the devices.
        first_L1: where each start's begin.
        by_stop_N, first_by_stop_L2: the options in order of their stops, and where each stop's begin.
    """

    start_N: Ints
    stop_N: Ints
    class_N: Ints
    fits_N: Ints
    cost_N: Floats
    first_L1: Ints
    by_stop_N: Ints
    first_by_stop_L2: Ints


@njit(cache=True, nogil=True)
def downstream(
    stages: Stages, rules: Rules
) -> tuple[Floats, Floats, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """The cheapest way to run the layers after each cut.

    Returns:
        rest_L1JA: [cut, j, a] with j stages after the cut, the one before it of class a, its transfer included.
        here_JA: the cheapest whole plans, by the stages of the plan and the first one's class.
        choice_L1JA, level_L1JA: [start, j, a] the option that starts there, and the level after it.
        next_L1JA: [cut, j, a] the class of the stage that starts there, where the one before it is of class a.
    """
    _, stop_N, class_N, fits_N, cost_N, first_L1, _, _ = stages
    limit, need_J, transfer_L1AA, link_busy_L1AA = rules
    L, J, A = len(first_L1) - 1, len(need_J), transfer_L1AA.shape[1]
    rest_L1JA = np.full((L + 1, J, A), np.inf)
    choice_L1JA = np.full((L + 1, J, A), _NONE, np.int32)
    level_L1JA = np.zeros((L + 1, J, A), np.int32)
    next_L1JA = np.full((L + 1, J, A), _NONE, np.int32)
    here_JA = np.full((J, A), np.inf)
    rest_L1JA[L, 0] = 0.0
    last = np.zeros(L + 1, np.int64)  # the last level after each cut that can be reached
    for start in range(L - 1, -1, -1):
        here_JA[:] = np.inf
        deepest = 0
        for i in range(first_L1[start], first_L1[start + 1]):
            stop, a, cost, fits = stop_N[i], class_N[i], cost_N[i], fits_N[i]
            # Levels beyond the last that is reached are inf throughout, and add to no plan.
            for j in range(last[stop] + 1):
                if fits < need_J[j]:
                    continue
                total = cost + rest_L1JA[stop, j, a]
                k = min(j + 1, J - 1)
                if total < here_JA[k, a]:
                    here_JA[k, a] = total
                    choice_L1JA[start, k, a] = i
                    level_L1JA[start, k, a] = j
                    deepest = max(deepest, k)
        last[start] = deepest
        if start == 0:
            break
        for row in range((deepest + 1) * A):  # the transfer to what starts here, from each class before
            j, b = row // A, row % A
            if here_JA[j, b] == np.inf:
                continue
            for a in range(A):
                if link_busy_L1AA[start, a, b] > limit:
                    continue
                total = here_JA[j, b] + transfer_L1AA[start, a, b]
                if total < rest_L1JA[start, j, a]:
                    rest_L1JA[start, j, a] = total
                    next_L1JA[start, j, a] = b
    return rest_L1JA, here_JA, choice_L1JA, level_L1JA, next_L1JA


@njit(cache=True, nogil=True)
def follow(
    stop_N: Ints,
    class_N: Ints,
    here_JA: Floats,
    choice_L1JA: NDArray[np.int32],
    level_L1JA: NDArray[np.int32],
    next_L1JA: NDArray[np.int32],
) -> Ints:
    """The options of the cheapest plan, in order; empty if there is none."""
    J, A = here_JA.shape
    L = len(choice_L1JA) - 1
    chosen = np.empty(L, np.int64)
    count = 0
    best, j, a = np.inf, 0, 0
    for level in range(J):
        for b in range(A):
            if here_JA[level, b] < best:
                best, j, a = here_JA[level, b], level, b
    if best == np.inf:
        return chosen[:0]
    start = 0
    while start < L:
        i = choice_L1JA[start, j, a]
        chosen[count] = i
        count += 1
        j = level_L1JA[start, j, a]
        start = stop_N[i]
        a = next_L1JA[start, j, class_N[i]]
    return chosen[:count]


@njit(cache=True, nogil=True)
def upstream(stages: Stages, rules: Rules) -> Floats:
    """The cheapest way to run the layers before each cut: [cut, j, a] where the stage after it has j stages after it.

    That stage is of class a, and the transfer to it is included.
    """
    start_N, _, class_N, fits_N, cost_N, _, by_stop_N, first_by_stop_L2 = stages
    need_J = rules.need_J
    L, J, A = len(rules.transfer_L1AA) - 1, len(need_J), rules.transfer_L1AA.shape[1]
    rest_L1JA = np.full((L + 1, J, A), np.inf)
    rest_L1JA[0] = 0.0
    here_JA = np.empty((J, A))
    for stop in range(1, L):
        here_JA[:] = np.inf  # [j, a] ends here with j stages after it, of class a
        for at in range(first_by_stop_L2[stop], first_by_stop_L2[stop + 1]):
            i = by_stop_N[at]
            start, a, cost, fits = start_N[i], class_N[i], cost_N[i], fits_N[i]
            for j in range(J):
                if fits >= need_J[j]:
                    total = cost + rest_L1JA[start, j, a]
                    here_JA[j, a] = min(here_JA[j, a], total)
        _cross(stop, rules, here_JA, rest_L1JA)
    return rest_L1JA


@njit(cache=True, nogil=True)
def _cross(cut: int, rules: Rules, here_JA: Floats, rest_L1JA: Floats) -> None:
    """What stops at a cut, by the class of the stage after, with the transfer to it."""
    limit, _, transfer_L1AA, link_busy_L1AA = rules
    J, A = here_JA.shape
    for j in range(J):  # the stage after the cut has j stages after it, so the one before has one more
        k = min(j + 1, J - 1)
        for a in range(A):
            if here_JA[k, a] == np.inf:
                continue
            for b in range(A):
                if link_busy_L1AA[cut, a, b] <= limit:
                    total = here_JA[k, a] + transfer_L1AA[cut, a, b]
                    rest_L1JA[cut, j, b] = min(rest_L1JA[cut, j, b], total)


@njit(cache=True, nogil=True)
def through(stages: Stages, need_J: Ints, upstream_L1JA: Floats, downstream_L1JA: Floats) -> Floats:
    """The cheapest plan that has each option."""
    start_N, stop_N, class_N, fits_N, cost_N, _, _, _ = stages
    through_N = np.full(len(stop_N), np.inf)
    for i in range(len(stop_N)):
        start, stop, a = start_N[i], stop_N[i], class_N[i]
        for j in range(len(need_J)):
            if fits_N[i] >= need_J[j]:
                total = upstream_L1JA[start, j, a] + downstream_L1JA[stop, j, a]
                through_N[i] = min(through_N[i], total)
        through_N[i] += cost_N[i]
    return through_N
