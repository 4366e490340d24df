"""Where a user's module is cut into layers: as it says itself, between its children, or where its graph allows."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dejavu.foundation.errors import OWN_CODE, InputError
from dejavu.foundation.tracing import FakeMode, fake_tensors, without_torchs_stack
from dejavu.foundation.tracing.dtypes import to_dtype_of_fake
from dejavu.workload.data import ExampleShape
from dejavu.workload.models.user.children import Writes, chain, layer_name, parts, tie
from dejavu.workload.models.user.layer import build
from dejavu.workload.models.user.operators import TORCH
from dejavu.workload.models.user.state import kept_outside_graphs
from dejavu.workload.models.user.traced import TWO, CutOtherwise, trace

WHOLE = "model"  # the name of the one layer of a model that cannot be cut
LAYERS = "dejavu_layers"  # the method by which a module says what its layers are
_BATCH_SIZE = 2  # of the examples on which boundaries are looked for; nothing is computed

PACKAGE = Path(__file__).parents[3]  # this project's

Take = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Cut:
    """A module's layers, in order.

    Attributes:
        takes: how each layer is taken from the module, by its name.
        notes: sentences for the user.
        tied: of a layer, the weights that an earlier layer has, too, as `LayerBuilder.tied` has them.
    """

    takes: Mapping[str, Take]
    notes: tuple[str, ...] = ()
    tied: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)


def cut(make: Callable[[], nn.Module], shape: ExampleShape, dtype: torch.dtype = torch.float32) -> Cut:
    """Cut a module, in the first of these ways that can be taken.

    1. It has a method `dejavu_layers`, which returns its layers.
    2. It is a Sequential, or another module that runs its children once each, in order, and does nothing else; of one
       that only runs one other, that one is cut.
    3. Its graph, traced by `torch.export`, has one tensor at boundaries between its modules.
    4. It is one layer; the notes say why.

    Args:
        dtype: that it will be trained in: a graph has the types of numbers that the module asks for while it is traced.

    Raises:
        InputError: its `dejavu_layers` are not its layers.
    """
    mode = FakeMode()
    with fake_tensors(mode):  # only boundaries are wanted: no memory, no random numbers
        module = make()
        example = torch.empty((_BATCH_SIZE, *shape.input_shape), dtype=shape.input_dtype)
        if hasattr(module, LAYERS):
            return _declared(module, example)
        found = {name: part for name, part in parts(module) if not isinstance(part, nn.Identity)}
        reason, makers = chain(module, found, example)
    if not reason:
        groups, notes = tie(found, makers)
        if len({layer_name(group) for group in groups}) < len(groups):
            return _whole("its children's names differ only in dots")
        if len(found) == 1 and any(True for _ in next(iter(found.values())).children()):
            return _inside(next(iter(found)), make, shape, dtype)
        return Cut({layer_name(group): partial(_children, group) for group in groups}, notes)
    with fake_tensors(mode):
        module, passed = make(), make()  # without what watched it
        for one in (module, passed):
            to_dtype_of_fake(one, dtype)
        example = example.to(dtype) if example.is_floating_point() else example
    try:
        with without_torchs_stack():
            with fake_tensors(mode):
                kept = kept_outside_graphs(passed, example)
            if kept:
                return _whole(reason, kept)
            pieces, notes = trace(module, example)
    except CutOtherwise as error:
        return _whole(reason, str(error))
    except OWN_CODE as error:  # and whatever torch finds in it
        return _whole(reason, f"torch.export cannot trace it: {_said(error)}")
    if len(pieces) == 1:
        return _whole(reason, *notes)
    takes = {piece.name: partial(build, piece=piece) for piece in pieces}
    return Cut(takes, notes, {piece.name: piece.tied for piece in pieces})


def _inside(name: str, make: Callable[[], nn.Module], shape: ExampleShape, dtype: torch.dtype) -> Cut:
    """Cut the one child that does all that a module does."""
    found = cut(lambda: make().get_submodule(name), shape, dtype)
    if len(found.takes) == 1:
        return Cut({layer_name((name,)): partial(_children, (name,))}, found.notes)
    takes = {layer: partial(_of_child, name, take) for layer, take in found.takes.items()}
    return Cut(takes, found.notes, found.tied)


def _of_child(name: str, take: Take, module: nn.Module) -> nn.Module:
    return take(module.get_submodule(name))


def _said(error: BaseException) -> str:
    """Return what torch found, and in which line of the user's code."""
    text = " ".join(str(error).split())
    if "specialized it to be a constant" in text:  # torch says it at length
        text = "the forward pass is for one number of examples only, and stages take parts of a microbatch"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(Path(frame.filename))]
    where = f" ({frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`)" if frames else ""
    return f"{text[:200]}{where}"


