"""The paper's filter: of many draws, keep the most promising before any step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dejavu.init._base import Draw
from dejavu.init.proposers._base import Probe, Proposer, Scored, draws_at, hypercube
from dejavu.init.space import Space


@dataclass(frozen=True)
class LossAndGradient(Proposer):
    """The default and a Latin hypercube, of which those with a small first loss and a large first gradient are tried.

    A gradient is also large where training is about to diverge, so this gains little and can harm; it is here as an
    ablation.

    Attributes:
        candidates_per_draw: how many are probed for each that is tried.
    """

    candidates_per_draw: int = 4

    def num_probed(self, count: int) -> int:
        return self.candidates_per_draw * count

    def propose(self, space: Space, count: int, *, seed: int, known: Sequence[Scored] = ()) -> list[Draw]:
        points_Nd = hypercube(max(count - 1, 0), space.num_dimensions, np.random.default_rng(seed))
        return [Draw(seed=seed), *draws_at(space, points_Nd, seed=seed, first=1)][:count]

    def choose(self, probes: Sequence[Probe], count: int) -> list[Draw]:
        """Choose by the lowest sum of two ranks: of the loss, ascending, and the gradient norm, descending.

        Ties go to the lower loss. A probe that is not finite is chosen only where too few others are left.
        """
        sound = [probe for probe in probes if math.isfinite(probe.loss) and math.isfinite(probe.gradient_norm)]
        by_loss = sorted(sound, key=lambda probe: probe.loss)
        by_gradient = sorted(sound, key=lambda probe: -probe.gradient_norm)
        rank = {probe.draw: place for place, probe in enumerate(by_loss)}
        for place, probe in enumerate(by_gradient):
            rank[probe.draw] += place
        unsound = [probe for probe in probes if probe.draw not in rank]
        return [probe.draw for probe in (*sorted(by_loss, key=lambda probe: rank[probe.draw]), *unsound)][:count]
