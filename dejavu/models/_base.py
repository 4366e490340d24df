"""What every model of the zoo gives: its layers in order, each built on its own, and its loss."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dejavu.data import ExampleShape


def source_hash(thing: object) -> str:
    """A hash of the whole file that defines a class, a function or a module."""
    return hashlib.sha256(inspect.getsource(inspect.getmodule(thing) or type(thing)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class LayerBuilder:
    """One layer: its name, unique in the model, and how it is made.

    A stage builds its own layers only, so no process ever holds a model that is too large for it.
    """

    name: str
    build: Callable[[], nn.Module]


class Model(ABC):
    """A model as a chain of layers: each takes the output of the one before it. Settings are the fields."""

    @abstractmethod
    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        """The layers in order, for examples of this shape.

        Raises:
            InputError: the model cannot take such examples.
        """

    @property
    def code(self) -> str:
        """Names the code behind the model: what was learned under one code is not taken for another's."""
        return source_hash(type(self))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy over all targets of a microbatch; classes are the last dimension of the output."""
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
