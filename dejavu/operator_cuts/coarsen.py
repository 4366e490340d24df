"""From all operators to a given number of points, between which a pipeline may be cut."""

from __future__ import annotations

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.operator_cuts.problem import Floats, OperatorArrays

NUM_POINTS = 128  # Auto-MAP's


def coarsen(arrays: OperatorArrays, num_points: int = NUM_POINTS) -> OperatorArrays:
    """Join neighbours until there are `num_points`; of fewer operators each is a point.

    The compute is divided into as many equal windows, and each point ends in its window where the least crosses (of
    equal ones, nearest to the window's middle). Windows without an end of an operator, because one operator is longer,
    give theirs to the runs with the most compute, which are divided where the least crosses.
    """
    if num_points < 1:
        raise InputError(f"points: found {num_points}; wanted 1 or more")
    return joined(arrays, ends_of_points(arrays, num_points))


def ends_of_points(arrays: OperatorArrays, num_points: int) -> list[int]:
    """Return the operator after each point's last, rising."""
    count, crossing_P = len(arrays), arrays.crossing_bytes_P
    if count <= num_points:
        return list(range(1, count + 1))
    done_P = np.cumsum(arrays.compute_seconds_P)
    if not done_P[-1] > 0:  # nothing to weigh them by
        done_P = np.arange(1.0, count + 1)
    place_P = done_P / done_P[-1] * num_points  # operator p ends so many windows from the beginning
    window_P = np.floor(place_P[:-1] + 0.5).astype(int)  # cut k is looked for between k − ½ and k + ½
    ends = {count}
    for k in range(1, num_points):
        here = np.flatnonzero(window_P == k)
        if len(here):
            ends.add(int(here[np.lexsort((np.abs(place_P[here] - k), crossing_P[here]))[0]]) + 1)
    while len(ends) < num_points:
        ends.add(_cut_in_two(sorted(ends), done_P, crossing_P))
    return sorted(ends)


def _cut_in_two(ends: list[int], done_P: Floats, crossing_P: Floats) -> int:
    """Return a cut of the run with the most compute that has more than one operator, where the least crosses."""
    runs = [(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True) if end - start > 1]
    before_P = np.concatenate(([0.0], done_P))
    start, end = max(runs, key=lambda run: before_P[run[1]] - before_P[run[0]])
    return start + 1 + int(crossing_P[start : end - 1].argmin())


def joined(arrays: OperatorArrays, ends: list[int]) -> OperatorArrays:
    """Join operators into runs that end before the given ones; the last end is the number of operators."""
    starts = [0, *ends[:-1]]
    added = (arrays.compute_seconds_P, arrays.weight_bytes_P, arrays.held_bytes_P)
    compute, weights, held = (np.add.reduceat(array, starts) for array in added)
    names = tuple(arrays.names[start] for start in starts) if arrays.names else ()
    return OperatorArrays(compute, weights, arrays.crossing_bytes_P[np.array(ends) - 1], held, names)
