"""What a captured model is: layers in order, each with its operators, its bytes, and its memory over time.

`dejavu.graphs.capture` makes them.

Shape suffixes: L1 = L + 1 cut positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dejavu.cluster.records import Kind
from dejavu.graphs.liveness import Footprint
from dejavu.profiles.kernel import Kernel
from dejavu.workload.models import TensorParallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Operator:
    """One operator on one microbatch.

    Attributes:
        kind: the ATen name, such as `aten.addmm`.
        direction: `forward` or `backward`.
        input_shapes, output_shapes: of its tensors, in order.
        flops: multiplications and additions, each counted; 0 where torch knows no formula (memory-bound operators).
        read_bytes, written_bytes: its tensors once, as if nothing were cached.
        parameter_bytes: of what it reads, the layer's weights.
        is_causal: it is attention in which each query sees the keys up to its own position; `flops` count all keys.
    """

    kind: str
    direction: str
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flops: float
    read_bytes: int
    written_bytes: int
    parameter_bytes: int = 0
    is_causal: bool = False


@dataclass(frozen=True, eq=False)
class FoundSplit:
    """How a layer's weights may be split over devices, found instead of declared, and what each device then does.

    Attributes:
        degree: the number of devices.
        weights: (the weight's place in the layer's `weight_names`, the dimension that it is split by).
        whole_sums: sums over the devices are made whole where they arise; see `sharding.propagation`.
        split_loss: of the last layer: the output is a device's own classes' scores, of which the loss is computed.
        kernels: a device's, by direction.
        moves: by direction, collectives among the devices: name, and bytes of the whole tensor.
        parameter_bytes: of the weights on one device; `largest_parameter_bytes`: of the largest.
        held_share, peak_share: of what the whole layer holds between the passes, and of its peak.
    """

    degree: int
    weights: tuple[tuple[int, int], ...]
    whole_sums: bool
    split_loss: bool
    kernels: Mapping[str, tuple[Kernel, ...]]
    moves: Mapping[str, tuple[tuple[str, float], ...]]
    parameter_bytes: float
    largest_parameter_bytes: float
    held_share: float
    peak_share: float


@dataclass(frozen=True)
class Layer:
    """A run of operators between two possible cuts, with its totals for one microbatch.

    Attributes:
        signature: the same for layers that do the same work on the same shapes.
        parameter_bytes: its weights.
        activation_bytes: kept from forward to backward.
        output_bytes: crosses a cut after this layer.
        footprint, recompute_footprint: its memory over time, without and with activation checkpointing.
        frozen_bytes: those of its weights that are not trained: without gradient, and without state of the optimizer.
        has_backward: it has a backward pass: there is something to train in it or before it.
        num_recomputed: how many of its forward operators activation checkpointing runs again: torch's stops where the
            last tensor that the backward pass asks for is there, so not a block's last product; None: all.
        tensor_parallel: how the model says that it may be sharded over devices; None: not at all.
        tied_bytes: those of its weights that another layer has, too, and whose gradients both exchange once a step.
        is_compiled: it runs as torch's compiler made it, which is measured apart. Its operators are those without.
        found: splits that were found where the model declares none, one for a degree.
        weight_names: of a layer with such splits, in the order of its module.
    """

    name: str
    signature: str
    operators: tuple[Operator, ...]
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int
    output_shape: tuple[int, ...]
    footprint: Footprint
    recompute_footprint: Footprint
    tensor_parallel: TensorParallel | None = None
    tied_bytes: int = 0
    is_compiled: bool = False
    found: tuple[FoundSplit, ...] = ()
    weight_names: tuple[str, ...] = ()
    num_recomputed: int | None = None
    frozen_bytes: int = 0
    has_backward: bool = True

    def found_split(self, degree: int) -> FoundSplit | None:
        """Return the split that was found for so many devices; None: the layer declares its own, or stays whole."""
        return next((one for one in self.found if one.degree == degree), None)

    @property
    def trained_bytes(self) -> int:
        return self.parameter_bytes - self.frozen_bytes

    @property
    def keeps_its_split(self) -> bool:
        """Whether no split is looked for: the layer says which of its weights are split, or it is compiled as it is."""
        return self.is_compiled or (self.tensor_parallel is not None and self.tensor_parallel.weights is not None)

    def compiled(self) -> Layer:
        """Return the same layer to be run compiled: other work, under a signature of its own."""
        return replace(self, signature=content_hash([self.signature, "compiled"]), is_compiled=True)

    @property
    def not_recomputed(self) -> tuple[Operator, ...]:
        """Return the forward operators that activation checkpointing does not run again."""
        forward = tuple(operator for operator in self.operators if operator.direction == "forward")
        return () if self.num_recomputed is None else forward[self.num_recomputed :]

    def flops(self, direction: str) -> float:
        return sum(operator.flops for operator in self.operators if operator.direction == direction)

    @cached_property
    def family(self) -> str:
        """A hash that is equal at all microbatch sizes: of its operators, and the shapes of single examples."""
        examples = [
            [shape[1:] for shape in operator.output_shapes if len(shape) > 2 and shape[0] == self.output_shape[0]]
            for operator in self.operators
            if operator.direction == "forward"
        ]
        kinds = [operator.kind for operator in self.operators]
        how = ["compiled"] if self.is_compiled else []
        return content_hash([kinds, examples, self.parameter_bytes, self.output_shape[1:], *how])


@dataclass(frozen=True)
class Graph:
    """A captured model: its layers in order, for one microbatch size and dtype.

    Attributes:
        notes: what a person should know of how the model was cut into layers.
        kind: of the devices whose kernels it has.
    """

    layers: tuple[Layer, ...]
    microbatch_size: int
    dtype: str
    notes: tuple[str, ...] = ()
    kind: Kind = "cpu"

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, ...], NDArray[np.int64]]:
        """One layer of each kind, and each layer's kind: those of one kind differ in nothing but their names.

        Layers that were traced once share what they keep, so it is the same object; comparing it would take longer
        than what this saves.
        """
        kinds: dict[object, tuple[int, Layer]] = {}
        kind_L = []
        for layer in self.layers:
            shared = (id(layer.operators), id(layer.footprint), id(layer.recompute_footprint))
            sizes = (
                layer.parameter_bytes,
                layer.activation_bytes,
                layer.output_bytes,
                layer.tied_bytes,
                layer.frozen_bytes,
            )
            same = (*shared, *sizes, layer.signature, layer.output_shape, layer.tensor_parallel, layer.found)
            kind_L.append(kinds.setdefault(same, (len(kinds), layer))[0])
        return tuple(layer for _, layer in kinds.values()), np.array(kind_L, dtype=np.int64)

    @property
    def cut_bytes_L1(self) -> NDArray[np.float64]:
        """What crosses a cut before layer k, one microbatch; nothing before the first layer and after the last."""
        return np.array([0.0, *(float(layer.output_bytes) for layer in self.layers[:-1]), 0.0])

    @property
    def num_parameters(self) -> int:
        return self.parameter_bytes // DTYPES[self.dtype].itemsize

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for models that do the same work, whatever their layers are called."""
        return content_hash([layer.signature for layer in self.layers])


def content_hash(content: Any) -> str:
    """Hash what JSON can write."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
