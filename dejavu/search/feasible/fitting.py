"""Compiled loop that finds a plan that fits, or tries everything: which cuts can be reached from behind, with what.

A label is a cut from which all layers to the last have stages: so many stages, so many devices of each type. Seconds
are not looked at, so that of two labels with the same stages and devices often one is enough (`spared_until`).

Letters: C = configurations, J = levels of stages behind, U = vectors of devices in mixed radix, M = labels. `costs` are
StageTable's.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.search.shared.stage_table import _ACTIVE, _BLOCKED, _FIXED, _MESSAGE, _ROOM, _STEP, _between, stage_cost

NONE, FOUND, OUT_OF_WORK = 0, 1, 2
_MOST_KEPT = 4  # cuts that a state remembers to drop others by


@njit(cache=True, nogil=True, error_model="numpy")
def search(
    costs, how_C, offset_C, block_C, stride_T, least_message_C, until_L1, need_J, num_vectors, full, keep_all, max_work
):  # fmt: skip
    """Whether there is a plan, and the (stop, configuration) of its stages in order.

    Args:
        how_C: the configurations to use. offset_C, block_C: what a stage adds to a vector, and its digit's bound.
        stride_T: of each type's digit. least_message_C: the least message bytes at any cut. until_L1: `spared_until`.
        need_J: microbatches in flight of a stage with j stages behind it; the last level stands for all that follow.
        full: the vector that a whole plan must have, −1: any.
        keep_all: no label is left out for another: every device must be used, or more layers may need less.
        max_work: stages looked at.
    """
    J, C = len(need_J), len(how_C)
    sums_CL1N, dense_CLL13 = costs[0], costs[3]
    dense = len(dense_CLL13) > 0
    L = dense_CLL13.shape[1] if dense else sums_CL1N.shape[1] - 1
    size = 1 << 12
    cut_M, how_M = np.empty(size, np.int32), np.empty(size, np.int32)
    parent_M, next_M = np.empty(size, np.int32), np.empty(size, np.int32)
    head = np.full(num_vectors * J, -1, np.int32)
    # Each state remembers some cuts that are reached with no more stages and devices, its own or others'.
    kept, num_kept = np.empty((num_vectors * J, _MOST_KEPT), np.int32), np.zeros(num_vectors * J, np.int32)
    reached = np.zeros((num_vectors * J if keep_all else 1, L + 1 if keep_all else 1), np.bool_)
    cut_M[0], how_M[0], parent_M[0], next_M[0] = L, -1, -1, -1
    head[0] = 0
    M, work = 1, 0.0
    for u in range(num_vectors):
        for j in range(J):
            state = u * J + j
            count, m = 0, head[state]
            while m >= 0:
                count += 1
                m = next_M[m]
            here, cuts = np.empty(count, np.int32), np.empty(count, np.int32)
            count, m = 0, head[state]
            while m >= 0:
                here[count], cuts[count] = m, cut_M[m]
                count += 1
                m = next_M[m]
            if not keep_all:
                _inherit(kept, num_kept, state, state - 1 if j > 0 else -1)
                for t in range(len(stride_T)):
                    digit = u // stride_T[t]
                    if t + 1 < len(stride_T):
                        digit %= stride_T[t + 1] // stride_T[t]
                    if digit > 0:
                        _inherit(kept, num_kept, state, state - stride_T[t] * J)
            for n in np.argsort(cuts, kind="mergesort"):  # the furthest cuts first: they spare others
                m = here[n]
                stop = cut_M[m]
                if not keep_all:
                    spared = False
                    for k in range(num_kept[state]):
                        spared = spared or kept[state, k] <= stop < until_L1[kept[state, k]]
                    if spared:
                        continue
                    if num_kept[state] < _MOST_KEPT:
                        kept[state, num_kept[state]] = stop
                        num_kept[state] += 1
                for i in range(C):
                    c = how_C[i]
                    if u % block_C[i] + offset_C[i] >= block_C[i]:
                        continue
                    to = (u + offset_C[i]) * J + min(j + 1, J - 1)
                    # Without `keep_all` costs are sums: a stage that fits does so with fewer layers at smaller cuts.
                    low = stop - 1
                    while low >= 0 and (dense or _may_reach(sums_CL1N, low, stop, c, need_J[j], least_message_C[i])):
                        low -= 1
                        work += 1
                    last = -1
                    for start in range(low + 1, stop):
                        if keep_all:
                            if reached[to, start]:
                                continue
                        elif last >= 0 and start < until_L1[last]:
                            continue
                        work += 1
                        seconds, once, fits = stage_cost(costs, start, stop, c)
                        if fits < need_J[j] or seconds == np.inf or once == np.inf:
                            continue
                        if start == 0 and full >= 0 and u + offset_C[i] != full:
                            continue
                        last = start
                        if keep_all:
                            reached[to, start] = True
                        if size == M:
                            size *= 2
                            cut_M, how_M = _longer(cut_M, size), _longer(how_M, size)
                            parent_M, next_M = _longer(parent_M, size), _longer(next_M, size)
                        cut_M[M], how_M[M], parent_M[M], next_M[M] = start, c, m, head[to]
                        head[to] = M
                        M += 1
                        if start == 0:
                            return FOUND, _follow(cut_M, how_M, parent_M, M - 1)
                if work > max_work:
                    return OUT_OF_WORK, np.empty((0, 2), np.int64)
    return NONE, np.empty((0, 2), np.int64)


@njit(cache=True, nogil=True, error_model="numpy")
def spared_until(sums_CL1N, how_C, least_message_C, need):
    """[cut]: a label at this cut makes those needless that are behind it and before that cut, with as many devices.

    Stages that lead from the first layer to a cut behind this one also lead to this one: without those that begin
    behind it, and with the last of the others ended here. That one has fewer layers, but the message at this cut may
    be larger than at its own: by no more than what the layers between need, under any configuration, wherever it
    ended.

    Args:
        need: microbatches in flight, the fewest of any stage.
    """
    L = sums_CL1N.shape[1] - 1
    until_L1 = np.full(L + 1, L + 1, np.int64)
    for cut in range(L):
        for i in range(len(how_C)):
            c = how_C[i]
            message = sums_CL1N[c, cut, _MESSAGE]
            for behind in range(cut + 1, until_L1[cut]):
                active = need * _between(sums_CL1N, cut, behind, c, _ACTIVE)
                spent = _between(sums_CL1N, cut, behind, c, _FIXED)
                spent += min(active, _between(sums_CL1N, cut, behind, c, _STEP))
                if message - sums_CL1N[c, behind, _MESSAGE] > spent:
                    until_L1[cut] = behind
                    break
                if message - least_message_C[i] <= spent:
                    break
    return until_L1


@njit(cache=True, nogil=True, error_model="numpy")
def _may_reach(sums_CL1N, start, stop, c, need, least_message):
    """Whether a stage from here or from before may fit: scratch is nothing, and the message at the cut the least."""
    if sums_CL1N[c, stop, _BLOCKED] > sums_CL1N[c, start, _BLOCKED]:
        return False
    held = max(need * _between(sums_CL1N, start, stop, c, _ACTIVE), _between(sums_CL1N, start, stop, c, _STEP))
    always = _between(sums_CL1N, start, stop, c, _FIXED) + sums_CL1N[c, stop, _MESSAGE] + least_message
    return held <= sums_CL1N[c, start, _ROOM] * (1 + 1e-12) - always


@njit(cache=True, nogil=True, error_model="numpy")
def _inherit(kept, num_kept, state, other):
    """What spares labels with fewer stages or devices spares them here."""
    if other < 0:
        return
    for k in range(num_kept[other]):
        known = num_kept[state] == _MOST_KEPT
        for i in range(num_kept[state]):
            known = known or kept[state, i] == kept[other, k]
        if not known:
            kept[state, num_kept[state]] = kept[other, k]
            num_kept[state] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _follow(cut_M, how_M, parent_M, m):
    """(stop, configuration) of each stage from this label on."""
    count, at = 0, m
    while parent_M[at] >= 0:
        count += 1
        at = parent_M[at]
    stages = np.empty((count, 2), np.int64)
    for s in range(count):
        stages[s, 0], stages[s, 1] = cut_M[parent_M[m]], how_M[m]
        m = parent_M[m]
    return stages


@njit(cache=True, nogil=True, error_model="numpy")
def _longer(table, size):
    longer = np.empty(size, table.dtype)
    longer[: len(table)] = table
    return longer
