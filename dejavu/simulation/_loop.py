"""The event loop, compiled: actions on devices, messages on links; whatever shares one of them gets an equal part.

A resource (a device, a link, a channel's delay) serves the activities on it in equal parts. Activity p is rank p's
present action, P + c the message that channel c is sending, P + C + c the one that it is receiving.
Suffixes as in `_action_table`; R = resources, J = activities, T = nodes of a tournament tree over the resources, 4 = a
message's parts (sender, wire, delay, receiver) or moments (STARTED, LEFT, TAKEN, ARRIVED).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.simulation._action_table import NOTHING, ActionTable, Integers

Floats = NDArray[np.float64]

STARTED, LEFT, TAKEN, ARRIVED = range(4)  # sending began, the wire is free, receiving began, the input is there
IDLE, FIRST, SECOND = range(3)  # of sending: the sender, then the wire; of receiving: the delay, then the receiver


class Costs(NamedTuple):
    """What everything takes, in seconds when alone, and from which resource.

    Attributes:
        work_A, device_P: an action; where ranks run.
        work_K4, resource_K4: the parts of a message on a route.
    """

    work_A: Floats
    device_P: Integers
    work_K4: Floats
    resource_K4: Integers


class Shares(NamedTuple):
    """What is on the resources now.

    Attributes:
        jobs_RJ, num_R: the activities on a resource, and how many.
        left_J: seconds of work, when alone, that an activity had left at its resource's `since_R`.
        next_T: node 1 has the earliest time at which an activity ends, nodes T/2 + r that of resource r.
    """

    jobs_RJ: Integers
    num_R: Integers
    left_J: Floats
    since_R: Floats
    next_T: Floats


class ActionTimes(NamedTuple):
    """When everything happened, in seconds; nan where it did not: for messages within a rank.

    Attributes:
        start_A, stop_A: actions.
        times_M4: messages.
    """

    start_A: Floats
    stop_A: Floats
    times_M4: Floats


def simulate_actions(order: ActionTable, costs: Costs) -> ActionTimes:
    """Every action and message of the step."""
    P, C, A = len(costs.device_P), len(order.from_C), len(costs.work_A)
    R = 1 + int(max(costs.device_P.max(), costs.resource_K4.max(initial=0)))
    leaves = 1 << (R - 1).bit_length()
    shares = Shares(
        jobs_RJ=np.empty((R, P + 2 * C), np.int64),
        num_R=np.zeros(R, np.int64),
        left_J=np.zeros(P + 2 * C),
        since_R=np.zeros(R),
        next_T=np.full(2 * leaves, np.inf),
    )
    times_M4 = np.full((len(order.channel_K) * order.num_microbatches, 4), np.nan)
    simulated = ActionTimes(np.full(A, np.nan), np.full(A, np.nan), times_M4)
    _run(order, costs, shares, simulated)
    return simulated


@njit(cache=True, nogil=True)
def _run(order: ActionTable, costs: Costs, shares: Shares, simulated: ActionTimes) -> None:
    """Fill `simulated`. One function, its arrays in local names: handing them on would count references each time."""
    _, _, _, first_P1, input_A, output_A, _, channel_K, from_C, to_C, queue_M, first_C1, B, _ = order
    work_A, device_P, work_K4, resource_K4 = costs
    next_T = shares.next_T
    start_A, stop_A, times_M4 = simulated
    P, C = len(device_P), len(from_C)
    next_P = first_P1[:-1].copy()  # a rank's present action
    waits_P = np.full(P, NOTHING)  # the message that it waits for
    phase_J = np.full(P + 2 * C, IDLE)
    place_3C = np.empty((3, C), np.int64)  # in each channel's queue: posted, sent, received
    for c in range(C):
        place_3C[0, c] = place_3C[1, c] = place_3C[2, c] = first_C1[c]
    ready = np.arange(P)  # ranks that look at their next action
    num_ready, now = P, 0.0
    while True:
        for rank in ready[:num_ready]:
            i = next_P[rank]
            waits_P[rank] = NOTHING
            if i == first_P1[rank + 1]:
                continue
            if input_A[i] != NOTHING and np.isnan(times_M4[input_A[i], ARRIVED]):
                waits_P[rank] = input_A[i]
                continue
            start_A[i] = now
            _put(shares, device_P[rank], rank, work_A[i], now)
        num_ready, now = 0, next_T[1]
        if now == np.inf:
            return
        j = _take(shares, now)
        if j < P:
            i = next_P[j]
            stop_A[i] = now
            next_P[j] += 1
            ready[0], num_ready = j, 1
            if output_A[i] == NOTHING:
                continue
            c = channel_K[output_A[i] // B]
            place_3C[0, c] += 1
        else:
            c = (j - P) % C
        for half in range(2):  # the channel's sending, then its receiving
            side = P + half * C + c
            if j != side and phase_J[side] != IDLE:
                continue
            work, resource = 0.0, 0
            while work == 0.0:
                if phase_J[side] == SECOND:
                    times_M4[queue_M[place_3C[half + 1, c]], ARRIVED if half else LEFT] = now
                    place_3C[half + 1, c] += 1
                    phase_J[side] = IDLE
                if place_3C[half + 1, c] == place_3C[half, c]:
                    break
                message = queue_M[place_3C[half + 1, c]]
                part = 2 * half + phase_J[side]
                work, resource = work_K4[message // B, part], resource_K4[message // B, part]
                if part == 0:
                    times_M4[message, STARTED] = now
                elif part == 2:  # the delay began when it left
                    work = max(0.0, times_M4[message, LEFT] + work - now)
                elif part == 3:
                    times_M4[message, TAKEN] = now
                phase_J[side] += 1
            if work > 0.0:
                _put(shares, resource, side, work, now)
        rank = to_C[c]
        if waits_P[rank] != NOTHING and not np.isnan(times_M4[waits_P[rank], ARRIVED]):
            ready[num_ready] = rank
            num_ready += 1


@njit(cache=True, nogil=True)
def _put(shares: Shares, r: int, j: int, work: float, now: float) -> None:
    """One more activity on a resource."""
    jobs_RJ, num_R, left_J, since_R, next_T = shares
    _settle(jobs_RJ, num_R, left_J, since_R, r, now)
    left_J[j] = work
    jobs_RJ[r, num_R[r]] = j
    num_R[r] += 1
    _announce(jobs_RJ, num_R, left_J, next_T, r, now)


@njit(cache=True, nogil=True)
def _take(shares: Shares, now: float) -> int:
    """The activity that ends now, off its resource."""
    jobs_RJ, num_R, left_J, since_R, next_T = shares
    half, node = len(next_T) // 2, 1
    while node < half:
        node = 2 * node if next_T[2 * node] == next_T[node] else 2 * node + 1
    r = node - half
    _settle(jobs_RJ, num_R, left_J, since_R, r, now)
    least = 0
    for k in range(1, num_R[r]):
        if left_J[jobs_RJ[r, k]] < left_J[jobs_RJ[r, least]]:
            least = k
    j: int = jobs_RJ[r, least]
    num_R[r] -= 1
    jobs_RJ[r, least] = jobs_RJ[r, num_R[r]]
    _announce(jobs_RJ, num_R, left_J, next_T, r, now)
    return j


@njit(cache=True, nogil=True)
def _settle(jobs_RJ: Integers, num_R: Integers, left_J: Floats, since_R: Floats, r: int, now: float) -> None:
    """What the activities on a resource have done since its last change, in equal parts."""
    if num_R[r]:
        done = (now - since_R[r]) / num_R[r]
        for k in range(num_R[r]):
            left_J[jobs_RJ[r, k]] -= done
    since_R[r] = now


@njit(cache=True, nogil=True)
def _announce(jobs_RJ: Integers, num_R: Integers, left_J: Floats, next_T: Floats, r: int, now: float) -> None:
    """When the first of a resource's activities will end; never before now, whatever was rounded."""
    earliest = np.inf
    for k in range(num_R[r]):
        earliest = min(earliest, now + max(left_J[jobs_RJ[r, k]], 0.0) * num_R[r])
    node = r + len(next_T) // 2
    while node and next_T[node] != earliest:
        next_T[node] = earliest
        node //= 2
        earliest = min(next_T[2 * node], next_T[2 * node + 1])
