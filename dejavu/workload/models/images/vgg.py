"""VGG: plain 3 × 3 convolutions, then three large linear layers (Simonyan & Zisserman, 2015)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import IMAGES, LayerBuilder, Model, are_counts, check_images, check_whole_numbers

NUM_GROUPS = 5
MOST_WIDENING = 8  # the last two groups are as wide as each other: 512 where the first has 64
POOLED_PIXELS = 7  # the linear layers see 7 × 7, whatever the image's size, as in torchvision


class Convolution(nn.Module):
    """3 × 3 convolution and ReLU; the last of a group halves the image."""

    def __init__(self, num_inputs: int, num_outputs: int, *, halves: bool) -> None:
        super().__init__()
        self.halves = halves
        self.convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.convolution(x))
        return nn.functional.max_pool2d(x, 2) if self.halves else x


class Hidden(nn.Module):
    """A linear layer and ReLU; the first one takes the images, pooled."""

    def __init__(self, num_inputs: int, num_outputs: int, *, pools: bool) -> None:
        super().__init__()
        self.pools = pools
        self.linear = nn.Linear(num_inputs, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pools:
            x = nn.functional.adaptive_avg_pool2d(x, POOLED_PIXELS).flatten(1)
        return nn.functional.relu(self.linear(x))


@dataclass(frozen=True)
class VGG(Model):
    """VGG-19 as it stands; VGG-16 is `convolutions: [2, 2, 3, 3, 3]`.

    Dropout is left out: a step has to give the same loss under every plan.

    Attributes:
        convolutions: how many in each of the five groups.
        width: channels of the first group; each further one has twice as many, up to 8 times.
        hidden: width of the linear layers.
    """

    usual_data: ClassVar[Mapping[str, Any]] = IMAGES

    convolutions: tuple[int, ...] = (2, 2, 4, 4, 4)
    width: int = 64
    hidden: int = 4096

    def __post_init__(self) -> None:
        check_whole_numbers(self, "width", "hidden")
        groups = self.convolutions
        if not are_counts(groups, NUM_GROUPS):
            raise InputError(
                f"model_options: convolutions is {groups!r}; wanted {NUM_GROUPS} whole numbers ≥ 1", ("model_options",)
            )

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_images("vgg", shape, least_pixels=2**NUM_GROUPS)
        builders = []
        channels = shape.input_shape[0]
        for group, count in enumerate(self.convolutions):
            width = self.width * min(2**group, MOST_WIDENING)
            for i in range(count):
                make = partial(Convolution, channels, width, halves=i == count - 1)
                builders.append(LayerBuilder(f"convolution{group}_{i}", make))
                channels = width
        first = partial(Hidden, channels * POOLED_PIXELS**2, self.hidden, pools=True)
        return (
            *builders,
            LayerBuilder("hidden0", first),
            LayerBuilder("hidden1", partial(Hidden, self.hidden, self.hidden, pools=False)),
            LayerBuilder("classifier", partial(nn.Linear, self.hidden, shape.num_classes)),
        )
