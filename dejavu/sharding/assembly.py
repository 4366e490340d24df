"""From operators to the choice problem: for each operator its splits over a mesh, priced; for each tensor its moves.

Shape suffixes: K = options of a node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from dejavu.graphs.dtensor import REPLICATED
from dejavu.graphs.graph import Operator
from dejavu.graphs.kernels import kernel_of
from dejavu.profiles.kernel import Kernel
from dejavu.sharding.operator_graph import WEIGHT, Node, OperatorGraph, TensorType, Value
from dejavu.sharding.problem import ChoiceProblem, Floats, Pair
from dejavu.sharding.solvers.repeated import Block
from dejavu.sharding.strategies import Strategy, placements_of, strategies_of

Placement = tuple[int, ...]  # on each dimension of the mesh
Moves = Callable[[str, int, float], float]  # (collective, mesh dimension, bytes of the whole tensor there) -> seconds
KernelSeconds = Callable[[Sequence[Kernel]], Floats]


class Option(NamedTuple):
    """One way to run a node, or to hold a source: its inputs' and outputs' placements."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True)
class ShardingPrices:
    """What work and moves cost on the devices of a mesh.

    Attributes:
        mesh: the number of devices on each dimension, such as (4, 8): 4 nodes of 8.
        kernels: kernels -> their seconds on a device.
        moves: what a collective takes along a dimension of the mesh.
        passes_in_a_step: gradients of weights are reduced once in so many.
        bytes_for_each: of a weight's byte, what is held besides it (itself, its gradient, the optimizer's state).
    """

    mesh: tuple[int, ...]
    kernels: KernelSeconds
    moves: Moves
    passes_in_a_step: int = 1
    bytes_for_each: float = 4.0


class Flow(NamedTuple):
    """A tensor's way between two of the problem's nodes: as which of their tensors, counted from 0.

    Attributes:
        place: which input of the user; None: what it holds.
    """

    maker: int
    output: int
    user: int
    place: int | None


@dataclass
class Sharded:
    """A problem with what its nodes and options stand for.

    Attributes:
        options: of each of the problem's nodes.
        of_node: (layer, node of its graph) -> the problem's node.
        cuts: for each cut of the layers, the nodes of what crosses it and of its gradient; None: there is none.
        blocks: the nodes of each layer.
        flows: every tensor that an edge stands for.
    """

    problem: ChoiceProblem
    options: list[tuple[Option, ...]]
    of_node: dict[tuple[int, int], int]
    cuts: list[tuple[int, int | None]] = field(default_factory=list)
    blocks: tuple[Block, ...] = ()
    flows: tuple[Flow, ...] = ()


def assemble(layers: Sequence[OperatorGraph], prices: ShardingPrices) -> Sharded:
    """Pose the choice of shardings for layers that follow each other."""
    return _Assembly(prices).of(layers)


