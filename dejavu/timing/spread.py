"""What repeated timings come to, as the columns of the cost database."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, quantiles


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, and the number of two or more repeats."""
    tenths = quantiles(seconds, n=10, method="inclusive")  # never outside what was measured
    return {
        "seconds": median(seconds),
        "seconds_low": tenths[0],
        "seconds_high": tenths[-1],
        "repeats": len(seconds),
    }


def mean_spread(seconds: Sequence[float]) -> dict[str, float]:
    """As `spread`, with the mean in place of the median; it is inside the two percentiles' range, or their end."""
    found, mean = spread(seconds), fmean(seconds)
    ends = {"seconds_low": min(found["seconds_low"], mean), "seconds_high": max(found["seconds_high"], mean)}
    return {**found, **ends, "seconds": mean}
