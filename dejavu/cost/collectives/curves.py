"""The curve of one collective over message sizes: measured, interpolated between measurements, or predicted.

A group whose curve was measured is interpolated, monotonically; any other is priced by the α–β model, which its
measured neighbours correct; without measurements the shipped coefficients and the links do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejavu.cost.collectives.alpha_beta import Coefficients, GroupLayout, Links, fit, shipped
from dejavu.cost.collectives.interpolation import CurvePoints, CurveProcess
from dejavu.cost.collectives.points import Floats, Integers, Points
from dejavu.cost.estimates import INTERPOLATED, MEASURED, CostError, Estimate
from dejavu.profiles.collective import Collective

NO_COMMUNICATION, ALPHA_BETA, CORRECTED = "no communication", "alpha-beta", "alpha-beta, corrected"

_INTERVAL = 0.90
_GAUSSIAN_90 = 1.645  # standard deviations on either side that hold 90 % of a Gaussian
# The shipped coefficients on hardware that they were not fitted on: nine of ten all_reduces inside an A100 node (vidur,
# 2026-11-21) were within this log ratio, the median within 0.37; small messages are the worst.
_OTHER_HARDWARE_LOG_ERROR = 1.11
_LEAST_POINTS_TO_CALIBRATE = 20
_MOST_POINTS = 3000  # conditioning takes time as their cube; more are thinned evenly
_GRID_POINTS = 8  # between two measured sizes, where the running maximum is taken


@dataclass(frozen=True, eq=False)
class CollectiveModel:
    """One collective on one kind of device with one kind of links.

    Attributes:
        points: what was measured; may be empty.
        size_factor: how many standard deviations hold 90 % of the points when their size is left out.
    """

    name: str
    links: Links
    points: Points
    coefficients: Coefficients
    process: CurveProcess | None = None
    size_factor: float = _GAUSSIAN_90

    @classmethod
    def of(cls, name: str, points: Points, links: Links) -> CollectiveModel:
        """Fit the model to the points; without any, use the shipped coefficients."""
        prior = shipped()[name]
        if not len(points):
            return cls(name, links, points, prior)
        if len(points) > _MOST_POINTS:
            points = points.take(np.linspace(0, len(points) - 1, _MOST_POINTS).astype(np.int64))
        coefficients = fit(name, points.layouts, points.sizes_bytes, points.seconds, links, prior)
        base = coefficients.seconds(name, points.layouts, points.sizes_bytes, links)
        groups, dtypes = _numbers(points.subjects), _numbers(points.dtypes)
        curve_points = CurvePoints.of(name, points.layouts, points.sizes_bytes, groups, dtypes)
        process = CurveProcess(curve_points, np.log(points.seconds / base))
        return cls(
            name,
            links,
            points,
            coefficients,
            process,
            _factor(process, _numbers(list(zip(points.subjects, points.sizes_bytes, strict=True)))),
        )

    def predict(
        self, layouts: Sequence[GroupLayout], subjects: Sequence[str], dtypes: Sequence[str], sizes_bytes: Floats
    ) -> tuple[Floats, Floats]:
        """Return log seconds and their standard deviation, point by point, as if none of them were measured."""
        base = np.log(self.coefficients.seconds(self.name, layouts, sizes_bytes, self.links))
        if self.process is None:
            return base, np.full(len(base), _unmeasured_log_error(self.coefficients) / _GAUSSIAN_90)
        asked = CurvePoints.of(
            self.name,
            layouts,
            sizes_bytes,
            _numbers(subjects, known=self.points.subjects),
            _numbers(dtypes, known=self.points.dtypes),
        )
        mean, deviation = self.process.predict(asked)
        return base + mean, deviation

    def estimate(self, collective: Collective, size_bytes: float, dtype: str) -> Estimate:
        """Estimate one call; 0 for one rank."""
        check_size(size_bytes)
        if collective.num_ranks == 1:
            return Estimate(0.0, 0.0, 0.0, NO_COMMUNICATION)
        layout, subject = GroupLayout.of(collective), collective.subject
        sizes, knots, spread = self._curve(subject, dtype)
        if len(sizes) and sizes[0] <= size_bytes <= sizes[-1]:
            return self._between(layout, subject, dtype, size_bytes, sizes, knots, spread)
        mean, deviation = self.predict([layout], [subject], [dtype], np.array([float(size_bytes)]))
        log_seconds = float(mean[0])
        if len(sizes):  # more bytes take no less time than fewer that were measured
            log_seconds = min(log_seconds, knots[0]) if size_bytes < sizes[0] else max(log_seconds, knots[-1])
        if self.process is None:
            return _estimate(log_seconds, float(deviation[0]) * _GAUSSIAN_90, ALPHA_BETA)
        return _estimate(log_seconds, float(deviation[0]) * self.coefficients.deviations, CORRECTED)

    def _curve(self, subject: str, dtype: str) -> tuple[Floats, Floats, float]:
        """Return the measured sizes of a group, and their log seconds made nondecreasing."""
        if not len(self.points):
            return np.array([]), np.array([]), 0.0
        from sklearn.isotonic import IsotonicRegression  # half a second to import; without measurements not needed

        own = [row for row, found in enumerate(self.points.subjects) if found == subject]
        same = [row for row in own if self.points.dtypes[row] == dtype]
        rows = same or own  # another dtype's bytes take as long
        if same == [] and own:
            rows = [row for row in own if self.points.dtypes[row] == self.points.dtypes[own[0]]]
        sizes = self.points.sizes_bytes[rows]
        order = np.argsort(sizes)
        sizes, logs = sizes[order], np.log(self.points.seconds[rows])[order]
        if not len(sizes):
            return sizes, logs, 0.0
        knots = IsotonicRegression().fit(np.log(sizes), logs).predict(np.log(sizes))
        return sizes, knots, float(np.abs(knots - logs).mean())

    def _between(
        self,
        layout: GroupLayout,
        subject: str,
        dtype: str,
        size_bytes: float,
        sizes: Floats,
        knots: Floats,
        spread: float,
    ) -> Estimate:
        right = int(np.searchsorted(sizes, size_bytes))
        if sizes[right] == size_bytes:
            return _estimate(float(knots[right]), max(spread, _repeat_noise(layout)) * _GAUSSIAN_90, MEASURED)
        # The same grid for every size of an interval, so that the running maximum never falls from one to the next.
        grid = np.geomspace(sizes[right - 1], sizes[right], _GRID_POINTS + 2)[1:-1]
        asked = np.append(grid[grid < size_bytes], size_bytes)
        count = len(asked)
        mean, deviation = self.predict([layout] * count, [subject] * count, [dtype] * count, asked)
        log_seconds = float(np.clip(mean.max(), knots[right - 1], knots[right]))
        return _estimate(log_seconds, float(deviation[-1]) * self.size_factor, INTERPOLATED)


def check_size(size_bytes: float) -> None:
    """Raise CostError where a message cannot have this size."""
    if not (math.isfinite(size_bytes) and size_bytes >= 0):
        raise CostError(f"size of a collective is {size_bytes} bytes; wanted a finite number ≥ 0")


def _numbers(values: Sequence[Any], known: Sequence[Any] | None = None) -> Integers:
    """Number the values: equal ones alike, those of `known` as there, others with new numbers."""
    numbers: dict[Any, int] = {}
    for value in known or ():
        numbers.setdefault(value, len(numbers))
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _factor(process: CurveProcess, blocks_P: Integers) -> float:
    """Return how many standard deviations hold 90 % of the points when their blocks are left out."""
    if len(process.points) < _LEAST_POINTS_TO_CALIBRATE or len(np.unique(blocks_P)) < 2:
        return _GAUSSIAN_90
    mean, deviation = process.leave_out(blocks_P)
    return float(np.quantile(np.abs(process.residuals_P - mean) / deviation, _INTERVAL))


def _repeat_noise(layout: GroupLayout) -> float:
    asked = CurvePoints.of("all_gather", [layout], np.array([1.0]), np.array([0]), np.array([0]))
    return float(np.sqrt(asked.noise_variance[0]))


def _unmeasured_log_error(coefficients: Coefficients) -> float:
    return max(coefficients.log_error, _OTHER_HARDWARE_LOG_ERROR)


def _estimate(log_seconds: float, half_width: float, source: str) -> Estimate:
    return Estimate(
        math.exp(log_seconds), math.exp(log_seconds - half_width), math.exp(log_seconds + half_width), source
    )
