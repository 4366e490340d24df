"""A draw of initial weights is a few numbers; every process rebuilds the same weights from it, bit for bit."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Draw:
    """One way to draw all weights of a model.

    Attributes:
        scheme: a name of `SCHEMES`.
        gain: factor on the scheme's own standard deviation, for matrices; 1.0 is the scheme as published.
        seed: of the random numbers; each layer has a stream of its own, so any stage can be drawn alone.
    """

    scheme: str = "default"
    gain: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.scheme} × {self.gain:.2f}, seed {self.seed}"


class Scheme(ABC):
    """How the weights of one layer are drawn. Vectors (biases, norms) stay as the layer's own constructor left them."""

    @abstractmethod
    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, depth: int) -> None:
        """Overwrite a weight of two or more dimensions in place; `depth` is the model's number of layers."""


def layer_seed(seed: int, name: str) -> int:
    """The seed of one layer's own stream."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


class KeepDefault(Scheme):
    """The framework's default: what the layers' own constructors draw."""

    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, depth: int) -> None:
        pass


def matrices(module: nn.Module) -> list[torch.Tensor]:
    """The weights that schemes draw: those with two or more dimensions."""
    return [parameter for parameter in module.parameters() if parameter.dim() >= 2]
