"""The published ways to draw a weight. Gains multiply the drawn values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dejavu.init._base import Scheme


@dataclass(frozen=True)
class Torch(Scheme):
    """One of torch's own initializers."""

    initializer: Callable[..., torch.Tensor]

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, depth: int) -> None:
        self.initializer(weight, generator=generator)


@dataclass(frozen=True)
class Normal(Scheme):
    """Normal with one deviation everywhere, as GPT-2 and BERT draw (0.02; Radford et al., 2019)."""

    deviation: float = 0.02

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, depth: int) -> None:
        nn.init.normal_(weight, std=self.deviation, generator=generator)


@dataclass(frozen=True)
class DepthScaled(Scheme):
    """After GPT-2, which scales residual projections only: all weights smaller by the root of twice the depth."""

    deviation: float = 0.02

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, depth: int) -> None:
        nn.init.normal_(weight, std=self.deviation / (2 * depth) ** 0.5, generator=generator)
