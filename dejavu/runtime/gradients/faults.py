"""Drills: what a faulty device does to its gradients, done to them on purpose, in the rank itself.

A rank that finds `DEJAVU_GRADIENT_FAULTS` in its environment, a JSON list of `GradientFault`s, spoils its own gradients
before they are combined with the other replicas'. Tests and `benchmarks.gradients` set it; nothing else does.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import Family

ENVIRONMENT = "DEJAVU_GRADIENT_FAULTS"
NOISE = 10.0  # times the gradient's own root mean square
STALE_STEPS = 10  # how old a stale gradient is
FLIPPED_SHARE = 1e-2  # of the numbers, each in one bit

Spoil = Callable[[torch.Tensor, deque[torch.Tensor], torch.Generator], torch.Tensor]


def _noise(gradient_P: torch.Tensor, earlier: deque[torch.Tensor], chance: torch.Generator) -> torch.Tensor:
    size = NOISE * gradient_P.square().mean().sqrt()
    drawn = torch.randn(gradient_P.shape, generator=chance, dtype=gradient_P.dtype)
    return gradient_P + size * drawn.to(gradient_P.device)


def _stale(gradient_P: torch.Tensor, earlier: deque[torch.Tensor], chance: torch.Generator) -> torch.Tensor:
    earlier.append(gradient_P.clone())
    return earlier[0]


def _bit_flip(gradient_P: torch.Tensor, earlier: deque[torch.Tensor], chance: torch.Generator) -> torch.Tensor:
    """Flip a bit drawn from all of them (sign, exponent, fraction) in a share of the numbers, at least in one."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[gradient_P.element_size()]
    count = max(1, int(FLIPPED_SHARE * gradient_P.numel()))
    places = torch.randint(gradient_P.numel(), (count,), generator=chance)
    bits = torch.randint(8 * gradient_P.element_size(), (count,), generator=chance)
    flipped = gradient_P.clone()
    numbers, at = flipped.view(whole), places.to(gradient_P.device)
    numbers[at] = numbers[at] ^ torch.ones((), dtype=whole).bitwise_left_shift(bits.to(whole)).to(numbers.device)
    return flipped


FAULTS: Family[Spoil] = Family(
    "fault of a gradient",
    {
        "sign_flip": lambda gradient_P, earlier, chance: -gradient_P,
        "noise": _noise,
        "zeros": lambda gradient_P, earlier, chance: torch.zeros_like(gradient_P),
        "nan": lambda gradient_P, earlier, chance: torch.full_like(gradient_P, torch.nan),
        "inf": lambda gradient_P, earlier, chance: torch.full_like(gradient_P, torch.inf),
        "stale": _stale,
        "bit_flip": _bit_flip,
    },
)


@dataclass(frozen=True)
class GradientFault:
    """A fault of one rank.

    Attributes:
        kind: a name of `FAULTS`.
        rank: of the world.
        layer: whose gradients alone it strikes; empty: those of all its layers.
        first_step: from which it lasts to the end.
        seconds: by which the device is late in each step, too.
    """

    kind: str
    rank: int
    layer: str = ""
    first_step: int = 0
    seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise InputError(FAULTS.unknown(self.kind))


class FaultyGradients:
    """One faulty device; it remembers its earlier gradients, and draws the same bits in every training."""

    def __init__(self, fault: GradientFault) -> None:
        self.fault = fault
        self._chance = torch.Generator().manual_seed(fault.seed)
        self._earlier: deque[torch.Tensor] = deque(maxlen=STALE_STEPS + 1)

    @classmethod
    def of_rank(cls, rank: int) -> list[FaultyGradients]:
        """Return what this process's environment says of a rank; usually nothing."""
        said = json.loads(os.environ.get(ENVIRONMENT, "[]"))
        return [cls(fault) for fault in (GradientFault(**one) for one in said) if fault.rank == rank]

    def spoil(self, step: int, gradient_P: torch.Tensor, columns_of: Mapping[str, slice]) -> torch.Tensor:
        """Return what the device has in place of its gradient in a step.

        Args:
            columns_of: where the gradient of each layer is.
        """
        if step < self.fault.first_step:
            return gradient_P
        if self.fault.layer and self.fault.layer not in columns_of:  # it is of another stage
            return gradient_P
        time.sleep(self.fault.seconds)
        columns = columns_of[self.fault.layer] if self.fault.layer else slice(None)
        spoiled_P = gradient_P.clone()
        spoiled_P[columns] = FAULTS[self.fault.kind](gradient_P[columns], self._earlier, self._chance)
        return spoiled_P


def in_environment(*faults: GradientFault) -> dict[str, str]:
    """Return the variable that gives ranks these faults."""
    return {ENVIRONMENT: json.dumps([vars(fault) for fault in faults])}
