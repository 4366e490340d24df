"""A small convolutional network for small images, such as scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import DIGITS, LayerBuilder, Model, check_images, check_whole_numbers
from dejavu.workload.models.modules.images import Classifier


class PlainConvolution(nn.Module):
    """3 × 3 convolution, ReLU."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.convolution(x))


class Convolution(nn.Module):
    """3 × 3 convolution, group norm, ReLU; added to its input where shapes allow."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=1)
        self.norm = nn.GroupNorm(1, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(self.norm(self.convolution(x)))
        return x + y if x.shape == y.shape else y


@dataclass(frozen=True)
class CNN(Model):
    """A stem, blocks of one width, a classifier.

    Attributes:
        plain: neither norms nor a residual stream, as before both were known.
    """

    usual_data: ClassVar[Mapping[str, Any]] = DIGITS

    num_blocks: int = 6
    width: int = 32
    plain: bool = False

    def __post_init__(self) -> None:
        check_whole_numbers(self, "num_blocks", "width")

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_images("cnn", shape)
        convolution = PlainConvolution if self.plain else Convolution
        return (
            LayerBuilder("stem", partial(convolution, shape.input_shape[0], self.width)),
            *(LayerBuilder(f"block{i}", partial(convolution, self.width, self.width)) for i in range(self.num_blocks)),
            LayerBuilder("classifier", partial(Classifier, self.width, shape.num_classes)),
        )
