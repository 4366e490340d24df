"""The interface of proposers: they choose as many draws as are wanted, in one batch or several.

Shape letters: N = points, d = dimensions of the space.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dejavu.init._base import Draw
from dejavu.init.space import Space


class Scored(NamedTuple):
    """A draw that was tried, and its score: lower is better, infinite where it failed."""

    draw: Draw
    score: float


class Probe(NamedTuple):
    """A draw's first batch before any step: the mean loss, and the norm of all gradients together."""

    draw: Draw
    loss: float
    gradient_norm: float


class Proposer(ABC):
    """Proposes N distinct draws for a seed, the same for the same seed.

    Each has random numbers of its own: the k-th of all batches has `seed + k`. Of all proposers but the two plain
    samples (`random`, `latin_hypercube`), the first draw is the framework's default, so that a gain over it is known.
    """

    def batches(self, count: int) -> tuple[int, ...]:
        """Return how many are proposed at a time; each later batch knows the scores of all earlier ones."""
        return (count,)

    def num_probed(self, count: int) -> int:
        """Return how many to propose and probe, of which `choose` keeps `count`; 0: nothing is probed."""
        return 0

    @abstractmethod
    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        """Propose the next `count` draws.

        Args:
            known: all draws of the earlier batches.
        """

    def choose(self, probes: Sequence[Probe], count: int) -> list[Draw]:
        """Choose the draws to try; called only where `num_probed` is not 0."""
        return [probe.draw for probe in probes[:count]]


def hypercube(num_points: int, num_dimensions: int, random: np.random.Generator) -> np.ndarray:
    """Sample a scrambled Latin hypercube (N, d): one point in each of a dimension's N slices (McKay et al., 1979)."""
    if not num_points:
        return np.empty((0, num_dimensions))
    from scipy.stats import qmc  # half a second, which ranks need not wait for

    points_Nd: np.ndarray = qmc.LatinHypercube(d=num_dimensions, scramble=True, rng=random).random(num_points)
    return points_Nd


def draws_at(space: Space, points_Nd: Iterable[np.ndarray], *, seed: int, first: int = 0) -> list[Draw]:
    """Return the draws at these points, of which the first is the search's draw number `first`."""
    return [space.draw(point_d, seed + k) for k, point_d in enumerate(points_Nd, start=first)]


def usable(space: Space, known: Iterable[Scored]) -> list[Scored]:
    """Keep those in the space; scores of a scheme that is only tried as published say nothing about other points."""
    return [one for one in known if one.draw.scheme in space.scaled_schemes]
