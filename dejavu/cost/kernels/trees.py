"""Boosted trees and curves as plain arrays, so that a predictor ships without a pickle and without scikit-learn.

Shape suffixes: K = kernels, F = features, T = trees, N = nodes of the largest tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingRegressor

Floats = NDArray[np.float64]
CHUNK_KERNELS = 1024  # kernels at a time: with 300 trees some arrays of two megabytes


@dataclass(frozen=True, eq=False)
class Trees:
    """A sum of trees.

    Attributes:
        feature_TN, threshold_TN: go left where the feature is no greater.
        left_TN, right_TN: a leaf points at itself.
        value_TN: at the leaves.
    """

    base: float
    depth: int
    feature_TN: NDArray[np.int16]
    threshold_TN: NDArray[np.float32]
    left_TN: NDArray[np.int16]
    right_TN: NDArray[np.int16]
    value_TN: NDArray[np.float32]

    @classmethod
    def of(cls, model: HistGradientBoostingRegressor) -> Trees:
        trees = [stage[0].nodes for stage in model._predictors]
        shape = (len(trees), max(len(nodes) for nodes in trees))
        feature, left, right = (np.zeros(shape, dtype=np.int16) for _ in range(3))
        threshold, value = (np.zeros(shape, dtype=np.float32) for _ in range(2))
        left[:] = right[:] = np.arange(shape[1])
        for tree, nodes in enumerate(trees):
            inner = np.flatnonzero(nodes["is_leaf"] == 0)
            feature[tree, inner] = nodes["feature_idx"][inner]
            threshold[tree, inner] = nodes["num_threshold"][inner]
            left[tree, inner] = nodes["left"][inner]
            right[tree, inner] = nodes["right"][inner]
            value[tree, : len(nodes)] = nodes["value"]
        depth = max(int(nodes["depth"].max()) for nodes in trees)
        return cls(float(np.ravel(model._baseline_prediction)[0]), depth, feature, threshold, left, right, value)

    def averaged(self, other: Trees) -> Trees:
        """Return the mean of two sums of trees: the trees of both, each with half its value."""
        nodes = max(self.feature_TN.shape[1], other.feature_TN.shape[1])
        ours, theirs = self._wider(nodes), other._wider(nodes)
        joined = {name: np.concatenate([ours[name], theirs[name]]) for name in ours}
        joined["value_TN"] = joined["value_TN"] / 2
        return Trees((self.base + other.base) / 2, max(self.depth, other.depth), **joined)

    def _wider(self, num_nodes: int) -> dict[str, NDArray[Any]]:
        """Return the tables with room for so many nodes; no walk comes to those that are added."""
        added = ((0, 0), (0, num_nodes - self.feature_TN.shape[1]))
        return {name: np.pad(table, added) for name, table in self.arrays().items() if table.ndim == 2}

    def predict(self, features_KF: Floats) -> Floats:
        chunks = [
            self._chunk(features_KF[start : start + CHUNK_KERNELS].astype(np.float32))
            for start in range(0, len(features_KF), CHUNK_KERNELS)
        ]
        return np.concatenate(chunks) if chunks else np.zeros(0)

    def _chunk(self, features_KF: NDArray[np.float32]) -> Floats:
        """Walk all trees one level at a time: nodes of tree t are numbered from t × N."""
        kernels, nodes = np.arange(len(features_KF))[:, None], self.feature_TN.shape[1]
        root_T = np.arange(len(self.feature_TN)) * nodes
        feature, threshold, value = self.feature_TN.ravel(), self.threshold_TN.ravel(), self.value_TN.ravel()
        children = np.stack([(side + root_T[:, None]).ravel() for side in (self.left_TN, self.right_TN)])
        node_KT = np.tile(root_T, (len(features_KF), 1))
        for _ in range(self.depth):
            right_KT = features_KF[kernels, feature[node_KT]] > threshold[node_KT]
            node_KT = children[right_KT.astype(np.int8), node_KT]
        summed_K: Floats = value[node_KT].sum(axis=1, dtype=np.float64)
        return self.base + summed_K

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Trees:
        tables = {name: array for name, array in arrays.items() if name not in ("base", "depth")}
        return cls(base=float(arrays["base"]), depth=int(arrays["depth"]), **tables)


@dataclass(frozen=True, eq=False)
class Curve:
    """An increasing function of the first feature, both logarithms: straight between knots, level below them, and
    with a slope of 1 above: twice the work takes twice the time."""

    knot: Floats
    value: Floats

    @classmethod
    def of(cls, feature_K: Floats, target_K: Floats, weight_K: Floats, num_knots: int = 24) -> Curve:
        """Fit through the weighted medians of equal shares of the points, made nondecreasing."""
        order = np.argsort(feature_K, kind="stable")
        parts = [part for part in np.array_split(order, num_knots) if len(part)]
        knot = np.array([np.median(feature_K[part]) for part in parts])
        value = np.array([_weighted_median(target_K[part], weight_K[part]) for part in parts])
        distinct, first = np.unique(knot, return_index=True)
        return cls(distinct, np.maximum.accumulate(value[first]))

    def averaged(self, other: Curve) -> Curve:
        """Return the mean of two curves: straight between the knots of both."""
        knot = np.union1d(self.knot, other.knot)
        return Curve(knot, (self.predict(knot[:, None]) + other.predict(knot[:, None])) / 2)

    def predict(self, features_KF: Floats) -> Floats:
        feature_K = features_KF[:, 0]
        above_K: Floats = np.maximum(feature_K - self.knot[-1], 0.0)
        return np.interp(feature_K, self.knot, self.value) + above_K

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"knot": self.knot, "value": self.value}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Curve:
        return cls(**arrays)


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])
