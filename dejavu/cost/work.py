"""What a pass computes, moves and launches, kept with measured rows to check them by; and what of it runs again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dejavu.cluster import DeviceType
from dejavu.cost.sources.predicted import layer_kernels
from dejavu.graphs.graph import Layer, Operator
from dejavu.plans.schedule import PARTS
from dejavu.workload import OptimizerSettings


@dataclass(frozen=True)
class Work:
    """The work of some layers, in one pass or several; as if nothing were cached.

    Attributes:
        moved_bytes: read and written.
        num_kernels: that are launched.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: int = 0

    @classmethod
    def of(cls, layers: Sequence[Layer], direction: str, dtype: str, optimizer: OptimizerSettings) -> Work:
        """Return the work of one pass over these layers; for a part of a backward pass the upper bound: the whole."""
        if direction in PARTS:
            direction = "backward"
        kernels_of = [layer_kernels(layer, direction, dtype, optimizer) for layer in layers]
        kernels = [kernel for own in kernels_of for kernel in own]
        # The compiler may make one of all, but of the optimizer's, which it leaves as they are.
        fused = [direction != "optimizer" and layer.is_compiled for layer in layers]
        launched = sum(min(len(own), 1) if one else len(own) for own, one in zip(kernels_of, fused, strict=True))
        moved_bytes = sum(kernel.read_bytes + kernel.written_bytes for kernel in kernels)
        return cls(sum(layer.flops(direction) for layer in layers), moved_bytes, launched)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops, self.moved_bytes + other.moved_bytes, self.num_kernels + other.num_kernels
        )

    def times(self, count: int) -> Work:
        """Return the work of so many repetitions."""
        return Work(self.flops * count, self.moved_bytes * count, self.num_kernels * count)

    def to_dict(self) -> dict[str, float]:
        """Return what `profiles.plausible` reads of a row's `extra`."""
        return {"flops": self.flops, "moved_bytes": self.moved_bytes, "num_kernels": self.num_kernels}


def recomputed_share(layer: Layer, device: DeviceType) -> float:
    """Return the share of the forward pass's seconds, each operator by the roofline of its whole tensors.

    A ratio of the same layer's operators: what the roofline leaves out matters little, and parts of a layer have the
    share of the whole.
    """
    skipped = layer.not_recomputed
    if not skipped:
        return 1.0
    whole = _seconds((one for one in layer.operators if one.direction == "forward"), device)
    return 1.0 - _seconds(skipped, device) / whole if whole else 1.0


def _seconds(operators: Iterable[Operator], device: DeviceType) -> float:
    found = 0.0
    for one in operators:
        peak = device.peak_flops_per_second.get(one.dtype)
        moved = (one.read_bytes + one.written_bytes) / device.memory_bytes_per_second
        found += max(one.flops / peak if peak else 0.0, moved)
    return found