class _Assembly:
    def __init__(self, prices: ShardingPrices) -> None:
        self._prices = prices
        self._options: list[tuple[Option, ...]] = []
        self._work: list[list[Kernel | None]] = []
        self._bytes: list[Floats] = []
        self._edges: dict[Pair, Floats] = {}
        self._of_node: dict[tuple[int, int], int] = {}
        self._known: dict[object, tuple[tuple[Option, ...], list[Kernel | None]]] = {}
        self._tables: dict[object, Floats] = {}
        self._flows: list[Flow] = []

    def of(self, layers: Sequence[OperatorGraph]) -> Sharded:
        cuts = [
            (
                self._add(self._places(layers[0].type_of(layers[0].received))),
                self._gradient(layers[0].leaving, layers[0]),
            )
        ]
        for layer in layers:
            cuts.append((self._add(self._places(layer.type_of(layer.output))), self._gradient(layer.arriving, layer)))
        kinds: dict[int, int] = {}
        blocks = list[Block]()
        ends = [tuple(node for node in cut if node is not None) for cut in cuts]
        for number, layer in enumerate(layers):
            first = len(self._options)
            self._layer(number, layer, cuts[number], cuts[number + 1])
            kind = kinds.setdefault(id(layer), len(kinds))
            blocks.append(Block(kind, ends[number], ends[number + 1], tuple(range(first, len(self._options)))))
        seconds = self._seconds()
        problem = ChoiceProblem(tuple(seconds), self._edges, tuple(self._bytes))
        return Sharded(problem, self._options, self._of_node, cuts, tuple(blocks), tuple(self._flows))

    def _gradient(self, value: Value | None, layer: OperatorGraph) -> int | None:
        return None if value is None else self._add(self._places(layer.type_of(value)))

    def _layer(
        self, number: int, layer: OperatorGraph, before: tuple[int, int | None], after: tuple[int, int | None]
    ) -> None:
        given = {layer.received.node: before[0]}
        if layer.arriving is not None and after[1] is not None:
            given[layer.arriving.node] = after[1]
        kept = kept_values(layer)
        for k, node in enumerate(layer.nodes):
            self._of_node[number, k] = given[k] if k in given else self._node(layer, k, node, kept)
        for value, user, place in layer.uses():
            self._edge(number, layer, value, self._of_node[number, user], place)
        self._edge(number, layer, layer.output, after[0], None)
        if layer.leaving is not None and before[1] is not None:
            self._edge(number, layer, layer.leaving, before[1], None)
        for name, value in layer.gradients.items():
            at = self._of_node[number, layer.weights[name]]
            self._edge(number, layer, value, at, None, 1.0 / self._prices.passes_in_a_step)

    def _node(self, layer: OperatorGraph, k: int, node: Node, kept: set[Value]) -> int:
        if node.is_source:
            options = self._places(node.outputs[0])
            held = node.outputs[0].size_bytes * (self._prices.bytes_for_each if node.kind == WEIGHT else 0.0)
            return self._add(options, [None] * len(options), [held / self._parts(one.outputs[0]) for one in options])
        inputs = tuple(layer.type_of(value) for value in node.inputs)
        fixed = tuple(str(one) for one in node.arguments)
        key = (node.kind, node.direction, inputs, node.outputs, fixed)
        if key not in self._known:
            options = tuple(_options(node, inputs, self._prices.mesh))
            self._known[key] = options, [kernel_on(node, inputs, one, self._prices.mesh) for one in options]
        options, kernels = self._known[key]
        sizes = [(o, tensor.size_bytes) for o, tensor in enumerate(node.outputs) if Value(k, o) in kept]
        held_K = [sum(size / self._parts(one.outputs[o]) for o, size in sizes) for one in options]
        return self._add(options, kernels, held_K)

    def _places(self, tensor: TensorType) -> tuple[Option, ...]:
        found = list[Placement]()

        def extend(placement: Placement, shape: tuple[int, ...]) -> None:
            if len(placement) == len(self._prices.mesh):
                found.append(placement)
                return
            size = self._prices.mesh[len(placement)]
            for one in placements_of(TensorType(shape, tensor.dtype), size):
                extend((*placement, one), _local(shape, one, size))

        extend((), tensor.shape)
        return tuple(Option((), (one,)) for one in found)

    def _add(
        self,
        options: tuple[Option, ...],
        work: Sequence[Kernel | None] | None = None,
        held_K: Sequence[float] | None = None,
    ) -> int:
        self._options.append(options)
        self._work.append(list(work) if work is not None else [None] * len(options))
        self._bytes.append(np.array(held_K) if held_K is not None else np.zeros(len(options)))
        return len(self._options) - 1

    def _parts(self, placement: Placement) -> int:
        return prod(size for size, one in zip(self._prices.mesh, placement, strict=True) if one >= 0)

    def _seconds(self) -> list[Floats]:
        kernels = list(dict.fromkeys(one for some in self._work for one in some if one is not None))
        known = dict(zip(kernels, self._prices.kernels(kernels).tolist(), strict=True)) if kernels else {}
        return [np.array([0.0 if one is None else known[one] for one in some]) for some in self._work]

    def _edge(
        self, number: int, layer: OperatorGraph, value: Value, to: int, place: int | None, factor: float = 1.0
    ) -> None:
        """Add what moving a tensor costs; `place`: as which input of the other node, None: as what it holds."""
        at = self._of_node[number, value.node]
        self._flows.append(Flow(at, value.output, to, place))
        from_ = [one.outputs[value.output] for one in self._options[at]]
        wanted = [one.outputs[0] if place is None else one.inputs[place] for one in self._options[to]]
        table = factor * self._moves(layer.type_of(value), from_, wanted)
        pair = (min(at, to), max(at, to))
        table = table if at < to else table.T
        self._edges[pair] = self._edges[pair] + table if pair in self._edges else table

    def _moves(self, tensor: TensorType, from_: Iterable[Placement], wanted: Iterable[Placement]) -> Floats:
        key = (tensor, tuple(from_), tuple(wanted))
        if key not in self._tables:
            self._tables[key] = np.array([[self._move(tensor, a, b) for b in key[2]] for a in key[1]])
        return self._tables[key]

    def _move(self, tensor: TensorType, a: Placement, b: Placement) -> float:
        """Price one tensor's way from one placement to another, one mesh dimension after the other."""
        total, now = 0.0, list(a)
        for dim, (one, other) in enumerate(zip(a, b, strict=True)):
            if one == other:
                continue
            others = prod(size for k, size in enumerate(self._prices.mesh) if k != dim and now[k] >= 0)
            total += self._step(one, other, dim, tensor.size_bytes / others)
            now[dim] = other
        return total

    def _step(self, one: int, other: int, dim: int, size_bytes: float) -> float:
        if other < REPLICATED:  # what is whole is one device's part of a sum, or a mean; what is split is neither
            return 0.0 if one == REPLICATED else np.inf
        name = collective_of(one, other)
        return 0.0 if name is None else self._prices.moves(name, dim, size_bytes)


