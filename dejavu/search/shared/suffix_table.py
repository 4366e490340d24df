"""Compiled loops of the exact search: the cheapest way to run the last layers, for every number of devices.

Letters: N = stage options, L1 = cut positions, J = levels of stages after a cut, A = link classes, D = device vectors
(mixed radix), C = configurations, G = groups of them that take the same devices and links.
An option is one stage: layers `start` to `stop` under one configuration, `seconds` for one microbatch, `busy` for what
it occupies its devices with besides the fill ((B − 1) · seconds + once), `fits` microbatches in flight.
Options are sorted by start, stop, group, seconds. All that belong to one start lie between first_L1[start] and
first_L1[start + 1].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.shared.rules import Rules

Ints = NDArray[np.int64]


class Stages(NamedTuple):
    """The options that plans are made of; see the module.

    Attributes:
        first_L1: where each start's begin.
        stop_N, group_N: where a stage stops, and its group.
        seconds_N, busy_N: for one microbatch, and besides the fill.
        fits_N: microbatches in flight.
    """

    first_L1: Ints
    stop_N: Ints
    group_N: Ints
    seconds_N: Floats
    busy_N: Floats
    fits_N: Ints


class Groups(NamedTuple):
    """What the stages of a group take.

    Attributes:
        offset_G, block_G: what a stage adds to a vector of devices, and the bound of the digits up to its type's.
        class_G: the link class.
    """

    offset_G: Ints
    block_G: Ints
    class_G: Ints


class Table(NamedTuple):
    """The least seconds after each cut.

    Attributes:
        rest_L1JAD: [cut, j, a, d] with j stages after the cut, as far as memory or `max_stages` tells them apart, the
            stage before the cut of class a, whose transfer is included, and devices d that may be taken.
        alive_L1JA: whether any number of devices does.
        here_JAD: the same from the start that was last filled, without a transfer, the first stage of class a.
    """

    rest_L1JAD: Floats
    alive_L1JA: NDArray[np.bool_]
    here_JAD: Floats


@njit(cache=True, nogil=True)
def list_options(
    seconds_CLL1: Floats,
    busy_CLL1: Floats,
    fits_CLL1: Ints,
    order_C: Ints,
    first_G1: Ints,
    family_G: Ints,
    least_fits: int,
    idle_allowed: bool,
) -> tuple[Ints, Ints, Ints, Ints, Floats, Floats, Ints]:
    """The options worth keeping: faster, less busy or smaller than any other of the same stage and devices.

    Where devices may stay idle an option with fewer devices of the same family (type and link class) counts too; groups
    of a family come in order of their devices.
    """
    C, L = seconds_CLL1.shape[0], seconds_CLL1.shape[1]
    most = 0
    for start in range(L):
        for stop in range(start + 1, L + 1):
            for c in order_C:
                if busy_CLL1[c, start, stop] < np.inf and fits_CLL1[c, start, stop] >= least_fits:
                    most += 1
    options = (
        np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64),
        np.empty(most), np.empty(most), np.empty(most, np.int64),
    )  # fmt: skip
    tables, kinds = (seconds_CLL1, busy_CLL1, fits_CLL1), (order_C, first_G1, family_G)
    first, waiting, n = np.zeros(L + 1, np.int64), np.empty(C, np.int64), 0
    for start in range(L):
        first[start] = n
        n = _list_from(start, n, tables, kinds, (least_fits, idle_allowed), waiting, options)
    first[L] = n
    stops, groups, configurations, seconds, busy, fits = options
    return first, stops[:n], groups[:n], configurations[:n], seconds[:n], busy[:n], fits[:n]


@njit(cache=True, nogil=True)
def _list_from(
    start: int,
    n: int,
    tables: tuple[Floats, Floats, Ints],
    kinds: tuple[Ints, Ints, Ints],
    rules: tuple[int, bool],
    waiting: Ints,
    options: tuple[Ints, Ints, Ints, Floats, Floats, Ints],
) -> int:
    """Write the options of one start, from row n on; how many rows there are then."""
    seconds_CLL1, busy_CLL1, fits_CLL1 = tables
    order_C, first_G1, family_G = kinds
    least_fits, idle_allowed = rules
    stops, groups, configurations, seconds, busy, fits = options
    for stop in range(start + 1, seconds_CLL1.shape[2]):
        cell = n
        for g in range(len(family_G)):
            here = 0
            for at in range(first_G1[g], first_G1[g + 1]):  # insertion sort by seconds, then busy
                c = order_C[at]
                t, u = seconds_CLL1[c, start, stop], busy_CLL1[c, start, stop]
                if u == np.inf or fits_CLL1[c, start, stop] < least_fits:
                    continue
                k = here
                while k > 0 and not (
                    seconds_CLL1[waiting[k - 1], start, stop] < t
                    or (seconds_CLL1[waiting[k - 1], start, stop] == t and busy_CLL1[waiting[k - 1], start, stop] <= u)
                ):
                    waiting[k] = waiting[k - 1]
                    k -= 1
                waiting[k] = c
                here += 1
            for k in range(here):
                c = waiting[k]
                t, u, m = seconds_CLL1[c, start, stop], busy_CLL1[c, start, stop], fits_CLL1[c, start, stop]
                # An option is dropped for one of the same layers and no more devices of the same links that is as
                # good in all that a plan asks of a stage: in any plan that has it the other takes its place.
                i = cell
                while i < n and not (
                    (groups[i] == g or (idle_allowed and family_G[groups[i]] == family_G[g]))
                    and seconds[i] <= t
                    and busy[i] <= u
                    and fits[i] >= m
                ):
                    i += 1
                if i == n:
                    stops[n], groups[n], configurations[n] = stop, g, c
                    seconds[n], busy[n], fits[n] = t, u, m
                    n += 1
    return n


@njit(cache=True, nogil=True)
def chain_bounds(first_L1: Ints, stop_N: Ints, seconds_N: Floats, busy_N: Floats) -> tuple[Floats, Floats]:
    """For every cut, ignoring devices, memory and links: least seconds up to it, and least bottleneck up to it."""
    L = len(first_L1) - 1
    least, bottleneck = np.full(L + 1, np.inf), np.full(L + 1, np.inf)
    least[0] = bottleneck[0] = 0.0
    for start in range(L):
        for i in range(first_L1[start], first_L1[start + 1]):
            stop = stop_N[i]
            least[stop] = min(least[stop], least[start] + seconds_N[i])
            bottleneck[stop] = min(bottleneck[stop], max(bottleneck[start], busy_N[i]))
    return least, bottleneck


@njit(cache=True, nogil=True)
def fill(
    begin: int,
    end: int,
    cutoff: float,
    stages: Stages,
    groups: Groups,
    rules: Rules,
    least_L1: Floats,
    table: Table,
) -> None:
    """One more stretch of the table, starts end − 1 down to begin.

    States that cannot lead to a sum below `cutoff` are dropped. After start 0, `here_JAD` holds the answer.

    Args:
        least_L1: no way to run the layers up to a cut takes fewer seconds; see `chain_bounds`.
    """
    for start in range(end - 1, begin - 1, -1):
        _fill_here(start, rules.limit, stages, groups, rules.need_J, table)
        if start == 0:
            return
        _cross(start, cutoff, rules, least_L1, table)


@njit(cache=True, nogil=True)
def _fill_here(start: int, limit: float, stages: Stages, groups: Groups, need_J: Ints, table: Table) -> None:
    """The least seconds from a start on, over all stages that begin there."""
    first_L1, stop_N, group_N, seconds_N, busy_N, fits_N = stages
    offset_G, block_G, class_G = groups
    rest_L1JAD, alive_L1JA, here_JAD = table
    J, _, D = here_JAD.shape
    here_JAD[:] = np.inf
    i, after = first_L1[start], first_L1[start + 1]
    while i < after:
        stop, g, front = stop_N[i], group_N[i], i
        while i < after and stop_N[i] == stop and group_N[i] == g:
            i += 1
        a, offset, block = class_G[g], offset_G[g], block_G[g]
        for j in range(J):
            if not alive_L1JA[stop, j, a]:
                continue
            # Options of one stage and group differ in seconds alone once they fit and keep to the limit: the first
            # that does is the fastest, and no other of the run is looked at.
            k = front
            while k < i and not (busy_N[k] <= limit and fits_N[k] >= need_J[j]):
                k += 1
            if k == i:
                continue
            t, rest_D, here_D = seconds_N[k], rest_L1JAD[stop, j, a], here_JAD[min(j + 1, J - 1), a]
            for base in range(0, D, block):  # vectors in which the digit of the stage's type is large enough
                for d in range(base + offset, base + block):
                    total = t + rest_D[d - offset]
                    here_D[d] = min(here_D[d], total)


@njit(cache=True, nogil=True)
def _cross(cut: int, cutoff: float, rules: Rules, least_L1: Floats, table: Table) -> None:
    """What starts at a cut, by the class of the stage before, with the transfer from it."""
    limit, _, transfer_L1AA, link_busy_L1AA = rules
    rest_L1JAD, alive_L1JA, here_JAD = table
    J, A, D = here_JAD.shape
    for row in range(J * A):
        j, a = row // A, row % A
        rest_D, some = rest_L1JAD[cut, j, a], False
        rest_D[:] = np.inf
        for b in range(A):
            if link_busy_L1AA[cut, a, b] > limit:
                continue
            x = transfer_L1AA[cut, a, b]
            for d in range(D):
                total = here_JAD[j, b, d] + x
                # A state is dropped where even the least seconds up to its cut, whatever devices and memory they take,
                # lead to the cutoff: a plan below it has no such state.
                if total < rest_D[d] and total + least_L1[cut] < cutoff:
                    rest_D[d] = total
                    some = True
        alive_L1JA[cut, j, a] = some


@njit(cache=True, nogil=True)
def trace(stages: Stages, groups: Groups, rules: Rules, table: Table) -> Ints:
    """The options of the cheapest plan in a filled table, in order; empty if there is none.

    Follows the table by comparing floats for equality: the sums are made in the same order as in `fill`.
    """
    here_JAD = table.here_JAD
    J, A, D = here_JAD.shape
    L = len(stages.first_L1) - 1
    wanted, j = np.inf, 0
    for level in range(J):
        for a in range(A):
            if here_JAD[level, a, D - 1] < wanted:
                wanted, j = here_JAD[level, a, D - 1], level
    chosen = np.empty(L, np.int64)
    count = 0
    if wanted == np.inf:
        return chosen[:0]
    start, d, before = 0, D - 1, 0
    while start < L:
        i, j = _stage_of(wanted, (start, j, d, before), stages, groups, rules, table)
        g, stop = stages.group_N[i], stages.stop_N[i]
        before, d = groups.class_G[g], d - groups.offset_G[g]
        wanted = table.rest_L1JAD[stop, j, before, d]
        chosen[count] = i
        count += 1
        start = stop
    return chosen[:count]


@njit(cache=True, nogil=True)
def _stage_of(
    wanted: float,
    at: tuple[int, int, int, int],
    stages: Stages,
    groups: Groups,
    rules: Rules,
    table: Table,
) -> tuple[int, int]:
    """An option from which the table has the wanted seconds, and the level after it.

    Args:
        at: where the stage starts, the level there, the devices that may be taken, the class of the stage before.
    """
    start, j, d, before = at
    first_L1, stop_N, group_N, seconds_N, busy_N, fits_N = stages
    offset_G, block_G, class_G = groups
    limit, need_J, transfer_L1AA, link_busy_L1AA = rules
    J = len(need_J)
    for i in range(first_L1[start], first_L1[start + 1]):
        stop, g = stop_N[i], group_N[i]
        a, offset = class_G[g], offset_G[g]
        if busy_N[i] > limit or d % block_G[g] < offset:
            continue
        if start > 0 and link_busy_L1AA[start, before, a] > limit:
            continue
        for level in range(max(j - 1, 0), j + 1):
            if min(level + 1, J - 1) != j or fits_N[i] < need_J[level] or not table.alive_L1JA[stop, level, a]:
                continue
            total = seconds_N[i] + table.rest_L1JAD[stop, level, a, d - offset]
            if start > 0:
                total = total + transfer_L1AA[start, before, a]
            if total == wanted:
                return i, level
    raise AssertionError("the table cannot be followed back")
