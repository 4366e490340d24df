"""Compiled loops that turn prices on devices into plans: what a prefix costs under prices, and a beam that it guides.

Letters as in `shared.suffix_table`: N = stage options, L1 = cut positions, J = levels of stages after a cut, A = link
classes, G = groups of configurations that take the same devices and links; W = states that wait at a cut, S = the
window's layers, 4 and 6 = the columns named below. A window is the layers `lo` to `hi` of a plan; the whole plan is
one. A state of the beam is a suffix of the window: its level of stages after, the class of its first stage, the devices
that it takes (mixed radix, with those outside the window).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.shared.rules import Rules

_WAITING_PER_KEPT = 6  # states that may wait at a cut, for each that is kept, before the worst are dropped
_PRIO, _SUM, _COST, _PAID = range(4)  # columns of a state's numbers
_KEY, _LEVEL, _CLASS, _DEVICES, _OPTION, _PARENT = range(6)  # columns of its whole numbers

Ints = NDArray[np.int64]


class Stages(NamedTuple):
    """The stages that a window may have, none busier than the limit.

    Attributes:
        first_L1, stop_N, group_N, seconds_N, fits_N: as in `shared.suffix_table.Stages`.
        cost_N: seconds, the price of the devices, and whatever else is to guide the beam.
    """

    first_L1: Ints
    stop_N: Ints
    group_N: Ints
    seconds_N: Floats
    fits_N: Ints
    cost_N: Floats


class Groups(NamedTuple):
    """Attributes: as in `shared.suffix_table.Groups`; price_G: seconds for the devices of a stage."""

    offset_G: Ints
    block_G: Ints
    class_G: Ints
    price_G: Floats


class Prefixes(NamedTuple):
    """What the layers from `lo` to a cut take at least, where a stage of class a follows with level j; seconds.

    Attributes:
        guide_L1JA: in costs, by which states are ranked.
        bound_L1JA: in seconds and prices of devices alone.
        spend_L1JA: in prices of devices alone.
    """

    guide_L1JA: Floats
    bound_L1JA: Floats
    spend_L1JA: Floats


class Surroundings(NamedTuple):
    """What lies after and outside the window.

    Attributes:
        level: of the stages after it.
        class_after: of the first of them; −1: none.
        devices: that the stages outside take; mixed radix.
    """

    level: int
    class_after: int
    devices: int


class Goal(NamedTuple):
    """Which windows are looked for.

    Attributes:
        cutoff: only a Σ below this counts, in seconds.
        ceiling: Σ and the price of the devices stay below this.
        budget: that the devices may cost, in seconds.
        whole_devices: what all devices are in mixed radix, where none may stay idle; −1: any may.
    """

    cutoff: float
    ceiling: float
    budget: float
    whole_devices: int


Problem = tuple[Stages, Groups, Rules, Prefixes]


class _Waiting(NamedTuple):
    """States that wait at a cut, and an open hash table of their keys."""

    numbers_W4: Floats
    wholes_W6: Ints
    keys: Ints
    where: Ints


class _Kept(NamedTuple):
    """The states that were kept at each cut of the window, and how many."""

    numbers_S1W4: Floats
    wholes_S1W6: Ints
    count_S1: Ints


@njit(cache=True, nogil=True)
def prefix_costs(
    stages: Stages, class_G: Ints, rules: Rules, lo: int, hi: int, transfer_weight: float, H_L1JA: Floats
) -> None:
    """H[cut, j, a]: the least Σ of cost and transfers from `lo` to the cut, where a stage of class a follows.

    j: level of the stages after the cut. Devices are not counted; their prices are part of `cost_N`. `H_L1JA[lo]` is
    given, the rest up to `hi` − 1 is filled.
    """
    first_L1, stop_N, group_N, _, fits_N, cost_N = stages
    need_J = rules.need_J
    J = len(need_J)
    ended_L1JA = np.full(H_L1JA.shape, np.inf)
    for start in range(lo, hi):
        if start > lo:
            _cross(start, rules, transfer_weight, ended_L1JA[start], H_L1JA[start])
        i, after = first_L1[start], first_L1[start + 1]
        while i < after and stop_N[i] <= hi:
            stop, front, a = stop_N[i], i, class_G[group_N[i]]
            i = _end_of_run(i, after, stop_N, group_N)
            for j in range(J):
                rest = H_L1JA[start, min(j + 1, J - 1), a]
                if rest == np.inf:
                    continue
                k = _first_that_fits(front, i, need_J[j], fits_N)
                if k < i:
                    ended_L1JA[stop, j, a] = min(ended_L1JA[stop, j, a], cost_N[k] + rest)


@njit(cache=True, nogil=True)
def _cross(cut: int, rules: Rules, transfer_weight: float, ended_JA: Floats, H_JA: Floats) -> None:
    """What ended at a cut, by the class of its last stage, with the transfer to each class that may follow."""
    limit, _, transfer_L1AA, link_busy_L1AA = rules
    J, A = ended_JA.shape
    H_JA[:] = np.inf
    for b in range(A):
        for j in range(J):
            before = ended_JA[j, b]
            if before == np.inf:
                continue
            for a in range(A):
                if link_busy_L1AA[cut, b, a] <= limit:
                    H_JA[j, a] = min(H_JA[j, a], before + transfer_weight * transfer_L1AA[cut, b, a])


@njit(cache=True, nogil=True)
def _end_of_run(front: int, after: int, stop_N: Ints, group_N: Ints) -> int:
    """Where the options of the same stop and group as the one at `front` end."""
    stop, g, i = stop_N[front], group_N[front], front
    while i < after and stop_N[i] == stop and group_N[i] == g:
        i += 1
    return i


@njit(cache=True, nogil=True)
def _first_that_fits(front: int, after: int, need: int, fits_N: Ints) -> int:
    """The fastest option of one stage and group within its memory; `after` if there is none."""
    for k in range(front, after):
        if fits_N[k] >= need:
            return k
    return after


@njit(cache=True, nogil=True)
def _slot(keys: Ints, key: int) -> int:
    """Where the key is in the open hash table, or belongs."""
    mask = len(keys) - 1
    at = (key * 0x9E3779B97F4A7C1 >> 20) & mask
    while keys[at] >= 0 and keys[at] != key:
        at = (at + 1) & mask
    return at


@njit(cache=True, nogil=True)
def _drop_the_worst(count: int, width: int, waiting: _Waiting) -> tuple[int, float]:
    """Keep the `width` waiting states of least priority (ties may drop more); how many are left, and the threshold."""
    numbers, wholes, keys, where = waiting
    worst = np.partition(numbers[:count, _PRIO], width)[width]
    keys[:] = -1
    kept = 0
    for q in range(count):
        if numbers[q, _PRIO] < worst:
            numbers[kept] = numbers[q]
            wholes[kept] = wholes[q]
            at = _slot(keys, wholes[kept, _KEY])
            keys[at], where[at] = wholes[kept, _KEY], kept
            kept += 1
    return kept, worst


@njit(cache=True, nogil=True)
def beam(lo: int, hi: int, width: int, problem: Problem, surroundings: Surroundings, goal: Goal) -> tuple[Ints, bool]:
    """Options of the cheapest window that the beam found, in order, and whether no state was dropped.

    From `hi` to `lo`, at each cut the `width` states are kept whose cost so far under prices plus `guide` is least.

    Args:
        problem: the `Stages`, `Groups`, `Rules` and `Prefixes`.
    """
    stop_N = problem[0].stop_N
    span = hi - lo
    kept = _Kept(np.empty((span + 1, width, 4)), np.empty((span + 1, width, 6), np.int64), np.zeros(span + 1, np.int64))
    kept.numbers_S1W4[span, 0] = 0.0
    kept.wholes_S1W6[span, 0] = -1
    kept.wholes_S1W6[span, 0, _LEVEL], kept.wholes_S1W6[span, 0, _CLASS] = surroundings.level, surroundings.class_after
    kept.wholes_S1W6[span, 0, _DEVICES] = surroundings.devices
    kept.count_S1[span] = 1
    waiting = _room_to_wait(width)
    is_complete = True
    for start in range(hi - 1, lo, -1):
        count, dropped = _advance(start, lo, hi, problem, goal, kept, waiting)
        if count > width:
            count, _ = _drop_the_worst(count, width, waiting)
            dropped = True
        if dropped:
            is_complete = False
        waiting.keys[:] = -1
        kept.count_S1[start - lo] = count
        kept.numbers_S1W4[start - lo, :count] = waiting.numbers_W4[:count]
        kept.wholes_S1W6[start - lo, :count] = waiting.wholes_W6[:count]
    option, parent = _finish(lo, hi, problem, goal, kept)
    chosen, length = np.empty(span, np.int64), 0
    while option >= 0:
        chosen[length] = option
        length += 1
        if stop_N[option] == hi:
            break
        at_stop = stop_N[option] - lo
        option, parent = kept.wholes_S1W6[at_stop, parent, _OPTION], kept.wholes_S1W6[at_stop, parent, _PARENT]
    return chosen[:length], is_complete


@njit(cache=True, nogil=True)
def _room_to_wait(width: int) -> _Waiting:
    size, slots = _WAITING_PER_KEPT * width, 16
    while slots < 2 * size + 2:
        slots *= 2
    keys = np.full(slots, -1, np.int64)
    return _Waiting(np.empty((size, 4)), np.empty((size, 6), np.int64), keys, np.empty(slots, np.int64))


@njit(cache=True, nogil=True)
def _advance(
    start: int, lo: int, hi: int, problem: Problem, goal: Goal, kept: _Kept, waiting: _Waiting
) -> tuple[int, bool]:
    """Let states wait at a cut inside the window: each stage from there before each state that was kept at its stop.

    Returns how many wait, and whether any was dropped that might have become the best.
    """
    (first_L1, stop_N, group_N, seconds_N, fits_N, cost_N), (offset_G, block_G, class_G, price_G), rules, prefixes = (
        problem
    )
    limit, need_J, transfer_L1AA, link_busy_L1AA = rules
    guide_L1JA, bound_L1JA, spend_L1JA = prefixes
    _, ceiling, budget, _ = goal
    kept_numbers, kept_wholes, count_S1 = kept
    numbers, wholes, keys, where = waiting
    _, J, A = guide_L1JA.shape
    size, width = len(numbers), len(numbers) // _WAITING_PER_KEPT
    count, worst, dropped = 0, np.inf, False
    i, after = first_L1[start], first_L1[start + 1]
    while i < after and stop_N[i] <= hi:
        stop, g, front = stop_N[i], group_N[i], i
        i = _end_of_run(i, after, stop_N, group_N)
        a, offset, block = class_G[g], offset_G[g], block_G[g]
        for s in range(count_S1[stop - lo]):
            d, j = kept_wholes[stop - lo, s, _DEVICES], kept_wholes[stop - lo, s, _LEVEL]
            b, x = kept_wholes[stop - lo, s, _CLASS], 0.0
            # More devices of this type than there are; stages before only take more.
            if d % block + offset >= block:
                continue
            if b >= 0:
                if link_busy_L1AA[stop, a, b] > limit:
                    continue
                x = transfer_L1AA[stop, a, b]
            # No stages from `lo` to here, whatever their devices: the state completes to no plan.
            ahead = min(j + 1, J - 1)
            rest = guide_L1JA[start, ahead, a]
            if rest == np.inf:
                continue
            # Of a run, which has the same devices, the fastest that fits; the others only cost more.
            k = _first_that_fits(front, i, need_J[j], fits_N)
            if k == i:
                continue
            total = kept_numbers[stop - lo, s, _SUM] + seconds_N[k] + x
            cost = kept_numbers[stop - lo, s, _COST] + cost_N[k] + x
            paid = kept_numbers[stop - lo, s, _PAID] + price_G[g]
            # Lagrangian bound: all that completes the state has at least this Σ plus prices; a plan below the cutoff
            # pays at most the budget besides, so that it stays below the ceiling. And the layers before have to be
            # paid from the same budget.
            if total + paid + bound_L1JA[start, ahead, a] >= ceiling or paid + spend_L1JA[start, ahead, a] > budget:
                continue
            # The beam itself: as costly as the best that was dropped here before. A better plan may be lost.
            if cost + rest >= worst:
                dropped = True
                continue
            # Of two states with the same devices, class and level the cheaper completes as the other does.
            key = ((d + offset) * A + a) * J + ahead
            at = _slot(keys, key)
            m = where[at] if keys[at] == key else count
            if m < count and total >= numbers[m, _SUM]:
                continue
            if m == count == size:  # no room: the beam's worst make some, this one perhaps among them
                dropped = True
                count, worst = _drop_the_worst(count, width, waiting)
                if cost + rest >= worst:
                    continue
                m, at = count, _slot(keys, key)
            if m == count:
                count += 1
                keys[at], where[at] = key, m
            numbers[m, _PRIO], numbers[m, _SUM], numbers[m, _COST], numbers[m, _PAID] = cost + rest, total, cost, paid
            wholes[m, _KEY], wholes[m, _LEVEL], wholes[m, _CLASS] = key, ahead, a
            wholes[m, _DEVICES], wholes[m, _OPTION], wholes[m, _PARENT] = d + offset, k, s
    return count, dropped


@njit(cache=True, nogil=True)
def _finish(lo: int, hi: int, problem: Problem, goal: Goal, kept: _Kept) -> tuple[int, int]:
    """The option that starts at `lo` and the state after it that are the cheapest window; −1: none is below the cutoff.

    What stands before the window is part of a stage's `guide` there: the transfer to it.
    """
    (first_L1, stop_N, group_N, seconds_N, fits_N, _), (offset_G, block_G, class_G, _), rules, prefixes = problem
    limit, need_J, transfer_L1AA, link_busy_L1AA = rules
    guide_L1JA, whole_devices = prefixes.guide_L1JA, goal.whole_devices
    kept_numbers, kept_wholes, count_S1 = kept
    J = guide_L1JA.shape[1]
    best, best_option, best_parent = goal.cutoff, -1, -1
    # Runs, states and transfers as in `_advance`: the transfer as a function of both took 1.9 × as long.
    i, after = first_L1[lo], first_L1[lo + 1]
    while i < after and stop_N[i] <= hi:
        stop, g, front = stop_N[i], group_N[i], i
        i = _end_of_run(i, after, stop_N, group_N)
        a, offset, block = class_G[g], offset_G[g], block_G[g]
        for s in range(count_S1[stop - lo]):
            d, j = kept_wholes[stop - lo, s, _DEVICES], kept_wholes[stop - lo, s, _LEVEL]
            b, x = kept_wholes[stop - lo, s, _CLASS], 0.0
            if d % block + offset >= block or (whole_devices >= 0 and d + offset != whole_devices):
                continue
            if b >= 0:
                if link_busy_L1AA[stop, a, b] > limit:
                    continue
                x = transfer_L1AA[stop, a, b]
            rest = guide_L1JA[lo, min(j + 1, J - 1), a]
            k = _first_that_fits(front, i, need_J[j], fits_N)
            if rest == np.inf or k == i:
                continue
            total = kept_numbers[stop - lo, s, _SUM] + seconds_N[k] + x
            if total + rest < best:
                best, best_option, best_parent = total + rest, k, s
    return best_option, best_parent
