"""What a device computes of each layer: a tensor-parallel device's part of it, of a replica's microbatch.

Shape suffixes: L = layers, D = device types.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import Cluster
from dejavu.cost.estimates import PASSES, CostError, CostTable, EstimateGrid, Floats, is_prediction
from dejavu.cost.kernels.sequence import OwnTokens, SliceOfTokens, gathers_output, resized
from dejavu.cost.kernels.sharding import layer_kernels, trained_bytes
from dejavu.cost.sources.predicted import Predicted, optimizer_kernels
from dejavu.cost.work import recomputed_share
from dejavu.graphs.graph import Graph, Layer
from dejavu.plans import StageConfiguration
from dejavu.profiles.kernel import Kernel

Bools = NDArray[np.bool_]


class PricedParts(NamedTuple):
    """A model at one microbatch size, captured and priced layer by layer on every device type."""

    graph: Graph
    table: CostTable


class Passes(NamedTuple):
    """Seconds of each layer, one microbatch of one replica, communication included; the optimizer's per step."""

    forward_L: Floats
    backward_L: Floats
    optimizer_L: Floats

    @classmethod
    def mean(cls, each: Sequence[Passes]) -> Passes:
        """Return the mean of what slices of a sequence take."""
        return cls(*(np.mean(rows, axis=0) for rows in zip(*each, strict=True)))


class LayerPart(NamedTuple):
    """The part of each layer that one device of a stage computes.

    Attributes:
        microbatch_size: the replica's.
        shards: into how many parts the replicas shard the optimizer's work.
        expert_parallel: of experts it has some whole.
        context_parallel: into how many parts devices split the sequence.
        sequence_parallel: devices that share weights split the sequence between them.
        tokens: the slice of a sequence; None: all of it.
    """

    device_type: str
    microbatch_size: int
    tensor_parallel: int = 1
    shards: int = 1
    expert_parallel: bool = False
    context_parallel: int = 1
    sequence_parallel: bool = False
    tokens: SliceOfTokens | None = None

    @classmethod
    def of(
        cls, configuration: StageConfiguration, microbatch_size: int, tokens: SliceOfTokens | None = None
    ) -> LayerPart:
        r = configuration.data_parallel
        return cls(
            configuration.device_type,
            microbatch_size // configuration.example_parts,
            configuration.tensor_parallel,
            r if configuration.zero_level >= 1 else 1,
            configuration.expert_parallel,
            configuration.context_parallel,
            configuration.sequence_parallel,
            tokens,
        )

    @property
    def whole(self) -> LayerPart:
        """Return the same microbatch on one device."""
        return LayerPart(self.device_type, self.microbatch_size)


