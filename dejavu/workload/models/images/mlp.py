"""A deep plain perceptron: linear layers and ReLU, with nothing that forgives bad initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import DIGITS, LayerBuilder, Model, check_images, check_whole_numbers


class Hidden(nn.Module):
    """A linear layer and ReLU; images (batch, channels, height, width) become vectors first."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.linear(x.flatten(1)))


@dataclass(frozen=True)
class MLP(Model):
    """A perceptron of many layers of one width, for small images, or for rows of numbers.

    Without norms and shortcuts the scale of the signal is multiplied from layer to layer, so whether such a model
    trains at all depends on how its weights are drawn: He et al. (2015, figures 2 and 3) compare initializations on
    plain networks of 22 layers, where theirs learns sooner than Xavier's, and of 30, where Xavier's does not learn.
    Choose it to compare initializations; for accuracy take `cnn`.

    Attributes:
        num_blocks: hidden layers.
        width: outputs of each of them.
    """

    usual_data: ClassVar[Mapping[str, Any]] = DIGITS

    num_blocks: int = 12
    width: int = 64

    def __post_init__(self) -> None:
        check_whole_numbers(self, "num_blocks", "width")

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        if len(shape.input_shape) != 1 or not shape.input_dtype.is_floating_point:  # rows of numbers, as of a table
            check_images("mlp", shape)
        first, hidden = partial(Hidden, prod(shape.input_shape), self.width), partial(Hidden, self.width, self.width)
        return (
            LayerBuilder("hidden0", first),
            *(LayerBuilder(f"hidden{i}", hidden) for i in range(1, self.num_blocks)),
            LayerBuilder("classifier", partial(nn.Linear, self.width, shape.num_classes)),
        )
