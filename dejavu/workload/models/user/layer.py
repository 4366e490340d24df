"""A layer that runs a part of a traced module, with the module's own weights under the module's own names."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from dejavu.workload.models.user.traced import Piece


class TracedLayer(fx.GraphModule):
    """A layer's graph over its weights; `eval()` and `to(device)` do what they do to the module that it is from.

    Whether it is in training is read from `training` whenever it runs, as modules do.

    Attributes:
        evaluation: its graph in evaluation, which reads this layer's tensors and has none.
        as_made: the buffers that the module has as other tensors, or makes in its forward pass: they stay in their type
            of numbers, as they do in the module, where this layer is converted to another.
    """

    evaluation: fx.GraphModule
    as_made: tuple[str, ...]

    def recompile(self) -> Any:
        """Make both ways from the graphs; torch calls it when the one of training is set."""
        code, kind = super().recompile(), type(self)
        in_training = kind.forward

        def forward(layer: TracedLayer, x: torch.Tensor) -> torch.Tensor:
            way = in_training if layer.training else type(layer.evaluation).forward
            return way(layer, x)  # type: ignore[no-any-return]

        kind.forward = forward
        return code

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TracedLayer:
        made = {name: self.get_buffer(name) for name in self.as_made}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in made.items():
            path, _, own = name.rpartition(".")
            self.get_submodule(path)._buffers[own] = tensor.to(self.get_buffer(name).device)
        device = next((one.device for one in (*self.parameters(), *self.buffers())), None)
        if device is not None:  # where masks and tables are made, too
            for node in self._operators():
                if isinstance(node.kwargs.get("device"), torch.device):
                    node.update_kwarg("device", device)
            self._changed()
        return self

    def _graph_modules(self) -> list[fx.GraphModule]:
        """List both of its graphs and those that they call, as of blocks without gradients."""
        return [self.evaluation, *(part for part in self.modules() if isinstance(part, fx.GraphModule))]

    def _operators(self) -> Iterator[fx.Node]:
        for part in self._graph_modules():
            yield from part.graph.nodes

    def _changed(self) -> None:
        for part in self._graph_modules():
            part.recompile()


def build(module: nn.Module, piece: Piece) -> TracedLayer:
    """Make a layer of a module that its factory made."""
    tree = nn.Module()
    names, as_made = set(piece.tensors), list[str]()
    for name in piece.tensors:
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        place = _place(tree, module, path, names)
        if place is not owner:
            _put(place, owner, own)
            if own not in owner._parameters and own not in owner._buffers:
                as_made.append(name)
    for name, value in piece.constants.items():
        if isinstance(value, torch.Tensor):
            tree.register_buffer(name, value, persistent=False)
            as_made.append(name)
        else:
            tree.add_module(name, copy.deepcopy(value))  # as a block without gradients
    layer = TracedLayer(tree, copy.deepcopy(piece.graph), "TracedLayer")
    layer._modules.update(tree._modules)
    layer._non_persistent_buffers_set |= tree._non_persistent_buffers_set
    for name, parameter in tree._parameters.items():
        layer.register_parameter(name, parameter)
    for name, buffer in tree._buffers.items():
        layer._buffers[name] = buffer
    vars(layer)["as_made"] = tuple(as_made)
    vars(layer)["evaluation"] = evaluation = fx.GraphModule(tree, copy.deepcopy(piece.evaluation))
    for held in (evaluation._modules, evaluation._parameters, evaluation._buffers):
        held.clear()
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
