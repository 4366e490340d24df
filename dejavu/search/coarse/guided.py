"""Compiled beam over whole plans with every cut, guided by prices on devices: thousands of layers in a second.

From the last layer to the first, so that a label knows how many stages are after it and memory is exact. For each stop
and configuration the windows (`coarse.windows`) know one start, the cheapest at these prices; a label is continued by
that one only, and by the nearest that fits where it does not. So it proves nothing.

Letters as in `coarse.windows`; M = labels, J = stages after a stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.windows import Choices, Links, Stages
from dejavu.search.shared.stage_table import Costs, stage_cost

Ints = NDArray[np.int64]


class Aim(NamedTuple):
    """Which plans are looked for, and how far.

    Attributes:
        limit, cutoff: seconds of the bottleneck and of Σ that they have at most.
        width: labels that are kept at a cut.
        most_labels: in all.
    """

    limit: float
    cutoff: float
    width: int
    most_labels: int


class Devices(NamedTuple):
    """What there is, packed as in `exact.labels`: a field for each type, with a spare bit above it.

    Attributes:
        packed_C: of a stage.
        guard, have: all spare bits; all devices.
        use_all: none may stay idle.
        spent: seconds of all that there is at its prices.
    """

    packed_C: Ints
    guard: int
    have: int
    use_all: bool
    spent: float


class Exactly(NamedTuple):
    """What a stage costs and holds, without a relaxation.

    Attributes:
        costs: see `StageTable`.
        index_C: the problem's configuration.
        need_J: microbatches in flight of a stage with so many after it; no plan has more stages than this is long.
    """

    costs: Costs
    index_C: Ints
    need_J: Ints


@njit(cache=True, nogil=True, error_model="numpy")
def beam(
    aim: Aim, stages: Stages, links: Links, choices: Choices, devices: Devices, exactly: Exactly
) -> tuple[float, Ints, Ints]:
    """The least Σ of a plan that was met, inf if none was; its stages' starts and configurations, in order."""
    limit, cutoff, width, most_labels = aim
    price_C, class_C, _, furthest_CL, among_K = stages
    start_CL1, to_AL1 = choices.start_CL1, choices.to_AL1
    packed_C, guard, have, use_all, spent = devices
    L = furthest_CL.shape[1]
    seconds_M, priced_M, bound_M = np.zeros(most_labels), np.zeros(most_labels), np.zeros(most_labels)
    packed_M, start_M = np.zeros(most_labels, np.int64), np.zeros(most_labels, np.int64)
    after_M, how_M = np.zeros(most_labels, np.int32), np.zeros(most_labels, np.int32)
    parent_M, next_M = np.zeros(most_labels, np.int32), np.full(most_labels, -1, np.int32)
    head_L1 = np.full(L + 1, -1, np.int32)
    head_L1[L], count = 0, 1
    best, best_label = cutoff, 0
    kept = np.empty(width, np.int64)
    for cut in range(L, 0, -1):
        num_kept = _distinct(head_L1[cut], next_M, bound_M, packed_M, best, kept)
        for m in kept[:num_kept]:
            if after_M[m] >= len(exactly.need_J):
                continue
            for c in among_K:
                packed = packed_M[m] + packed_C[c]
                if (((have | guard) - packed) & guard) != guard or start_CL1[c, cut] < 0:
                    continue
                transfer = _transfer(limit, cut, class_C[c], class_C[how_M[m]], links) if cut < L else 0.0
                if transfer == np.inf:
                    continue
                # What is before costs at least this at these prices: most labels end here, before their memory is
                # looked at. A start that is nearer is no cheaper.
                at = start_CL1[c, cut]
                priced = priced_M[m] + price_C[c]
                least = seconds_M[m] + transfer + priced - spent + to_AL1[class_C[c], at]
                if least >= best:
                    continue
                start, seconds = _fitting(limit, at, cut, c, after_M[m], links.repeats, exactly)
                total = seconds_M[m] + transfer + seconds
                bound = max(total, total + priced - spent + to_AL1[class_C[c], start])
                if start == cut or bound >= best or (start == 0 and use_all and packed != have):
                    continue
                if count == most_labels:
                    return _followed(best, best_label, L, cutoff, start_M, how_M, parent_M)
                seconds_M[count], priced_M[count], bound_M[count], packed_M[count] = total, priced, bound, packed
                start_M[count], after_M[count], how_M[count], parent_M[count] = start, after_M[m] + 1, c, m
                if start == 0:
                    best, best_label = total, count
                else:
                    next_M[count], head_L1[start] = head_L1[start], count
                count += 1
    return _followed(best, best_label, L, cutoff, start_M, how_M, parent_M)


@njit(cache=True, nogil=True)
def _transfer(limit: float, cut: int, a: int, b: int, links: Links) -> float:
    """Seconds across the cut between two classes; inf where the link would be busier than the limit."""
    seconds: float = 2.0 * (links.latency_AA[a, b] + links.per_byte_AA[a, b] * links.bytes_L1[cut])
    return seconds if links.repeats * seconds <= limit else np.inf


@njit(cache=True, nogil=True)
def _distinct(head: int, next_M: NDArray[np.int32], bound_M: Floats, packed_M: Ints, best: float, kept: Ints) -> int:
    """Write the labels of a list that are kept, the least bound first, of equal devices one; how many these are."""
    count, m = 0, head
    while m >= 0:
        count += 1
        m = next_M[m]
    here, bounds = np.empty(count, np.int64), np.empty(count)
    n, m = 0, head
    while m >= 0:
        here[n], bounds[n] = m, bound_M[m]
        n += 1
        m = next_M[m]
    num_kept = 0
    for m in here[np.argsort(bounds)]:
        if bound_M[m] >= best or num_kept == len(kept):
            break
        is_new = True
        for k in range(num_kept):
            if packed_M[kept[k]] == packed_M[m]:
                is_new = False
                break
        if is_new:
            kept[num_kept] = m
            num_kept += 1
    return num_kept


@njit(cache=True, nogil=True, error_model="numpy")
def _fitting(
    limit: float, start: int, stop: int, c: int, after: int, repeats: float, exactly: Exactly
) -> tuple[int, float]:
    """The start, or the next one from which the stage fits, and its seconds; `stop` if none does."""
    need, index = exactly.need_J[after], exactly.index_C[c]
    seconds, once, fits = stage_cost(exactly.costs, start, stop, index)
    if fits >= need and repeats * seconds + once <= limit:
        return start, seconds
    low, high = start, stop
    while high - low > 1:
        middle = (low + high) // 2
        seconds, once, fits = stage_cost(exactly.costs, middle, stop, index)
        if fits >= need and repeats * seconds + once <= limit:
            high = middle
        else:
            low = middle
    if high == stop:
        return stop, np.inf
    return high, stage_cost(exactly.costs, high, stop, index)[0]


@njit(cache=True, nogil=True)
def _followed(
    best: float,
    label: int,
    most_stages: int,
    cutoff: float,
    start_M: Ints,
    how_M: NDArray[np.int32],
    parent_M: NDArray[np.int32],
) -> tuple[float, Ints, Ints]:
    starts, hows = np.empty(most_stages, np.int64), np.empty(most_stages, np.int64)
    n, m = 0, label
    while m > 0:
        starts[n], hows[n] = start_M[m], how_M[m]
        n += 1
        m = parent_M[m]
    return (best if n else np.inf), starts[:n], hows[:n]
