"""Orders: how urgent operations are, and list scheduling by that.

Suffixes as in `dejavu.placement.problem`.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.placement.problem import Arrays, Floats, Ints, PlacementProblem
from dejavu.placement.shared.timeline import State, clear, inputs_seconds, put


def upward_ranks(problem: PlacementProblem, message_weight: float = 1.0) -> Floats:
    """Return each operation's longest way to the end, with mean seconds and mean messages, times a weight.

    [Topcuoglu et al., 2002](https://doi.org/10.1109/71.993206), equation 5.
    """
    arrays, D = problem.arrays, problem.num_devices
    apart = ~np.eye(D, dtype=bool)
    mean_T = arrays.message_seconds_TDD[:, apart].mean(axis=1) if D > 1 else np.zeros(len(problem.tensors))
    runs_ND = np.isfinite(arrays.seconds_ND)
    mean_N = np.where(runs_ND, arrays.seconds_ND, 0.0).sum(axis=1) / runs_ND.sum(axis=1)
    order_N = np.array(problem.topological_N, dtype=np.int64)
    return np.asarray(_ranks(arrays, order_N, mean_N, message_weight * mean_T))


@njit(cache=True, nogil=True)
def _ranks(arrays: Arrays, order_N: Ints, seconds_N: Floats, message_T: Floats) -> Floats:
    rank_N = np.zeros(len(order_N))
    for n in order_N[::-1]:
        after = 0.0
        for o in range(arrays.first_output_N1[n], arrays.first_output_N1[n + 1]):
            t = arrays.output_O[o]
            for r in range(arrays.first_reader_T1[t], arrays.first_reader_T1[t + 1]):
                after = max(after, message_T[t] + rank_N[arrays.reader_R[r]])
        rank_N[n] = seconds_N[n] + after
    return rank_N


def by_rank(problem: PlacementProblem, rank_N: Floats) -> Ints:
    """Return the operations, the most urgent first, each after those that it reads from."""
    order_N = np.array(problem.topological_N, dtype=np.int64)
    return order_N[np.argsort(-rank_N[order_N], kind="stable")]


@njit(cache=True, nogil=True)
def dispatch(arrays: Arrays, state: State, device_G: Ints, rank_N: Floats, order_N: Ints) -> float:
    """List scheduling of what is placed: of all that could start, what starts first does, the most urgent of equals.

    Args:
        order_N: written to.

    Returns:
        The seconds.
    """
    N = len(order_N)
    clear(state)
    waits_N, ready, num_ready = np.zeros(N, dtype=np.int64), np.empty(N, dtype=np.int64), 0
    for n in range(N):
        waits_N[n] = arrays.first_input_N1[n + 1] - arrays.first_input_N1[n]
        if waits_N[n] == 0:
            ready[num_ready] = n
            num_ready += 1
    latest = 0.0
    for step in range(N):
        chosen, first = -1, np.inf
        for k in range(num_ready):
            n = ready[k]
            d = device_G[arrays.group_N[n]]
            start = max(state.free_D[d], inputs_seconds(arrays, state, n, d, False))
            if start < first or (start == first and rank_N[n] > rank_N[ready[chosen]]):
                chosen, first = k, start
        n = ready[chosen]
        num_ready -= 1
        ready[chosen] = ready[num_ready]
        order_N[step] = n
        latest = max(latest, put(arrays, state, n, device_G[arrays.group_N[n]]))
        for o in range(arrays.first_output_N1[n], arrays.first_output_N1[n + 1]):
            t = arrays.output_O[o]
            for r in range(arrays.first_reader_T1[t], arrays.first_reader_T1[t + 1]):
                w = arrays.reader_R[r]
                waits_N[w] -= 1
                if waits_N[w] == 0:
                    ready[num_ready] = w
                    num_ready += 1
    return latest


@njit(cache=True, nogil=True)
def fill_by_rank(
    arrays: Arrays, state: State, rank_N: Floats, order_N: Ints, device_G: Ints, held_D: Floats, inserts: bool
) -> float:
    """HEFT: each operation, the most urgent first, goes where it ends first; into a gap between others, if it fits.

    Args:
        order_N: the operations by rank.
        device_G: written to; entries from 0 on are kept.
        held_D: memory in use on each device; written to.
        inserts: with gaps; else only after what is on the device.

    Returns:
        The last end; infinite where some group fitted nowhere. Messages of inserted operations are priced as if they
        were sent last, so the price of the placement, in the order of starts, is another.
    """
    N, D = arrays.seconds_ND.shape
    clear(state)
    begin_DN, end_DN, num_D = np.zeros((D, N)), np.zeros((D, N)), np.zeros(D, dtype=np.int64)
    latest = 0.0
    for n in order_N:
        g = arrays.group_N[n]
        best, where, starts, slot = np.inf, -1, 0.0, 0
        for d in range(D):
            if device_G[g] >= 0 and device_G[g] != d:
                continue
            if device_G[g] < 0 and held_D[d] + arrays.memory_G[g] > arrays.memory_D[d]:
                continue
            seconds = arrays.seconds_ND[n, d]
            ready = inputs_seconds(arrays, state, n, d, False)
            at = num_D[d]
            start = max(ready, end_DN[d, at - 1] if at > 0 else 0.0)
            k = at - 1
            while inserts and k >= 0 and begin_DN[d, k] >= ready + seconds:
                gap = max(ready, end_DN[d, k - 1] if k > 0 else 0.0)
                if gap + seconds <= begin_DN[d, k]:
                    start, at = gap, k
                k -= 1
            if start + seconds < best:
                best, where, starts, slot = start + seconds, d, start, at
        if where < 0:
            return np.inf
        if device_G[g] < 0:
            device_G[g] = where
            held_D[where] += arrays.memory_G[g]
        put(arrays, state, n, where)
        for k in range(num_D[where], slot, -1):
            begin_DN[where, k], end_DN[where, k] = begin_DN[where, k - 1], end_DN[where, k - 1]
        begin_DN[where, slot], end_DN[where, slot] = starts, best
        num_D[where] += 1
        state.start_N[n], state.finish_N[n] = starts, best
        for o in range(arrays.first_output_N1[n], arrays.first_output_N1[n + 1]):
            state.arrival_TD[arrays.output_O[o], where] = best
        latest = max(latest, best)
    return latest


def by_start(problem: PlacementProblem, start_N: Floats) -> Ints:
    """Return the operations by when they start, each after those that it reads from, also where these take no time."""
    order_N = np.array(problem.topological_N, dtype=np.int64)
    return order_N[np.argsort(start_N[order_N], kind="stable")]
