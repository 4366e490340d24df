"""The published ways to draw a weight. A matrix's fan-in is the product of all its dimensions but the first.

To add one: its class, and one line in `SCHEMES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from dejavu.foundation.registry import Family
from dejavu.init._base import Role, Scheme

CUT = 2.0  # deviations at which a truncated normal ends, as in Flax
# The remaining deviation of a unit normal after that truncation: sqrt(1 - 2 c φ(c) / (2 Φ(c) - 1)) at c = 2.
LEFT_AFTER_CUT = 0.8796256610342398


class KeepDefault(Scheme):
    """The framework's default: what the layers' own constructors draw."""

    @property
    def critical_gain(self) -> float:
        return math.sqrt(6.0)  # torch's linear layers and convolutions have the variance 1 / (3 fan-in)

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        pass


@dataclass(frozen=True)
class Torch(Scheme):
    """One of torch's own initializers.

    Attributes:
        variance_by_fan_in: of a square matrix: its variance times its fan-in.
    """

    initializer: Callable[..., torch.Tensor]
    variance_by_fan_in: float

    @property
    def critical_gain(self) -> float:
        return math.sqrt(2.0 / self.variance_by_fan_in)

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        self.initializer(weight, generator=generator)


class Uniform(Scheme):
    """Uniform with the variance 1 / fan-in (LeCun et al., 1998, §4.6)."""

    @property
    def critical_gain(self) -> float:
        return math.sqrt(2.0)

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        bound = math.sqrt(3.0 / weight[0].numel())
        nn.init.uniform_(weight, -bound, bound, generator=generator)


class TruncatedNormal(Scheme):
    """Truncated normal with the variance 1 / fan-in after truncation: Flax's `lecun_normal`."""

    @property
    def critical_gain(self) -> float:
        return math.sqrt(2.0)

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        deviation = 1.0 / math.sqrt(weight[0].numel()) / LEFT_AFTER_CUT
        nn.init.trunc_normal_(weight, 0.0, deviation, -CUT * deviation, CUT * deviation, generator=generator)


@dataclass(frozen=True)
class Normal(Scheme):
    """Normal with one deviation everywhere, as GPT-2 and BERT draw (0.02; Radford et al., 2019)."""

    deviation: float = 0.02

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        nn.init.normal_(weight, std=self.deviation, generator=generator)


@dataclass(frozen=True)
class DepthScaled(Scheme):
    """Normal, with matrices that write into a residual stream smaller by sqrt(2 · depth) (Radford et al., 2019, §2.3).

    A layer adds to the stream twice. Depth counts all layers of the chain, the embedding and the head too.
    """

    deviation: float = 0.02

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        smaller = math.sqrt(2 * depth) if role == "residual" else 1.0
        nn.init.normal_(weight, std=self.deviation / smaller, generator=generator)


class LSUV(Scheme):
    """Orthogonal, then every linear map rescaled to a unit variance of its outputs (Mishkin & Matas, 2016).

    The rescaling runs a batch through the whole model, so a stage cannot draw such weights alone, and it undoes the
    factors of a draw on everything that it rescales.
    """

    calibrated: ClassVar[bool] = True

    @property
    def critical_gain(self) -> float:
        return 1.0

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        nn.init.orthogonal_(weight, generator=generator)


SCHEMES: Family[Scheme] = Family(
    "scheme",
    {
        "default": KeepDefault(),
        "uniform": Uniform(),
        "normal": Normal(),
        "truncated_normal": TruncatedNormal(),
        "kaiming": Torch(nn.init.kaiming_normal_, 2.0),
        "xavier": Torch(nn.init.xavier_normal_, 1.0),
        "orthogonal": Torch(nn.init.orthogonal_, 1.0),
        "depth_scaled": DepthScaled(),
        "lsuv": LSUV(),
    },
    field=("trials", "schemes"),
)
MENU = tuple(name for name, scheme in SCHEMES.items() if not scheme.calibrated)  # tried unless a workload names others
