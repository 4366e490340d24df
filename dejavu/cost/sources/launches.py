"""What the host takes to launch a layer's kernels on a GPU: a pass takes that, where the GPU works faster.

Launches are counted in units of an element-wise operator's, forward; other operators take more of the host, since torch
reshapes, chooses algorithms and allocates for them. The counts are rounded from the host's times of operators in traces
of blocks of a GPT, a Llama and a CNN on an H100 (torch 2.11, 2026-11-27; docs/log.md), but the gradient of an
embedding's, which is 24 there and was set by what layers took. How long a unit takes depends on the host and
is measured there (`dejavu.profiling.launches`); where nobody measured it, hosts are taken for one that was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dejavu.cluster import DeviceType
from dejavu.cost.estimates import Estimate
from dejavu.graphs.graph import Layer
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.kernel import Kernel

HOST = "host's launches"  # the source of an estimate
FORWARD = {
    "matmul": 5.0,
    "convolution": 12.0,
    "attention": 7.5,
    "normalization": 4.0,
    "softmax": 2.0,
    "gather": 4.0,
    "reduction": 2.5,
    "copy": 1.4,
    "elementwise": 1.0,
}
BACKWARD = {
    "matmul": 3.0,
    "convolution": 16.5,
    "attention": 9.0,
    "normalization": 4.0,
    "softmax": 2.0,
    "gather": 20.0,
    "reduction": 1.0,
    "copy": 1.5,
    "elementwise": 1.6,
}
_OF_NAMES = {  # of operators that their family says too little of
    "native_group_norm": 7.0,
    "native_group_norm_backward": 11.0,
    "nll_loss_forward": 2.5,
    "nll_loss_backward": 6.0,
    "arange": 1.9,
    "stack": 1.9,
}
ADDED = 1.0  # backward: a weight's gradient is added to those of earlier microbatches
# How much a host may differ from its own measurement: a block's launches took 1.1 to 1.8 ms in five processes on two
# machines of one kind, and 1.0 to 2.4 ms within one of them. Others' processors are faster or slower besides: two is
# a guess.
SPREAD, SPREAD_OF_OTHERS = 1.6, 2.0


@dataclass(frozen=True)
class Pace:
    """Seconds of a host: of a unit forward and backward, and of a weight in the optimizer's step.

    Attributes:
        is_measured: on such devices' hosts; otherwise it is another host's.
    """

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    is_measured: bool = True

    @property
    def spread(self) -> float:
        """By what factor launches may take longer or less, in nine of ten cases."""
        return SPREAD if self.is_measured else SPREAD_OF_OTHERS


# Of an H200's host (torch 2.11, 2026-11-27; docs/log.md).
KNOWN = Pace(10.9e-6, 19.1e-6, 34.0e-6, is_measured=False)
KNOWN_ON = "an H200's"


def pace_of(database: ProfileDatabase, device: DeviceType) -> Pace | None:
    """Return the pace of such devices' hosts: of the newest measurement and the known host's the geometric mean.

    A process differs from the next one on its host as much as hosts do: trainings on two machines took 1.0 and up to
    1.7 times what followed from the pace measured there, and 1.0 to 1.3 times what the known one gives (steps in 16
    bits).
    Hosts of AMD's GPUs, of which none was measured, launch through the same torch. None: no GPU's.
    """
    if device.kind == "cpu":
        return None
    rows = database.latest(kind="launch", device_type=device.name)
    found = {row.subject: row.seconds for row in sorted(rows, key=lambda row: row.measured_at)}
    if not {"forward", "backward", "optimizer"} <= found.keys():
        return KNOWN
    return Pace(
        math.sqrt(found["forward"] * KNOWN.forward_seconds),
        math.sqrt(found["backward"] * KNOWN.backward_seconds),
        math.sqrt(found["optimizer"] * KNOWN.weight_seconds),
    )


def launching_seconds(layer: Layer, direction: str, kernels: Sequence[Kernel], pace: Pace) -> float:
    """Return what the host takes for one pass; of a compiled layer, whose kernels are fused, nothing is known: 0."""
    if direction == "optimizer":
        return num_weights(layer) * pace.weight_seconds
    if layer.is_compiled or (direction == "backward" and not layer.has_backward):
        return 0.0
    units = units_of(kernels, direction)
    if direction == "forward":
        return units * pace.forward_seconds
    return (units + ADDED * num_weights(layer)) * pace.backward_seconds


def units_of(kernels: Sequence[Kernel], direction: str) -> float:
    """Count launches of one pass's kernels in units."""
    table = FORWARD if direction == "forward" else BACKWARD
    return sum(_OF_NAMES.get(kernel.name, table[kernel.family]) for kernel in kernels)


def num_weights(layer: Layer) -> int:
    """Return how many tensors a layer's weights are, if any is trained: what its operators read besides the input."""
    if not layer.trained_bytes:
        return 0
    reading = (one for one in layer.operators if one.direction == "forward" and one.parameter_bytes > 0)
    return sum(max(len(one.input_shapes) - 1, 1) for one in reading)


def no_faster(estimate: Estimate, host_seconds: float, spread: float = SPREAD) -> Estimate:
    """Return the estimate of a pass that takes no less than its host does, give or take a factor."""
    if not host_seconds:
        return estimate
    return Estimate(
        max(estimate.seconds, host_seconds),
        max(estimate.low_seconds, host_seconds / spread),
        max(estimate.high_seconds, host_seconds * spread),
        estimate.source if estimate.seconds >= host_seconds else HOST,
    )
