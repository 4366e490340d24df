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
        asker_TD: for which operation it was sent there, its producer where it was made.
        free_D, link_free_DD: when a device's last operation, a link's last message, ends.
        try_D: room to try in.
    """

    device_N: Ints
    start_N: Floats
    finish_N: Floats
    arrival_TD: Floats
    asker_TD: Ints
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
        np.full((T, D), -1, dtype=np.int64),
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
            state.arrival_TD[chosen, d], state.asker_TD[chosen, d] = arrives, n
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
        t = arrays.output_O[o]
        state.arrival_TD[t, d], state.asker_TD[t, d] = finish, n
    return finish


@njit(cache=True, nogil=True)
def clear(state: State) -> None:
    """Place nothing."""
    state.device_N[:] = -1
    state.arrival_TD[:] = np.inf
    state.free_D[:] = 0.0
    state.link_free_DD[:] = 0.0


@njit(cache=True, nogil=True)
def resume(arrays: Arrays, done: State, order_N: Ints, at_N: Ints, first: int, state: State) -> None:
    """Write to `state` what all operations before position `first` made of it in `done`, which placed this order.

    Nothing that is placed later changes it, so it need not be simulated again.

    Args:
        at_N: the position of each operation in `order_N`.
    """
    state.free_D[:], state.link_free_DD[:], state.arrival_TD[:] = 0.0, 0.0, np.inf
    for k in range(first):
        n = order_N[k]
        d = done.device_N[n]
        state.device_N[n], state.start_N[n], state.finish_N[n] = d, done.start_N[n], done.finish_N[n]
        state.free_D[d] = done.finish_N[n]
        for o in range(arrays.first_output_N1[n], arrays.first_output_N1[n + 1]):
            t = arrays.output_O[o]
            for c in range(len(state.free_D)):
                arrives = done.arrival_TD[t, c]
                if arrives == np.inf or at_N[done.asker_TD[t, c]] >= first:
                    continue
                state.arrival_TD[t, c], state.asker_TD[t, c] = arrives, done.asker_TD[t, c]
                if c != d:
                    state.link_free_DD[d, c] = max(state.link_free_DD[d, c], arrives)


@njit(cache=True, nogil=True)
def run_in_order(arrays: Arrays, state: State, device_G: Ints, order_N: Ints, limit: float, first: int = 0) -> float:
    """Place all operations in this order; return the seconds, or infinity as soon as they will be `limit` or more.

    Args:
        first: the position to go on from; what is before it is placed (`resume`).
    """
    if first == 0:
        clear(state)
    left_D, latest = np.zeros(len(state.free_D)), 0.0
    for k in range(len(order_N)):
        n = order_N[k]
        d = device_G[arrays.group_N[n]]
        if k < first:
            latest = max(latest, state.finish_N[n])
        else:
            left_D[d] += arrays.seconds_ND[n, d]
    if latest >= limit:
        return np.inf
    for k in range(first, len(order_N)):
        n = order_N[k]
        d = device_G[arrays.group_N[n]]
        finish = put(arrays, state, n, d)
        left_D[d] -= arrays.seconds_ND[n, d]
        latest = max(latest, finish)
        # What a device has left to do comes one after another; rounding must not refuse what is below the limit.
        if finish >= limit or finish + left_D[d] >= limit * (1 + 1e-12):
            return np.inf
    return latest
