"""Splits of layers that declare none, found and priced, so that searches may choose them.

Which weights are split is decided once, at the workload's own microbatch: the cheapest placement by `sharding.found`.
At other sizes the same split is followed through torch again, so its kernels and messages are those of that size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from dejavu.cluster.islands import Island
from dejavu.cluster.meshes import meshes
from dejavu.cost.kernels.sharding import layer_kernels
from dejavu.foundation.processes.homes import Homes
from dejavu.foundation.tracing import FakeMode, fake_tensors
from dejavu.graphs.capture import Form, loss_of, on_kind
from dejavu.graphs.graph import DTYPES, FoundSplit, Graph
from dejavu.graphs.layer_trace import built
from dejavu.planning.request import PlanRequest
from dejavu.planning.shardings.prices import prices_on
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.kernel import Kernel
from dejavu.sharding.assembly import ShardingPrices
from dejavu.sharding.found import find
from dejavu.sharding.operator_graph import OperatorGraph, trace_operators
from dejavu.sharding.problem import Floats, ShardingError
from dejavu.sharding.propagation import Carried, carried_out
from dejavu.workload.data import dataset_of
from dejavu.workload.models import LayerBuilder, layers_of, model_of
from dejavu.workload.models.ties import ties_of


class _Kind(NamedTuple):
    """What is equal for layers that are split alike.

    Their operators at the workload's own microbatch, and their weights up to numbers in names.
    """

    signature: str
    weights: tuple[tuple[str, tuple[int, ...]], ...]


class _Decision(NamedTuple):
    """Which weights are split, by their places, how sums are made, and whether the loss is; see `Found`."""

    weights: tuple[tuple[int, int], ...] = ()
    whole_sums: bool = False
    split_loss: bool = False


@dataclass(frozen=True)
class _Trace:
    """One layer at one microbatch size."""

    graph: OperatorGraph
    whole: Carried


class FoundSplits:
    """The splits of a request's layers, for every degree that a stage may have; each is searched once.

    Args:
        request: whose cluster, parallelism and workload say which degrees there are.
        graph_at: a microbatch size -> the model as captured, without splits.
    """

    def __init__(self, request: PlanRequest, database: ProfileDatabase, graph_at: Callable[[int], Graph]) -> None:
        self._request, self._database, self._graph_at = request, database, graph_at
        self._decisions: dict[tuple[_Kind, int], _Decision] = {}
        self._records: dict[tuple[_Kind, int], tuple[FoundSplit, ...]] = {}  # by microbatch size
        self._prices: dict[int, ShardingPrices] = {}
        self._byte_seconds: dict[int, float] = {}
        self._known_names: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self._traces: dict[int, _Trace] = {}  # by position, at the workload's own microbatch

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again when it is asked for: a flow keeps its choice on disk."""
        kept = {name: getattr(self, name) for name in ("_request", "_database", "_graph_at", "_decisions")}
        made = ("_records", "_prices", "_byte_seconds", "_known_names", "_traces")
        return {**kept, **{name: {} for name in made}}

    def search(self, sizes: Sequence[int], num_homes: int) -> None:
        """Find the splits at all these microbatch sizes side by side, in so many forked processes."""
        own = self._graph_at(self._own_size)
        kinds: dict[_Kind, int] = {}
        for position, layer in enumerate(own.layers):
            if layer.parameter_bytes and not layer.keeps_its_split:
                kinds.setdefault(self._kind(position)[0], position)
        for degree in self._degrees(own):
            self._seconds_per_byte(degree)  # a fork has it then, and the kernels' prices
        for size in sizes:
            self._graph_at(size)
        with Homes([self] * num_homes, num_homes, forks=True) as homes:
            asked = [(kind, position, degree) for kind, position in kinds.items() for degree in self._degrees(own)]
            found = homes.each([(k % num_homes, one) for k, one in enumerate(asked)], FoundSplits._decided)
            self._decisions.update({(kind, degree): one for (kind, _, degree), one in zip(asked, found, strict=True)})
            at = [(kind, position, size, self._decisions) for size in sizes for kind, position in kinds.items()]
            records = homes.each([(k % num_homes, one) for k, one in enumerate(at)], FoundSplits._recorded_by)
            self._records.update({(kind, size): one for (kind, _, size, _), one in zip(at, records, strict=True)})

    def added(self, graph: Graph) -> Graph:
        """Return the graph with the splits of each layer that declares none.

        What a declaration costs is of no use where it does not say which weights are split: such a layer cannot be run
        so, and what was found takes its place.
        """
        if not self._degrees(graph):
            return graph
        layers = list(graph.layers)
        for position, layer in enumerate(layers):
            if layer.keeps_its_split:
                continue
            layers[position] = layer = replace(layer, tensor_parallel=None)
            if not layer.parameter_bytes:
                continue
            kind, names = self._kind(position)
            found = self._recorded(kind, position, graph.microbatch_size)
            layers[position] = replace(layer, found=found, weight_names=names)
        return replace(graph, layers=tuple(layers))

    @property
    def _own_size(self) -> int:
        return self._request.workload.microbatch_size

    def _degrees(self, graph: Graph) -> Mapping[int, str]:
        """Return the degrees that a stage may have, each with the type of device that it is searched for."""
        spread, cluster = self._request.spread, self._request.cluster
        declared = [one.most for layer in graph.layers if (one := layer.tensor_parallel) and one.weights is not None]
        found: dict[int, str] = {}
        for name in sorted(cluster.device_counts, key=lambda name: -cluster.device_counts[name]):
            for _, width in meshes(cluster, Island(name)):
                for degree in range(2, min(width, spread.max_tensor_parallel or width) + 1):
                    if width % degree == 0 and all(most % degree == 0 for most in declared):
                        found.setdefault(degree, name)
        return dict(sorted(found.items()))

    def _recorded_by(
        self, kind: _Kind, position: int, size: int, decisions: Mapping[tuple[_Kind, int], _Decision]
    ) -> tuple[FoundSplit, ...]:
        """Return the splits of a kind of layer at a microbatch size, as they were decided elsewhere."""
        self._decisions.update(decisions)
        return self._recorded(kind, position, size)

    def _recorded(self, kind: _Kind, position: int, size: int) -> tuple[FoundSplit, ...]:
        if (kind, size) not in self._records:
            self._records[kind, size] = self._found(kind, position, self._graph_at(size))
        return self._records[kind, size]

    def _found(self, kind: _Kind, position: int, graph: Graph) -> tuple[FoundSplit, ...]:
        found, traced = list[FoundSplit](), None
        for degree in self._degrees(graph):
            decision = self._decided(kind, position, degree)
            if not decision.weights:
                continue
            traced = traced or self._trace(position, graph)
            try:
                found.append(_record(traced, decision, degree))
            except ShardingError:  # a smaller microbatch does not divide
                continue
        return tuple(found)

    def _decided(self, kind: _Kind, position: int, degree: int) -> _Decision:
        """Return which weights are split; none: the layer stays whole."""
        key = kind, degree
        if key not in self._decisions:
            prices = self._prices_of(degree)
            try:
                traced = self._trace(position, self._graph_at(self._own_size)).graph
                found = find(
                    traced,
                    prices,
                    self._seconds_per_byte(degree),
                    self._tied.get(position, ()),
                    loss_by_class=position == len(self._builders) - 1 and self._has_loss_by_class,
                )
                places = {name: k for k, name in enumerate(traced.weights)}
                split = tuple((places[name], dim) for name, dim in found.weights)
                self._decisions[key] = _Decision(split, found.whole_sums, found.carried.split_loss)
            except ShardingError:
                self._decisions[key] = _Decision()
        return self._decisions[key]

    def _prices_of(self, degree: int) -> ShardingPrices:
        if degree not in self._prices:
            request = self._request
            name = self._degrees(self._graph_at(self._own_size))[degree]
            prices = prices_on(request.cluster, name, (degree,), request.workload, self._database)
            self._prices[degree] = replace(prices, kernels=_Remembered(prices.kernels))
        return self._prices[degree]

    def _seconds_per_byte(self, degree: int) -> float:
        """Price a byte: the whole model's pass takes so long for each byte that a device holds.

        A model of a hundredth of a device's memory is split by time alone; of one that needs several devices, what a
        weight occupies counts as much as what it computes.
        """
        if degree not in self._byte_seconds:
            graph = self._graph_at(self._own_size)
            device = self._request.cluster.device_types[self._degrees(graph)[degree]]
            ways = ("forward", "backward")
            kernels = [one for layer in graph.layers for way in ways for one in layer_kernels(layer, way)]
            seconds = float(self._prices_of(degree).kernels(kernels).sum())
            self._byte_seconds[degree] = seconds / device.memory_bytes
        return self._byte_seconds[degree]

    def _kind(self, position: int) -> tuple[_Kind, tuple[str, ...]]:
        weights = self._named(position)
        alike = tuple((re.sub(r"\d+", "#", name), shape) for name, shape in weights)
        own = self._graph_at(self._own_size).layers[position]
        return _Kind(own.signature, alike), tuple(name for name, _ in weights)

    @cached_property
    def _builders(self) -> tuple[LayerBuilder, ...]:
        return layers_of(self._request.workload)

    @cached_property
    def _has_loss_by_class(self) -> bool:
        return model_of(self._request.workload).has_loss_by_class

    def _named(self, position: int) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of a layer's weights."""
        if position not in self._known_names:
            with fake_tensors(self._mode):
                module = self._builders[position].build()
            named = [(name, tuple(weight.shape)) for name, weight in module.named_parameters()]
            self._known_names[position] = named
        return self._known_names[position]

    @cached_property
    def _tied(self) -> dict[int, list[str]]:
        """Weights that two layers have: they stay whole."""
        found: dict[int, list[str]] = {}
        for tie in ties_of(self._builders):
            for end in tie.ends:
                found.setdefault(end.position, []).append(end.weight)
        return found

    @cached_property
    def _mode(self) -> FakeMode:
        return FakeMode(allow_non_fake_inputs=False)

    def _trace(self, position: int, graph: Graph) -> _Trace:
        """Trace a layer at a graph's microbatch.

        Raises:
            ShardingError: torch cannot run it on distributed tensors.
        """
        if graph.microbatch_size != self._own_size:
            return self._traced(position, graph)
        if position not in self._traces:
            self._traces[position] = self._traced(position, graph)
        return self._traces[position]

    def _traced(self, position: int, graph: Graph) -> _Trace:
        workload, builders = self._request.workload, self._builders
        data, dtype, model = dataset_of(workload).shape, DTYPES[graph.dtype], model_of(workload)
        shape, given = (graph.microbatch_size, *data.input_shape), data.input_dtype
        if position:
            shape, given = graph.layers[position - 1].output_shape, dtype
        inputs = Form.contiguous(shape, dtype if given.is_floating_point else given)
        target = Form.contiguous((graph.microbatch_size, *data.target_shape), torch.int64)
        with fake_tensors(self._mode):
            loss = loss_of(model.loss, target.tensor()) if position == len(builders) - 1 else None
            module = built(on_kind(builders[position], graph.kind), dtype, workload.autocast)
            try:
                traced = trace_operators(module, inputs.tensor(), loss)
            except Exception as error:  # what a layer does with whole numbers, say
                raise ShardingError(f"layer {builders[position].name!r} cannot be traced: {error}") from error
        return _Trace(traced, carried_out(traced, {}, 1))


