"""Which draws are tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from dejavu.init._base import Draw


class Proposer(ABC):
    """N draws for a seed; the first is always the framework's default, so that a gain over it can be stated."""

    @abstractmethod
    def propose(self, count: int, *, seed: int) -> list[Draw]:
        """`count` draws, the same for the same seed."""


@dataclass(frozen=True)
class Seeds(Proposer):
    """The framework's default with other seeds: the ablation that any cleverer proposer has to beat."""

    def propose(self, count: int, *, seed: int) -> list[Draw]:
        return [Draw("default", 1.0, seed + k) for k in range(count)]


@dataclass(frozen=True)
class LatinHypercube(Proposer):
    """The default, then a scrambled Latin hypercube over scheme × log gain (McKay et al., 1979)."""

    schemes: tuple[str, ...] = ("default", "xavier", "kaiming", "orthogonal", "normal", "depth_scaled")
    least_gain: float = 0.5
    most_gain: float = 2.0

    def propose(self, count: int, *, seed: int) -> list[Draw]:
        draws = [Draw("default", 1.0, seed)][:count]
        if count > 1:
            from scipy.stats import qmc  # half a second, which ranks need not wait for

            points = qmc.LatinHypercube(d=2, scramble=True, rng=seed).random(count - 1)
            for k, (which, how_much) in enumerate(points, start=1):
                gain = self.least_gain * (self.most_gain / self.least_gain) ** how_much
                draws.append(Draw(self.schemes[int(which * len(self.schemes))], round(float(gain), 4), seed + k))
        return draws
