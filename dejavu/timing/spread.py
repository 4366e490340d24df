"""Statistics of repeated timings, as the columns of the cost database."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, quantiles


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile, and the number of repeats, of which there are two or more."""
    tenths = quantiles(seconds, n=10, method="inclusive")  # never outside what was measured
    return {
        "seconds": median(seconds),
        "seconds_low": tenths[0],
        "seconds_high": tenths[-1],
        "repeats": len(seconds),
    }


def mean_spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return `spread` with the mean in place of the median, and the percentiles widened to include it."""
    found, mean = spread(seconds), fmean(seconds)
    ends = {"seconds_low": min(found["seconds_low"], mean), "seconds_high": max(found["seconds_high"], mean)}
    return {**found, **ends, "seconds": mean}
