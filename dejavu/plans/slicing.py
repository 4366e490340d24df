"""TeraPipe: a causal decoder's sequence goes through the stages in slices (Li et al., ICML 2021).

A position depends on earlier ones only, so a stage can begin with the next slice while the one before is in the next
stage. A later slice attends to more, so the best slices are not equal.

Letters: L = units of a sequence (a unit is the granularity, so many tokens), K = stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.errors import InputError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Slicing:
    """A sequence in slices.

    Attributes:
        lengths: of the slices in order, in units.
        seconds: one step: Σ t + (K − 1) · max t (the paper's equation 5), of all sequences one after the other.
        slice_seconds: each slice through one stage.
    """

    lengths: tuple[int, ...]
    seconds: float
    slice_seconds: tuple[float, ...]


def best_slices(seconds_LL: Floats, num_stages: int, num_sequences: int = 1) -> Slicing:
    """Return the slices of least step time, by the paper's dynamic program (algorithm 1, without its rounding).

    For each bound on the slowest slice, in rising order, the least sum of slices that keep it; bounds are the entries
    of the table, so the answer is exact. It ends where no larger bound can be better.

    Args:
        seconds_LL: [j − 1, i]: a slice of j units after a context of i, through one stage, forward and backward;
            entries with i + j > L are not looked at.
        num_stages: K, all alike.
        num_sequences: that follow each other through the stages.

    Raises:
        InputError: the table is not square, or has a time that is negative or not finite.
    """
    table = _checked(seconds_LL, num_stages, num_sequences)
    L = len(table)
    places = [(j, i) for j in range(1, L + 1) for i in range(L - j + 1)]
    bounds = np.unique([table[j - 1, i] for j, i in places])
    best = _least_sum(table, np.inf)
    assert best is not None
    least_sum = sum(best.slice_seconds)
    best = _priced(table, best.lengths, num_stages, num_sequences)
    for bound in bounds:
        # No slicing with this slowest slice is below the least sum of all with this fill.
        if num_sequences * least_sum + (num_stages - 1) * bound >= best.seconds:
            break
        found = _least_sum(table, bound)
        if found is not None:
            best = min(best, _priced(table, found.lengths, num_stages, num_sequences), key=lambda one: one.seconds)
    return best


def best_uniform_slices(seconds_LL: Floats, num_stages: int, num_sequences: int = 1) -> Slicing:
    """Return the best of the slicings into equal parts, the baseline of the paper's figure 7.

    Raises:
        InputError: as `best_slices`.
    """
    table = _checked(seconds_LL, num_stages, num_sequences)
    L = len(table)
    ways = [(L // n,) * n for n in range(1, L + 1) if L % n == 0]
    return min((_priced(table, way, num_stages, num_sequences) for way in ways), key=lambda one: one.seconds)


def _least_sum(table: Floats, bound: float) -> Slicing | None:
    """Return the slices of least sum of which none takes longer; None: there are none."""
    L = len(table)
    least, length = np.full(L + 1, np.inf), np.zeros(L + 1, dtype=np.int64)
    least[0] = 0.0
    for stop in range(1, L + 1):
        context = np.arange(stop)
        seconds = table[stop - context - 1, context]
        total = np.where(seconds <= bound, least[:stop] + seconds, np.inf)
        start = int(total.argmin())
        least[stop], length[stop] = total[start], stop - start
    if np.isinf(least[L]):
        return None
    lengths, stop = [], L
    while stop:
        lengths.append(int(length[stop]))
        stop -= lengths[-1]
    return _priced(table, tuple(reversed(lengths)), 1, 1)


def _priced(table: Floats, lengths: tuple[int, ...], num_stages: int, num_sequences: int) -> Slicing:
    starts = np.cumsum([0, *lengths[:-1]])
    each = tuple(float(table[j - 1, i]) for j, i in zip(lengths, starts, strict=True))
    return Slicing(lengths, num_sequences * sum(each) + (num_stages - 1) * max(each), each)


def _checked(seconds_LL: Floats, num_stages: int, num_sequences: int) -> Floats:
    table = np.asarray(seconds_LL, dtype=np.float64)
    if table.ndim != 2 or not len(table) or table.shape[0] != table.shape[1]:
        raise InputError(f"times of slices of shape {table.shape}; wanted a square table, lengths by contexts")
    within = np.add.outer(np.arange(1, len(table) + 1), np.arange(len(table))) <= len(table)
    if not (np.isfinite(table[within]) & (table[within] >= 0)).all():
        raise InputError("a slice's time is negative or not finite; wanted seconds ≥ 0")
    if num_stages < 1 or num_sequences < 1:
        raise InputError(f"{num_sequences} sequences through {num_stages} stages; wanted one or more of each")
    return table
