"""A user's own model, by `package.module:factory`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dejavu.data import ExampleShape
from dejavu.errors import InputError
from dejavu.models._base import LayerBuilder, Model, source_hash


@dataclass(frozen=True)
class UserModel(Model):
    """An `nn.Sequential` that the user's factory returns; its children are the layers."""

    factory: Callable[..., nn.Sequential]
    options: Mapping[str, Any] = field(default_factory=dict)

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        with torch.device("meta"):  # only the names are wanted: no memory, no random numbers
            module = self.factory(**self.options)
        _refuse_shared(module)
        return tuple(LayerBuilder(name, partial(self._child, name)) for name in module._modules)

    @property
    def code(self) -> str:
        return source_hash(self.factory)

    def _child(self, name: str) -> nn.Module:
        return self.factory(**self.options).get_submodule(name)


def _refuse_shared(module: nn.Sequential) -> None:
    """That no two layers hold the same weights: each layer is built on its own, which would untie them.

    Raises:
        InputError: two do.
    """
    owner: dict[int, str] = {}
    for name, child in module._modules.items():
        for tensor in (*child.parameters(), *child.buffers()) if child is not None else ():
            first = owner.setdefault(id(tensor), name)
            if first != name:
                raise InputError(
                    f"layers {first!r} and {name!r} share weights; wanted layers with weights of their own", ("model",)
                )


def load_model(reference: str, options: Mapping[str, Any]) -> Model:
    """The model behind `package.module:factory`, which returns an `nn.Sequential` or a `Model`.

    Raises:
        InputError: there is no such module or attribute, it fails, or returns something else.
    """
    module_name, _, attribute = reference.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever a user's file does wrong when it is read
        message = (
            f"model {reference!r} cannot be imported: {type(error).__name__}: {error}; wanted package.module:factory"
        )
        raise InputError(message, ("model",)) from error
    try:
        with torch.device("meta"):
            made = factory(**options)
    except Exception as error:
        message = f"model {reference!r} fails with model_options {dict(options)}: {type(error).__name__}: {error}"
        raise InputError(message, ("model_options",)) from error
    if isinstance(made, Model):
        return made
    if not isinstance(made, nn.Sequential):
        raise InputError(
            f"model {reference!r} returns a {type(made).__name__}; wanted an nn.Sequential or a Model", ("model",)
        )
    return UserModel(factory, options)
