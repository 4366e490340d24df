"""Physical limits of a layer's measured time, from its arithmetic and traffic: rows outside are not used.

The limits come from the roofline with the device's nominal peaks alone. Measured kernels could correct it, but they
are rows of the database, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.cluster import DeviceType
from dejavu.cost.kernels.roofline import KernelRoofline, peak_flops_per_second
from dejavu.cost.sources.predicted import layer_kernels
from dejavu.graphs.graph import Graph, Layer
from dejavu.workload import OptimizerSettings

# Measured over expected, of 300 passes of seven small models on a busy core (2026-11-22): 1.5 to 32, the most where
# there is little but launches. GPUs are closer. A unit or a clock that is wrong is off by 1000.
FASTEST_RATIO = 20.0
SLOWEST_RATIO = 100.0
LAUNCHES_SECONDS = 1e-4  # of a layer's kernels: a layer that does next to nothing still launches some


@dataclass(frozen=True)
class Limits:
    """Plausible limits of a pass's measured time, and what the roofline expects."""

    expected_seconds: float

    @property
    def least_seconds(self) -> float:
        return self.expected_seconds / FASTEST_RATIO

    @property
    def most_seconds(self) -> float:
        return SLOWEST_RATIO * max(self.expected_seconds, LAUNCHES_SECONDS)

    def hold(self, seconds: float) -> bool:
        """Return whether a measurement is within the limits."""
        return self.least_seconds <= seconds <= self.most_seconds

    def __str__(self) -> str:
        return (
            f"expected between {self.least_seconds:.3g} and {self.most_seconds:.3g} s, for its arithmetic and traffic "
            f"take about {self.expected_seconds:.3g} s"
        )


def limits(
    layer: Layer, direction: str, graph: Graph, device: DeviceType, optimizer: OptimizerSettings
) -> Limits | None:
    """Return the limits of one pass of one layer; None where the device's peak in the graph's dtype is unknown."""
    if peak_flops_per_second(device, graph.dtype) is None:
        return None
    kernels = layer_kernels(layer, direction, graph.dtype, optimizer)
    return Limits(float(KernelRoofline().seconds(kernels, device).sum()) if kernels else 0.0)
