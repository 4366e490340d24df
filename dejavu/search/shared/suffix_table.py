"""Compiled loops of the exact search: the cheapest way to run the last layers, for every number of devices.

Letters: N = stage options, L1 = cut positions, J = levels of stages behind, A = link classes, D = device vectors (mixed
radix), G = groups of configurations that take the same devices and links.
An option is one stage: layers `start` to `stop` under one configuration, `seconds` for one microbatch, `busy` for what
it occupies its devices with besides the fill ((B − 1) · seconds + once), `fits` microbatches in flight.
Options are sorted by start, stop, group, seconds. All that belong to one start lie between first_L1[start] and
first_L1[start + 1].
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit


@njit(cache=True, nogil=True)
def list_options(seconds_CLL1, busy_CLL1, fits_CLL1, order_C, first_G1, family_G, least_fits, idle_allowed):
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
    stops, groups, configurations = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    seconds, busy, fits = np.empty(most), np.empty(most), np.empty(most, np.int64)
    first = np.zeros(L + 1, np.int64)
    waiting = np.empty(C, np.int64)
    n = 0
    for start in range(L):
        first[start] = n
        for stop in range(start + 1, L + 1):
            cell = n
            for g in range(len(family_G)):
                here = 0
                for at in range(first_G1[g], first_G1[g + 1]):  # insertion sort by seconds, then busy
                    c = order_C[at]
                    t, u = seconds_CLL1[c, start, stop], busy_CLL1[c, start, stop]
                    if u < np.inf and fits_CLL1[c, start, stop] >= least_fits:
                        k = here
                        while k > 0:
                            before = waiting[k - 1]
                            t_before = seconds_CLL1[before, start, stop]
                            if t_before < t or (t_before == t and busy_CLL1[before, start, stop] <= u):
                                break
                            waiting[k] = before
                            k -= 1
                        waiting[k] = c
                        here += 1
                for k in range(here):
                    c = waiting[k]
                    t, u, m = seconds_CLL1[c, start, stop], busy_CLL1[c, start, stop], fits_CLL1[c, start, stop]
                    dominated = False
                    for i in range(cell, n):
                        comparable = groups[i] == g or (idle_allowed and family_G[groups[i]] == family_G[g])
                        if comparable and seconds[i] <= t and busy[i] <= u and fits[i] >= m:
                            dominated = True
                            break
                    if not dominated:
                        stops[n], groups[n], configurations[n] = stop, g, c
                        seconds[n], busy[n], fits[n] = t, u, m
                        n += 1
    first[L] = n
    return first, stops[:n], groups[:n], configurations[:n], seconds[:n], busy[:n], fits[:n]


@njit(cache=True, nogil=True)
def chain_bounds(first_L1, stop_N, seconds_N, busy_N):
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
    begin, end, limit, cutoff,
    first_L1, stop_N, group_N, seconds_N, busy_N, fits_N,
    need_J, offset_G, block_G, class_G,
    transfer_L1AA, link_busy_L1AA, least_L1,
    rest_L1JAD, alive_L1JA, here_JAD,
):  # fmt: skip
    """One more stretch of the table, starts end − 1 down to begin: rest[cut, j, a, d] = least seconds behind the cut.

    j: stages behind the cut, as far as memory or `max_stages` tells them apart; a: link class of the stage before the
    cut, whose transfer is included; d: devices that may be taken. Nothing busier than `limit` is used, and states that
    cannot lead to a sum below `cutoff` are dropped. After start 0, here_JAD holds the answer.
    """
    J, A, D = here_JAD.shape
    for start in range(end - 1, begin - 1, -1):
        here_JAD[:] = np.inf
        i, after = first_L1[start], first_L1[start + 1]
        while i < after:
            stop, g = stop_N[i], group_N[i]
            front = i
            while i < after and stop_N[i] == stop and group_N[i] == g:
                i += 1
            a, offset, block = class_G[g], offset_G[g], block_G[g]
            for j in range(J):
                if not alive_L1JA[stop, j, a]:
                    continue
                for k in range(front, i):
                    if busy_N[k] <= limit and fits_N[k] >= need_J[j]:
                        t = seconds_N[k]
                        behind = rest_L1JAD[stop, j, a]
                        here = here_JAD[min(j + 1, J - 1), a]
                        for base in range(0, D, block):
                            for d in range(base + offset, base + block):
                                total = t + behind[d - offset]
                                here[d] = min(here[d], total)
                        break
        if start == 0:
            return
        for j in range(J):
            for a in range(A):
                rest = rest_L1JAD[start, j, a]
                rest[:] = np.inf
                some = False
                for b in range(A):
                    if link_busy_L1AA[start, a, b] <= limit:
                        x = transfer_L1AA[start, a, b]
                        for d in range(D):
                            total = here_JAD[j, b, d] + x
                            if total < rest[d] and total + least_L1[start] < cutoff:
                                rest[d] = total
                                some = True
                alive_L1JA[start, j, a] = some


@njit(cache=True, nogil=True)
def trace(
    limit,
    first_L1, stop_N, group_N, seconds_N, busy_N, fits_N,
    need_J, offset_G, block_G, class_G,
    transfer_L1AA, link_busy_L1AA,
    rest_L1JAD, alive_L1JA, here_JAD,
):  # fmt: skip
    """The options of the cheapest plan in a filled table, in order; empty if there is none.

    Follows the table by comparing floats for equality: the sums are made in the same order as in `fill`.
    """
    J, A, D = here_JAD.shape
    L = len(first_L1) - 1
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
        found = False
        for i in range(first_L1[start], first_L1[start + 1]):
            stop, g = stop_N[i], group_N[i]
            a, offset = class_G[g], offset_G[g]
            if busy_N[i] > limit or d % block_G[g] < offset:
                continue
            if start > 0 and link_busy_L1AA[start, before, a] > limit:
                continue
            for level in range(max(j - 1, 0), j + 1):
                if min(level + 1, J - 1) != j or fits_N[i] < need_J[level] or not alive_L1JA[stop, level, a]:
                    continue
                total = seconds_N[i] + rest_L1JAD[stop, level, a, d - offset]
                if start > 0:
                    total = total + transfer_L1AA[start, before, a]
                if total == wanted:
                    chosen[count] = i
                    count += 1
                    wanted, j, d, before, start = rest_L1JAD[stop, level, a, d - offset], level, d - offset, a, stop
                    found = True
                    break
            if found:
                break
        if not found:
            raise AssertionError("the table cannot be followed back")
    return chosen[:count]
