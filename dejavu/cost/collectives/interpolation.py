"""Interpolating measured curves: a Gaussian process over an α–β model's residuals, in log seconds over log bytes.

Curves of groups that are laid out alike (ranks per node, groups sharing a card, nodes) bend alike, since the library
switches protocols at the same message sizes; so a size that was not measured, and a group that was not, learn from
their neighbours. Noise is modelled as noise, so predictions do not follow it.

Shape suffixes: P = points measured, Q = points asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from dejavu.cost.collectives.alpha_beta import GroupLayout

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Amplitudes are standard deviations of log seconds; lengths are in octaves of chunk bytes, or of counts. Those of one
# curve and the noise lean on a fit by marginal likelihood to all of Alpa's V100 profile (2026-11-21), rounded by hand;
# those across layouts are guesses made before any fit, because two meshes cannot teach them. Ten other settings tried
# moved the median error on meshes left out by up to 3 points, and on sizes left out by up to 0.4.
_BROAD, _BROAD_OCTAVES, _BROAD_RANKS, _BROAD_SHARING, _BROAD_NODES = 0.25, 6.0, 2.0, 3.0, 3.0
_BEND, _BEND_OCTAVES, _BEND_LAYOUT, _BEND_NODES = 0.10, 2.5, 1.0, 2.0
_OWN, _OWN_OCTAVES = 0.07, 6.0
_OWN_BEND, _OWN_BEND_OCTAVES = 0.015, 1.0
_OWN_DTYPE, _OWN_DTYPE_OCTAVES = 0.035, 2.2
_CROSSING_FACTOR = 1.3  # networks are less regular than links inside a node
_NOISE, _CROSSING_NOISE = 0.018, 0.026


@dataclass(frozen=True, eq=False)
class CurvePoints:
    """Points of curves of one collective.

    Attributes:
        coordinates: P × 4: log2 of chunk bytes, ranks per node, groups sharing a card (½ for none), nodes.
        group_P, dtype_P: which curve, as numbers.
    """

    coordinates: Floats
    group_P: Integers
    dtype_P: Integers

    @classmethod
    def of(
        cls, name: str, layouts: Sequence[GroupLayout], sizes_bytes: Floats, groups: Integers, dtypes: Integers
    ) -> CurvePoints:
        ranks = np.array([layout.num_ranks for layout in layouts], dtype=np.float64)
        chunks = 2.0 if name == "all_to_all" else 1.0  # rank to rank goes S / n², around a ring S / n
        columns = [
            np.log2(np.maximum(sizes_bytes, 1.0)) - chunks * np.log2(ranks),
            np.log2([layout.ranks_per_node for layout in layouts]),
            np.log2([max(layout.sharing, 0.5) for layout in layouts]),
            np.log2([float(layout.num_nodes) for layout in layouts]),
        ]
        return cls(np.stack(columns, axis=1), np.asarray(groups), np.asarray(dtypes))

    def __len__(self) -> int:
        return len(self.group_P)

    def take(self, rows: Integers | slice) -> CurvePoints:
        return CurvePoints(self.coordinates[rows], self.group_P[rows], self.dtype_P[rows])

    @property
    def noise_variance(self) -> Floats:
        return np.where(self.coordinates[:, 3] > 0, _CROSSING_NOISE, _NOISE) ** 2


@dataclass(frozen=True, eq=False)
class CurveProcess:
    """The process, conditioned on log residuals of measurements.

    Attributes:
        points, residuals_P: what was measured.
    """

    points: CurvePoints
    residuals_P: Floats
    _factor: tuple[Floats, bool] = field(init=False, repr=False)
    _weights_P: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        matrix = covariance(self.points, self.points) + np.diag(self.points.noise_variance)
        factor = cho_factor(matrix, lower=True)
        object.__setattr__(self, "_factor", factor)
        object.__setattr__(self, "_weights_P", cho_solve(factor, self.residuals_P))

    def predict(self, asked: CurvePoints) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of a measurement there, noise included."""
        cross = covariance(asked, self.points)
        variance = prior_variance(asked) - np.einsum("qp,pq->q", cross, cho_solve(self._factor, cross.T))
        return cross @ self._weights_P, np.sqrt(np.maximum(variance, 0.0) + asked.noise_variance)

    def leave_out(self, blocks_P: Integers) -> tuple[Floats, Floats]:
        """Predict each block of points from all others: mean and standard deviation, exactly, without refitting.

        See Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 5.4.2.
        """
        inverse = cho_solve(self._factor, np.eye(len(self.points)))
        mean, deviation = np.empty(len(self.points)), np.empty(len(self.points))
        for block in np.unique(blocks_P):
            rows = np.flatnonzero(blocks_P == block)
            within = np.linalg.inv(inverse[np.ix_(rows, rows)])
            mean[rows] = self.residuals_P[rows] - within @ self._weights_P[rows]
            deviation[rows] = np.sqrt(np.diag(within))
        return mean, deviation


def covariance(a: CurvePoints, b: CurvePoints) -> Floats:
    """Return the covariance between the residuals at two sets of points, noise not included."""
    size, ranks, sharing, nodes = (
        np.abs(a.coordinates[:, None, axis] - b.coordinates[None, :, axis]) for axis in range(4)
    )
    amplitude = np.sqrt(np.outer(_amplitude(a), _amplitude(b)))
    same_group = a.group_P[:, None] == b.group_P[None, :]
    same_dtype = a.dtype_P[:, None] == b.dtype_P[None, :]
    broad = _smooth(size / _BROAD_OCTAVES) * _smooth(
        np.sqrt((ranks / _BROAD_RANKS) ** 2 + (sharing / _BROAD_SHARING) ** 2 + (nodes / _BROAD_NODES) ** 2)
    )
    bend = _rough(size / _BEND_OCTAVES) * _smooth(
        np.sqrt((ranks**2 + sharing**2) / _BEND_LAYOUT**2 + (nodes / _BEND_NODES) ** 2)
    )
    own = _OWN**2 * _smooth(size / _OWN_OCTAVES) + _OWN_BEND**2 * _rough(size / _OWN_BEND_OCTAVES)
    own_dtype = _OWN_DTYPE**2 * same_dtype * _rough(size / _OWN_DTYPE_OCTAVES)
    bent: Floats = amplitude * (_BEND**2 * bend + same_group * (own + own_dtype))
    return _BROAD**2 * broad + bent


def prior_variance(points: CurvePoints) -> Floats:
    """Return the diagonal of `covariance`."""
    return _BROAD**2 + _amplitude(points) * (_BEND**2 + _OWN**2 + _OWN_BEND**2 + _OWN_DTYPE**2)


def _amplitude(points: CurvePoints) -> Floats:
    return np.where(points.coordinates[:, 3] > 0, _CROSSING_FACTOR**2, 1.0)


def _smooth(distance: Floats) -> Floats:
    """Matérn 5/2."""
    scaled: Floats = np.sqrt(5.0) * distance
    return (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled)


def _rough(distance: Floats) -> Floats:
    """Matérn 3/2: one derivative, as at a switch of protocols."""
    scaled: Floats = np.sqrt(3.0) * distance
    return (1.0 + scaled) * np.exp(-scaled)
