"""Shrinking a difference between prediction and measurement, given how much such times vary by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

NORMAL_90 = 1.645  # standard deviations on either side that hold 90 % of a normal distribution
LEAST_DEVIATION = 0.02  # of a logarithm: times of equal trainings differ by about 2 % on a quiet machine (docs/log.md)


def believed(log_ratio: float, deviation: float) -> float:
    """Return the part of a measured log ratio that is believed, where chance alone has this standard deviation.

    Zero within the 90 % range of chance, so that memory changes no prediction that was right; nearly all of it far
    beyond, and continuous between. The nonnegative garrote: between the soft threshold, which always shrinks, and the
    hard one, which jumps ([Breiman, Technometrics 1995](https://doi.org/10.2307/1269730),
    [Gao, JCGS 1998](https://doi.org/10.1080/10618600.1998.10474789)).
    """
    reach = NORMAL_90 * deviation
    return 0.0 if abs(log_ratio) <= reach else log_ratio * (1 - (reach / log_ratio) ** 2)


def deviation_of(seconds: float, low: float | None, high: float | None) -> float:
    """Return the standard deviation of the logarithm, from a 90 % interval; at least `LEAST_DEVIATION`."""
    if low is None or high is None or low <= 0 or seconds <= 0:
        return LEAST_DEVIATION
    return max(LEAST_DEVIATION, math.log(high / low) / (2 * NORMAL_90))


def pooled_deviation(groups: Sequence[Sequence[float]], expected: float) -> float:
    """Return the standard deviation of repeated values around their group's mean; `expected` counts as one more.

    Without repeats it is `expected`; the more repeats there are, the less `expected` weighs.
    """
    squares = sum((value - fmean(group)) ** 2 for group in groups for value in group)
    return math.sqrt((expected**2 + squares) / (1 + sum(len(group) - 1 for group in groups)))
