"""A layer that runs a part of a traced module, with the module's own weights under the module's own names."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from dejavu.workload.models.user.traced import Piece

# What operators call the argument by which they are told that they are in training.
_TRAINS = ("train", "training")
_NORMALIZES_BY = "use_input_stats"  # an instance norm's: always, where it keeps no statistics
_KEPT_MEAN = 3  # the number of its argument with the mean that it keeps, if it does
_COUNTER = "num_batches_tracked"  # of a norm that keeps statistics
_DROPS = "dropout_p"  # an attention's: nothing in evaluation


class TracedLayer(fx.GraphModule):
    """A layer's graph over its weights; `eval()` and `to(device)` do what they do to the module that it is from.

    Whether it is in training is read from `training` whenever it runs, as modules do.
    """

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
            tree.add_module(name, block := copy.deepcopy(value))  # as a block without gradients
            for part in (one for one in block.modules() if isinstance(one, fx.GraphModule)):
                _read_training(part.graph)
                part.recompile()
    graph = copy.deepcopy(piece.graph)
    _read_training(graph)
    layer = TracedLayer(tree, graph, "TracedLayer")
    layer._modules.update(tree._modules)
    layer._non_persistent_buffers_set |= tree._non_persistent_buffers_set
    for name, parameter in tree._parameters.items():
        layer.register_parameter(name, parameter)
    return layer


def _read_training(graph: fx.Graph) -> None:
    """Let a graph that was traced in training ask whether it is in training.

    What was in evaluation when it was traced, as a frozen norm, stays so. Norms count batches in training alone.
    """
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        for number, argument in enumerate(schema.arguments if schema is not None else ()):
            is_named = argument.name in node.kwargs
            found = node.kwargs.get(argument.name) if is_named else next(iter(node.args[number : number + 1]), None)
            if not _depends(node, argument.name, found):
                continue
            with graph.inserting_before(node):
                asked = graph.create_node("get_attr", "training")
                if argument.name == _DROPS:
                    asked = graph.call_function(operator.mul, (found, asked))
            if is_named:
                node.update_kwarg(argument.name, asked)
            else:
                node.update_arg(number, asked)


def _depends(node: fx.Node, name: str, found: Any) -> bool:
    """Return whether an operator's argument has this value only because it is in training."""
    if name == _NORMALIZES_BY:
        return found is True and len(node.args) > _KEPT_MEAN and node.args[_KEPT_MEAN] is not None
    if name == "other" and node.target is torch.ops.aten.add_.Tensor:
        counter = node.args[0]
        return isinstance(counter, fx.Node) and str(counter.target).rpartition(".")[2] == _COUNTER
    return found is True if name in _TRAINS else name == _DROPS and bool(found)


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