def _record(traced: _Trace, decision: _Decision, degree: int) -> FoundSplit:
    graph, whole = traced.graph, traced.whole
    names, split = list(graph.weights), dict(decision.weights)
    placed = {names[k]: dim for k, dim in decision.weights}
    carried = carried_out(graph, placed, degree, whole_sums=decision.whole_sums, loss_by_class=decision.split_loss)
    if carried.split_loss != decision.split_loss:
        raise ShardingError("the loss is split at another size of microbatches, and not at this one")
    sizes = [
        graph.nodes[node].outputs[0].size_bytes / (degree if k in split else 1)
        for k, node in enumerate(graph.weights.values())
    ]
    return FoundSplit(
        degree=degree,
        weights=decision.weights,
        whole_sums=decision.whole_sums,
        split_loss=carried.split_loss,
        kernels=carried.kernels,
        moves={way: tuple((move.name, move.size_bytes) for move in some) for way, some in carried.moves.items()},
        parameter_bytes=sum(sizes),
        largest_parameter_bytes=max(sizes),
        held_share=carried.held_bytes / whole.held_bytes if whole.held_bytes else 1.0,
        peak_share=carried.peak_bytes / whole.peak_bytes if whole.peak_bytes else 1.0,
    )


class _Remembered:
    """Seconds of kernels, each priced once."""

    def __init__(self, kernels: Callable[[Sequence[Kernel]], Floats]) -> None:
        self._price, self._known = kernels, dict[Kernel, float]()

    def __call__(self, kernels: Sequence[Kernel]) -> Floats:
        new = [one for one in dict.fromkeys(kernels) if one not in self._known]
        if new:
            self._known.update(zip(new, self._price(new).tolist(), strict=True))
        return np.array([self._known[one] for one in kernels])