def _is_ours(file: Path) -> bool:
    return TORCH in file.parents or PACKAGE in file.parents or not file.is_file()


def _whole(reason: str, *notes: str) -> Cut:
    return Cut({WHOLE: lambda module: module}, (f"the model is one layer: {reason}", *notes))


def _children(names: tuple[str, ...], module: nn.Module) -> nn.Module:
    return _together({name: module.get_submodule(name) for name in names})


def _together(found: Mapping[str, nn.Module]) -> nn.Module:
    named = OrderedDict((name.replace(".", "_"), part) for name, part in found.items())
    return named.popitem()[1] if len(named) == 1 else nn.Sequential(named)


def _declared(module: nn.Module, example: torch.Tensor) -> Cut:
    found = _own_layers(module)
    said = f"{type(module).__name__}.{LAYERS}()"
    held = {id(tensor) for part in found.values() for tensor in (*part.parameters(), *part.buffers())}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) not in held:
            raise InputError(f"{said}: the weight {name!r} is in none of its {len(found)} layers", ("model",))
    x, before, writes = example, "the input", Writes(example)
    for name, part in found.items():
        try:
            y = writes.run(name, part, x)
        except OWN_CODE as error:
            raise InputError(
                f"{said}: layer {name!r} fails on what {before} gives, {tuple(x.shape)}: "
                f"{type(error).__name__}: {str(error)[:300]}",
                ("model",),
            ) from error
        if not isinstance(y, torch.Tensor):
            raise InputError(f"{said}: layer {name!r} returns a {type(y).__name__}; wanted one tensor", ("model",))
        x, before = y, repr(name)
    whole = module(example)
    if not isinstance(whole, torch.Tensor) or whole.shape != x.shape:
        shape = tuple(whole.shape) if isinstance(whole, torch.Tensor) else type(whole).__name__
        raise InputError(f"{said}: its layers, in order, give {tuple(x.shape)}; the module itself {shape}", ("model",))
    sharing: dict[int, set[str]] = {}
    for name, part in found.items():
        for parameter in part.parameters():
            sharing.setdefault(id(parameter), set()).add(name)
    apart = {one for one, names in sharing.items() if len(names) == TWO}
    groups, notes = tie(found, writes.makers, apart)
    takes = {layer_name(group): partial(_declared_layer, group) for group in groups}
    return Cut(takes, notes, _ties(groups, found, apart))


def _ties(
    groups: Iterable[tuple[str, ...]], found: Mapping[str, nn.Module], apart: Collection[int]
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return each layer's weights that an earlier layer has, too."""
    first: dict[int, tuple[str, str]] = {}
    tied: dict[str, tuple[tuple[str, str], ...]] = {}
    for group in groups:
        layer = layer_name(group)
        for name, weight in _together({name: found[name] for name in group}).named_parameters():
            if id(weight) in apart:
                owner, used = first.setdefault(id(weight), (layer, name))
                if owner != layer:
                    tied[layer] = (*tied.get(layer, ()), (name, f"{owner}.{used}"))
    return tied


def _declared_layer(names: tuple[str, ...], module: nn.Module) -> nn.Module:
    found = _own_layers(module)
    return _together({name: found[name] for name in names})


def _own_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that a module says it has, by their names: a dict's keys, or what they are called in it."""
    given: Any = getattr(module, LAYERS)()
    said = f"{type(module).__name__}.{LAYERS}()"
    if isinstance(given, nn.ModuleDict | Mapping):
        named = [(str(name), part) for name, part in given.items()]
    elif isinstance(given, list | tuple | nn.ModuleList | nn.Sequential):
        own = {id(part): name for name, part in module.named_modules()}
        named = [(own.get(id(part)) or f"layer{number}", part) for number, part in enumerate(given)]
    else:
        raise InputError(f"{said} returns a {type(given).__name__}; wanted a list or a dict of modules", ("model",))
    found: dict[str, nn.Module] = {}
    for number, (name, part) in enumerate(named):
        if not isinstance(part, nn.Module):
            raise InputError(f"{said} has a {type(part).__name__} as layer {number}; wanted a module", ("model",))
        name = name.replace(".", "_")
        found[name if name not in found else f"{name}_{number}"] = part
    if not found:
        raise InputError(f"{said} returns no layers", ("model",))
    return found
