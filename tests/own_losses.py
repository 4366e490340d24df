"""A model of the zoo with a loss of one's own, by whose name ranks import this file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dejavu.workload.data import ExampleShape
from dejavu.workload.models import LayerBuilder, Model
from dejavu.workload.models.gpt import GPT


class Smoothed(GPT):
    """Its loss takes the scores of all classes."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=0.1)


class LastOnly(GPT):
    """Its loss is of the last position alone: no mean over all of them, as its layers say of the one of its base."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output[:, -1], target[:, -1])


class Breaking(Smoothed):
    """Its loss is not to be had outside planning."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not isinstance(output, FakeTensor):
            raise (SystemExit if self.num_blocks > 1 else OSError)("a table is gone")
        return super().loss(output, target)


class Summed(Smoothed):
    """Its loss is a mean over examples, a sum, a mean of what is not ignored, or fails, as its number of heads says."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        sum_of_all = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")
        if self.num_heads == 1:
            return sum_of_all / len(target)
        if self.num_heads == 2:
            return sum_of_all
        if self.num_heads == 4:
            nn.functional.binary_cross_entropy(output, torch.ones_like(output))  # wants probabilities
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=ord(" "))


class NoNumber(Smoothed):
    """Its loss is none, in the way that its number of heads says."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = super().loss(output, target)
        wrong: list[Callable[[], Any]] = [
            lambda: None,
            lambda: (loss, output),
            lambda: {"loss": loss},
            lambda: loss.expand(3),
            lambda: 0.5,
            lambda: torch.full((), 0.5),
            lambda: nn.functional.mse_loss(output, target),
            lambda: {}["loss"],
            sys.exit,
        ]
        return wrong[self.num_heads - 1]()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class InParts(Model):
    """Layers by these names; where there is none, a module in a layer's place."""

    names: tuple[Any, ...]

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        made: Any = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        return tuple(made if name is None else LayerBuilder(name, lambda: made) for name in self.names)


class Hooked(GPT):
    """Of every weight some columns, and of some matrices every other row, stay as they were drawn, by hooks."""

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        return tuple(replace(one, build=partial(_hooked, one.build)) for one in super().layers(shape))


def _hooked(build: Callable[[], nn.Module]) -> nn.Module:
    layer = build()
    for number, weight in enumerate(layer.parameters()):
        weight.register_hook(lambda gradient: gradient * (torch.arange(gradient.shape[-1]) % 3 > 0))
        if number % 2 and weight.dim() == 2:
            weight.register_hook(lambda gradient: gradient * (torch.arange(len(gradient)) % 2)[:, None])
    return layer
