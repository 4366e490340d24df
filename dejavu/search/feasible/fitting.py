"""Compiled loop that finds a plan that fits, or tries everything: which cuts the layers after can be run from.

A label is a cut from which all layers to the last have stages: so many stages, so many devices of each type. Seconds
are not looked at, so that of two labels with the same stages and devices often one is enough (`spared_until`).

Letters: C = configurations, J = levels of stages after a cut, U = vectors of devices in mixed radix, M = labels, X =
states (U × J), T = device types, L1 = cut positions. `costs` are StageTable's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.shared.stage_table import (
    _ACTIVE,
    _BLOCKED,
    _FIXED,
    _MESSAGE,
    _ROOM,
    _STEP,
    Costs,
    _between,
    stage_cost,
)

NONE, FOUND, OUT_OF_WORK = 0, 1, 2
_MOST_KEPT = 4  # cuts that a state remembers to drop others by
_FIRST_SIZE = 1 << 12  # labels; room doubles where there are more

Ints = NDArray[np.int64]


class Uses(NamedTuple):
    """The configurations to use.

    Attributes:
        configuration_C: which these are of all.
        offset_C, block_C: what a stage adds to a vector of devices, and the bound of the digits up to its type's.
        least_message_C: the least message bytes at any cut.
    """

    configuration_C: Ints
    offset_C: Ints
    block_C: Ints
    least_message_C: Floats


class Space(NamedTuple):
    """The states that there are.

    Attributes:
        need_J: microbatches in flight of a stage with j stages after it; the last level stands for all that follow.
        stride_T: of each type's digit in a vector of devices.
        num_vectors: U.
        full: the vector that a whole plan must have; −1: any.
        keep_all: no label is left out for another: every device must be used, or more layers may need less.
    """

    need_J: Ints
    stride_T: Ints
    num_vectors: int
    full: int
    keep_all: bool


class _Labels(NamedTuple):
    """Cut, configuration of the stage that starts there, the label after it, and the next label of the same state."""

    cut_M: NDArray[np.int32]
    configuration_M: NDArray[np.int32]
    parent_M: NDArray[np.int32]
    next_M: NDArray[np.int32]


class _States(NamedTuple):
    """The labels of each state, and what drops others.

    Attributes:
        head_X: the first of a state's labels; −1: none.
        kept_X4, num_kept_X: some cuts that are reached with no more stages and devices, a state's own or others'.
        reached_XL1: which cuts a state has; empty unless all are kept.
        until_L1: see `spared_until`.
        work_1, max_work: how many stages were looked at, and may be.
    """

    head_X: NDArray[np.int32]
    kept_X4: NDArray[np.int32]
    num_kept_X: NDArray[np.int32]
    reached_XL1: NDArray[np.bool_]
    until_L1: Ints
    work_1: Floats
    max_work: float


@njit(cache=True, nogil=True, error_model="numpy")
def search(costs: Costs, uses: Uses, space: Space, until_L1: Ints, max_work: float) -> tuple[int, Ints]:
    """Whether there is a plan, and the (stop, configuration) of its stages in order.

    States are taken by their devices, then stages: each stage adds devices, so a state's labels are complete by then.

    Args:
        until_L1: `spared_until`.
        max_work: stages looked at.
    """
    sums_CL1N, dense_CLL13 = costs[0], costs[3]
    L = dense_CLL13.shape[1] if len(dense_CLL13) > 0 else sums_CL1N.shape[1] - 1
    num_states, C, keep_all = space.num_vectors * len(space.need_J), len(uses.configuration_C), space.keep_all
    states = _States(
        np.full(num_states, -1, np.int32),
        np.empty((num_states, _MOST_KEPT), np.int32),
        np.zeros(num_states, np.int32),
        np.zeros((num_states if keep_all else 1, L + 1 if keep_all else 1), np.bool_),
        until_L1,
        np.zeros(1),
        max_work,
    )
    size, M = _FIRST_SIZE, 1
    labels = _Labels(
        np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32)
    )
    labels.cut_M[0], labels.configuration_M[0], labels.parent_M[0], labels.next_M[0] = L, -1, -1, -1
    states.head_X[0] = 0
    for state in range(num_states):
        if not keep_all:
            _inherit_all(states, state, space)
        for m in _furthest_first(labels, states.head_X[state]):
            stop = labels.cut_M[m]
            if not keep_all and _is_spared(states, state, stop):
                continue
            while size < M + C * stop:
                size *= 2
                labels = _longer_labels(labels, size)
            M, found = _extend(labels, M, m, state, costs, uses, space, states)
            if found == FOUND:
                return FOUND, _follow(labels, M - 1)
            if found == OUT_OF_WORK:
                return OUT_OF_WORK, np.empty((0, 2), np.int64)
    return NONE, np.empty((0, 2), np.int64)


@njit(cache=True, nogil=True, error_model="numpy")
def _extend(
    labels: _Labels, M: int, m: int, state: int, costs: Costs, uses: Uses, space: Space, states: _States
) -> tuple[int, int]:
    """Add the labels that label m leads to with one stage more, from row M on.

    Arrays are in local names: one that is read out of a record in a loop is counted as one more reference each time.

    Returns:
        How many labels there are then, and whether the last one is a whole plan.
    """
    cut_M, configuration_M, parent_M, next_M = labels
    configuration_C, offset_C, block_C, least_message_C = uses
    need_J, _, _, full, keep_all = space
    head_X, _, _, reached_XL1, until_L1, work_1, max_work = states
    sums_CL1N, dense, J, work = costs[0], len(costs[3]) > 0, len(need_J), work_1[0]
    u, j, stop = state // J, state % J, int(np.int64(cut_M[m]))
    need = need_J[j]
    for i in range(len(configuration_C)):
        c, offset = configuration_C[i], offset_C[i]
        # More devices of this type than there are; stages before only take more.
        if u % block_C[i] + offset >= block_C[i]:
            continue
        to = (u + offset) * J + min(j + 1, J - 1)
        # Where costs are sums a stage takes less the fewer its layers, but for the messages at its cuts: once not even
        # the smallest message of all would fit, no stage from before does.
        low = stop - 1
        while low >= 0 and (dense or _may_reach(sums_CL1N, low, stop, c, need, least_message_C[i])):
            low -= 1
            work += 1
        last = -1
        for start in range(low + 1, stop):
            # A state's label at a cut is as good as any other there: they differ only in what runs the layers after.
            # And without `keep_all` the label that was written last makes some of those after it needless.
            if reached_XL1[to, start] if keep_all else last >= 0 and start < until_L1[last]:
                continue
            work += 1
            seconds, once, fits = stage_cost(costs, start, stop, c)
            if fits < need or seconds == np.inf or once == np.inf:
                continue
            if start == 0 and full >= 0 and u + offset != full:
                continue
            last = start
            if keep_all:
                reached_XL1[to, start] = True
            cut_M[M], configuration_M[M], parent_M[M], next_M[M] = start, c, m, head_X[to]
            head_X[to] = M
            M += 1
            if start == 0:
                return M, FOUND
        if work > max_work:
            return M, OUT_OF_WORK
    work_1[0] = work
    return M, NONE


@njit(cache=True, nogil=True, error_model="numpy")
def _furthest_first(labels: _Labels, head: int) -> NDArray[np.int32]:
    """The labels of a list, the furthest cuts first, that is, the smallest: they spare others."""
    cut_M, next_M = labels.cut_M, labels.next_M
    count, m = 0, head
    while m >= 0:
        count += 1
        m = next_M[m]
    here, cuts = np.empty(count, np.int32), np.empty(count, np.int32)
    count, m = 0, head
    while m >= 0:
        here[count], cuts[count] = m, cut_M[m]
        count += 1
        m = next_M[m]
    return here[np.argsort(cuts, kind="mergesort")]


@njit(cache=True, nogil=True, error_model="numpy")
def _is_spared(states: _States, state: int, cut: int) -> bool:
    """Whether a label at this cut is needless; if not, its cut is remembered, to spare others.

    One of a cut before it with no more stages and devices runs all that it does; see `spared_until` for why the cut
    in between can be left out.
    """
    kept_X4, num_kept_X, until_L1 = states.kept_X4, states.num_kept_X, states.until_L1
    for k in range(num_kept_X[state]):
        if kept_X4[state, k] <= cut < until_L1[kept_X4[state, k]]:
            return True
    if num_kept_X[state] < _MOST_KEPT:
        kept_X4[state, num_kept_X[state]] = cut
        num_kept_X[state] += 1
    return False


@njit(cache=True, nogil=True, error_model="numpy")
def spared_until(sums_CL1N: Floats, configuration_C: Ints, least_message_C: Floats, need: int) -> Ints:
    """[cut]: a label at this cut makes those needless that are after it and before that cut, with as many devices.

    Stages that lead from the first layer to a cut after this one also lead to this one: without those that begin
    after it, and with the last of the others ended here. That one has fewer layers, but the message at this cut may
    be larger than at its own: by no more than what the layers between need, under any configuration, wherever it
    ended.

    Args:
        need: microbatches in flight, the fewest of any stage.
    """
    L = sums_CL1N.shape[1] - 1
    until_L1 = np.full(L + 1, L + 1, np.int64)
    for cut in range(L):
        for i in range(len(configuration_C)):
            c = configuration_C[i]
            message = sums_CL1N[c, cut, _MESSAGE]
            for after in range(cut + 1, until_L1[cut]):
                active = need * _between(sums_CL1N, cut, after, c, _ACTIVE)
                spent = _between(sums_CL1N, cut, after, c, _FIXED)
                spent += min(active, _between(sums_CL1N, cut, after, c, _STEP))
                if message - sums_CL1N[c, after, _MESSAGE] > spent:
                    until_L1[cut] = after
                    break
                if message - least_message_C[i] <= spent:
                    break
    return until_L1


@njit(cache=True, nogil=True, error_model="numpy")
def _may_reach(sums_CL1N: Floats, start: int, stop: int, c: int, need: int, least_message: float) -> bool:
    """Whether a stage from here or from before may fit: scratch is nothing, and the message at the cut the least."""
    if sums_CL1N[c, stop, _BLOCKED] > sums_CL1N[c, start, _BLOCKED]:
        return False
    held: float = max(need * _between(sums_CL1N, start, stop, c, _ACTIVE), _between(sums_CL1N, start, stop, c, _STEP))
    always: float = _between(sums_CL1N, start, stop, c, _FIXED) + sums_CL1N[c, stop, _MESSAGE] + least_message
    room: float = sums_CL1N[c, start, _ROOM] * (1 + 1e-12)
    return held <= room - always


@njit(cache=True, nogil=True, error_model="numpy")
def _inherit_all(states: _States, state: int, space: Space) -> None:
    """What spares labels with one stage or one device fewer spares them here: they do all that those here can."""
    stride_T, num_levels = space.stride_T, len(space.need_J)
    u, j = state // num_levels, state % num_levels
    if j > 0:
        _inherit(states, state, state - 1)
    for t in range(len(stride_T)):
        digit = u // stride_T[t]
        if t + 1 < len(stride_T):
            digit %= stride_T[t + 1] // stride_T[t]
        if digit > 0:
            _inherit(states, state, state - stride_T[t] * num_levels)


@njit(cache=True, nogil=True, error_model="numpy")
def _inherit(states: _States, state: int, other: int) -> None:
    """Remember the cuts that another state does."""
    kept_X4, num_kept_X = states.kept_X4, states.num_kept_X
    for k in range(num_kept_X[other]):
        is_known = num_kept_X[state] == _MOST_KEPT
        for i in range(num_kept_X[state]):
            is_known = is_known or kept_X4[state, i] == kept_X4[other, k]
        if not is_known:
            kept_X4[state, num_kept_X[state]] = kept_X4[other, k]
            num_kept_X[state] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _follow(labels: _Labels, m: int) -> Ints:
    """(stop, configuration) of each stage from this label on."""
    cut_M, configuration_M, parent_M, _ = labels
    count, at = 0, m
    while parent_M[at] >= 0:
        count += 1
        at = parent_M[at]
    stages = np.empty((count, 2), np.int64)
    for s in range(count):
        stages[s, 0], stages[s, 1] = cut_M[parent_M[m]], configuration_M[m]
        m = parent_M[m]
    return stages


@njit(cache=True, nogil=True, error_model="numpy")
def _longer_labels(labels: _Labels, size: int) -> _Labels:
    cut_M, configuration_M, parent_M, next_M = labels
    return _Labels(_longer(cut_M, size), _longer(configuration_M, size), _longer(parent_M, size), _longer(next_M, size))


@njit(cache=True, nogil=True, error_model="numpy")
def _longer(table: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    longer = np.empty(size, table.dtype)
    longer[: len(table)] = table
    return longer
