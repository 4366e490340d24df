"""Modules that run their children one after the other, which can be cut between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from dejavu.foundation.errors import OWN_CODE
from dejavu.workload.models._base import is_layer_name


def layer_name(group: tuple[str, ...]) -> str:
    """Name a layer without dots, which separate a layer's name from its weights' in checkpoints."""
    name = (group[0] if len(group) == 1 else f"{group[0]}-{group[-1]}").replace(".", "_")
    return name if is_layer_name(name) else f"{name}_"


def parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children in order; instead of a list of modules, its items."""
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList):
            yield from parts(child, f"{prefix}{name}.")
        elif child is not None:
            yield prefix + name, child


class Writes:
    """Which parts write to memory that another part made, as an in-place ReLU does.

    Args:
        given: what the first part receives.

    Attributes:
        makers: a part that writes -> the part that made what it writes to; "" is `given`.
    """

    def __init__(self, given: torch.Tensor) -> None:
        self.makers: dict[str, str] = {}
        # Of each memory its first tensor, which keeps the memory from being another's later, and the part that made it.
        self._made: dict[int, tuple[torch.Tensor, str]] = {_memory(given): (given, "")}

    def run(self, name: str, part: nn.Module, x: torch.Tensor) -> Any:
        """Run a part on what the part before it returned."""
        version = x._version
        output = part(x)
        if x._version != version:
            self.makers[name] = self._made[_memory(x)][1]
        if isinstance(output, torch.Tensor):
            self._made.setdefault(_memory(output), (output, name))  # a view of an earlier one is no new memory
        return output


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def chain(module: nn.Module, found: Mapping[str, nn.Module], example: torch.Tensor) -> tuple[str, dict[str, str]]:
    """Return why running these children in sequence would not be the module's forward pass; empty if it would.

    The second result says which of them write to what another made, as `Writes.makers` does.
    """
    if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        return f"{type(module).__name__} has weights of its own beside its children's", {}
    if not found:
        return f"{type(module).__name__} has no children", {}
    if not _runs_in_sequence(module) and (reason := _watch(module, list(found), example)):
        return reason, {}
    writes, x = Writes(example), example
    for name, part in found.items():
        try:
            x = writes.run(name, part, x)
        except OWN_CODE:  # of a Sequential: capturing the layer says what it cannot do
            break
        if not isinstance(x, torch.Tensor):
            return f"{name!r} returns a {type(x).__name__}", {}
    return "", writes.makers


def _runs_in_sequence(module: nn.Module) -> bool:
    """Return whether a module is a Sequential whose forward pass neither its class nor hooks change."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not hooks


def _watch(module: nn.Module, names: list[str], example: torch.Tensor) -> str:
    """Return why running the children in sequence would not be the module's forward pass; empty if it would.

    Each child's one input must be the same tensor object that the previous child returned, unmodified in between, and
    torch's switches those of the call. That is checked while the module's own forward pass runs on fake tensors.
    """
    before, version, called = example, example._version, list[str]()
    faults: list[str] = []
    switches = _switches()

    def enter(name: str, part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        place = f"{called[-1]!r} and {name!r}" if called else f"the input and {name!r}"
        if len(inputs) != 1 or options or inputs[0] is not before or _version(before) != version:
            faults.append(f"its forward pass does something between {place}")
        if _switches() != switches:
            faults.append(f"its forward pass runs {name!r} without gradients or under autocast")

    def leave(name: str, part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal before, version
        called.append(name)
        before = output
        version = _version(output)
        if not isinstance(output, torch.Tensor):
            faults.append(f"{name!r} returns a {type(output).__name__}")

    with ExitStack() as watched:
        for name in names:
            part = module.get_submodule(name)
            watched.callback(part.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            watched.callback(part.register_forward_hook(partial(leave, name)).remove)
        try:
            result = module(example)
        except OWN_CODE as error:  # on tensors without memory
            return f"its forward pass fails on tensors without memory: {type(error).__name__}: {error}"
    if not faults and called != names:
        return f"its forward pass does not run its children {', '.join(names)} once each in this order"
    if not faults and (result is not before or _version(before) != version):
        return f"its forward pass does something after {called[-1]!r}"
    return faults[0] if faults else ""


def _switches() -> tuple[bool, ...]:
    """Return what of torch a forward pass can switch around a child."""
    autocast = (torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _version(thing: Any) -> int:
    """Return how often a tensor was written to."""
    return thing._version if isinstance(thing, torch.Tensor) else 0


def tie(
    found: Mapping[str, nn.Module], makers: Mapping[str, str], apart: Collection[int] = ()
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Group parts that share weights with everything between them, and return a sentence for each tie.

    A part that writes to its input is in the group of the part that made it (`Writes.makers`): a tensor that crosses a
    cut must not be modified. Tensors with the ids in `apart` may be in several.
    """
    names, first = list(found), dict[int, int]()
    until = list(range(len(names)))  # the last part that must be in one layer with this one
    notes: dict[str, None] = {}
    for position, name in enumerate(names):
        part = found[name]
        if name in makers:
            maker = names.index(makers[name]) if makers[name] else 0
            until[maker] = max(until[maker], position)
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
