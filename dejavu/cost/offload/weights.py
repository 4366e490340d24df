"""Weights in the node's memory, fetched for each pass of a layer; gradients that go there and add up.

A microbatch takes three copies of a layer's weights: going forward, going backward (with recomputation before it, which
leaves them there), and its gradient out (ZeRO-Infinity, Rajbhandari et al., SC 2021). Of a backward pass in two parts
each part wants the weights. Not all weights are wanted going backward: an embedding's are not, and are counted. The
stream that computes copies, so nothing overlaps.

Shape suffix: L = layers.
"""

from __future__ import annotations

from typing import NamedTuple

from dejavu.cluster import HostMemory
from dejavu.cost.memory.layers import ForEachByte
from dejavu.plans.stage_costs import Floats
from dejavu.workload import OptimizerSettings

_ADDED = 3  # tensors that adding a gradient to a sum reads and writes


class Fetching(NamedTuple):
    """How much longer each layer's passes of a microbatch take: a whole backward pass, and its two parts."""

    forward_L: Floats
    backward_L: Floats
    backward_input_L: Floats
    backward_weight_L: Floats


def fetching_seconds(weights_bytes_L: Floats, optimizer: OptimizerSettings, host: HostMemory) -> Fetching:
    """Return how much longer each layer's passes of a microbatch take.

    The node's processors cast the gradient where there are masters, and add it to those of the microbatches before.

    Args:
        host: a device's part of its node's memory.
    """
    assert host.update_bytes_per_second is not None, "a device's part says it"
    copied = weights_bytes_L / host.bytes_per_second
    wide = ForEachByte.of(optimizer).gradient_bytes
    moved = _ADDED * wide + (1.0 + wide if optimizer.master_weights else 0.0)
    last = 2 * copied + weights_bytes_L * moved / host.update_bytes_per_second
    return Fetching(copied, last, copied, last)


def summing_seconds(weights_bytes_L: Floats, optimizer: OptimizerSettings, host: HostMemory) -> Floats:
    """Return how long each layer's gradients take to the device and back, where replicas sum them once a step."""
    return 2 * ForEachByte.of(optimizer).gradient_bytes * weights_bytes_L / host.bytes_per_second


def arriving_bytes(largest_layer_bytes: float, optimizer: OptimizerSettings) -> float:
    """Return what a layer's gradients need in the node's memory before they are added up: as they come, and cast."""
    cast = ForEachByte.of(optimizer).gradient_bytes if optimizer.master_weights else 0.0
    return largest_layer_bytes * (1.0 + cast)
