"""Compiled loops that turn prices on devices into plans: what a prefix costs under prices, and a beam that it guides.

Letters as in `_suffix`: N = stage options, L1 = cut positions, J = levels of stages behind, A = link classes,
G = groups of configurations that take the same devices and links. A window is the layers `lo` to `hi` of a plan; the
whole plan is one. A state of the beam is a suffix of the window: its level of stages behind, the class of its first
stage, the devices that it takes (mixed radix, with those outside the window).
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit

_WAITING_PER_KEPT = 6  # states that may wait at a cut, for each that is kept, before the worst are dropped
_PRIO, _SUM, _COST, _PAID = range(4)  # columns of a state's numbers
_KEY, _LEVEL, _CLASS, _DEVICES, _OPTION, _PARENT = range(6)  # columns of its whole numbers


@njit(cache=True, nogil=True)
def prefix_costs(
    lo, hi, limit, transfer_weight, first_L1, stop_N, group_N, cost_N, fits_N,
    need_J, class_G, transfer_L1AA, link_busy_L1AA, H_L1JA,
):  # fmt: skip
    """H[cut, j, a]: the least Σ of cost and transfers from `lo` to the cut, where a stage of class a follows.

    j: level of the stages behind the cut. Devices are not counted; their prices are part of `cost_N`. `H_L1JA[lo]` is
    given, the rest up to `hi` − 1 is filled.
    """
    _, J, A = H_L1JA.shape
    ended_L1JA = np.full(H_L1JA.shape, np.inf)
    for start in range(lo, hi):
        if start > lo:
            H_L1JA[start] = np.inf
            for b in range(A):
                for j in range(J):
                    before = ended_L1JA[start, j, b]
                    if before < np.inf:
                        for a in range(A):
                            if link_busy_L1AA[start, b, a] <= limit:
                                total = before + transfer_weight * transfer_L1AA[start, b, a]
                                H_L1JA[start, j, a] = min(H_L1JA[start, j, a], total)
        i, after = first_L1[start], first_L1[start + 1]
        while i < after and stop_N[i] <= hi:
            stop, g = stop_N[i], group_N[i]
            front = i
            while i < after and stop_N[i] == stop and group_N[i] == g:
                i += 1
            a = class_G[g]
            for j in range(J):
                rest = H_L1JA[start, min(j + 1, J - 1), a]
                if rest < np.inf:
                    k = _first_that_fits(front, i, need_J[j], fits_N)
                    if k < i:
                        ended_L1JA[stop, j, a] = min(ended_L1JA[stop, j, a], cost_N[k] + rest)


@njit(cache=True, nogil=True)
def _first_that_fits(front, after, need, fits_N):
    """The fastest option of one stage and group within its memory; `after` if there is none."""
    for k in range(front, after):
        if fits_N[k] >= need:
            return k
    return after


@njit(cache=True, nogil=True)
def _slot(keys, key):
    """Where the key is in the open hash table, or belongs."""
    mask = len(keys) - 1
    at = (key * 0x9E3779B97F4A7C1 >> 20) & mask
    while keys[at] >= 0 and keys[at] != key:
        at = (at + 1) & mask
    return at


@njit(cache=True, nogil=True)
def _drop_the_worst(count, width, numbers, wholes, keys, where):
    """Keep the `width` waiting states of least priority (ties may drop more); how many are left, and the threshold."""
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
def beam(
    lo, hi, limit, cutoff, ceiling, width, use_all_devices, budget, level, behind_class, devices, full,
    first_L1, stop_N, group_N, seconds_N, fits_N, cost_N, price_G,
    need_J, offset_G, block_G, class_G, transfer_L1AA, link_busy_L1AA, H_L1JA, bound_L1JA, spend_L1JA,
):  # fmt: skip
    """Options of the cheapest window that the beam found, in order, and whether no state was dropped.

    From `hi` to `lo`, at each cut the `width` states are kept whose cost so far under prices plus `H` is least; none
    whose seconds and devices at their prices plus `bound` reach `ceiling`, or that leaves less of the budget than the
    prefix has to spend on devices. Only a Σ below `cutoff` counts. `level`, `behind_class` (−1: none) and `devices`
    say what lies behind and outside the window. Options busier than the limit are not among those given.
    """
    _, J, A = H_L1JA.shape
    span = hi - lo
    kept_numbers, kept_wholes = np.empty((span + 1, width, 4)), np.empty((span + 1, width, 6), np.int64)
    count_at = np.zeros(span + 1, np.int64)
    kept_numbers[span, 0] = 0.0
    kept_wholes[span, 0] = -1
    kept_wholes[span, 0, _LEVEL], kept_wholes[span, 0, _CLASS] = level, behind_class
    kept_wholes[span, 0, _DEVICES] = devices
    count_at[span] = 1
    size = _WAITING_PER_KEPT * width
    slots = 16
    while slots < 2 * size + 2:
        slots *= 2
    keys, where = np.full(slots, -1, np.int64), np.empty(slots, np.int64)
    numbers, wholes = np.empty((size, 4)), np.empty((size, 6), np.int64)
    complete = True
    best, best_option, best_parent = cutoff, -1, -1
    for start in range(hi - 1, lo - 1, -1):
        count, worst = 0, np.inf
        i, after = first_L1[start], first_L1[start + 1]
        while i < after and stop_N[i] <= hi:
            stop, g = stop_N[i], group_N[i]
            front = i
            while i < after and stop_N[i] == stop and group_N[i] == g:
                i += 1
            a, offset, block = class_G[g], offset_G[g], block_G[g]
            for s in range(count_at[stop - lo]):
                d, j, b = (
                    kept_wholes[stop - lo, s, _DEVICES],
                    kept_wholes[stop - lo, s, _LEVEL],
                    kept_wholes[stop - lo, s, _CLASS],
                )
                if d % block + offset >= block:
                    continue
                x = 0.0
                if b >= 0:
                    if link_busy_L1AA[stop, a, b] > limit:
                        continue
                    x = transfer_L1AA[stop, a, b]
                ahead = min(j + 1, J - 1)
                rest = H_L1JA[start, ahead, a]
                if rest == np.inf:
                    continue
                k = _first_that_fits(front, i, need_J[j], fits_N)
                if k == i:
                    continue
                total = kept_numbers[stop - lo, s, _SUM] + seconds_N[k] + x
                if start == lo:
                    if total + rest < best and (not use_all_devices or d + offset == full):
                        best, best_option, best_parent = total + rest, k, s
                    continue
                cost = kept_numbers[stop - lo, s, _COST] + cost_N[k] + x
                paid = kept_numbers[stop - lo, s, _PAID] + price_G[g]
                if total + paid + bound_L1JA[start, ahead, a] >= ceiling or paid + spend_L1JA[start, ahead, a] > budget:
                    continue
                if cost + rest >= worst:
                    complete = False
                    continue
                key = ((d + offset) * A + a) * J + ahead
                at = _slot(keys, key)
                if keys[at] == key:
                    m = where[at]
                    if total >= numbers[m, _SUM]:
                        continue
                else:
                    if count == size:
                        complete = False
                        count, worst = _drop_the_worst(count, width, numbers, wholes, keys, where)
                        if cost + rest >= worst:
                            continue
                        at = _slot(keys, key)
                    m = count
                    count += 1
                    keys[at], where[at] = key, m
                numbers[m, _PRIO], numbers[m, _SUM], numbers[m, _COST], numbers[m, _PAID] = (
                    cost + rest,
                    total,
                    cost,
                    paid,
                )
                wholes[m, _KEY], wholes[m, _LEVEL], wholes[m, _CLASS] = key, ahead, a
                wholes[m, _DEVICES], wholes[m, _OPTION], wholes[m, _PARENT] = d + offset, k, s
        if start == lo:
            break
        if count > width:
            complete = False
            count, worst = _drop_the_worst(count, width, numbers, wholes, keys, where)
        keys[:] = -1
        count_at[start - lo] = count
        kept_numbers[start - lo, :count] = numbers[:count]
        kept_wholes[start - lo, :count] = wholes[:count]
    chosen = np.empty(span, np.int64)
    length, option, parent = 0, best_option, best_parent
    while option >= 0:
        chosen[length] = option
        length += 1
        if stop_N[option] == hi:
            break
        at_stop = stop_N[option] - lo
        option, parent = kept_wholes[at_stop, parent, _OPTION], kept_wholes[at_stop, parent, _PARENT]
    return chosen[:length], complete
