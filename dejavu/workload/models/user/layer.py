"""A layer that runs a part of a traced module, with the module's own weights under the module's own names."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from dejavu.workload.models.user.traced import Piece

# Where an operator is told that it is in training: the number of the argument, and its value in evaluation.
_TRAINS: dict[str, tuple[int, Any]] = {
    "aten::dropout": (2, False),
    "aten::feature_dropout": (2, False),
    "aten::alpha_dropout": (2, False),
    "aten::batch_norm": (5, False),
    "aten::instance_norm": (5, True),
    "aten::scaled_dot_product_attention": (4, 0.0),
}


class TracedLayer(fx.GraphModule):
    """A layer's graph over its weights; `eval()` and `to(device)` do what they do to the module that it is from."""

    def train(self, mode: bool = True) -> TracedLayer:
        """Let dropout and batch norms train or not."""
        super().train(mode)
        for node in self._operators():
            schema = getattr(node.target, "_schema", None)
            if schema is None or schema.name not in _TRAINS:
                continue
            number, value = _TRAINS[schema.name]
            name = schema.arguments[number].name
            if len(node.args) > number:
                trained = node.meta.setdefault("trained", node.args[number])
                node.update_arg(number, trained if mode else value)
            elif name in node.kwargs:
                trained = node.meta.setdefault("trained", node.kwargs[name])
                node.update_kwarg(name, trained if mode else value)
        self._changed()
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TracedLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next((one.device for one in (*self.parameters(), *self.buffers())), None)
        if device is not None:  # where masks and tables are made, too
            for node in self._operators():
                if isinstance(node.kwargs.get("device"), torch.device):
                    node.update_kwarg("device", device)
            self._changed()
        return self

    def _graph_modules(self) -> list[fx.GraphModule]:
        """List itself and the graphs that it calls, as those of blocks without gradients."""
        return [part for part in self.modules() if isinstance(part, fx.GraphModule)]

    def _operators(self) -> Iterator[fx.Node]:
        for part in self._graph_modules():
            yield from part.graph.nodes

    def _changed(self) -> None:
        for part in self._graph_modules():
            part.recompile()


def build(module: nn.Module, piece: Piece) -> TracedLayer:
    """Make a layer of a module that its factory made."""
    tree = nn.Module()
    names = set(piece.tensors)
    for name in piece.tensors:
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        place = _place(tree, module, path, names)
        if place is not owner:
            _put(place, owner, own)
    for name, value in piece.constants.items():
        if isinstance(value, torch.Tensor):
            tree.register_buffer(name, value, persistent=False)
        else:
            tree.add_module(name, copy.deepcopy(value))
    layer = TracedLayer(tree, copy.deepcopy(piece.graph), "TracedLayer")
    layer._modules.update(tree._modules)
    layer._non_persistent_buffers_set |= tree._non_persistent_buffers_set
    for name, parameter in tree._parameters.items():
        layer.register_parameter(name, parameter)
    return layer


def _place(tree: nn.Module, module: nn.Module, path: str, names: set[str]) -> nn.Module:
    """Return the module at a path of the tree: the real one where it has no weights but the layer's, else an empty one.

    Real ones tell what a weight is: an embedding is drawn otherwise than a matrix.
    """
    if not path:
        return tree
    above, _, last = path.rpartition(".")
    parent = _place(tree, module, above, names)
    if last not in parent._modules:
        real = module.get_submodule(path)
        own = [name for name, _ in (*real.named_parameters(recurse=False), *real.named_buffers(recurse=False))]
        is_whole = not real._modules and all(f"{path}.{name}" in names for name in own)
        parent.add_module(last, real if is_whole else nn.Module())
    found = parent._modules[last]
    assert found is not None
    return found


def _put(place: nn.Module, owner: nn.Module, name: str) -> None:
    if name in owner._parameters:
        place.register_parameter(name, owner._parameters[name])
    elif name in owner._buffers:
        place.register_buffer(name, owner._buffers[name], persistent=name not in owner._non_persistent_buffers_set)
    else:
        place.register_buffer(name, operator.attrgetter(name)(owner), persistent=False)
