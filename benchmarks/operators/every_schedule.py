"""Exhaustive search over placements and orders, to hold `exact` against: nothing is left out for taking long."""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.placement import PlacementProblem
from dejavu.placement.problem import Arrays, Ints
from dejavu.placement.shared.timeline import State, empty_state, put


def fastest_of_all(problem: PlacementProblem) -> float:
    """Return the least seconds of all schedules; infinite where memory has room for none.

    Listed are all topological orders with all devices for each operation, so most schedules many times.
    """
    N, arrays = len(problem.operations), problem.arrays
    placed_N, device_G = np.zeros(N, dtype=np.int64), np.full(problem.num_groups, -1, dtype=np.int64)
    return float(_fastest(arrays, empty_state(arrays), placed_N, device_G, N, np.inf))


@njit()
def _fastest(arrays: Arrays, state: State, placed_N: Ints, device_G: Ints, left: int, best: float) -> float:
    N, D = arrays.seconds_ND.shape
    if left == 0:
        held_D = np.zeros(D)
        for g in range(len(device_G)):
            held_D[device_G[g]] += arrays.memory_G[g]
        return min(best, state.finish_N.max()) if (held_D <= arrays.memory_D).all() else best
    arrival_TD, free_D, link_free_DD = state.arrival_TD.copy(), state.free_D.copy(), state.link_free_DD.copy()
    for n in range(N):
        ready = placed_N[n] == 0
        for i in range(arrays.first_input_N1[n], arrays.first_input_N1[n + 1]):
            ready = ready and placed_N[arrays.producer_T[arrays.input_I[i]]] == 1
        before = device_G[arrays.group_N[n]]
        for d in range(D):
            if ready and before in (-1, d):
                state.arrival_TD[:], state.free_D[:], state.link_free_DD[:] = arrival_TD, free_D, link_free_DD
                device_G[arrays.group_N[n]], placed_N[n] = d, 1
                put(arrays, state, n, d)
                best = _fastest(arrays, state, placed_N, device_G, left - 1, best)
                device_G[arrays.group_N[n]], placed_N[n] = before, 0
    return best
