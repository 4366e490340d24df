"""Proposers that use no scores: one draw, other seeds, the published schemes, samples of the space, and a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dejavu.init._base import Draw
from dejavu.init.proposers._base import Proposer, Scored, draws_at, hypercube
from dejavu.init.space import Space


@dataclass(frozen=True)
class Single(Proposer):
    """The framework's default, once, however many are wanted: no search at all."""

    def batches(self, count: int) -> tuple[int, ...]:
        return (min(count, 1),)

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        return [Draw(seed=seed)][:count]


@dataclass(frozen=True)
class Seeds(Proposer):
    """The framework's default with other seeds: the baseline that any cleverer proposer has to beat."""

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        return [Draw(seed=seed + k) for k in range(count)]


@dataclass(frozen=True)
class Families(Proposer):
    """Each scheme as it is published, the framework's default first; then all again with other seeds."""

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        schemes = tuple(dict.fromkeys(("default", *space.schemes)))
        return [Draw(schemes[k % len(schemes)], seed=seed + k) for k in range(count)]


@dataclass(frozen=True)
class Random(Proposer):
    """Points of the space, each independent of the others."""

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        return draws_at(space, np.random.default_rng(seed).random((count, space.num_dimensions)), seed=seed)


@dataclass(frozen=True)
class LatinHypercube(Proposer):
    """Points of the space that cover each of its dimensions evenly, scrambled (McKay et al., 1979)."""

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        points_Nd = hypercube(count, space.num_dimensions, np.random.default_rng(seed))
        return draws_at(space, points_Nd, seed=seed)


@dataclass(frozen=True)
class Mixed(Proposer):
    """Published schemes as they are, then a Latin hypercube: never much worse than the best scheme, mostly better.

    Attributes:
        families_share: of the draws, at least one.
    """

    families_share: float = 0.2

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        num_families = min(count, max(1, round(self.families_share * count)))
        points_Nd = hypercube(count - num_families, space.num_dimensions, np.random.default_rng(seed))
        return [
            *Families().propose(space, num_families, seed=seed),
            *draws_at(space, points_Nd, seed=seed, first=num_families),
        ]
