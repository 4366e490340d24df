"""The price, compiled: when operations run and messages arrive, one operation after another.

Devices run their operations in the given order and never another one first. A message leaves its producer's device when
the tensor is there and the link is free; a link carries its messages in the order in which their readers run, those of
one reader in the order in which they were made. So what is placed so far is never changed by what is placed later:
schedules can be built, and searched, operation by operation.

Suffixes as in `dejavu.placement.problem`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.placement.problem import Arrays, Floats, Ints


class State(NamedTuple):
    """What is placed so far.

    Attributes:
        device_N, start_N, finish_N: of each operation; device −1: not placed.
        arrival_TD: when a tensor is on a device; infinite: it is not sent there.
        free_D, link_free_DD: when a device's last operation, a link's last message, ends.
        try_D: room to try in.
    """

    device_N: Ints
    start_N: Floats
    finish_N: Floats
    arrival_TD: Floats
    free_D: Floats
    link_free_DD: Floats
    try_D: Floats


def empty_state(arrays: Arrays) -> State:
    """Return a state in which nothing is placed."""
    N, D = arrays.seconds_ND.shape
    T = len(arrays.producer_T)
    return State(
        np.full(N, -1, dtype=np.int64),
        np.zeros(N),
        np.zeros(N),
        np.full((T, D), np.inf),
        np.zeros(D),
        np.zeros((D, D)),
        np.zeros(D),
    )


@njit(cache=True, nogil=True)
def inputs_seconds(arrays: Arrays, state: State, n: int, d: int, sends: bool) -> float:
    """When all that operation n reads would be on device d; with `sends` the messages are sent."""
    ready = 0.0
    first, stop = arrays.first_input_N1[n], arrays.first_input_N1[n + 1]
    missing = 0
    for i in range(first, stop):
        t = arrays.input_I[i]
        if state.arrival_TD[t, d] < np.inf:
            ready = max(ready, state.arrival_TD[t, d])
        else:
            missing += 1
    if missing == 0:
        return ready
    if not sends:
        state.try_D[:] = state.link_free_DD[:, d]
    last_made, last_t = -1.0, np.int64(-1)
    for _ in range(missing):
        # the tensor that was made next, by time and then by number
        made, chosen = np.inf, np.int64(-1)
        for i in range(first, stop):
            t = arrays.input_I[i]
            at = state.finish_N[arrays.producer_T[t]]
            later = at > last_made or (at == last_made and t > last_t)
            if later and at < made and state.arrival_TD[t, d] == np.inf:
                made, chosen = at, t
        last_made, last_t = made, chosen
        c = state.device_N[arrays.producer_T[chosen]]
        free = state.link_free_DD[c, d] if sends else state.try_D[c]
        arrives = max(free, made) + arrays.message_seconds_TDD[chosen, c, d]
        if sends:
            state.link_free_DD[c, d] = arrives
            state.arrival_TD[chosen, d] = arrives
        else:
            state.try_D[c] = arrives
        ready = max(ready, arrives)
    return ready


@njit(cache=True, nogil=True)
def put(arrays: Arrays, state: State, n: int, d: int) -> float:
    """Run operation n next on device d; return when it ends."""
    start = max(inputs_seconds(arrays, state, n, d, True), state.free_D[d])
    finish: float = start + arrays.seconds_ND[n, d]
    state.device_N[n], state.start_N[n], state.finish_N[n], state.free_D[d] = d, start, finish, finish
    for o in range(arrays.first_output_N1[n], arrays.first_output_N1[n + 1]):
        state.arrival_TD[arrays.output_O[o], d] = finish
    return finish


@njit(cache=True, nogil=True)
def clear(state: State) -> None:
    """Place nothing."""
    state.device_N[:] = -1
    state.arrival_TD[:] = np.inf
    state.free_D[:] = 0.0
    state.link_free_DD[:] = 0.0


@njit(cache=True, nogil=True)
def run_in_order(arrays: Arrays, state: State, device_G: Ints, order_N: Ints, limit: float) -> float:
    """Place all operations in this order; return the seconds, or infinity as soon as they are `limit` or more."""
    clear(state)
    latest = 0.0
    for n in order_N:
        latest = max(latest, put(arrays, state, n, device_G[arrays.group_N[n]]))
        if latest >= limit:
            return np.inf
    return latest
