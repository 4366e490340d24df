"""Memory of one device of a stage under a configuration, as sums over layers: an upper bound on its need.

Shape suffixes: L = layers, L1 = L + 1 cut positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dejavu.cluster import DeviceType
from dejavu.cost.kernels.sharding import degree_of
from dejavu.cost.memory import (
    Floats,
    ForEachByte,
    layer_activation_bytes,
    layer_temporary_bytes,
    message_bytes,
    step_bytes,
)
from dejavu.graphs.graph import Layer
from dejavu.plans import StageConfiguration
from dejavu.workload import Workload


@dataclass(frozen=True, eq=False)
class ConfigurationMemory:
    """The memory fields of `AdditiveCosts`, for one configuration."""

    capacity_bytes: float
    fixed_bytes_L: Floats
    activation_bytes_L: Floats
    temporary_bytes_L: Floats
    message_bytes_L1: Floats
    step_bytes_L: Floats


def configuration_memory(
    configuration: StageConfiguration,
    layers: Sequence[Layer],
    workload: Workload,
    device: DeviceType,
    example_bytes: float,
) -> ConfigurationMemory:
    """Compute it for layers captured at a replica's microbatch; `example_bytes`: a whole step's inputs and targets.

    ZeRO shards optimizer state, gradients and weights over the replicas from levels 1, 2 and 3 on (Rajbhandari et al.,
    SC 2020, fig. 1). Of sharded gradients and weights one layer is whole at a time: a stage is charged for the model's
    largest. That and the replica's examples are held once per stage, so half is charged at each of its two cuts.
    """
    r, zero = configuration.data_parallel, configuration.zero_level
    degree_L = [degree_of(layer, configuration.tensor_parallel) for layer in layers]
    weights_L = np.array([layer.parameter_bytes / t for layer, t in zip(layers, degree_L, strict=True)])
    buffers_L = np.array([float(layer.footprint.buffer_bytes) for layer in layers])
    each_byte = ForEachByte.of(workload.optimizer)
    kept = each_byte.optimizer_bytes / (r if zero >= 1 else 1)
    gradients, parameters = each_byte.gradient_bytes / (r if zero >= 2 else 1), 1 / (r if zero >= 3 else 1)
    gathered = ((each_byte.gradient_bytes - gradients) + (1 - parameters)) * float(weights_L.max())
    cuts_L1 = np.array([0.0, *(float(layer.output_bytes) for layer in layers[:-1]), 0.0])

    def each(size: Callable[..., float]) -> Floats:
        pairs = zip(layers, degree_L, strict=True)
        return np.array(
            [size(layer, recompute=configuration.recompute, tensor_parallel=degree) for layer, degree in pairs]
        )

    return ConfigurationMemory(
        capacity_bytes=float(device.memory_bytes),
        fixed_bytes_L=weights_L * (parameters + gradients + kept) + buffers_L,
        activation_bytes_L=each(layer_activation_bytes),
        temporary_bytes_L=each(partial(layer_temporary_bytes, optimizer=workload.optimizer)),
        message_bytes_L1=message_bytes(cuts_L1, workload.num_microbatches) + (gathered + example_bytes / r) / 2,
        step_bytes_L=step_bytes(weights_L, workload.optimizer, device) / (r if zero >= 1 else 1),
    )
