"""Compiled loops of the label program: partial plans from their first stage to the last device, pruned exactly.

A label is a way to run the points from one place on with the devices from one place on. Its state is its number of
stages, its first point, and the first and last device of its first stage: all that the price of what comes upstream
depends on. Of two labels of a state one is dropped if the other has no larger Σ and no larger busiest part.

Letters: P1 = places between points, N = places of device cuts (a, b, c are such places), K = labels of one level,
where a level is a number of stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.operator_cuts.problem import Floats

Ints = NDArray[np.int64]


class Tables(NamedTuple):
    """A problem as arrays; the formula is in `operator_cuts.pricing`."""

    seconds_P1: Floats
    weight_bytes_P1: Floats
    held_bytes_P1: Floats
    crossing_bytes_P1: Floats
    at_N: Ints
    all_reduce_NN: Floats
    transfer_NNN: Floats
    repeats: float
    copies: float
    memory_bytes: float


class Level(NamedTuple):
    """All labels of one number of stages.

    Attributes:
        first_NNP: where the labels of state (a, b, o) begin, a row of `(a · N + b) · P + o`; each in order of Σ.
        parent_K, state_K: the label downstream in the level before, and its state's row.
    """

    first_NNP: Ints
    total_K: Floats
    busiest_K: Floats
    parent_K: Ints
    state_K: Ints


class Found(NamedTuple):
    """Labels of one state before they are compared."""

    total_K: Floats
    busiest_K: Floats
    parent_K: Ints
    state_K: Ints


@njit(cache=True)
def last_stages(tables: Tables, cutoff: float) -> Level:
    """Return the level of plans' last stages."""
    N, P = len(tables.at_N), len(tables.seconds_P1) - 1
    first_NNP, found, count = np.zeros(N * N * P + 1, np.int64), _room(N * P), 0
    for row in range(N * N * P):
        a, b, o = row // P // N, row // P % N, row % P
        # A stage begins at the first device exactly if it begins at the first point.
        if a < b and b == N - 1 and (a == 0) == (o == 0):
            total, busiest = _stage(tables, a, b, o, P, 1.0)
            if total + busiest + _upstream(tables, a, o, total, busiest) < cutoff:
                found.total_K[count], found.busiest_K[count], found.parent_K[count] = total, busiest, -1
                count += 1
        first_NNP[row + 1] = count
    return Level(first_NNP, found.total_K, found.busiest_K, found.parent_K, found.state_K)


@njit(cache=True)
def one_stage_more(tables: Tables, after: Level, in_flight: float, is_last_level: bool, cutoff: float) -> Level:
    """Return the level whose labels have one stage before those of `after`.

    Args:
        in_flight: microbatches that the new stage holds.
        is_last_level: only whole plans are wanted.
        cutoff: what cannot become a plan below it is dropped.
    """
    N, P = len(tables.at_N), len(tables.seconds_P1) - 1
    first_NNP, kept, count = np.zeros(N * N * P + 1, np.int64), _room(1 << 12), 0
    found = _room(1 << 10)
    for row in range(N * N * P):
        a, b, o = row // P // N, row // P % N, row % P
        if a < b and b < N - 1 and (a == 0) == (o == 0) and not (is_last_level and a):
            found, num_found = _extensions(tables, after, (a, b, o), in_flight, cutoff, found)
            kept, count = _keep(found, num_found, kept, count)
        first_NNP[row + 1] = count
    return Level(first_NNP, kept.total_K, kept.busiest_K, kept.parent_K, kept.state_K)


@njit(cache=True)
def _extensions(
    tables: Tables, after: Level, state: tuple[int, int, int], in_flight: float, cutoff: float, found: Found
) -> tuple[Found, int]:
    """Write the labels of one state that may become plans below the cutoff; return them and how many there are."""
    a, b, o = state
    N, P, count = len(tables.at_N), len(tables.seconds_P1) - 1, 0
    crossing_P1, transfer_NNN, repeats = tables.crossing_bytes_P1, tables.transfer_NNN, tables.repeats
    first_NNP = after.first_NNP
    for q in range(o + 1, P):
        seconds, busy = _stage(tables, a, b, o, q, in_flight)
        # More points make the stage longer and larger: none of those that follow fits or is short enough either.
        if seconds + busy + _upstream(tables, a, o, seconds, busy) >= cutoff:
            break
        for c in range(b + 1, N):
            row = (b * N + c) * P + q
            if first_NNP[row] == first_NNP[row + 1]:
                continue
            crossing = crossing_P1[q] * transfer_NNN[a, b, c]
            own, own_busy = seconds + crossing, max(busy, repeats * crossing)
            if count + first_NNP[row + 1] - first_NNP[row] > len(found.total_K):
                found = _longer(found, 2 * (count + first_NNP[row + 1] - first_NNP[row]))
            count = _join(after, row, own, own_busy, _bound(tables, a, o), cutoff, found, count)
    return found, count


