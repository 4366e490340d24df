"""The tree of schedules, compiled: its node of depth k has k operations placed, in the order of their starts.

Suffixes as in `dejavu.placement.problem`; K = depths, C = candidates (operation and device) at a depth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.placement.problem import Arrays, Floats, Ints, PlacementProblem
from dejavu.placement.shared.bound import Ends
from dejavu.placement.shared.timeline import State, empty_state, inputs_seconds, put

_SURELY = 1.0 - 1e-12  # a branch is dropped if it is no better than the best by more than rounding


class Tree(NamedTuple):
    """The path from the root to the node that is looked at, and what the bounds need.

    Attributes:
        state: of that node; arrays that begin with K: as it was at each depth.
        order_N, device_G, placed_G: the operations so far, each group's device, and how many of a group are placed.
        candidate_KC2: operations and devices that may come next, the most promising first.
        bound_KC: no schedule below that candidate is faster.
        next_K, count_K: which candidate is next, and how many there are.
        head_N, least_N, tail_N, work_N, prices_D: as in `shared.bound`.
        alike_D: the first device that is equal to each: its memory, links and speeds.
        early_N: room to work in.
    """

    state: State
    arrival_KTD: Floats
    free_KD: Floats
    link_free_KDD: Floats
    held_KD: Floats
    order_N: Ints
    device_G: Ints
    placed_G: Ints
    candidate_KC2: Ints
    bound_KC: Floats
    next_K: Ints
    count_K: Ints
    head_N: Floats
    least_N: Floats
    tail_N: Floats
    work_N: Floats
    prices_D: Floats
    alike_D: Ints
    topological_N: Ints
    best_device_G: Ints
    best_N: Ints
    early_N: Floats


def tree_of(problem: PlacementProblem, found: Ends, prices_D: Floats) -> Tree:
    """Return a tree of which nothing has been looked at."""
    arrays, N, D, G = problem.arrays, len(problem.operations), problem.num_devices, problem.num_groups
    with np.errstate(invalid="ignore"):
        priced_ND = prices_D[None] * arrays.seconds_ND
    return Tree(
        state=empty_state(arrays),
        arrival_KTD=np.full((N + 1, len(problem.tensors), D), np.inf),
        free_KD=np.zeros((N + 1, D)),
        link_free_KDD=np.zeros((N + 1, D, D)),
        held_KD=np.zeros((N + 1, D)),
        order_N=np.zeros(N, dtype=np.int64),
        device_G=np.full(G, -1, dtype=np.int64),
        placed_G=np.zeros(G, dtype=np.int64),
        candidate_KC2=np.zeros((N + 1, N * D, 2), dtype=np.int64),
        bound_KC=np.zeros((N + 1, N * D)),
        next_K=np.zeros(N + 1, dtype=np.int64),
        count_K=np.zeros(N + 1, dtype=np.int64),
        head_N=found.head_N,
        least_N=arrays.seconds_ND.min(axis=1),
        tail_N=found.tail_N,
        work_N=np.where(np.isfinite(priced_ND), priced_ND, np.inf).min(axis=1),
        prices_D=prices_D,
        alike_D=_alike(problem),
        topological_N=np.array(problem.topological_N, dtype=np.int64),
        best_device_G=np.zeros(G, dtype=np.int64),
        best_N=np.zeros(N, dtype=np.int64),
        early_N=np.zeros(N),
    )


def _alike(problem: PlacementProblem) -> Ints:
    """Return the first device that each could change places with, whatever is on the others."""
    arrays, D = problem.arrays, problem.num_devices
    alike_D = np.arange(D, dtype=np.int64)
    for d in range(D):
        for c in range(d):
            swapped = np.arange(D)
            swapped[[c, d]] = d, c
            same = (arrays.seconds_ND[:, c] == arrays.seconds_ND[:, d]).all() and arrays.memory_D[c] == arrays.memory_D[
                d
            ]
            links_TDD = arrays.message_seconds_TDD
            if same and (links_TDD[:, swapped][:, :, swapped] == links_TDD).all():
                alike_D[d] = alike_D[c]
                break
    return alike_D


def open_bound(tree: Tree, limits_2: Floats, depth: int) -> float:
    """Return what no schedule is faster than, with branches left that were not looked at."""
    least = limits_2[0]
    for k in range(depth + 1):
        for c in range(tree.next_K[k], tree.count_K[k]):
            least = min(least, tree.bound_KC[k, c])
    return float(max(least, limits_2[1]))


def expand_root(arrays: Arrays, tree: Tree, limits_2: Floats) -> int:
    """List what may come first, and return the depth, 0."""
    _expand(arrays, tree, limits_2, 0)
    return 0


@njit(cache=True, nogil=True)
def explore(arrays: Arrays, tree: Tree, limits_2: Floats, depth: int, most: int) -> int:
    """Look at so many nodes, depth first; return the depth to go on from, −1 where all is done."""
    state, N = tree.state, len(tree.order_N)
    looked = 0
    while depth >= 0 and looked < most:
        c = tree.next_K[depth]
        if c >= tree.count_K[depth] or tree.bound_KC[depth, c] >= limits_2[0] * _SURELY:
            # candidates are sorted: none after this one is better
            tree.count_K[depth] = 0
            depth -= 1
            if depth >= 0:
                _take_back(arrays, tree, depth)
            continue
        tree.next_K[depth] = c + 1
        looked += 1
        n, d = tree.candidate_KC2[depth, c]
        g = arrays.group_N[n]
        state.arrival_TD[:] = tree.arrival_KTD[depth]
        state.free_D[:] = tree.free_KD[depth]
        state.link_free_DD[:] = tree.link_free_KDD[depth]
        tree.held_KD[depth + 1] = tree.held_KD[depth]
        if tree.placed_G[g] == 0:
            tree.device_G[g] = d
            tree.held_KD[depth + 1, d] += arrays.memory_G[g]
        tree.placed_G[g] += 1
        tree.order_N[depth] = n
        put(arrays, state, n, d)
        tree.arrival_KTD[depth + 1] = state.arrival_TD
        tree.free_KD[depth + 1] = state.free_D
        tree.link_free_KDD[depth + 1] = state.link_free_DD
        if depth + 1 == N:
            latest = state.finish_N.max()
            if latest < limits_2[0]:
                limits_2[0] = latest
                tree.best_device_G[:], tree.best_N[:] = tree.device_G, tree.order_N
            _take_back(arrays, tree, depth)
            continue
        _expand(arrays, tree, limits_2, depth + 1)
        depth += 1
    return depth


@njit(cache=True, nogil=True)
def _take_back(arrays: Arrays, tree: Tree, depth: int) -> None:
    """Unplace the operation that was placed last at this depth."""
    n = tree.order_N[depth]
    g = arrays.group_N[n]
    tree.state.device_N[n] = -1
    tree.placed_G[g] -= 1
    if tree.placed_G[g] == 0:
        tree.device_G[g] = -1


@njit(cache=True, nogil=True)
def _expand(arrays: Arrays, tree: Tree, limits_2: Floats, depth: int) -> None:
    """List the operations and devices that may come next and could still beat the best."""
    state, count = tree.state, 0
    tree.next_K[depth] = tree.count_K[depth] = 0
    last = tree.order_N[depth - 1] if depth > 0 else -1
    last_start = state.start_N[last] if depth > 0 else 0.0
    bound = _bound(arrays, tree, depth, last_start)
    if bound >= limits_2[0] * _SURELY:
        return
    for n in range(len(tree.order_N)):
        if state.device_N[n] >= 0 or not _is_ready(arrays, state, n):
            continue
        for d in range(len(tree.free_KD[0])):
            if not _may_be_on(arrays, tree, depth, n, d):
                continue
            start = max(inputs_seconds(arrays, state, n, d, False), state.free_D[d])
            # Every schedule, listed by its starts, is a path of the tree, so what starts before the last is on another.
            if start < last_start:
                continue
            # Of two that start at once on different devices, and were both ready, the lower number comes first.
            if start == last_start and n < last and state.device_N[last] != d and not _follows(arrays, n, last):
                continue
            least = max(bound, start + arrays.seconds_ND[n, d] + tree.tail_N[n])
            if least >= limits_2[0] * _SURELY:
                continue
            at = count
            while at > 0 and tree.bound_KC[depth, at - 1] > least:
                tree.bound_KC[depth, at] = tree.bound_KC[depth, at - 1]
                tree.candidate_KC2[depth, at] = tree.candidate_KC2[depth, at - 1]
                at -= 1
            tree.bound_KC[depth, at] = least
            tree.candidate_KC2[depth, at, 0], tree.candidate_KC2[depth, at, 1] = n, d
            count += 1
    tree.count_K[depth] = count


@njit(cache=True, nogil=True)
def _may_be_on(arrays: Arrays, tree: Tree, depth: int, n: int, d: int) -> bool:
    """Whether it runs and fits there, its group is nowhere else, and no equal device is as empty."""
    g = arrays.group_N[n]
    if arrays.seconds_ND[n, d] == np.inf:
        return False
    if tree.placed_G[g] > 0:
        return bool(tree.device_G[g] == d)
    if tree.held_KD[depth, d] + arrays.memory_G[g] > arrays.memory_D[d]:
        return False
    # Equal devices with nothing on them differ by their numbers only: the first will do.
    for other in range(d):
        if tree.alike_D[other] == tree.alike_D[d]:
            used = False
            for k in range(depth):
                used = used or tree.state.device_N[tree.order_N[k]] == other
            if not used:
                return False
    return True


@njit(cache=True, nogil=True)
def _is_ready(arrays: Arrays, state: State, n: int) -> bool:
    for i in range(arrays.first_input_N1[n], arrays.first_input_N1[n + 1]):
        if state.device_N[arrays.producer_T[arrays.input_I[i]]] < 0:
            return False
    return True


@njit(cache=True, nogil=True)
def _follows(arrays: Arrays, reader: int, producer: int) -> bool:
    for i in range(arrays.first_input_N1[reader], arrays.first_input_N1[reader + 1]):
        if arrays.producer_T[arrays.input_I[i]] == producer:
            return True
    return False


@njit(cache=True, nogil=True)
def _bound(arrays: Arrays, tree: Tree, depth: int, last_start: float) -> float:
    """What no schedule that begins like this is faster than: paths from what is placed, and the work that is left.

    Nothing that is left starts before what was placed last.
    """
    state, bound, work = tree.state, 0.0, 0.0
    for n in tree.topological_N:
        if state.device_N[n] >= 0:
            bound = max(bound, state.finish_N[n] + tree.tail_N[n])
            continue
        early = max(tree.head_N[n], last_start)
        for i in range(arrays.first_input_N1[n], arrays.first_input_N1[n + 1]):
            p = arrays.producer_T[arrays.input_I[i]]
            if state.device_N[p] >= 0:
                early = max(early, state.finish_N[p])
            else:
                early = max(early, tree.early_N[p] + tree.least_N[p])
        tree.early_N[n] = early
        bound = max(bound, early + tree.least_N[n] + tree.tail_N[n])
        work += tree.work_N[n]
    for d in range(len(tree.prices_D)):
        work += tree.prices_D[d] * max(tree.free_KD[depth, d], last_start)
    return max(bound, work)
