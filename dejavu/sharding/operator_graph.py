"""The operators of one layer, forward and backward, with the tensors between them.

Traced on fake tensors, without weights, as `dejavu.graphs` traces what a layer costs. Two tensors are one here if they
are the same elements of the same memory: autograd hands saved tensors out in wrappers of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dejavu.graphs.attention import AttendsOnGPU
from dejavu.graphs.layer_trace import flops_of, is_causal, is_view

INPUT, WEIGHT, CONSTANT, ARRIVING = "input", "weight", "constant", "arriving"


class Value(NamedTuple):
    """One result of a node."""

    node: int
    output: int = 0


class TensorType(NamedTuple):
    """A tensor without its elements; the dtype is torch's."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Node:
    """An operator, or a tensor that comes from outside.

    Attributes:
        call: the operator; None: a source, which `kind` names (`input`, `weight`, `constant`, `arriving`).
        name: of a weight, its name inside the layer.
        arguments: of the call, flat, with an `Argument` where a tensor stands.
        inputs: which tensors these are.
        flops: of the whole operator, in FLOP.
        is_view: it only aliases its input's memory.
        is_causal: as `dejavu.graphs.graph.Operator` has it.
    """

    kind: str
    direction: str
    outputs: tuple[TensorType, ...]
    call: Any = None
    name: str = ""
    inputs: tuple[Value, ...] = ()
    arguments: tuple[Any, ...] = ()
    structure: Any = None
    flops: float = 0.0
    is_view: bool = False
    is_causal: bool = False

    @property
    def is_source(self) -> bool:
        return self.call is None

    def arguments_with(self, tensors: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with these in place of its tensors, by their number."""
        flat = [tensors[one.number] if isinstance(one, Argument) else one for one in self.arguments]
        args, kwargs = tree_unflatten(flat, self.structure)
        return args, kwargs


class Argument(NamedTuple):
    """The place of an operator's tensor among its inputs."""

    number: int


@dataclass(frozen=True, eq=False)
class OperatorGraph:
    """A layer, or several that follow each other.

    Attributes:
        nodes: in the order of the calls, so each one's inputs come before it.
        weights: their nodes by name; `gradients`: where each one's gradient is made, if it is used.
        received, output: what crosses the two cuts; `arriving` and `leaving`: their gradients, if there are any.
        leaves: the layer's own output, from which the last layer's loss is made; `returns`: its gradient.
    """

    nodes: tuple[Node, ...]
    weights: dict[str, int]
    gradients: dict[str, Value]
    received: Value
    output: Value
    arriving: Value | None
    leaving: Value | None
    leaves: Value
    returns: Value | None

    def type_of(self, value: Value) -> TensorType:
        return self.nodes[value.node].outputs[value.output]

    def uses(self) -> Iterator[tuple[Value, int, int]]:
        """Return every use of a tensor: which, by which node, as which of its inputs."""
        for number, node in enumerate(self.nodes):
            for place, value in enumerate(node.inputs):
                yield value, number, place


Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def trace_operators(
    module: torch.nn.Module, inputs: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> OperatorGraph:
    """Trace a layer on fake inputs, under the fake tensor mode that is active; the last layer with the loss."""
    received = inputs.detach().requires_grad_(inputs.dtype.is_floating_point)
    recorder = _Recorder()
    start = recorder.source(INPUT, received)
    layer = module.layer if isinstance(module, AttendsOnGPU) else module  # whose names are the model's
    weights = {name: recorder.source(WEIGHT, one, name).node for name, one in layer.named_parameters()}
    for name, buffer in layer.named_buffers():
        recorder.source(CONSTANT, buffer, name)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), recorder:
        output = module(received)
        put_out = recorder.value(output)
        if loss:
            recorder.forget_views(output)
        end = loss(output) if loss else output
    recorder.direction = "backward"
    come_back = list[Value]()
    if loss and output.requires_grad:
        output.register_hook(lambda gradient: come_back.append(recorder.forget_views(gradient)))
    arriving = torch.ones_like(end)
    leaves = {name: one for name, one in layer.named_parameters() if one.requires_grad}
    wanted = [*([received] if received.requires_grad else []), *leaves.values()]
    arrives = recorder.source(ARRIVING, arriving)
    come_back += [] if loss else [arrives]
    found: tuple[torch.Tensor | None, ...] = ()
    if wanted and end.requires_grad:
        with recorder:
            found = torch.autograd.grad(end, wanted, arriving, allow_unused=True)
    made = dict(zip([*([""] if received.requires_grad else []), *leaves], found, strict=False))
    gradients = {name: recorder.value(one) for name, one in made.items() if one is not None}
    ends = recorder.value(end)
    return OperatorGraph(
        nodes=tuple(recorder.nodes),
        weights=weights,
        gradients={name: value for name, value in gradients.items() if name},
        received=start,
        output=ends,
        arriving=arrives if found else None,
        leaving=gradients.get(""),
        leaves=put_out,
        returns=come_back[0] if found and come_back else None,
    )


class _Recorder(TorchDispatchMode):
    """Records every operator, views included: a view decides which dimensions can be split."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.nodes: list[Node] = []
        self.direction = "forward"
        self._known: dict[Key, Value] = {}
        self._alive: list[torch.Tensor] = []  # or its memory's address could be another tensor's

    def source(self, kind: str, tensor: torch.Tensor, name: str = "") -> Value:
        self.nodes.append(Node(kind, self.direction, (_type(tensor),), name=name))
        return self._know(tensor, Value(len(self.nodes) - 1))

    def value(self, tensor: torch.Tensor) -> Value:
        """Return where a tensor comes from; one that no operator made is a constant."""
        found = self._known.get(_key(tensor))
        return self.source(CONSTANT, tensor) if found is None else found

    def forget_views(self, tensor: torch.Tensor) -> Value:
        """Return where a tensor comes from; another view of its memory is from now on one of this tensor."""
        value, own = self.value(tensor), _key(tensor)
        for key in [key for key in self._known if key[0] == own[0] and key != own]:
            del self._known[key]
        return value

    def _know(self, tensor: torch.Tensor, value: Value) -> Value:
        self._known[_key(tensor)] = value
        self._alive.append(tensor)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, structure = tree_flatten((args, kwargs))
        reads = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        as_read = {id(leaf): _key(leaf) for leaf in reads}  # `transpose_` changes how its input lies
        result = func(*args, **kwargs)
        writes = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not writes or (is_view(func) and len(writes) == 1 and _key(writes[0]) in self._known):
            return result  # nothing computed, or another wrapper of the same tensor
        inputs, arguments = list[Value](), list[Any]()
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                arguments.append(Argument(len(inputs)))
                known = self._known.get(as_read[id(leaf)])
                inputs.append(self.source(CONSTANT, leaf) if known is None else known)
            else:
                arguments.append(leaf)
        self.nodes.append(
            Node(
                kind=str(func.overloadpacket),
                direction=self.direction,
                outputs=tuple(map(_type, writes)),
                call=func,
                inputs=tuple(inputs),
                arguments=tuple(arguments),
                structure=structure,
                flops=flops_of(func, args, kwargs, result),
                is_view=is_view(func),
                is_causal=is_causal(func, args, kwargs),
            )
        )
        for number, tensor in enumerate(writes):
            self._know(tensor, Value(len(self.nodes) - 1, number))
        self._alive += reads
        return result


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def _key(tensor: torch.Tensor) -> Key:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
