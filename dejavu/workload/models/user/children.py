"""Modules that run their children one after the other, which can be cut between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


def layer_name(group: tuple[str, ...]) -> str:
    """Name a layer without dots, which separate a layer's name from its weights' in checkpoints."""
    return (group[0] if len(group) == 1 else f"{group[0]}-{group[-1]}").replace(".", "_")


def parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children in order; instead of a list of modules, its items."""
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList):
            yield from parts(child, f"{prefix}{name}.")
        elif child is not None:
            yield prefix + name, child


def watch(module: nn.Module, names: list[str], example: torch.Tensor) -> tuple[str, set[str]]:
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


def tie(
    found: Mapping[str, nn.Module], writers: Collection[str], apart: Collection[int] = ()
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Group parts that share weights with everything between them, and return a sentence for each tie.

    A part that writes to its input is in the group of the part that made it: a tensor that crosses a cut must not be
    modified. Tensors with the ids in `apart` may be in several.
    """
    names, first = list(found), dict[int, int]()
    until = list(range(len(names)))  # the last part that must be in one layer with this one
    notes: dict[str, None] = {}
    for position, name in enumerate(names):
        part = found[name]
        if name in writers and position:
            until[position - 1] = max(until[position - 1], position)
        for tensor in (*part.parameters(), *part.buffers()):
            if id(tensor) in apart:
                continue
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
