"""Which replica of a stage is suspected far more often than chance does it, or is far off several times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

WINDOW_STEPS = 50  # the last ones, in which a replica is compared with chance: a device may fail at any time
FAR = 100.0  # times as far off as the median replica: distances of many numbers hardly scatter, so no honest one is
FAR_STEPS = 3  # so often, and a replica is named though it is usually like the others: a device that fails now and then
CHANCE = 1e-9  # of so many suspicions of a replica that is like the others, in a window


@cache
def chance_of(count: int, steps: int, probability: float) -> float:
    """Return the probability of at least `count` of so many independent steps (a binomial's upper tail)."""
    return math.fsum(
        math.comb(steps, n) * probability**n * (1 - probability) ** (steps - n) for n in range(count, steps + 1)
    )


@dataclass
class Tally:
    """How often one replica was among the most suspected of its stage, or of a layer.

    Replicas that are alike are suspected equally often: k of N with a probability of k / N in each step.

    Attributes:
        num_far: in how many steps it was far off, or not finite.
        is_named: it was suspected far more often than that in some window, or was far off several times.
        ratios: in the last steps in which it was suspected, its suspicion over the replicas' median.
    """

    watched_steps: int = 0
    num_steps: int = 0
    num_not_finite: int = 0
    num_far: int = 0
    first_step: int = -1
    last_step: int = -1
    is_named: bool = False
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _window: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def add(self, step: int, *, suspected: bool, ratio: float, probability: float) -> None:
        """Count a step.

        Args:
            ratio: the replica's suspicion over the median of the finite ones; infinite: its gradient was not finite.
            probability: of being suspected by chance.
        """
        self.watched_steps += 1
        self._window.append(suspected)
        if not suspected:
            return
        self.num_steps += 1
        self.first_step, self.last_step = (step if self.first_step < 0 else self.first_step), step
        if math.isfinite(ratio):
            self.ratios.append(ratio)
        else:
            self.num_not_finite += 1
        self.num_far += ratio > FAR
        self.is_named |= (
            self.num_far >= FAR_STEPS or chance_of(sum(self._window), len(self._window), probability) < CHANCE
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "ratios": list(self.ratios), "_window": list(self._window)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tally:
        """Read what `to_dict` gave."""
        ratios, window = (deque(data[name], maxlen=WINDOW_STEPS) for name in ("ratios", "_window"))
        return cls(**{**data, "ratios": ratios, "_window": window})


class Watch:
    """The replicas of a stage, section by section.

    Shape suffixes: S = sections (layers, or one for all), N = replicas.

    Args:
        num_suspected: of how many replicas the most suspected are counted in each step.
    """

    def __init__(self, num_sections: int, num_replicas: int, num_suspected: int) -> None:
        self.tallies = [[Tally() for _ in range(num_replicas)] for _ in range(num_sections)]
        self._count = max(1, num_suspected)

    def look(self, step: int, suspicion_SN: torch.Tensor) -> None:
        """Count a step's most suspected. Gradients that are not finite are among them, however many there are."""
        for tallies, own in zip(self.tallies, suspicion_SN.tolist(), strict=True):
            least = min(own)
            if max(own) == least:  # all alike, as gradients of the same examples are
                continue
            finite = sorted(one for one in own if math.isfinite(one))
            middle = finite[len(finite) // 2] if finite else 0.0
            most = sorted(range(len(own)), key=own.__getitem__, reverse=True)[: self._count]
            for n, tally in enumerate(tallies):
                is_finite = math.isfinite(own[n])
                ratio = (own[n] / middle if middle > 0 else 1.0) if is_finite else math.inf
                is_one = n in most or not is_finite
                tally.add(step, suspected=is_one, ratio=ratio, probability=self._count / len(own))

    def named(self) -> dict[int, list[int]]:
        """Return by replica the sections in which it is named."""
        found: dict[int, list[int]] = {}
        for section, tallies in enumerate(self.tallies):
            for n, tally in enumerate(tallies):
                if tally.is_named:
                    found.setdefault(n, []).append(section)
        return found