class PartPrices:
    """Predicted seconds of parts of layers; every kernel is priced once."""

    def __init__(self, cluster: Cluster, at: Callable[[int], PricedParts], predicted: Predicted) -> None:
        self._cluster, self._at, self._predicted = cluster, at, predicted
        self._predictions: dict[LayerPart, Passes] = {}
        self._kernels: dict[LayerPart, dict[Hashable, tuple[list[Kernel], ...]]] = {}
        self._passes: dict[Hashable, tuple[list[Kernel], list[Kernel]]] = {}
        self._seconds: dict[str, dict[Kernel, float]] = {}

    def prediction(self, part: LayerPart) -> Passes:
        """Predict each layer as the sum of its kernels, or as their launches where these take longer."""
        if part not in self._predictions:
            self.ask([part])
            seconds, graph = self._seconds[part.device_type], self._at(part.microbatch_size).graph
            layers: dict[Hashable, Layer] = {work_of(layer): layer for layer in graph.layers}
            device = self._cluster.device_types[part.device_type]
            sums = {
                work: [
                    max(
                        sum(seconds[kernel] for kernel in kernels),
                        self._predicted.host_seconds(layers[work], way, kernels, device),
                    )
                    for way, kernels in zip(PASSES, passes, strict=True)
                ]
                for work, passes in self._kernels_of(part).items()
            }
            rows = np.array([sums[work_of(layer)] for layer in graph.layers], dtype=float)
            self._predictions[part] = Passes(*rows.T)
        return self._predictions[part]

    def products(self, part: LayerPart, direction: str) -> tuple[Floats, Floats]:
        """Predict each layer's products with weights, forward or backward: whole, and in as many parts as devices.

        Those that make gradients of weights are not computed in parts: tokens are what they sum over.
        """
        place, graph = ("forward", "backward").index(direction), self._at(part.microbatch_size).graph
        found = dict[Hashable, list[tuple[Kernel, Kernel]]]()
        for layer in graph.layers:
            num_tokens = -(-prod(layer.output_shape[:-1]) // part.context_parallel)
            found[work_of(layer)] = [
                (one, resized(one, {"m": -(-one.m // part.tensor_parallel)}) if one.m == num_tokens else one)
                for one in self._kernels_of(part)[work_of(layer)][place]
                if one.family == "matmul" and one.batch == 1
            ]
        seconds = self._priced(part.device_type, (one for pairs in found.values() for pair in pairs for one in pair))
        sums = {
            work: (
                sum(seconds[one] for one, _ in pairs),
                sum(seconds[few] * (part.tensor_parallel if few is not one else 1) for one, few in pairs),
            )
            for work, pairs in found.items()
        }
        whole_L, in_parts_L = np.array([sums[work_of(layer)] for layer in graph.layers], dtype=float).T
        return whole_L, in_parts_L

    def ask(self, parts: Iterable[LayerPart]) -> None:
        """Price all kernels of these parts that were not priced before, in one batch for each device type.

        Raises:
            CostError: only measurements of whole layers are known there.
        """
        wanted: dict[str, dict[Kernel, None]] = {}
        for part in parts:
            kernels = (k for passes in self._kernels_of(part).values() for few in passes for k in few)
            wanted.setdefault(part.device_type, {}).update(dict.fromkeys(kernels))
        for name, kernels_of_type in wanted.items():
            self._priced(name, kernels_of_type)

    def _priced(self, device_type: str, kernels: Iterable[Kernel]) -> dict[Kernel, float]:
        """Return the seconds of all kernels that were priced on a device type, these among them."""
        known = self._seconds.setdefault(device_type, {})
        asked = [kernel for kernel in dict.fromkeys(kernels) if kernel not in known]
        if asked:
            prices = self._predicted.prices(asked, self._cluster.device_types[device_type])
            known.update(zip(asked, prices.seconds_K.tolist(), strict=True))
        return known

    def _kernels_of(self, part: LayerPart) -> dict[Hashable, tuple[list[Kernel], ...]]:
        """Return the kernels of forward, backward and the optimizer, for each kind of layer."""
        if part not in self._kernels:
            graph, t = self._at(part.microbatch_size).graph, part.tensor_parallel
            device = self._cluster.device_types[part.device_type]
            if not device.peak_flops_per_second.get(graph.dtype):
                raise CostError(
                    f"parts of layers on {part.device_type!r} cannot be priced: no peak FLOP/s in {graph.dtype}; "
                    f"{device.wanted_peak(graph.dtype)}, or one device a stage only"
                )
            optimizer, last = self._predicted.optimizer, work_of(graph.layers[-1])
            self._kernels[part] = {
                work: (
                    *self._passes_of(layer, part, has_loss=work == last and gathers_output(layer)),
                    optimizer_kernels(trained_bytes(layer, t) / part.shards, optimizer, graph.dtype),
                )
                for work, layer in {work_of(layer): layer for layer in graph.layers}.items()
            }
        return self._kernels[part]

    def _passes_of(self, layer: Layer, part: LayerPart, *, has_loss: bool) -> tuple[list[Kernel], list[Kernel]]:
        """Return the kernels of a layer's forward and backward: the same for all device types and ZeRO levels."""
        own = part.tokens or OwnTokens(part.context_parallel, has_loss)
        t, how = part.tensor_parallel, {"expert_parallel": part.expert_parallel}
        how["sequence_parallel"] = part.sequence_parallel
        key = (part.microbatch_size, t, *how.values(), own, work_of(layer))
        if key not in self._passes:
            forward, backward = (
                list(layer_kernels(layer, way, t, tokens=own, **how)) for way in ("forward", "backward")
            )
            self._passes[key] = (forward, backward)
        return self._passes[key]


def work_of(layer: Layer) -> tuple[str, int, int, int, object, object]:
    """Return a key that is equal for layers whose parts cost the same."""
    return (
        layer.signature,
        layer.parameter_bytes,
        layer.frozen_bytes,
        layer.output_bytes,
        layer.tensor_parallel,
        layer.found,
    )


class StagePasses:
    """What a device of a stage computes of each layer, under any configuration; every number is computed once.

    Measurements are kept: a prediction only gives the factor by which a smaller microbatch or a part of a layer is
    faster.

    Args:
        at: a microbatch size -> the model captured and priced at it.
        predicted: prices parts of layers.
    """

    def __init__(self, cluster: Cluster, at: Callable[[int], PricedParts], predicted: Predicted) -> None:
        self._cluster = cluster
        self._at, self._priced = at, dict[int, PricedParts]()
        self._known_shares: dict[tuple[int, str], Floats] = {}
        self._known_trust: dict[tuple[int, str, int], Bools] = {}
        self._known_launches: dict[str, Floats] = {}
        self._predicted = predicted
        self._parts = PartPrices(cluster, self.at, predicted)

    def at(self, microbatch_size: int) -> PricedParts:
        """Return the model, captured and priced at a microbatch size."""
        if microbatch_size not in self._priced:
            self._priced[microbatch_size] = self._at(microbatch_size)
        return self._priced[microbatch_size]

    def seconds(self, configurations: Sequence[StageConfiguration], microbatch_size: int) -> list[float]:
        """Add up each one's passes over all layers, recomputing included and communication left out.

        Raises:
            CostError: parts of layers are needed on a device type for which only whole layers' measurements are known.
        """
        self.ask(configurations, microbatch_size)
        found = [self.passes(configuration, microbatch_size) for configuration in configurations]
        return [
            float((one.forward_L + one.backward_L + self.recomputed(configuration, microbatch_size)).sum())
            for configuration, one in zip(configurations, found, strict=True)
        ]

    def slice_seconds(self, configuration: StageConfiguration, microbatch_size: int, num_units: int) -> Floats:
        """Add up the passes of every slice of a sequence over all layers, recomputing and communication left out.

        Returns:
            (U, U): [j − 1, i]: a slice of j of U equal units after a context of i; 0 where i + j > U.
        """
        places = {(j, i): SliceOfTokens(i, i + j, num_units) for j in range(1, num_units + 1) for i in range(num_units)}
        inside = {place: one for place, one in places.items() if one.stop <= num_units}
        self.ask([configuration], microbatch_size, list(inside.values()))
        found = np.zeros((num_units, num_units))
        for (j, i), one in inside.items():
            passes = self.passes(configuration, microbatch_size, one)
            found[j - 1, i] = float((passes.forward_L + passes.backward_L).sum())
        return found

    def ask(
        self, configurations: Sequence[StageConfiguration], microbatch_size: int, slices: Sequence[SliceOfTokens] = ()
    ) -> None:
        """Price the kernels of all parts of layers in one batch."""
        parts = {
            LayerPart.of(configuration, microbatch_size, own)
            for configuration in configurations
            for own in (None, *slices)
        }
        self._parts.ask(one for part in parts if part != part.whole for one in (part, part.whole))

    def products(
        self, configuration: StageConfiguration, microbatch_size: int, direction: str
    ) -> tuple[Floats, Floats]:
        """Predict each layer's products with weights as `PartPrices.products`."""
        return self._parts.products(LayerPart.of(configuration, microbatch_size), direction)

    def passes(
        self, configuration: StageConfiguration, microbatch_size: int, tokens: SliceOfTokens | None = None
    ) -> Passes:
        """Price computation on the devices: the table's number times the predicted factor of a part of it.

        Of an optimizer that the node's processors carry out these are its launches (`offload.updates` has the rest).

        Args:
            tokens: the slice of a sequence; None: all of it.
        """
        found = self._passes(configuration, microbatch_size, tokens)
        if configuration.offload.optimizer:
            return found._replace(optimizer_L=self._launching_updates(configuration.device_type))
        return found

    def recomputed(self, configuration: StageConfiguration, microbatch_size: int) -> Floats:
        """Price what activation checkpointing computes again of each layer, communication left out."""
        forward_L = self.passes(configuration, microbatch_size).forward_L
        if not configuration.recompute:
            return 0.0 * forward_L
        graph = self.at(microbatch_size // configuration.example_parts).graph
        device = self._cluster.device_types[configuration.device_type]
        key = (microbatch_size // configuration.example_parts, device.name)
        if key not in self._known_shares:
            kinds, kind_L = graph.kinds
            self._known_shares[key] = np.array([recomputed_share(layer, device) for layer in kinds])[kind_L]
        return self._known_shares[key] * forward_L

    def _launching_updates(self, device_type: str) -> Floats:
        """Price what a rank's own Python takes for each layer's weights in the optimizer's step, wherever they are."""
        if device_type not in self._known_launches:
            device, graph = self._cluster.device_types[device_type], next(iter(self._priced.values())).graph
            kinds, kind_L = graph.kinds
            seconds = [self._predicted.host_seconds(layer, "optimizer", (), device) for layer in kinds]
            self._known_launches[device_type] = np.array(seconds)[kind_L]
        return self._known_launches[device_type]

    def _passes(self, configuration: StageConfiguration, microbatch_size: int, tokens: SliceOfTokens | None) -> Passes:
        part = LayerPart.of(configuration, microbatch_size, tokens)
        table = self._column_of(configuration.device_type, part.microbatch_size)
        if configuration.example_parts > 1:
            table = self._consistent(configuration.device_type, microbatch_size, part.microbatch_size, table)
        if part == part.whole:
            return table
        few, all_ = self._parts.prediction(part), self._parts.prediction(part.whole)
        found = Passes(*(known * ratio(one, every) for known, one, every in zip(table, few, all_, strict=True)))
        if tokens is None:
            return found
        return found._replace(optimizer_L=self._passes(configuration, microbatch_size, None).optimizer_L)

    def _consistent(self, device_type: str, microbatch_size: int, own: int, table: Passes) -> Passes:
        """Use measured × predicted ratio where the whole microbatch was measured and a replica's only predicted."""
        large, small = self.at(microbatch_size), self.at(own)
        column = small.table.device_types.index(device_type)
        found = []
        for k, name in enumerate(Passes._fields):
            grids = [priced.table.grids[name.removesuffix("_L")] for priced in (large, small)]
            trust = [self._trusted(size, name, column) for size in (microbatch_size, own)]
            scaled = trust[0] & ~trust[1]
            seconds = table[k]
            if scaled.any():
                many, few = (self._parts.prediction(LayerPart(device_type, size))[k] for size in (microbatch_size, own))
                seconds = np.where(scaled, grids[0].seconds_LD[:, column] * ratio(few, many), seconds)
            found.append(seconds)
        return Passes(*found)

    def _trusted(self, microbatch_size: int, name: str, column: int) -> Bools:
        """Return which layers' numbers are not predictions; asked for every configuration of a type."""
        key = (microbatch_size, name, column)
        if key not in self._known_trust:
            grid: EstimateGrid = self.at(microbatch_size).table.grids[name.removesuffix("_L")]
            self._known_trust[key] = np.array([not is_prediction(str(s)) for s in grid.source_LD[:, column]])
        return self._known_trust[key]

    def _column_of(self, device_type: str, microbatch_size: int) -> Passes:
        table = self.at(microbatch_size).table
        column = table.device_types.index(device_type)
        grids: tuple[EstimateGrid, ...] = (table.forward, table.backward, table.optimizer)
        return Passes(*(grid.seconds_LD[:, column] for grid in grids))


def ratio(part_L: Floats, whole_L: Floats) -> Floats:
    """Divide; 1 where a layer does nothing in that pass."""
    return np.where(whole_L > 0, part_L / np.where(whole_L > 0, whole_L, 1.0), 1.0)
