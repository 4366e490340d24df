"""Bayesian optimization: a Gaussian process over the space, and the draws with the largest expected improvement.

Shape letters: N = draws that were scored, C = candidates, d = dimensions of the space, f = features of a point.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejavu.init._base import Draw
from dejavu.init.proposers._base import Proposer, Scored, draws_at, hypercube, usable
from dejavu.init.space import MOST_DIMENSIONS, Space

NUM_BATCHES = 4  # after the first one; each waits for all trials of the one before it
MOST_FIRST = 2 * MOST_DIMENSIONS  # draws that are not chosen by scores: two for each dimension
MOST_FITTED = 300  # scores, and as many assumed ones: a fit takes time cubic in them
MOST_FITS = 32  # in one batch; a larger one takes several candidates at a time
NUM_CANDIDATES = 1000
NOISE = 0.01  # variance of a score over seeds, as a share of the variance between draws
NEAR = 0.1  # deviation of the candidates around the best draw, as a share of a dimension


@dataclass(frozen=True)
class Bayesian(Proposer):
    """A Latin hypercube, then the largest expected improvement (Jones et al., 1998), a batch at a time.

    Within a batch each chosen draw is assumed to score as the best one did, which keeps the next away from it (the
    constant liar, Ginsbourger et al., 2010).
    """

    def batches(self, count: int) -> tuple[int, ...]:
        first = min(MOST_FIRST, math.ceil(count / 2))
        rest = count - first
        parts = [rest // NUM_BATCHES + (k < rest % NUM_BATCHES) for k in range(NUM_BATCHES)]
        return (first, *(part for part in parts if part))

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        random = np.random.default_rng((seed, len(known)))
        if not known:
            points_Nd = hypercube(max(count - 1, 0), space.num_dimensions, random)
            return [Draw(seed=seed), *draws_at(space, points_Nd, seed=seed, first=1)][:count]
        seen = usable(space, known)
        if not any(math.isfinite(one.score) for one in seen):
            points_Nd = hypercube(count, space.num_dimensions, random)
        else:
            points_Nd = _improving(space, seen, count, random)
        return draws_at(space, points_Nd, seed=seed, first=len(known))


def _improving(space: Space, seen: list[Scored], count: int, random: np.random.Generator) -> np.ndarray:
    """Choose the points that a batch tries."""
    seen = sorted(seen, key=lambda one: one.score if math.isfinite(one.score) else math.inf)
    seen = seen[:: math.ceil(len(seen) / MOST_FITTED)]  # the best, and what is spread evenly below it
    points_Nd = np.array([space.point(one.draw) for one in seen])
    scores_N = _bounded([one.score for one in seen])
    process = _fitted(_features(space, points_Nd), scores_N)
    at_once = math.ceil(count / MOST_FITS)
    chosen_Nd = np.empty((0, space.num_dimensions))
    while len(chosen_Nd) < count:
        candidates_Cd = _candidates(points_Nd[0], max(NUM_CANDIDATES, 4 * at_once), random)
        mean_C, deviation_C = process.predict(_features(space, candidates_Cd), return_std=True)
        order = np.argsort(-_expected_improvement(mean_C, deviation_C, scores_N[0]), kind="stable")
        chosen_Nd = np.concatenate([chosen_Nd, candidates_Cd[order[:at_once]]])[:count]
        lies_Nd = chosen_Nd[-MOST_FITTED:]
        process = _fitted(
            _features(space, np.concatenate([points_Nd, lies_Nd])),
            np.concatenate([scores_N, np.full(len(lies_Nd), scores_N[0])]),
            process.kernel_,
        )
    return chosen_Nd


def _bounded(scores: Sequence[float]) -> np.ndarray:
    """Normalize scores: mean 0, deviation 1, and none further above the median than the best is below it.

    So a diverged loss weighs no more than any other bad one. A failed draw has the worst finite score.
    """
    scores_N = np.array(scores)
    finite_N = np.isfinite(scores_N)
    scores_N = np.where(finite_N, scores_N, scores_N[finite_N].max())
    scores_N = np.minimum(scores_N, 2.0 * np.median(scores_N) - scores_N.min())
    bounded_N: np.ndarray = (scores_N - scores_N.mean()) / (scores_N.std() or 1.0)
    return bounded_N


def _features(space: Space, points_Nd: np.ndarray) -> np.ndarray:
    """Return (N, f): one-hot schemes, any two as far apart as the ends of a factor's range, and the factors."""
    which_N = (points_Nd[:, 0] * len(space.scaled_schemes)).astype(int)
    return np.hstack([np.eye(len(space.scaled_schemes))[which_N] / math.sqrt(2.0), points_Nd[:, 1:]])


def _fitted(features_Nf: np.ndarray, scores_N: np.ndarray, kernel: Any = None) -> Any:
    """Fit the process to these scores; without a kernel also its scale and a length for each feature."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    optimizer = None if kernel is not None else "fmin_l_bfgs_b"
    kernel = kernel or ConstantKernel(1.0, (0.1, 10.0)) * Matern([0.5] * features_Nf.shape[1], (0.1, 5.0), nu=2.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # with few scores a scale at its bound is normal
        return GaussianProcessRegressor(kernel, alpha=NOISE, optimizer=optimizer).fit(features_Nf, scores_N)


def _candidates(best_d: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Sample half of the candidates anywhere, half around the best draw: of its scheme, or its factors under others."""
    anywhere_Cd = random.random((count - count // 2, len(best_d)))
    near_Cd = best_d + NEAR * random.standard_normal((count // 2, len(best_d)))
    near_Cd[::2, 0] = best_d[0]
    near_Cd[1::2, 0] = random.random(len(near_Cd[1::2]))
    return np.concatenate([anywhere_Cd, near_Cd.clip(0.0, math.nextafter(1.0, 0.0))])


def _expected_improvement(mean_C: np.ndarray, deviation_C: np.ndarray, best: float) -> np.ndarray:
    """Return the expected improvement over the best score (Jones et al., 1998, equation 15)."""
    from scipy.stats import norm

    deviation_C = np.maximum(deviation_C, 1e-12)  # of a candidate at a known point, rounding may leave 0
    better_C = (best - mean_C) / deviation_C
    improvement_C: np.ndarray = deviation_C * (better_C * norm.cdf(better_C) + norm.pdf(better_C))
    return improvement_C
