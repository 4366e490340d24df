"""A user's own model, by `package.module:factory`."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.foundation.tracing import fake_tensors
from dejavu.workload.data import ExampleShape
from dejavu.workload.models._base import LayerBuilder, Model, renamed, source_hash

WHOLE = "model"  # the name of the one layer of a model that cannot be cut
_BATCH_SIZE = 2  # of the examples on which a model's boundaries are looked for; nothing is computed


@dataclass(frozen=True)
class UserModel(Model):
    """The user's model: the children of an `nn.Sequential`, or of another module that runs them one after the other.

    Children that share weights are one layer, with everything between them. Where the forward pass does more than run
    one child after another, the model is one layer; `notes` says why.
    """

    factory: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)

    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        groups, _ = self._cut(shape)
        if not groups:
            return (LayerBuilder(WHOLE, partial(self.factory, **self.options)),)
        return tuple(LayerBuilder(_layer_name(group), partial(self._group, group)) for group in groups)

    def notes(self, shape: ExampleShape) -> tuple[str, ...]:
        return self._cut(shape)[1]

    def weight_names(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, str]:
        """Return the names in the factory's own module, `blocks.0.weight` for `blocks_0.weight`."""
        groups, _ = self._cut(shape)
        outer = {} if groups else {WHOLE: ""}
        for group in groups:
            layer = _layer_name(group)
            single = len(group) == 1
            outer |= {layer if single else f"{layer}.{_layer_name((name,))}": name for name in group}
        return renamed(names, outer)

    @property
    def code(self) -> str:
        return source_hash(self.factory)

    def _cut(self, shape: ExampleShape) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        """Return the submodules of each layer in order, none where the model is one layer; and notes for the user."""
        with fake_tensors():  # only boundaries are wanted: no memory, no random numbers
            module = self.factory(**self.options)
            names = [name for name, part in _parts(module) if not isinstance(part, nn.Identity)]
            example = torch.empty((_BATCH_SIZE, *shape.input_shape), dtype=shape.input_dtype)
            reason, writers = _watch(module, names, example)
        if reason and not isinstance(module, nn.Sequential):
            return [], (f"the model is one layer: {reason}",)
        groups, notes = _tie(module, names, writers)
        if len({_layer_name(group) for group in groups}) < len(groups):
            return [], ("the model is one layer: its children's names differ only in dots",)
        return groups, notes

    def _group(self, names: tuple[str, ...]) -> nn.Module:
        module = self.factory(**self.options)
        parts = OrderedDict((name.replace(".", "_"), module.get_submodule(name)) for name in names)
        return parts.popitem()[1] if len(parts) == 1 else nn.Sequential(parts)


def _layer_name(group: tuple[str, ...]) -> str:
    """Name a layer without dots, which separate a layer's name from its weights' in checkpoints."""
    return (group[0] if len(group) == 1 else f"{group[0]}-{group[-1]}").replace(".", "_")


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children in order; instead of a list of modules, its items."""
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList):
            yield from _parts(child, f"{prefix}{name}.")
        elif child is not None:
            yield prefix + name, child


def _watch(module: nn.Module, names: list[str], example: torch.Tensor) -> tuple[str, set[str]]:
    """Return why running the children in sequence would not be the module's forward pass; empty if it would.

    Each child's one input must be the same tensor object that the previous child returned, unmodified in between. That
    is checked while the module's own forward pass runs on fake tensors. The second result names the children that write
    to their input, as an in-place ReLU does.
    """
    if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        return f"{type(module).__name__} has weights of its own beside its children's", set()
    if not names:
        return f"{type(module).__name__} has no children", set()
    before, version, called = example, example._version, list[str]()
    faults: list[str] = []
    writers: set[str] = set()

    def enter(name: str, part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        place = f"{called[-1]!r} and {name!r}" if called else f"the input and {name!r}"
        if len(inputs) != 1 or options or inputs[0] is not before or _version(before) != version:
            faults.append(f"its forward pass does something between {place}")

    def leave(name: str, part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal before, version
        called.append(name)
        if _version(before) != version:
            writers.add(name)
        before = output
        version = _version(output)
        if not isinstance(output, torch.Tensor):
            faults.append(f"{name!r} returns a {type(output).__name__}")

    for name in names:
        part = module.get_submodule(name)
        part.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
        part.register_forward_hook(partial(leave, name))
    try:
        result = module(example)
    except Exception as error:  # whatever a user's code does on tensors without memory
        return f"its forward pass fails on tensors without memory: {type(error).__name__}: {error}", writers
    if not faults and called != names:
        return f"its forward pass does not run its children {', '.join(names)} once each in this order", writers
    if not faults and (result is not before or _version(before) != version):
        return f"its forward pass does something after {called[-1]!r}", writers
    return faults[0] if faults else "", writers


def _version(thing: Any) -> int:
    """Return how often a tensor was written to."""
    return thing._version if isinstance(thing, torch.Tensor) else 0


def _tie(module: nn.Module, names: list[str], writers: set[str]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Group parts that share weights with everything between them, and return a sentence for each tie.

    A part that writes to its input is in the group of the part that made it: a tensor that crosses a cut must not be
    modified.
    """
    first: dict[int, int] = {}
    until = list(range(len(names)))  # the last part that must be in one layer with this one
    notes: dict[str, None] = {}
    for position, name in enumerate(names):
        part = module.get_submodule(name)
        if name in writers and position:
            until[position - 1] = max(until[position - 1], position)
        for tensor in (*part.parameters(), *part.buffers()):
            owner = first.setdefault(id(tensor), position)
            if owner != position:
                until[owner] = max(until[owner], position)
                notes[f"{names[owner]!r} and {name!r} share weights: they are one layer with all between them"] = None
    groups, start = [], 0
    while start < len(names):
        stop = start + 1
        position = start
        while position < stop:
            stop = max(stop, until[position] + 1)
            position += 1
        groups.append(tuple(names[start:stop]))
        start = stop
    return groups, tuple(notes)


def load_model(reference: str, options: Mapping[str, Any]) -> Model:
    """Load the model of `package.module:factory`, which returns a module or a `Model`.

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
    if not isinstance(made, nn.Module):
        raise InputError(f"model {reference!r} returns a {type(made).__name__}; wanted a module or a Model", ("model",))
    return UserModel(factory, options)
