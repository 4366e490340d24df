"""Predictions for a part of each layer: a tensor-parallel device's, of a replica's microbatch.

Shape suffixes: L = layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from math import prod
from typing import NamedTuple

import numpy as np

from dejavu.cluster import Cluster
from dejavu.cost.estimates import PASSES, CostError, CostTable, Floats
from dejavu.cost.kernels.sequence import OwnTokens, SliceOfTokens, gathers_output, resized
from dejavu.cost.kernels.sharding import layer_kernels, weight_bytes
from dejavu.cost.sources.predicted import Predicted, optimizer_kernels
from dejavu.graphs.graph import Graph, Layer
from dejavu.plans import StageConfiguration
from dejavu.profiles.kernel import Kernel


class PricedParts(NamedTuple):
    """A model at one microbatch size, captured and priced layer by layer on every device type."""

    graph: Graph
    table: CostTable


class Passes(NamedTuple):
    """Seconds of each layer, one microbatch of one replica, communication included; the optimizer's per step."""

    forward_L: Floats
    backward_L: Floats
    optimizer_L: Floats


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
            if not self._cluster.device_types[part.device_type].peak_flops_per_second.get(graph.dtype):
                raise CostError(
                    f"parts of layers on {part.device_type!r} cannot be priced: its peak FLOP/s in {graph.dtype} is "
                    "not known; give it under `devices:` in the cluster file, or allow one device a stage only"
                )
            optimizer, last = self._predicted.optimizer, work_of(graph.layers[-1])
            self._kernels[part] = {
                work: (
                    *self._passes_of(layer, part, has_loss=work == last and gathers_output(layer)),
                    optimizer_kernels(weight_bytes(layer, t) / part.shards, optimizer, graph.dtype),
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


def work_of(layer: Layer) -> tuple[str, int, int, object, object]:
    """Return a key that is equal for layers whose parts cost the same."""
    return layer.signature, layer.parameter_bytes, layer.output_bytes, layer.tensor_parallel, layer.found