@njit(cache=True)
def _join(
    after: Level, row: int, own: float, own_busy: float, upstream: tuple[float, float], cutoff: float,
    found: Found, count: int,
) -> int:  # fmt: skip
    """Write the labels of a state downstream with this stage before them; return how many there are then."""
    for label in range(after.first_NNP[row], after.first_NNP[row + 1]):
        total, busiest = own + after.total_K[label], max(own_busy, after.busiest_K[label])
        # What is upstream adds at least its share of all its devices to Σ, and is at least so busy itself.
        if total + upstream[0] + max(busiest, upstream[1]) < cutoff:
            found.total_K[count], found.busiest_K[count] = total, busiest
            found.parent_K[count], found.state_K[count] = label, row
            count += 1
    return count


@njit(cache=True)
def _keep(found: Found, num_found: int, kept: Found, count: int) -> tuple[Found, int]:
    """Append the labels that no other of the state beats in both numbers, in order of Σ."""
    if num_found == 0:
        return kept, count
    least = np.inf
    for k in np.argsort(found.total_K[:num_found]):
        # In order of Σ a label is beaten by one before it exactly if that is no busier.
        if found.busiest_K[k] < least:
            least = found.busiest_K[k]
            if count == len(kept.total_K):
                kept = _longer(kept, 2 * count)
            kept.total_K[count], kept.busiest_K[count] = found.total_K[k], least
            kept.parent_K[count], kept.state_K[count] = found.parent_K[k], found.state_K[k]
            count += 1
    return kept, count


@njit(cache=True)
def _stage(tables: Tables, a: int, b: int, o: int, q: int, in_flight: float) -> tuple[float, float]:
    """Return a stage's seconds for one microbatch, and how long it is busy besides; infinite: it does not fit."""
    replicas = tables.at_N[b] - tables.at_N[a]
    weights = tables.weight_bytes_P1[q] - tables.weight_bytes_P1[o]
    held = tables.held_bytes_P1[q] - tables.held_bytes_P1[o]
    if tables.copies * weights + in_flight * held / replicas > tables.memory_bytes:
        return np.inf, np.inf
    seconds = (tables.seconds_P1[q] - tables.seconds_P1[o]) / replicas
    return seconds, tables.repeats * seconds + weights * tables.all_reduce_NN[a, b]


@njit(cache=True)
def _bound(tables: Tables, a: int, o: int) -> tuple[float, float]:
    """Return the least Σ of stages upstream of a place, and how busy the busiest is at least.

    However the points are cut, Σ of C_s / r_s and the largest C_s / r_s are at least Σ C_s / Σ r_s.
    """
    if a == 0:
        return 0.0, 0.0
    share = tables.seconds_P1[o] / tables.at_N[a]
    return share, tables.repeats * share


@njit(cache=True)
def _upstream(tables: Tables, a: int, o: int, seconds: float, busy: float) -> float:
    """Return what stages upstream add at least to the sum of a part of a plan and its busiest part."""
    total, busiest = _bound(tables, a, o)
    return total + max(0.0, busiest - busy)


@njit(cache=True)
def _room(size: int) -> Found:
    return Found(np.empty(size), np.empty(size), np.empty(size, np.int64), np.empty(size, np.int64))


@njit(cache=True)
def _longer(found: Found, size: int) -> Found:
    longer, count = _room(size), len(found.total_K)
    longer.total_K[:count], longer.busiest_K[:count] = found.total_K, found.busiest_K
    longer.parent_K[:count], longer.state_K[:count] = found.parent_K, found.state_K
    return longer


@njit(cache=True)
def least_memory(tables: Tables, in_flight_J: Floats) -> float:
    """Return the least that the fullest device of a plan needs, over all plans.

    Args:
        in_flight_J: microbatches that a stage with so many stages downstream holds, for each number that there may be.
    """
    N, P = len(tables.at_N), len(tables.seconds_P1) - 1
    best, after_NP = np.inf, np.full((N, P + 1), np.inf)
    after_NP[N - 1, P] = 0.0
    for in_flight in in_flight_J:
        level_NP = np.full((N, P + 1), np.inf)
        for a in range(N - 1):
            for o in range(P):
                if (a == 0) == (o == 0):
                    level_NP[a, o] = _least_from(tables, after_NP, a, o, in_flight)
        best, after_NP = min(best, level_NP[0, 0]), level_NP
    return best


@njit(cache=True)
def _least_from(tables: Tables, after_NP: Floats, a: int, o: int, in_flight: float) -> float:
    least = np.inf
    for b in range(a + 1, len(tables.at_N)):
        replicas = tables.at_N[b] - tables.at_N[a]
        for q in range(o + 1, len(tables.seconds_P1)):
            weights = tables.weight_bytes_P1[q] - tables.weight_bytes_P1[o]
            held = tables.held_bytes_P1[q] - tables.held_bytes_P1[o]
            needed = tables.copies * weights + in_flight * held / replicas
            least = min(least, max(needed, after_NP[b, q]))
    return least
