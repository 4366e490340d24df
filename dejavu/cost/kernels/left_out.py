"""How far off predicted kernels were on devices that were left out, and the ranges that follow for the next device.

Shape suffixes: K = kernels, D = devices, B = bins of size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Floats = NDArray[np.float64]

LEAST_ROWS = 50  # of one model, to learn from
SIZE_BIN_EDGES = (-2.0, 0.0, 1.0, 2.0, 4.0)  # of the feature `size`: ranges are wider for small kernels
COVERAGE = 0.90


@dataclass(frozen=True, eq=False)
class Errors:
    """log(measured / predicted) of one device's kernels, with their sizes; a device counts as one, however many."""

    size_K: Floats
    log_K: Floats
    weight_K: Floats

    @property
    def without_mean(self) -> Errors:
        return replace(self, log_K=self.log_K - self.log_K.mean())


def limits(found: Sequence[Errors], scale: float = 1.0) -> tuple[Floats, Floats]:
    """Return the 90 % limits of all these errors together, by bins of size."""
    size, log, weight = (
        np.concatenate([getattr(errors, field) for errors in found]) for field in ("size_K", "log_K", "weight_K")
    )
    return _quantiles(size, scale * log, weight)


def _quantiles(size_K: Floats, residual_K: Floats, weight_K: Floats) -> tuple[Floats, Floats]:
    """Return quantiles by bins of size; bins with too few rows use those of all."""
    edges = ((1.0 - COVERAGE) / 2.0, (1.0 + COVERAGE) / 2.0)
    bin_K = np.digitize(size_K, SIZE_BIN_EDGES)
    limits = np.tile([[_quantile(residual_K, weight_K, edge)] for edge in edges], len(SIZE_BIN_EDGES) + 1)
    for index in range(limits.shape[1]):
        inside = bin_K == index
        if inside.sum() >= LEAST_ROWS:
            limits[:, index] = [_quantile(residual_K[inside], weight_K[inside], edge) for edge in edges]
    return np.minimum(limits[0], 0.0), np.maximum(limits[1], 0.0)


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][min(np.searchsorted(total, share * total[-1]), len(values) - 1)])


def next_draw(errors_D: Sequence[float]) -> float:
    """Return half of the 90 % interval of a further device's error: each is a draw around zero, so it is Student's."""
    squares_D = np.square(np.array(errors_D))
    return float(stdtrit(len(squares_D), (1.0 + COVERAGE) / 2.0) * np.sqrt(squares_D.mean()))
