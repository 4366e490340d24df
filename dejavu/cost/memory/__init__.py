"""Memory of one device: weights, gradients, optimizer state, activations in flight, messages and temporaries.

The one memory model of plans: sums over layers, so that searches can add them up, and an upper bound on a stage's need.
`configuration_memory` puts them together, `layers` has its terms, `shard` what of a layer is a device's. `python -m
benchmarks.cost --memory` measures how much too high it is, against the allocator of real ranks.

Shape suffixes: L = layers, L1 = L + 1 cut positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cost.gradients import adding_bytes, gathered_bytes, held_out_share
from dejavu.cost.kernels.sequence import gathers_output
from dejavu.cost.kernels.sharding import trained_bytes, weight_bytes
from dejavu.cost.memory.layers import (
    MASTER_RATIO,
    ForEachByte,
    InPartsBytes,
    T,
    in_parts_bytes,
    kept_keys_bytes,
    layer_activation_bytes,
    layer_temporary_bytes,
    offloaded_bytes,
    step_bytes,
    tied_bytes,
)
from dejavu.cost.memory.shard import Shard
from dejavu.graphs.graph import Graph
from dejavu.plans import StageConfiguration
from dejavu.workload import OptimizerSettings, Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.slices import slice_lengths

Floats = NDArray[np.float64]

TARGET_BYTES = 8  # int64
# Of a layer under ZeRO, by level, its gradients as they are copied to be reduced, and whole, where others are shards.
_REDUCED_TENSORS = (0, 1, 2, 2)
_GRADIENTS, _WEIGHTS = 2, 3  # the levels from which on these are sharded


def example_bytes(workload: Workload) -> int:
    """Count the inputs and targets of one step, which the training loop gives to the first stage and the last."""
    shape = dataset_of(workload).shape
    inputs = math.prod(shape.input_shape) * shape.input_dtype.itemsize
    return workload.batch_size * (inputs + math.prod(shape.target_shape) * TARGET_BYTES)


def message_bytes(cut_bytes: T, num_microbatches: int) -> T:
    """Count what a stage holds for messages across one of its cuts: a step's worth each way.

    Torch's stage makes its receiving buffers once, for all microbatches, and torch's runtime keeps everything that a
    step sends until the step's end (`_PipelineScheduleRuntime._step_microbatches`, `send_ops`).
    """
    return 2 * num_microbatches * cut_bytes


class HeldState(NamedTuple):
    """What a device holds for each byte of a weight.

    Attributes:
        parameters: as weights, from the beginning to the end of a step.
        gradients: of those that are trained, alike; and what masters in their shards' place take more than these.
        optimizer: what it has of these.
        reduced: of one layer's trained weights, besides, while their gradients are reduced.
        arriving: of one layer's weights, besides, while they are gathered.
    """

    parameters: float
    gradients: float
    optimizer: float
    reduced: float = 0.0
    arriving: float = 0.0

    @classmethod
    def of(cls, configuration: StageConfiguration, settings: OptimizerSettings) -> HeldState:
        """Count it as torch's FSDP2 holds it, where replicas shard.

        ZeRO levels 1, 2 and 3 shard optimizer state, gradients and weights (Rajbhandari et al., SC 2020, fig. 1). FSDP
        always has its shards: of the weights, or of their float32 masters, which take their place. Levels 1 and 2 have
        the gathered weights beside them, level 3 those of one layer, and the buffer in which they arrive. Gradients
        are copied to be reduced; from level 2 on they are whole in one layer at a time.
        """
        each = ForEachByte.of(settings)
        if not configuration.shards_state:
            return cls(1.0, each.gradient_bytes, each.optimizer_bytes)
        level, part = configuration.zero_level, 1 / configuration.data_parallel
        master = MASTER_RATIO if settings.master_weights else 0
        return cls(
            parameters=part + (level < _WEIGHTS),
            gradients=each.gradient_bytes * (part if level >= _GRADIENTS else 1) + max(master - 1, 0) * part,
            optimizer=(each.optimizer_bytes - master) * part,
            reduced=(_REDUCED_TENSORS[level] + part) * each.gradient_bytes,
            arriving=2.0 * (level >= _WEIGHTS),
        )


@dataclass(frozen=True, eq=False)
class ConfigurationMemory:
    """The memory fields of `AdditiveCosts`, for one configuration.

    Attributes:
        offloaded_bytes_L: what a layer keeps in the host's memory for one microbatch in flight of one device.
        retained_bytes_L, waiting_bytes_L, in_parts_bytes_L: as of `AdditiveCosts`.
        state_away_bytes_L: of the optimizer, and of weights and gradients, what one device keeps elsewhere.
    """

    capacity_bytes: float
    fixed_bytes_L: Floats
    activation_bytes_L: Floats
    temporary_bytes_L: Floats
    message_bytes_L1: Floats
    step_bytes_L: Floats
    retained_bytes_L: Floats
    waiting_bytes_L: Floats
    in_parts_bytes_L: Floats
    offloaded_bytes_L: Floats
    state_away_bytes_L: Floats


def configuration_memory(
    configuration: StageConfiguration,
    graph: Graph,
    workload: Workload,
    device: DeviceType,
    example_bytes: float,
) -> ConfigurationMemory:
    """Compute it for a graph captured at a replica's microbatch; `example_bytes`: a whole step's inputs and targets.

    What FSDP holds of one layer at a time is charged for the model's largest (`HeldState`). That and the replica's
    examples are held once per stage, so half is charged at each of its two cuts: also of stages between the first and
    the last, which have no examples. Weights in the node's memory are on the device, with their gradients, while their
    layer runs.
    """
    kinds, kind_L = graph.kinds
    last = kind_L[-1] if gathers_output(graph.layers[-1]) else -1
    shards = [Shard.of(layer, configuration, has_loss=k == last) for k, layer in enumerate(kinds)]
    weights_L = np.array([weight_bytes(layer, configuration.tensor_parallel) for layer in kinds])[kind_L]
    trained_L = np.array([trained_bytes(layer, configuration.tensor_parallel) for layer in kinds])[kind_L]
    buffers_L = np.array([float(layer.footprint.buffer_bytes) for layer in kinds])[kind_L]
    each_byte, away = ForEachByte.of(workload.optimizer), configuration.offload
    held = HeldState.of(configuration, workload.optimizer)
    gathered = float((held.reduced * trained_L + held.arriving * weights_L).max())
    if configuration.zero_level and workload.gradients.gathers:  # a layer's, as they arrive from all replicas
        gathered += each_byte.gradient_bytes * float(trained_L.max())
    messages_L1 = message_bytes(graph.cut_bytes_L1 / configuration.sequence_parts, workload.num_microbatches)

    def each(size: Callable[..., float | InPartsBytes]) -> Floats:
        pairs = zip(kinds, shards, strict=True)
        return np.array([size(layer, recompute=configuration.recompute, shard=shard) for layer, shard in pairs])[kind_L]

    held_L = each(layer_activation_bytes)
    if lengths := slice_lengths(workload):
        earlier_L = np.array([kept_keys_bytes(layer, len(lengths), configuration) for layer in kinds])[kind_L]
        held_L = held_L + earlier_L
    optimizer, fetched = workload.optimizer, away.parameters is not None
    needs = partial(layer_temporary_bytes, optimizer=optimizer, fetched=fetched)
    temporary_L = each(needs)
    offloaded_L = np.zeros_like(held_L)
    if away.activations:  # the model's last layer keeps what it has, and its input, which no other holds
        offloaded_L[:-1] = each(offloaded_bytes)[:-1]
        temporary_L[:-1] = each(partial(needs, offload=True))[:-1]
        held_L[:-1] = 0.0
        held_L[-1] += shards[kind_L[-1]].input_bytes(graph.layers[-1])
    retained_L, waiting_L, most_L = each(partial(in_parts_bytes, optimizer=optimizer, fetched=fetched)).T
    rule, gradient_L = workload.gradients, each_byte.gradient_bytes * trained_L
    compared_L = adding_bytes(rule, configuration, gradient_L)
    tied_L = np.array([tied_bytes(layer, configuration, each_byte) for layer in kinds])[kind_L]
    here_L = held.parameters * weights_L + held.gradients * trained_L
    there_L = np.zeros_like(here_L)
    if away.parameters:
        here_L, there_L = there_L, here_L
    return ConfigurationMemory(
        capacity_bytes=float(device.memory_bytes),
        fixed_bytes_L=here_L + (0.0 if away.optimizer else held.optimizer) * trained_L + buffers_L + compared_L,
        activation_bytes_L=held_L,
        temporary_bytes_L=temporary_L,
        message_bytes_L1=messages_L1 + (gathered + example_bytes / configuration.example_parts) / 2,
        # Gathered gradients, and those of both ends of a tied weight, are gone when the optimizer steps.
        step_bytes_L=np.maximum.reduce(
            (
                (0.0 if away.optimizer else 1.0)
                * step_bytes(trained_L, workload.optimizer, device)
                / (configuration.data_parallel if configuration.shards_state else 1),
                gathered_bytes(rule, configuration, gradient_L, on_cpu=device.kind == "cpu")
                - compared_L
                + held_out_share(rule, configuration) * held_L,
                tied_L,
            )
        ),
        retained_bytes_L=retained_L,
        waiting_bytes_L=waiting_L,
        in_parts_bytes_L=np.maximum(most_L, temporary_L),
        offloaded_bytes_L=offloaded_L,
        state_away_bytes_L=there_L + (held.optimizer if away.optimizer else 0.0) * trained_L,
    )
