"""Compiled loops over problems of thousands of layers whose costs are sums: no list of stages, only windows of cuts.

Under a limit on the bottleneck the stages that may start at a layer reach to some furthest stop, which never moves away
as the start moves forward, and a stage's seconds are a difference of prefix sums: the cheapest way to each stop is a
minimum over a sliding window, one step for each stop and configuration.

Letters: C = configurations, L1 = cut positions, A = link classes.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit


@njit(cache=True, nogil=True)
def furthest_stops(
    limit, most_in_flight, busy_CL1, per_step_C, fixed_CL1, active_CL1, step_CL1, scratch_CL, capacity_C, end_CL,
    furthest_CL,
):  # fmt: skip
    """furthest[c, start]: no stage from there stops later that is no busier than the limit and fits its memory.

    A stage has at least as many stages behind it as the layers behind need, so it holds at least one microbatch more
    than that, up to the most that a schedule asks for (1: memory does not depend on the place). end[c, start]: the
    first layer from there on that cannot be part of any stage.
    """
    C, L = scratch_CL.shape
    large = np.empty((C, L), np.int64)  # [top:end] layers of a window, each with more scratch than all those before it
    top, end, right = np.zeros(C, np.int64), np.zeros(C, np.int64), np.full(C, L)
    behind = np.zeros(L + 1, np.int64)  # the fewest stages from a cut on
    for start in range(L - 1, -1, -1):
        reached = start
        for c in range(C):
            while end[c] > top[c] and scratch_CL[c, large[c, end[c] - 1]] <= scratch_CL[c, start]:
                end[c] -= 1
            large[c, end[c]] = start
            end[c] += 1
            right[c] = min(right[c], end_CL[c, start])
            while right[c] > start:
                stop = right[c]
                while large[c, top[c]] >= stop:
                    top[c] += 1
                need = min(behind[stop] + 1, most_in_flight)
                free = capacity_C[c] - (fixed_CL1[c, stop] - fixed_CL1[c, start])
                working = scratch_CL[c, large[c, top[c]]] + need * (active_CL1[c, stop] - active_CL1[c, start])
                if (
                    busy_CL1[c, stop] - busy_CL1[c, start] + per_step_C[c] <= limit
                    and working <= free
                    and step_CL1[c, stop] - step_CL1[c, start] <= free
                ):
                    break
                right[c] -= 1
            if right[c] == start:  # not even this layer alone: the window begins anew
                top[c] = end[c]
            furthest_CL[c, start] = right[c]
            reached = max(reached, right[c])
        if reached == start:
            return False
        behind[start] = behind[reached] + 1
    return True


@njit(cache=True, nogil=True)
def cheapest(
    limit, repeats, price_C, class_C, seconds_CL1, furthest_CL, latency_AA, per_byte_AA, cut_bytes_L1,
    choice_AL1, start_CL1, class_before_AL1,
):  # fmt: skip
    """The least Σ of seconds, transfers and prices of stages that reach no further than they may; inf if none do.

    choice[a, stop]: the configuration of the last stage, of class a; start[c, stop]: where that of configuration c
    begins; class_before[a, cut]: the class before a stage of class a.
    """
    C, L = furthest_CL.shape
    A = len(latency_AA)
    to_AL1 = np.full((A, L + 1), np.inf)  # [a, cut] all before it, and the transfer to a stage of class a
    to_AL1[:, 0] = 0.0
    queue = np.empty((C, L + 1), np.int64)  # [head:tail] starts, each cheaper than those behind it
    head, tail = np.zeros(C, np.int64), np.zeros(C, np.int64)
    here_A = np.empty(A)
    for stop in range(1, L + 1):
        here_A[:] = np.inf
        start = stop - 1
        for c in range(C):
            a = class_C[c]
            value = to_AL1[a, start] - seconds_CL1[c, start]
            if value < np.inf:
                while tail[c] > head[c]:
                    before = queue[c, tail[c] - 1]
                    if to_AL1[a, before] - seconds_CL1[c, before] < value:
                        break
                    tail[c] -= 1
                queue[c, tail[c]] = start
                tail[c] += 1
            while head[c] < tail[c] and furthest_CL[c, queue[c, head[c]]] < stop:
                head[c] += 1
            if head[c] < tail[c]:
                at = queue[c, head[c]]
                total = to_AL1[a, at] - seconds_CL1[c, at] + seconds_CL1[c, stop] + price_C[c]
                start_CL1[c, stop] = at
                if total < here_A[a]:
                    here_A[a] = total
                    choice_AL1[a, stop] = c
        if stop == L:
            return here_A.min(), here_A.argmin()
        for b in range(A):
            if here_A[b] < np.inf:
                for a in range(A):
                    seconds = 2.0 * (latency_AA[b, a] + per_byte_AA[b, a] * cut_bytes_L1[stop])
                    if repeats * seconds <= limit and here_A[b] + seconds < to_AL1[a, stop]:
                        to_AL1[a, stop] = here_A[b] + seconds
                        class_before_AL1[a, stop] = b
    return np.inf, 0
