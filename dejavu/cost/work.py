"""What a pass computes, moves and launches: kept with measured rows, so that they can be checked against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dejavu.cost.sources.predicted import layer_kernels
from dejavu.graphs.graph import Layer
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
