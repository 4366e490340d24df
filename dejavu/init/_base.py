"""A draw of initial weights is a few numbers; every process rebuilds the same weights from it, bit for bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, fields
from typing import ClassVar, Literal

import torch

Role = Literal["embedding", "hidden", "residual", "head"]  # what a matrix does in its model


@dataclass(frozen=True)
class Draw:
    """One way to draw all weights of a model. All numbers but the seed are factors on what the scheme draws.

    Attributes:
        scheme: a name of `SCHEMES`.
        gain: on every hidden and residual matrix; 1.0 is the scheme as published.
        slope: the last layer's gain over the first layer's; geometric in between, with a mean logarithm of zero.
        embedding: on embedding tables.
        head: on the last layer's matrices.
        residual: on matrices that write into a residual stream, times the gain.
        bias: on biases as the constructors drew them; 0.0: none.
        seed: of the random numbers; each layer has a stream of its own, so any stage can be drawn alone.
    """

    scheme: str = "default"
    gain: float = 1.0
    _: KW_ONLY
    slope: float = 1.0
    embedding: float = 1.0
    head: float = 1.0
    residual: float = 1.0
    bias: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        changed = [f"{name} {getattr(self, name):.3g}" for name in FACTORS[1:] if getattr(self, name) != 1.0]
        return ", ".join([f"{self.scheme} × {self.gain:.2f}", *changed, f"seed {self.seed}"])

    def factor(self, role: Role, *, position: int, depth: int) -> float:
        """Return the factor on a matrix of the layer at this position of `depth` layers, after its scheme drew it."""
        if role == "embedding":
            return self.embedding
        if role == "head":
            return self.head
        where = position / (depth - 1) - 0.5 if depth > 1 else 0.0  # from -1/2 in the first layer to 1/2 in the last
        tilt: float = self.slope**where
        return self.gain * tilt * (self.residual if role == "residual" else 1.0)


FACTORS = tuple(field.name for field in fields(Draw) if field.name not in ("scheme", "seed"))


class Scheme(ABC):
    """How the matrices of one layer are drawn: its parameters with two or more dimensions.

    A parameter that no scheme fits stays as the layer's own constructor left it: the vectors (biases, norms), on which
    neither a fan nor orthogonality is defined.

    Attributes:
        calibrated: the weights are rescaled by a batch through the whole model once it is drawn; see `calibrate`.
        critical_gain: the factor with which activations neither grow nor vanish through many equally wide layers with
            ReLU between them (He et al., 2015, eq. 10); None where it is not the same for all widths.
    """

    calibrated: ClassVar[bool] = False

    @property
    def critical_gain(self) -> float | None:
        return None

    @abstractmethod
    def fill(self, weight: torch.Tensor, generator: torch.Generator, *, role: Role, depth: int) -> None:
        """Overwrite a matrix in place; `depth` is the model's number of layers."""
