"""The optimizer's step by a node's processors, on state in the node's memory or on its disks.

Every step the gradients go to the node's memory, its processors update the weights, and the new weights come back.
Weights without masters go there first, since nothing of them stays. State on disks is read before the update and
written after it. It is a few weights after the other, no more than the largest has numbers, and nothing overlaps: all
of it is time of the step. What the rank takes to launch it comes besides (`StagePasses.passes`).

Shape suffix: L = layers.
"""

from __future__ import annotations

from typing import NamedTuple

from dejavu.cluster import HostMemory, Nvme
from dejavu.cost.memory.layers import MASTER_RATIO, ONE_BY_ONE_TENSORS, ForEachByte
from dejavu.cost.sources.predicted import optimizer_kernels
from dejavu.plans import StageConfiguration
from dejavu.plans.stage_costs import Floats
from dejavu.workload import OptimizerSettings, Workload

# Tensors that torch's fused step reads and writes once (aten/src/ATen/native/cpu/FusedAdamKernel.cpp and
# FusedSGDKernel.cpp): gradient and weight, each moment both ways, and the new weight.
_FUSED_BASE, _FUSED_PER_MOMENT = 3, 2
_MANY_BYTES = 2.0**30  # of a weight of which traffic is counted: kernels of whole elements


class Stepped(NamedTuple):
    """What an optimizer steps.

    Attributes:
        ratio: its bytes for each byte of the weights that layers compute with.
    """

    settings: OptimizerSettings
    dtype: str
    ratio: float

    @classmethod
    def of(cls, configuration: StageConfiguration, workload: Workload) -> Stepped:
        """Where replicas shard float32 masters, these are the weights that it steps, and have none themselves."""
        settings = workload.optimizer
        if settings.master_weights and configuration.shards_state:
            return cls(settings.model_copy(update={"master_weights": False}), "float32", MASTER_RATIO)
        return cls(settings, workload.dtype, 1.0)


def update_seconds(
    weights_bytes_L: Floats,
    optimizer: OptimizerSettings,
    dtype: str,
    host: HostMemory,
    *,
    is_fused: bool,
    with_copies: bool = True,
) -> Floats:
    """Return how long each layer's update takes by the node's processors, and its copies there and back.

    Args:
        weights_bytes_L: of a device, as it updates them.
        host: a device's part of its node's memory.
        is_fused: torch goes once over all tensors, as it does for weights of GPUs.
        with_copies: else weights and gradients are there.
    """
    assert host.update_bytes_per_second is not None, "a device's part says it"
    each = ForEachByte.of(optimizer)
    away = each.gradient_bytes + (0.0 if optimizer.master_weights else 1.0)
    moved = (away + 1.0) / host.bytes_per_second if with_copies else 0.0
    return weights_bytes_L * (moved + traffic(optimizer, dtype, is_fused=is_fused) / host.update_bytes_per_second)


def traffic(optimizer: OptimizerSettings, dtype: str, *, is_fused: bool) -> float:
    """Return the bytes that an update reads and writes in the node's memory for each byte of a weight."""
    if not is_fused:
        kernels = optimizer_kernels(_MANY_BYTES, optimizer, dtype)
        return sum(kernel.read_bytes + kernel.written_bytes for kernel in kernels) / _MANY_BYTES
    each = ForEachByte.of(optimizer)
    moments = each.optimizer_bytes / each.update_bytes - int(optimizer.master_weights)
    cast = MASTER_RATIO + 1.0 if optimizer.master_weights else 0.0
    return each.update_bytes * (_FUSED_BASE + _FUSED_PER_MOMENT * moments) + cast


def disk_seconds(state_bytes_L: Floats, nvme: Nvme) -> Floats:
    """Return how long each layer's state takes from the disks and back, given a device's part of them."""
    return state_bytes_L / nvme.read_bytes_per_second + state_bytes_L / nvme.write_bytes_per_second


def staging_bytes(largest_weight_bytes: float, optimizer: OptimizerSettings) -> float:
    """Return what updates need in the node's memory besides the state, for as many numbers as the largest weight has.

    Their gradients, their old or new values, and what torch's step allocates.
    """
    each = ForEachByte.of(optimizer)
    return largest_weight_bytes * (each.gradient_bytes + 1.0 + ONE_BY_ONE_TENSORS[optimizer.name] * each.update_bytes)
