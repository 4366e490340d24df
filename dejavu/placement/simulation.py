"""A placement, and its one price: a simulation of every operation and every message.

What is simulated: a device runs one operation at a time, in the placement's order, and never a later one first. A
tensor moves once to each device that reads it. A message takes the link's latency and its bytes over the bandwidth, and
holds the link in that direction for as long; it may travel while both devices compute. `shared.timeline` has the order
of messages.

What is not: links that share a network card, memory that changes during the step, operations that run on two devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import format_bytes
from dejavu.placement.problem import PlacementProblem
from dejavu.placement.shared.timeline import empty_state, run_in_order

_ROUNDING = 1e-9  # of sums of bytes in other orders


@dataclass(frozen=True)
class Placement:
    """Where and in which order operations run.

    Attributes:
        device_N: the number of each operation's device.
        order_N: all operations, each after those that it reads from; a device runs its own in this order.
    """

    device_N: tuple[int, ...]
    order_N: tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """A tensor on its way from one device to another."""

    tensor: int
    source: int
    destination: int
    arrival_seconds: float


@dataclass(frozen=True)
class Timeline:
    """When everything happens.

    Attributes:
        seconds: until the last operation has ended.
        start_N, finish_N: of each operation, in seconds.
    """

    seconds: float
    start_N: tuple[float, ...]
    finish_N: tuple[float, ...]
    messages: tuple[Message, ...]


def simulate(problem: PlacementProblem, placement: Placement) -> Timeline:
    """Price a placement.

    Raises:
        InputError: it is no placement of this problem: `check`.
    """
    check(problem, placement)
    arrays, state = problem.arrays, empty_state(problem.arrays)
    seconds = run_in_order(arrays, state, device_of_groups(problem, placement), np.array(placement.order_N), np.inf)
    sent = np.argwhere(np.isfinite(state.arrival_TD))
    messages = [
        Message(int(t), source, int(d), float(state.arrival_TD[t, d]))
        for t, d in sent
        if (source := placement.device_N[arrays.producer_T[t]]) != d
    ]
    return Timeline(float(seconds), tuple(state.start_N.tolist()), tuple(state.finish_N.tolist()), tuple(messages))


def device_of_groups(problem: PlacementProblem, placement: Placement) -> np.ndarray:
    """Return the device of each group."""
    device_G = np.zeros(problem.num_groups, dtype=np.int64)
    device_G[problem.group_N] = placement.device_N
    return device_G


def check(problem: PlacementProblem, placement: Placement) -> None:
    """Check that devices exist, run and hold what is on them, that groups stay together, and that the order is one.

    Raises:
        InputError: one of these is not so.
    """
    names, devices, arrays = [op.name for op in problem.operations], problem.devices.names, problem.arrays
    N, D = len(names), len(devices)
    if sorted(placement.order_N) != list(range(N)) or len(placement.device_N) != N:
        raise InputError(f"placement: found no order and device of each operation; wanted all {N}, each once")
    if unknown := [d for d in placement.device_N if not 0 <= d < D]:
        raise InputError(f"placement: found device {unknown[0]}; wanted 0 to {D - 1}")
    at = np.empty(N, dtype=np.int64)
    at[list(placement.order_N)] = np.arange(N)
    for t, tensor in enumerate(problem.tensors):
        for n in arrays.reader_R[arrays.first_reader_T1[t] : arrays.first_reader_T1[t + 1]]:
            if at[n] <= at[arrays.producer_T[t]]:
                raise InputError(
                    f"placement: found {names[n]!r} before {tensor.producer!r}; wanted it after what it reads"
                )
    device_G = device_of_groups(problem, placement)
    if (parted := np.flatnonzero(device_G[problem.group_N] != placement.device_N)).size:
        raise InputError(f"placement: found the group of {names[parted[0]]!r} on two devices; wanted it on one")
    if stuck := [n for n in range(N) if not np.isfinite(arrays.seconds_ND[n, placement.device_N[n]])]:
        raise InputError(f"placement: found {names[stuck[0]]!r} on a device where it cannot run; wanted another")
    held_D = np.bincount(device_G, weights=arrays.memory_G, minlength=D)
    for d in np.flatnonzero(held_D > arrays.memory_D * (1 + _ROUNDING)):
        room = format_bytes(arrays.memory_D[d])
        raise InputError(f"placement: found {format_bytes(held_D[d])} on {devices[d]}; wanted {room} or less")
