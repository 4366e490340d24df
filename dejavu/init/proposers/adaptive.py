"""A coarse grid, then finer samples around the best draw so far: the paper's proposer.

Shape letters: N = points, d = dimensions of the space.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dejavu.init._base import Draw
from dejavu.init.proposers._base import Proposer, Scored, draws_at, hypercube, usable
from dejavu.init.space import Space

LEAST_STAGED = 4  # fewer draws are one batch: there is nothing to refine


@dataclass(frozen=True)
class Adaptive(Proposer):
    """Half of the draws on a grid over scheme × gain × …, then two batches around the best, the box halved each time.

    It trusts one best draw, so it can lock onto a lucky one; `bayesian` weighs all of them.
    """

    def batches(self, count: int) -> tuple[int, ...]:
        if count < LEAST_STAGED:
            return (count,)
        coarse = count // 2
        fine = math.ceil((count - coarse) / 2)
        return (coarse, fine, count - coarse - fine)

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        random = np.random.default_rng((seed, len(known)))
        if not known:
            return [Draw(seed=seed), *draws_at(space, _grid(space, max(count - 1, 0), random), seed=seed, first=1)][
                :count
            ]
        points_Nd = hypercube(count, space.num_dimensions, random)
        finite = [one for one in usable(space, known) if math.isfinite(one.score)]
        if finite:
            # By `batches`, a second batch has at most twice its own size before it, a third more than twice.
            side = 0.5 if len(known) <= 2 * count else 0.25
            best_d = space.point(min(finite, key=lambda one: one.score).draw)
            points_Nd[:, 0] = best_d[0]  # neighbouring schemes are unrelated
            least_d = np.clip(best_d[1:] - side / 2, 0.0, 1.0 - side)
            points_Nd[:, 1:] = least_d + side * points_Nd[:, 1:]
        return draws_at(space, points_Nd, seed=seed, first=len(known))


def _grid(space: Space, num_points: int, random: np.random.Generator) -> list[np.ndarray]:
    """Return N points of the coarsest grid that has so many, in random order: all schemes, and levels of the factors.

    The first factors get their levels first; those without levels are left as published.
    """
    num_schemes, num_levels = len(space.scaled_schemes), [1] * len(space.dimensions)
    for k in itertools.cycle(range(len(num_levels))):
        if num_schemes * math.prod(num_levels) >= num_points:
            break
        num_levels[k] = 2 * num_levels[k] + 1  # 1, 3, 7: the middle, which is near the published scale, stays a level
    plain_d = space.point(Draw(space.scaled_schemes[0]))
    axes = [_middles(num_schemes)]
    axes += [_middles(count) if count > 1 else plain_d[k : k + 1] for k, count in enumerate(num_levels, start=1)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    order = random.permutation(len(grid))
    return [grid[i] for i in itertools.islice(itertools.cycle(order), num_points)]


def _middles(count: int) -> np.ndarray:
    """Return the middles of so many equal parts of [0, 1)."""
    return (np.arange(count) + 0.5) / count
