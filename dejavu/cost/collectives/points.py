"""Measured points of collectives, without the rows that are no measurements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejavu.cost.collectives.alpha_beta import GroupLayout
from dejavu.profiles import OUTLIER_RATIO, Measurement
from dejavu.profiles.collective import Collective

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_SAME_RATE = 1e-9  # relative; two times at exactly one bandwidth are one measurement and a multiple of it


@dataclass(frozen=True, eq=False)
class Points:
    """Measured points of one collective, cleaned.

    Attributes:
        layouts, subjects, dtypes, sizes_bytes, seconds: point by point.
        dropped: how many were left out, by reason.
    """

    layouts: tuple[GroupLayout, ...]
    subjects: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes_bytes: Floats
    seconds: Floats
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.subjects)

    def take(self, rows: Integers) -> Points:
        return Points(
            tuple(self.layouts[row] for row in rows),
            tuple(self.subjects[row] for row in rows),
            tuple(self.dtypes[row] for row in rows),
            self.sizes_bytes[rows],
            self.seconds[rows],
            self.dropped,
        )


def screened(collectives: Sequence[Collective], dtypes: Sequence[str], sizes_bytes: Floats, seconds: Floats) -> Points:
    """Keep the rows that are measurements; drop the rest, counted by reason."""
    dropped: Counter[str] = Counter()
    curves: dict[tuple[str, str], dict[float, list[float]]] = {}
    layouts: dict[str, GroupLayout] = {}
    for collective, dtype, size, took in zip(collectives, dtypes, sizes_bytes, seconds, strict=True):
        if not (math.isfinite(took) and took > 0):
            dropped["failed: no finite time above 0"] += 1
        elif not (math.isfinite(size) and size > 0) or collective.num_ranks == 1:
            dropped["nothing to send"] += 1
        else:
            subject = collective.subject
            layouts.setdefault(subject, GroupLayout.of(collective))
            curves.setdefault((subject, dtype), {}).setdefault(float(size), []).append(float(took))
    kept: list[tuple[GroupLayout, str, str, float, float]] = []
    for (subject, dtype), curve in curves.items():
        sizes = np.array(sorted(curve))
        times = np.array([float(np.median(curve[size])) for size in sizes])
        raised, outlier = _raised(sizes, times), _outliers(times)
        dropped["not measured: raised to the smaller size's bandwidth"] += int(raised.sum())
        dropped["outlier among its neighbours"] += int((outlier & ~raised).sum())
        good = ~(raised | outlier)
        kept += [(layouts[subject], subject, dtype, *pair) for pair in zip(sizes[good], times[good], strict=True)]
    columns: list[tuple[Any, ...]] = list(zip(*kept, strict=True)) or [()] * 5
    return Points(
        columns[0],
        columns[1],
        columns[2],
        np.array(columns[3], dtype=np.float64),
        np.array(columns[4], dtype=np.float64),
        {reason: count for reason, count in dropped.items() if count},
    )


def points_of(rows: Sequence[Measurement]) -> Points:
    """Convert rows of the database (kind `collective`, one name) to points; invalid ones are dropped and counted."""
    collectives, good, unreadable = [], [], 0
    for row in rows:
        try:
            collectives.append(Collective.from_json(row.name, row.extra or ""))
        except ValueError:
            unreadable += 1
        else:
            good.append(row)
    points = screened(
        collectives,
        [row.dtype for row in good],
        np.array([float(row.size_bytes or 0) for row in good]),
        np.array([row.seconds for row in good]),
    )
    if unreadable:
        points.dropped["extra that names no collective"] = unreadable
    return points


def _raised(sizes: Floats, times: Floats) -> NDArray[np.bool_]:
    """Find points at exactly the smaller size's bandwidth: Alpa wrote them over slower measurements."""
    raised = np.zeros(len(sizes), dtype=bool)
    rate = sizes / times
    raised[1:] = np.abs(rate[1:] / rate[:-1] - 1.0) < _SAME_RATE
    return raised


def _outliers(times: Floats) -> NDArray[np.bool_]:
    """Find points further than `OUTLIER_RATIO` from the median of the four around them: a unit or clock was wrong."""
    found = np.zeros(len(times), dtype=bool)
    for index in range(len(times) if len(times) >= 3 else 0):
        around = [there for there in range(index - 2, index + 3) if there != index and 0 <= there < len(times)]
        ratio = times[index] / float(np.median(times[around]))
        found[index] = not 1 / OUTLIER_RATIO < ratio < OUTLIER_RATIO
    return found
