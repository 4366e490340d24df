"""Compiled loops over plans whose devices have prices: bounds, and which options a better plan can still have.

With a price λ on each device of a type, the cheapest Σ + λ · devices over all plans, less λ · counts, bounds Σ of every
plan that keeps to the counts (Lagrangian relaxation; Handler and Zang, Networks 10, 1980, for paths with resources).
The counts are then no part of a state, so that a table has layers × stages behind × link classes entries.

Letters: N = options, sorted by start; L1 = cut positions, J = levels of stages behind, A = link classes. See `_suffix`.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit

_NONE = -1


@njit(cache=True, nogil=True)
def behind(limit, first_L1, stop_N, class_N, cost_N, fits_N, need_J, transfer_L1AA, link_busy_L1AA):
    """The cheapest way to run the layers behind each cut.

    Returns:
        behind_L1JA: [cut, j, a] with j stages behind the cut, the one before it of class a, its transfer included.
        here_JA: the cheapest whole plans, by the stages of the plan and the first one's class.
        choice_L1JA, level_L1JA: [start, j, a] the option that starts there, and the level behind it.
        next_L1JA: [cut, j, a] the class of the stage that starts there, where the one before it is of class a.
    """
    L, J, A = len(first_L1) - 1, len(need_J), transfer_L1AA.shape[1]
    behind_L1JA = np.full((L + 1, J, A), np.inf)
    choice_L1JA = np.full((L + 1, J, A), _NONE, np.int32)
    level_L1JA = np.zeros((L + 1, J, A), np.int32)
    next_L1JA = np.full((L + 1, J, A), _NONE, np.int32)
    here_JA = np.full((J, A), np.inf)
    behind_L1JA[L, 0] = 0.0
    last = np.zeros(L + 1, np.int64)  # the last level behind each cut that can be reached
    for start in range(L - 1, -1, -1):
        here_JA[:] = np.inf
        deepest = 0
        for i in range(first_L1[start], first_L1[start + 1]):
            stop, a, cost, fits = stop_N[i], class_N[i], cost_N[i], fits_N[i]
            for j in range(last[stop] + 1):
                if fits >= need_J[j]:
                    total = cost + behind_L1JA[stop, j, a]
                    k = min(j + 1, J - 1)
                    if total < here_JA[k, a]:
                        here_JA[k, a] = total
                        choice_L1JA[start, k, a] = i
                        level_L1JA[start, k, a] = j
                        deepest = max(deepest, k)
        last[start] = deepest
        if start == 0:
            break
        for j in range(deepest + 1):
            for b in range(A):
                if here_JA[j, b] < np.inf:
                    for a in range(A):
                        if link_busy_L1AA[start, a, b] <= limit:
                            total = here_JA[j, b] + transfer_L1AA[start, a, b]
                            if total < behind_L1JA[start, j, a]:
                                behind_L1JA[start, j, a] = total
                                next_L1JA[start, j, a] = b
    return behind_L1JA, here_JA, choice_L1JA, level_L1JA, next_L1JA


@njit(cache=True, nogil=True)
def follow(stop_N, class_N, here_JA, choice_L1JA, level_L1JA, next_L1JA):
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
def before(limit, start_N, by_stop_N, first_by_stop_L2, class_N, cost_N, fits_N, need_J, transfer_L1AA, link_busy_L1AA):
    """The cheapest way to run the layers before each cut: [cut, j, a] where the stage behind it has j stages behind it.

    That stage is of class a, and the transfer to it is included. by_stop_N lists the options by their stops.
    """
    L, J, A = len(transfer_L1AA) - 1, len(need_J), transfer_L1AA.shape[1]
    before_L1JA = np.full((L + 1, J, A), np.inf)
    before_L1JA[0] = 0.0
    here_JA = np.empty((J, A))
    for stop in range(1, L):
        here_JA[:] = np.inf  # [j, a] ends here with j stages behind it, of class a
        for at in range(first_by_stop_L2[stop], first_by_stop_L2[stop + 1]):
            i = by_stop_N[at]
            start, a, cost, fits = start_N[i], class_N[i], cost_N[i], fits_N[i]
            for j in range(J):
                if fits >= need_J[j]:
                    total = cost + before_L1JA[start, j, a]
                    here_JA[j, a] = min(here_JA[j, a], total)
        for j in range(J):  # the stage behind the cut has j stages behind it, so this one has one more
            k = min(j + 1, J - 1)
            for a in range(A):
                if here_JA[k, a] < np.inf:
                    for b in range(A):
                        if link_busy_L1AA[stop, a, b] <= limit:
                            total = here_JA[k, a] + transfer_L1AA[stop, a, b]
                            before_L1JA[stop, j, b] = min(before_L1JA[stop, j, b], total)
    return before_L1JA


@njit(cache=True, nogil=True)
def through(start_N, stop_N, class_N, cost_N, fits_N, need_J, before_L1JA, behind_L1JA):
    """The cheapest plan that has each option."""
    through_N = np.full(len(stop_N), np.inf)
    for i in range(len(stop_N)):
        start, stop, a = start_N[i], stop_N[i], class_N[i]
        for j in range(len(need_J)):
            if fits_N[i] >= need_J[j]:
                total = before_L1JA[start, j, a] + behind_L1JA[stop, j, a]
                through_N[i] = min(through_N[i], total)
        through_N[i] += cost_N[i]
    return through_N