def collective_of(one: int, other: int) -> str | None:
    """Return what moves a tensor between two placements, the second whole or split; None: each keeps its part."""
    if one < REPLICATED:
        return "all_reduce" if other == REPLICATED else "reduce_scatter"
    if one == REPLICATED:
        return None
    return "all_gather" if other == REPLICATED else "all_to_all"


def kernel_on(node: Node, inputs: Sequence[TensorType], option: Option, mesh: tuple[int, ...]) -> Kernel | None:
    """Return the kernel that one device of the mesh runs; None: none."""
    if node.is_view:
        return None
    given = [local_type(tensor, one, mesh) for tensor, one in zip(inputs, option.inputs, strict=True)]
    made = [local_type(tensor, one, mesh) for tensor, one in zip(node.outputs, option.outputs, strict=True)]
    dims = zip(*option.inputs, *option.outputs, strict=True) if option.inputs else zip(*option.outputs, strict=True)
    parts = prod(size for size, ones in zip(mesh, dims, strict=True) if any(one >= 0 for one in ones))
    return kernel_of(
        Operator(
            kind=node.kind,
            direction=node.direction,
            input_shapes=tuple(tensor.shape for tensor in given),
            output_shapes=tuple(tensor.shape for tensor in made),
            dtype=str(node.outputs[0].dtype).removeprefix("torch."),
            flops=node.flops / parts,
            read_bytes=sum(tensor.size_bytes for tensor in given),
            written_bytes=sum(tensor.size_bytes for tensor in made),
            parameter_bytes=0,
            is_causal=node.is_causal,
        )
    )


def _options(node: Node, inputs: tuple[TensorType, ...], mesh: tuple[int, ...]) -> Iterable[Option]:
    """Combine the ways of each mesh dimension, each for what the dimensions before leave."""

    def extend(
        chosen: tuple[Strategy, ...], given: tuple[TensorType, ...], made: tuple[TensorType, ...]
    ) -> Iterable[Option]:
        if len(chosen) == len(mesh):
            yield Option(
                tuple(tuple(one.inputs[k] for one in chosen) for k in range(len(inputs))),
                tuple(tuple(one.outputs[k] for one in chosen) for k in range(len(node.outputs))),
            )
            return
        size = mesh[len(chosen)]
        for one in strategies_of(node, inputs, size):
            if not _divide(one, given, made, size):
                continue
            less = [
                tuple(TensorType(_local(t.shape, p, size), t.dtype) for t, p in zip(some, places, strict=True))
                for some, places in ((given, one.inputs), (made, one.outputs))
            ]
            yield from extend((*chosen, one), less[0], less[1])

    return extend((), inputs, node.outputs)


def _divide(one: Strategy, given: tuple[TensorType, ...], made: tuple[TensorType, ...], size: int) -> bool:
    pairs = itertools.chain(zip(one.inputs, given, strict=True), zip(one.outputs, made, strict=True))
    return all(placement < 0 or tensor.shape[placement] % size == 0 for placement, tensor in pairs)


def _local(shape: tuple[int, ...], placement: int, size: int) -> tuple[int, ...]:
    return tuple(length // size if k == placement else length for k, length in enumerate(shape))


def local_type(tensor: TensorType, placement: Placement, mesh: tuple[int, ...]) -> TensorType:
    shape = tensor.shape
    for one, size in zip(placement, mesh, strict=True):
        shape = _local(shape, one, size)
    return TensorType(shape, tensor.dtype)


def kept_values(layer: OperatorGraph) -> set[Value]:
    """Return what is held from forward to backward: results of forward operators that backward ones use."""
    return {
        value
        for value, user, _ in layer.uses()
        if layer.nodes[user].direction == "backward"
        and layer.nodes[value.node].direction == "forward"
        and not layer.nodes[value.node].is_source
    }
