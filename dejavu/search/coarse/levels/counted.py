"""Compiled loops over windows of cuts with the number of stages in the state: memory is exact, devices have prices.

A state is a cut and a level, how many stages there are from the cut on. A stage from a state of level n holds the
microbatches of n stages, and leads to one of level n − 1. The last level may stand for all from it on: a stage from
there holds what is held there at least, and leads to the same level or the one before. Within a level the cheapest way
is a minimum over a sliding window, as in `coarse.windows`.

Letters as in `coarse.windows`; K = the configurations that are looked at, N = levels, from 0, N1 = from 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.levels import minima
from dejavu.search.coarse.levels.crossing import Crossing, transferred, transfers
from dejavu.search.coarse.levels.minima import Stops
from dejavu.search.coarse.windows import Costs, Links

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_BLOCK = 1024  # cuts that are gone through at all levels before others are, so that what is read of them stays near


class Levels(NamedTuple):
    """The states, and how far stages reach from them.

    Attributes:
        alive_NL1: the states that a plan of interest can have; of level 0 only the last cut, which is of no other.
        band_N2: the first and the last cut of each level; the first is above the last where it has none.
        is_open: the last level stands for all from it on.
        fitting_N1CL: see `fitting_stops`.
        busy_KL: see `busy_stops`.
        looked_NK: the configurations that are looked at from each level; see `looked_at`.
    """

    alive_NL1: Flags
    band_N2: Ints
    is_open: bool
    fitting_N1CL: Stops
    busy_KL: Stops
    looked_NK: Flags


class Ways(NamedTuple):
    """What stages cost under some prices, and between which classes of links.

    Attributes:
        among_K: the configurations.
        price_K, class_K: seconds for the devices of a stage, and its link class.
        seconds_CL1: of the layers, summed from the first.
    """

    among_K: Ints
    price_K: Floats
    class_K: Ints
    seconds_CL1: Floats


@njit(cache=True, nogil=True)
def _upto(table_CL1: Floats, c: int, cut: int, early: float) -> float:
    """A sum of layers up to a cut, less that share of those from the cut before it on."""
    return float(table_CL1[c, cut] - early * (table_CL1[c, cut] - table_CL1[c, cut - 1]))


@njit(cache=True, nogil=True)
def fitting_stops(need_N1: Ints, costs: Costs, found_N1CL: Stops) -> None:
    """[level − 1, c, start]: no stage from there stops later whose memory holds as many microbatches as are needed."""
    _, _, fixed_CL1, active_CL1, step_CL1, scratch_CL, capacity_C, end_CL, early = costs
    C, L = scratch_CL.shape
    large = np.empty(L, np.int64)  # [top:end] layers of a window, each with more scratch than all those before it
    for n in range(len(need_N1)):
        for c in range(C):
            top, end, right = 0, 0, L
            for start in range(L - 1, -1, -1):
                while end > top and scratch_CL[c, large[end - 1]] <= scratch_CL[c, start]:
                    end -= 1
                large[end] = start
                end += 1
                right = min(right, end_CL[c, start])
                while right > start:
                    while large[top] >= right:
                        top += 1
                    free = capacity_C[c] - (_upto(fixed_CL1, c, right, early) - fixed_CL1[c, start])
                    held = need_N1[n] * (_upto(active_CL1, c, right, early) - active_CL1[c, start])
                    step = _upto(step_CL1, c, right, early) - step_CL1[c, start]
                    if scratch_CL[c, large[top]] + held <= free and step <= free:
                        break
                    right -= 1
                if right == start:
                    top = end
                found_N1CL[n, c, start] = right


@njit(cache=True, nogil=True)
def busy_stops(limit: float, costs: Costs, among_K: Ints) -> Stops:
    """[k, start]: no stage from there stops later that is no busier than the limit."""
    busy_CL1, per_step_C, end_CL, early = costs.busy_CL1, costs.per_step_C, costs.end_CL, costs.early
    L = end_CL.shape[1]
    found = np.empty((len(among_K), L), np.int32)
    for k in range(len(among_K)):
        c, right = among_K[k], L
        for start in range(L - 1, -1, -1):
            right = min(right, end_CL[c, start])
            while right > start and not _upto(busy_CL1, c, right, early) - busy_CL1[c, start] + per_step_C[c] <= limit:
                right -= 1
            found[k, start] = right
    return found


@njit(cache=True, nogil=True)
def looked_at(
    used_NK: Flags, better_KK: Flags, among_K: Ints, band_N2: Ints, fitting_N1CL: Stops, busy_KL: Stops
) -> Flags:
    """[n, k]: used from this level, where no other configuration is as good in every layer and reaches as far.

    What one that is left out does, the other does with as many stages, no later and no busier, so that no plan is lost
    that has a bottleneck below any limit.

    Args:
        better_KK: [j, k] j takes what k takes, and in no layer more seconds or a busier device.
    """
    N, K = len(band_N2), len(among_K)
    found = used_NK.copy()
    for n in range(1, N):
        low, high = band_N2[n, 0], band_N2[n, 1]
        for k in range(K):
            for j in range(K if found[n, k] else 0):
                if not better_KK[j, k] or not found[n, j]:
                    continue
                as_far = True
                for start in range(low, high + 1):
                    far = min(fitting_N1CL[n - 1, among_K[j], start], busy_KL[j, start])
                    if far < min(fitting_N1CL[n - 1, among_K[k], start], busy_KL[k, start]):
                        as_far = False
                        break
                if as_far:
                    found[n, k] = False
                    break
    return found


@njit(cache=True, nogil=True)
def bands(alive_NL1: Flags) -> Ints:
    """As `Levels.band_N2`."""
    N, L1 = alive_NL1.shape
    found = np.empty((N, 2), np.int64)
    found[:, 0], found[:, 1] = L1, -1
    for n in range(N):
        for cut in range(L1):
            if alive_NL1[n, cut]:
                found[n, 0], found[n, 1] = min(found[n, 0], cut), cut
    return found


@njit(cache=True, nogil=True)
def _read(levels: Levels, n: int) -> tuple[int, int]:
    """The first and the last cut that are read of a level, besides the first of all: those of stages to or from it."""
    before, after = max(n - 1, 0), min(n + 1, len(levels.band_N2) - 1)
    first = min(levels.band_N2[n, 0], levels.band_N2[after, 0])
    last = max(max(levels.band_N2[before, 1], levels.band_N2[n, 1]), levels.band_N2[after, 1])
    return first, last


@njit(cache=True, nogil=True, fastmath=minima.NO_NAN)
def downstream(limit: float, ways: Ways, crossing: Crossing, levels: Levels, rest_NAL1: Floats) -> None:
    """Fill rest[n, a, cut]: the least Σ with prices of n stages from a cut on, with the transfer from class a to them.

    At cut 0 there is no transfer: a is the class of the first stage. What is far from all states is left as it is.
    """
    among_K, price_K, class_K, seconds_CL1 = ways
    N, A, L1 = rest_NAL1.shape
    for n in range(N):
        low, high = _read(levels, n)
        rest_NAL1[n, :, low : high + 1] = np.inf
        rest_NAL1[n, :, 0] = np.inf
    rest_NAL1[0, :, L1 - 1] = 0.0
    here_AB = np.empty((A, _BLOCK))
    value_B, end_B, least_B, upto_B = np.empty(L1), np.empty(_BLOCK, np.uint32), np.empty(_BLOCK), np.empty(L1)
    for block_high in range(L1 - 2, -1, -_BLOCK):
        for n in range(1, N - 1 if levels.is_open else N):
            low = max(levels.band_N2[n, 0], block_high - _BLOCK + 1)
            high, last = min(levels.band_N2[n - 1, 1] - 1, block_high), levels.band_N2[n - 1, 1]
            if low > high:
                continue
            num, band = high + 1 - low, slice(low, high + 1)
            here_AB[:] = np.inf
            for k in np.flatnonzero(levels.looked_NK[n]):
                c, a = among_K[k], class_K[k]
                minima.reach(levels.fitting_N1CL[n - 1, c, band], levels.busy_KL[k, band], low, last, end_B)
                after = slice(low + 1, low + 1 + end_B[num - 1])
                minima.sums(rest_NAL1[n - 1, a, after], seconds_CL1[c, after], 1.0, value_B)
                minima.least_ahead(value_B, end_B, upto_B, least_B[:num])
                minima.lowered(least_B, seconds_CL1[c, band], price_K[k], here_AB[a, :num])
            transfers(
                limit, crossing, levels.alive_NL1[n], max(low, 1), high, here_AB[:, max(1 - low, 0) :], rest_NAL1[n]
            )
            if low == 0 and levels.alive_NL1[n, 0]:
                rest_NAL1[n, :, 0] = here_AB[:, 0]
    if levels.is_open and N > 1:
        _open_downstream(limit, ways, crossing, levels, rest_NAL1)


@njit(cache=True, nogil=True)
def _open_downstream(limit: float, ways: Ways, crossing: Crossing, levels: Levels, rest_NAL1: Floats) -> None:
    """The last level, whose stages lead to the one before or stay."""
    among_K, price_K, class_K, seconds_CL1 = ways
    N, A, L1 = rest_NAL1.shape
    K, n = len(among_K), N - 1
    queue, value_KL1 = np.empty((K, L1), np.int32), np.empty((K, L1))
    head, tail = np.zeros(K, np.int64), np.zeros(K, np.int64)
    here_A, least_P, to_A = np.empty(A), np.empty(A), np.empty(A)
    looked = np.flatnonzero(levels.looked_NK[n])
    high = max(levels.band_N2[n - 1, 1], levels.band_N2[n, 1]) - 1
    for start in range(high, levels.band_N2[n, 0] - 1, -1):
        here_A[:] = np.inf
        for k in looked:
            c, a = among_K[k], class_K[k]
            value = min(rest_NAL1[n, a, start + 1], rest_NAL1[n - 1, a, start + 1]) + seconds_CL1[c, start + 1]
            if value < np.inf:
                while tail[k] > head[k] and value_KL1[k, tail[k] - 1] >= value:
                    tail[k] -= 1
                queue[k, tail[k]], value_KL1[k, tail[k]] = start + 1, value
                tail[k] += 1
            furthest = min(levels.fitting_N1CL[n - 1, c, start], levels.busy_KL[k, start])
            while head[k] < tail[k] and queue[k, head[k]] > furthest:
                head[k] += 1
            if head[k] < tail[k]:
                here_A[a] = min(here_A[a], value_KL1[k, head[k]] - seconds_CL1[c, start] + price_K[k])
        if levels.alive_NL1[n, start]:
            if start == 0:
                rest_NAL1[n, :, 0] = here_A
            else:
                transferred(limit, crossing, start, here_A, least_P, to_A)
                rest_NAL1[n, :, start] = to_A


@njit(cache=True, nogil=True)
def followed(limit: float, ways: Ways, links: Links, levels: Levels, rest_NAL1: Floats) -> Ints:
    """[configuration, start, stop; stage] of the cheapest plan, in order; there has to be one.

    Of stages that come to the same the longest: where nothing costs anything there are few of them.
    """
    among_K, price_K, class_K, seconds_CL1 = ways
    N, _, L1 = rest_NAL1.shape
    found = np.empty((3, L1), np.int64)
    cut, before, n, count = 0, 0, 1, 0
    for level in range(1, N):
        if rest_NAL1[level, :, 0].min() < rest_NAL1[n, :, 0].min():
            n = level
    while cut < L1 - 1:
        best, best_k, best_stop, best_level = np.inf, 0, cut + 1, n - 1
        for k in np.flatnonzero(levels.looked_NK[n]):
            c, a = among_K[k], class_K[k]
            seconds = 0.0
            if cut > 0:
                seconds = 2.0 * (links.latency_AA[before, a] + links.per_byte_AA[before, a] * links.bytes_L1[cut])
                if links.repeats * seconds > limit:
                    continue
            seconds += price_K[k] - seconds_CL1[c, cut]
            furthest = min(levels.fitting_N1CL[n - 1, c, cut], levels.busy_KL[k, cut])
            for level in range(n - 1, n + 1 if levels.is_open and n == N - 1 else n):
                for stop in range(cut + 1, min(int(furthest), levels.band_N2[level, 1]) + 1):
                    total = rest_NAL1[level, a, stop] + seconds_CL1[c, stop] + seconds
                    if total < best or (total == best and stop > best_stop):
                        best, best_k, best_stop, best_level = total, int(k), stop, level
        found[0, count], found[1, count], found[2, count] = among_K[best_k], cut, best_stop
        count += 1
        cut, before, n = best_stop, class_K[best_k], best_level
    return found[:, :count]


@njit(cache=True, nogil=True, fastmath=minima.NO_NAN)
def through(limit: float, ways: Ways, crossing: Crossing, levels: Levels, rest_NAL1: Floats) -> tuple[Floats, Floats]:
    """The least Σ with prices of whole plans that have each state, [n, cut], and each configuration there, [n, k].

    Args:
        rest_NAL1: as `downstream` filled it at the same prices. It is filled anew, with what is before each state,
            [n, a, cut]: Σ with prices of the stages up to there, and the transfer from them to a stage of class a.
    """
    among_K, price_K, class_K, seconds_CL1 = ways
    N, A, L1 = rest_NAL1.shape
    through_NL1, through_NK = np.full((N, L1), np.inf), np.full((N, len(among_K)), np.inf)
    here_AB, value_B, upto_B = np.empty((A, _BLOCK)), np.empty(L1), np.empty(L1)
    end_B, spare_B, begin_B = np.empty(L1, np.uint32), np.empty(_BLOCK + 1, np.uint32), np.empty(_BLOCK + 1, np.uint32)
    least_B = np.empty(_BLOCK)
    top = _tops(limit, ways, crossing, levels, rest_NAL1, through_NL1, through_NK)
    for block_low in range(1, L1, _BLOCK):
        block_high = min(block_low + _BLOCK, L1) - 1
        for n in range(top, 0, -1):
            # `rest` is what is before states of level n already; of level n − 1 it is in the blocks before.
            low, high = max(levels.band_N2[n, 0] + 1, block_low), min(levels.band_N2[n - 1, 1], block_high)
            here_AB[:] = np.inf
            for k in np.flatnonzero(levels.looked_NK[n]) if low <= high else np.empty(0, np.int64):
                c, a = among_K[k], class_K[k]
                fitting_L, busy_L = levels.fitting_N1CL[n - 1, c], levels.busy_KL[k]
                start = low - 1
                while start > levels.band_N2[n, 0] and min(fitting_L[start - 1], busy_L[start - 1]) >= low:
                    start -= 1
                num, skipped, after = high - start, low - 1 - start, slice(low, high + 1)
                minima.reach(fitting_L[start:high], busy_L[start:high], start, high, end_B)
                minima.reached(end_B[:num], skipped, spare_B, begin_B)
                minima.sums(rest_NAL1[n, a, start:high], seconds_CL1[c, start:high], -1.0, value_B)
                minima.least_behind(value_B[:num], skipped, begin_B, upto_B, least_B)
                minima.sums(least_B, seconds_CL1[c, after], 1.0, value_B)
                here_B = here_AB[a, : high + 1 - low]
                most = minima.through(
                    value_B, price_K[k], rest_NAL1[n - 1, a, after], here_B, through_NL1[n - 1, after]
                )
                through_NK[n, k] = min(through_NK[n, k], most)
            if n > 1:
                first, last = _read(levels, n - 1)
                rest_NAL1[n - 1, :, max(first, block_low) : min(last, block_high) + 1] = np.inf
                high = min(high, L1 - 2)
                transfers(limit, crossing, levels.alive_NL1[n - 1], low, high, here_AB, rest_NAL1[n - 1])
    return through_NL1, through_NK


@njit(cache=True, nogil=True)
def _tops(
    limit: float,
    ways: Ways,
    crossing: Crossing,
    levels: Levels,
    rest_NAL1: Floats,
    through_NL1: Floats,
    through_NK: Floats,
) -> int:
    """Fill in what is before the first states of plans, and before the last level; the level below that."""
    N, A, L1 = rest_NAL1.shape
    before_AL1 = np.full((A, L1), np.inf)
    top: int = N - 2 if levels.is_open and N > 1 else N - 1
    if levels.is_open and N > 1:
        open_AL1 = _open_through(limit, ways, crossing, levels, rest_NAL1, before_AL1, through_NL1, through_NK)
    for n in range(1, top + 1):
        if levels.alive_NL1[n, 0]:
            through_NL1[n, 0] = rest_NAL1[n, :, 0].min()
        rest_NAL1[n, :, 0] = 0.0 if levels.alive_NL1[n, 0] else np.inf
    if levels.is_open and N > 1:
        rest_NAL1[N - 1] = open_AL1
    if top > 0:
        rest_NAL1[top, :, 1:] = before_AL1[:, 1:]
    return top


@njit(cache=True, nogil=True)
def _open_through(
    limit: float,
    ways: Ways,
    crossing: Crossing,
    levels: Levels,
    rest_NAL1: Floats,
    before_AL1: Floats,
    through_NL1: Floats,
    through_NK: Floats,
) -> Floats:
    """The last level, whose stages lead to the one before, of which `before_AL1` is filled, or stay.

    Returns what is before its own states, likewise: [a, cut].
    """
    among_K, price_K, class_K, seconds_CL1 = ways
    N, A, L1 = rest_NAL1.shape
    K, n = len(among_K), N - 1
    to_AL1 = np.full((A, L1), np.inf)
    if levels.alive_NL1[n, 0]:
        to_AL1[:, 0] = 0.0
        through_NL1[n, 0] = rest_NAL1[n, :, 0].min()
    queue, value_KL1 = np.empty((K, L1), np.int32), np.empty((K, L1))
    head, tail = np.zeros(K, np.int64), np.zeros(K, np.int64)
    here_A, least_P, to_A = np.empty(A), np.empty(A), np.empty(A)
    looked = np.flatnonzero(levels.looked_NK[n])
    last = max(levels.band_N2[n - 1, 1], levels.band_N2[n, 1])
    for stop in range(levels.band_N2[n, 0] + 1, last + 1):
        here_A[:] = np.inf
        for k in looked:
            c, a = among_K[k], class_K[k]
            value = to_AL1[a, stop - 1] - seconds_CL1[c, stop - 1]
            if value < np.inf:
                while tail[k] > head[k] and value_KL1[k, tail[k] - 1] >= value:
                    tail[k] -= 1
                queue[k, tail[k]], value_KL1[k, tail[k]] = stop - 1, value
                tail[k] += 1
            while head[k] < tail[k] and (
                min(levels.fitting_N1CL[n - 1, c, queue[k, head[k]]], levels.busy_KL[k, queue[k, head[k]]]) < stop
            ):
                head[k] += 1
            if head[k] < tail[k]:
                total = value_KL1[k, head[k]] + seconds_CL1[c, stop] + price_K[k]
                here_A[a] = min(here_A[a], total)
                for level in range(n - 1, N):
                    whole = total + rest_NAL1[level, a, stop]
                    through_NL1[level, stop] = min(through_NL1[level, stop], whole)
                    through_NK[n, k] = min(through_NK[n, k], whole)
        if stop < L1 - 1:
            transferred(limit, crossing, stop, here_A, least_P, to_A)
            if levels.alive_NL1[n, stop]:
                to_AL1[:, stop] = to_A
            if levels.alive_NL1[n - 1, stop]:
                before_AL1[:, stop] = to_A
    return to_AL1
