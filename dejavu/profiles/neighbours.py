"""Bounds on one row from the other rows of its series: the same thing at other sizes, or others of its kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def bounds_of_neighbours(
    table: pa.Table, seconds: Floats, columns: Sequence[str], most_ratio: float
) -> tuple[Floats, Floats]:
    """Return the least and the most seconds that each row's neighbours allow; 0 and infinity where there are none.

    A message twice as large takes no less time and, at equal bandwidth, twice the time; rows without a size count as of
    one size. The nearest two on each side are used, so that one outlier among them does not condemn its neighbours.

    Args:
        seconds: of each row; values that are not positive are never neighbours.
        columns: rows that agree in these are one series.
        most_ratio: how much further than that a row may be.
    """
    _, codes = distinct_values(table, columns)
    sizes = np.maximum(pc.fill_null(table["size_bytes"], 1).to_numpy().astype(np.float64), 1.0)
    low, high = np.zeros(len(seconds)), np.full(len(seconds), np.inf)
    order = np.lexsort((sizes, codes))
    for series in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        around = np.arange(len(series)) + np.array([[-2], [-1], [1], [2]])
        inside = (around >= 0) & (around < len(series))
        neighbour = series[np.where(inside, around, 0)]
        ratio, there = sizes[series] / sizes[neighbour], seconds[neighbour]
        usable = inside & np.isfinite(there) & (there > 0)
        upper = np.sort(np.where(usable, there * np.maximum(ratio, 1.0), -np.inf), axis=0)
        lower = np.sort(np.where(usable, there * np.minimum(ratio, 1.0), np.inf), axis=0)
        # The second most lenient neighbour decides where there are three, else the most lenient.
        second = usable.sum(axis=0) >= 3
        bounds = np.where(second, upper[-2], upper[-1]), np.where(second, lower[1], lower[0])
        some = usable.any(axis=0)
        high[series[some]], low[series[some]] = bounds[0][some] * most_ratio, bounds[1][some] / most_ratio
    return low, high


def distinct_values(table: pa.Table, columns: Sequence[str]) -> tuple[list[tuple[str, ...]], NDArray[np.int64]]:
    """Return the distinct tuples of some columns, and the index of each row's."""
    codes = np.zeros(table.num_rows, dtype=np.int64)
    for column in columns:
        encoded = pc.dictionary_encode(pc.fill_null(pc.cast(table[column], "string"), "")).combine_chunks()
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
        _, codes = np.unique(codes, return_inverse=True)  # renumber densely, so that many columns do not overflow
    _, first, dense = np.unique(codes, return_index=True, return_inverse=True)
    rows = table.select(list(columns)).take(first).to_pylist()
    return [tuple(row.values()) for row in rows], dense.ravel()
