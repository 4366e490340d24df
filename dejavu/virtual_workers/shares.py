"""How many examples of a batch each virtual worker gets, so that the last one to end does so as early as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_UNITS = 64  # equal parts of a batch that are shared out


def num_units(num_examples: int) -> int:
    """Return into how many equal parts a batch is divided to share it out: the most that divide it."""
    return next(units for units in range(min(MOST_UNITS, num_examples), 0, -1) if num_examples % units == 0)


def balanced(seconds_VU: Sequence[Sequence[float]]) -> list[int] | None:
    """Share out all units so that the slowest worker takes the least time; None: there is no way.

    Exact for any times, by a table over workers and units: O(V · U²).

    Args:
        seconds_VU: of each worker, for 1 to U units; inf where it cannot have so many. Each gets one or more.

    Example:
        >>> balanced([[1.0, 2.0, 3.0, 4.0], [3.0, 6.0, 9.0, 12.0]])
        [3, 1]
    """
    times = np.asarray(seconds_VU, dtype=np.float64)
    num_workers, total = times.shape
    least: NDArray[np.float64] = np.full(total + 1, np.inf)  # of the workers so far, for so many units in all
    least[0] = 0.0
    taken = np.zeros((num_workers, total + 1), dtype=np.int64)
    for v in range(num_workers):
        before, least = least, np.full(total + 1, np.inf)
        for units in range(1, total + 1):
            slowest = np.maximum(times[v, :units], before[units - 1 :: -1])
            taken[v, units] = 1 + int(slowest.argmin())
            least[units] = slowest.min()
    if not np.isfinite(least[total]):
        return None
    found, left = list[int](), total
    for v in reversed(range(num_workers)):
        found.append(int(taken[v, left]))
        left -= found[-1]
    return found[::-1]
