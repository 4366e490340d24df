"""Wide ResNet: residual bottleneck blocks with more channels inside (Zagoruyko & Komodakis, 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import IMAGES, LayerBuilder, Model, are_counts, check_images, check_whole_numbers
from dejavu.workload.models.modules.images import Classifier

EXPANSION = 4  # a block's outputs, as a multiple of its group's width
NUM_GROUPS = 4
WIDENED = ("both", "output")


class Stem(nn.Module):
    """7 × 7 convolution, batch norm, ReLU; the image becomes four times smaller each way."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_inputs, num_outputs, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(nn.functional.relu(self.norm(self.convolution(x))), 3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions, each with batch norm, added to the input or its projection."""

    def __init__(self, num_inputs: int, first: int, second: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.contract = nn.Conv2d(num_inputs, first, 1, bias=False)
        self.contract_norm = nn.BatchNorm2d(first)
        self.convolution = nn.Conv2d(first, second, 3, stride=stride, padding=1, bias=False)
        self.convolution_norm = nn.BatchNorm2d(second)
        self.expand = nn.Conv2d(second, num_outputs, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(num_outputs)
        self.projection: nn.Module = nn.Identity()
        if num_inputs != num_outputs or stride != 1:
            convolution = nn.Conv2d(num_inputs, num_outputs, 1, stride=stride, bias=False)
            self.projection = nn.Sequential(convolution, nn.BatchNorm2d(num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(self.contract_norm(self.contract(x)))
        y = nn.functional.relu(self.convolution_norm(self.convolution(y)))
        return nn.functional.relu(self.projection(x) + self.expand_norm(self.expand(y)))


@dataclass(frozen=True)
class WideResNet(Model):
    """wide_resnet50_2 as it stands; 101 layers are `blocks: [3, 4, 23, 3]`.

    Alpa's family (Zheng et al., 2022, table 4) is `widened: output`: 250M is width 160, factor 2; 1B 320, 2; 4B 640, 2;
    6.8B 320, 16; 13B the same with 101 layers. Batch norm takes a microbatch for a batch, as every pipeline does.

    Attributes:
        blocks: how many in each of the four groups.
        width: of the first group; each further one has twice as many channels.
        width_factor: channels inside a block, as a multiple of its group's width.
        widened: `both` inner convolutions' channels (torchvision), or only those that the 3 × 3 one puts out (Alpa).
    """

    usual_data: ClassVar[Mapping[str, Any]] = IMAGES

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    width_factor: int = 2
    widened: Literal["both", "output"] = "both"

    def __post_init__(self) -> None:
        check_whole_numbers(self, "width", "width_factor")
        if not are_counts(self.blocks, NUM_GROUPS):
            raise InputError(
                f"model_options: blocks is {self.blocks!r}; wanted {NUM_GROUPS} whole numbers ≥ 1", ("model_options",)
            )
        if self.widened not in WIDENED:
            raise InputError(
                f"model_options: widened is {self.widened!r}; wanted one of {', '.join(WIDENED)}", ("model_options",)
            )

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        check_images("wide_resnet", shape)
        builders = [LayerBuilder("stem", partial(Stem, shape.input_shape[0], self.width))]
        channels = self.width
        for group, count in enumerate(self.blocks):
            width = self.width * 2**group
            second = width * self.width_factor
            first = second if self.widened == "both" else width
            for i in range(count):
                stride = 2 if group and i == 0 else 1
                make = partial(Bottleneck, channels, first, second, EXPANSION * width, stride)
                builders.append(LayerBuilder(f"block{group}_{i}", make))
                channels = EXPANSION * width
        return (*builders, LayerBuilder("classifier", partial(Classifier, channels, shape.num_classes)))
