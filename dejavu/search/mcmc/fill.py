"""Where to cut, compiled: stages as long as memory and a limit on the bottleneck allow, and random plans made so.

Suffixes, rows and columns as in `shared.stage_table` and `mcmc.moves`. A limit is on (B − 1) · seconds + once.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.mcmc.moves import CONFIGURATION, REFUSED, STOP, State, below, draw, random
from dejavu.search.shared.stage_table import DEVICES, TYPE, Arrays, Costs, Ints, Kinds, stage_cost

_DRAWS = 30  # configurations that are tried before a construction gives up on a stage


@njit(cache=True, nogil=True, error_model="numpy")
def farthest(costs: Costs, repeats: int, at: int, end: int, c: int, need: int, limit: float) -> int:
    """The stage that reaches from cut `at` nearest to cut `end`, before or after it, fits, and keeps the limit.

    `at` if there is none. Sums grow with the layers, so that the middle tells which half to look at; a dense table need
    not, and is scanned.
    """
    dense = len(costs[3]) > 0
    low, high, best = 1, abs(end - at), 0  # layers of the stage
    while low <= high:
        length = low if dense else (low + high) // 2
        start, stop = (at, at + length) if end > at else (at - length, at)
        seconds, once, fits = stage_cost(costs, start, stop, c)
        if fits >= need and repeats * seconds + once <= limit and seconds < np.inf:
            best = length
            low = length + 1
        elif dense:
            low = length + 1
        else:
            high = length - 1
    return at + best if end > at else at - best


@njit(cache=True, nogil=True, error_model="numpy")
def refill(
    costs: Costs, need_SS: Ints, repeats: int, num_layers: int, stage_S3: Ints, S: int, limit: float, rest: int
) -> bool:
    """Cut a plan anew: each stage as long as may be, stage `rest` takes what is left; whether that works."""
    cut = num_layers
    for s in range(S - 1, rest, -1):
        start = farthest(costs, repeats, cut, s, stage_S3[s, CONFIGURATION], need_SS[S, s], limit)
        if start >= cut:  # also where no layer is left for it
            return False
        stage_S3[s, STOP] = cut
        cut = start
    stage_S3[rest, STOP] = cut
    high, cut = cut, 0
    for s in range(rest):
        stop = farthest(costs, repeats, cut, high - (rest - s), stage_S3[s, CONFIGURATION], need_SS[S, s], limit)
        if stop <= cut:
            return False
        stage_S3[s, STOP] = stop
        cut = stop
    return cut < high


@njit(cache=True, nogil=True, error_model="numpy")
def settle(
    costs: Costs, need_SS: Ints, repeats: int, kinds: Kinds, stage_S3: Ints, S: int, first: int, last: int
) -> None:
    """The stages first to last each take the member of their group that fits and is busy for the least time."""
    _, _, member_C, first_G1, group_C = kinds
    for s in range(first, last + 1):
        start = stage_S3[s - 1, STOP] if s > 0 else 0
        g = group_C[stage_S3[s, CONFIGURATION]]
        least, least_short = np.inf, np.inf
        for i in range(first_G1[g], first_G1[g + 1]):
            seconds, once, fits = stage_cost(costs, start, stage_S3[s, STOP], member_C[i])
            busy, short = (repeats + 1) * seconds + once, max(need_SS[S, s] - fits, 0)
            if short < least_short or (short == least_short and busy < least):
                least, least_short = busy, short
                stage_S3[s, CONFIGURATION] = member_C[i]


@njit(cache=True, nogil=True, error_model="numpy")
def random_plan(
    table: Arrays, plan: tuple[Ints, Floats, Ints], state: State, limit: float, full: float, looks: int
) -> int:
    """Stages from the last to the first, each as long as may be with probability `full`; how many, or REFUSED.

    Of `looks` configurations the one is taken that holds the most layers on each of its devices.
    From the last, because there the memory that a stage needs is known: that of the stages after it.

    Args:
        table: StageTable's. plan: as in `mcmc.walk`; its stages and devices are written to.
        limit: on the bottleneck, in seconds.
    """
    costs, links, kinds, (need_SS, repeats, _) = table
    stage_S3, _, used_D = plan
    kind_C2, count_D, _, _, _ = kinds
    most, stop, S = len(stage_S3) - 1, len(links[1]) - 1, 0
    used_D[:] = 0
    while stop > 0:
        if most <= S:
            return REFUSED
        start, c, looked, most_each = stop, 0, 0, 0.0
        for _ in range(_DRAWS):
            other = draw(kinds, state)
            if used_D[kind_C2[other, TYPE]] + kind_C2[other, DEVICES] > count_D[kind_C2[other, TYPE]]:
                continue
            reach = farthest(costs, repeats, stop, 0, other, need_SS[S + 1, 0], limit)
            each = (stop - reach) / kind_C2[other, DEVICES]
            if each > most_each:
                start, c, most_each = reach, other, each
            looked += reach < stop
            if looked == looks:
                break
        if start == stop:
            return REFUSED
        if random(state) >= full:
            start += below(state, stop - start)
        stage_S3[most - S, STOP], stage_S3[most - S, CONFIGURATION] = stop, c  # from the end of the rows
        used_D[kind_C2[c, TYPE]] += kind_C2[c, DEVICES]
        stop = start
        S += 1
    for s in range(S):
        row = most - S + 1 + s
        stage_S3[s, STOP], stage_S3[s, CONFIGURATION] = stage_S3[row, STOP], stage_S3[row, CONFIGURATION]
    return S
