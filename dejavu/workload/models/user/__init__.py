"""A user's own model, by `package.module:factory`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from dejavu.foundation.errors import OWN_CODE, InputError
from dejavu.foundation.tracing import fake_tensors
from dejavu.workload.code import imported_code
from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import LayerBuilder, Model, Source, source_hash
from dejavu.workload.models.user.cutting import Cut, Take, cut
from dejavu.workload.models.user.waiting import values_when_read

_CUTS: dict[tuple[Any, ...], Cut] = {}  # of this process: tracing takes up to seconds
_MOST_CUTS = 16
_MISTAKES = {  # by what torch says of them
    "UninitializedParameter": "it has a lazy module, whose sizes only a forward pass tells; wanted nn.Linear and the "
    "like, with sizes",
    "Couldn't swap": "it converts its weights (`.to`, `.half`, `.cuda`); wanted them as modules make them: the "
    "workload's dtype and the plan's devices decide",
}


@dataclass(frozen=True)
class UserModel(Model):
    """The user's model, cut where it can be (`cutting.cut`).

    Layers that share weights are one layer, with everything between them.
    """

    factory: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""  # by whose name the factory was found
    dtype: torch.dtype = torch.float32  # that it will be trained in

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        cut = self._cut(shape)
        return tuple(
            LayerBuilder(name, partial(self._layer, take), tied=cut.tied.get(name, ()))
            for name, take in cut.takes.items()
        )

    def notes(self, shape: ExampleShape) -> tuple[str, ...]:
        return self._cut(shape).notes

    def weight_names(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, str]:
        """Return the names in the factory's own module, `blocks.0.weight` for `blocks_0.weight`.

        Layers are taken from one module, so a tensor of theirs is a tensor of its.
        """
        wanted, found, taken = set(names), dict[str, str](), set[str]()
        with fake_tensors():
            module = self.factory(**self.options)
        outer = _names(module)
        for layer, take in self._cut(shape).takes.items():
            left = {one: list(every) for one, every in outer.items()}
            for name, tensor in take(module).state_dict(keep_vars=True).items():
                every = left.get(id(tensor), [])
                if every and f"{layer}.{name}" in wanted:
                    # A traced layer has the names of the module that was traced: the whole, or what is wrapped in it.
                    same = min(every, key=lambda one: (not f".{one}".endswith(f".{name}"), one in taken))
                    every.remove(same)
                    taken.add(same)
                    found[f"{layer}.{name}"] = same
        return found

    def names_of_same(self) -> tuple[tuple[str, ...], ...]:
        with fake_tensors():
            every = _names(self.factory(**self.options)).values()
        return tuple(tuple(names) for names in every if len(names) > 1)

    def weight_sources(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, tuple[Source, ...]]:
        """Return where each weight may be: under its name, or else another one of the same tensor."""
        same = {name: every for every in self.names_of_same() for name in every}
        return {
            name: tuple(Source((one,)) for one in dict.fromkeys((outer, *same.get(outer, ()))))
            for name, outer in self.weight_names(shape, names).items()
        }

    @property
    def code(self) -> str:
        return imported_code(self.module) or source_hash(self.factory)

    def _cut(self, shape: ExampleShape) -> Cut:
        key = (self.factory, repr(sorted(self.options.items())), shape, self.dtype)
        if key not in _CUTS:
            if len(_CUTS) >= _MOST_CUTS:
                _CUTS.clear()
            _CUTS[key] = cut(partial(self.factory, **self.options), shape, self.dtype)
        return _CUTS[key]

    def _layer(self, take: Take) -> nn.Module:
        with values_when_read():
            return take(self.factory(**self.options))


def _names(module: nn.Module) -> dict[int, list[str]]:
    """Return the names of each tensor of a module's state."""
    found: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
    return found


def load_model(reference: str, options: Mapping[str, Any], dtype: torch.dtype) -> Model:
    """Load the model of `package.module:factory`, which returns a module or a `Model`.

    Args:
        dtype: that it will be trained in.

    Raises:
        InputError: there is no such module or attribute, it fails, or returns something else.
    """
    module_name, _, attribute = reference.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except OWN_CODE as error:  # of what runs when the file is read
        message = (
            f"model {reference!r} cannot be imported: {type(error).__name__}: {error}; wanted package.module:factory"
        )
        raise InputError(message, ("model",)) from error
    try:
        with fake_tensors():
            made = factory(**options)
    except OWN_CODE as error:
        message = f"model {reference!r} fails with model_options {dict(options)}: {_mistake(error)}"
        raise InputError(message, ("model_options",)) from error
    if isinstance(made, Model):
        return made
    if not isinstance(made, nn.Module):
        raise InputError(f"model {reference!r} returns a {type(made).__name__}; wanted a module or a Model", ("model",))
    return UserModel(factory, options, module_name, dtype)


def _mistake(error: BaseException) -> str:
    """Say why a factory failed on tensors without memory."""
    if isinstance(error, DataDependentOutputException):
        return (
            f"it reads values of weights ({error.func}), and planning makes them without any; wanted a factory that "
            "does not depend on what was drawn"
        )
    known = (said for words, said in _MISTAKES.items() if words in str(error))
    return next(known, f"{type(error).__name__}: {error}")
