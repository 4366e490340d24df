"""The roofline: an operator takes as long as its arithmetic or its memory traffic, whichever is longer.

See Williams et al., "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dejavu.cluster import DeviceType
from dejavu.cost._base import CostSource, LayerCost
from dejavu.cost.memory import MOMENTS
from dejavu.graph import Graph, Layer, Operator
from dejavu.workload import OptimizerSettings

# Fitted to the median log error over 181,097 fp32 kernels (matmul and element-wise) of seven GPUs that NeuSight
# published (Lee et al., ASPLOS 2025); median error 27 %, 90th percentile 59 %. See docs/log.md, 2026-11-21.
COMPUTE_EFFICIENCY = 0.51  # of the peak FLOP/s
MEMORY_EFFICIENCY = 0.70  # of the peak bytes per second
LAUNCH_SECONDS = 19e-6  # added by every operator
RELATIVE_ERROR = 0.59
# Read: weight, gradient, moments; written: weight, moments.
OPTIMIZER_BYTES_PER_PARAMETER_BYTE = {name: 3 + 2 * moments for name, moments in MOMENTS.items()}


@dataclass(frozen=True)
class Roofline(CostSource):
    """Two efficiencies and a launch time, for any device whose peaks are known; knows nothing of shapes or caches."""

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    compute_efficiency: float = COMPUTE_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY
    launch_seconds: float = LAUNCH_SECONDS

    def layer_cost(self, layer: Layer, graph: Graph, device: DeviceType) -> LayerCost | None:
        peak = device.peak_flops_per_second.get(graph.dtype)
        if peak is None:
            return None
        seconds = {"forward": 0.0, "backward": 0.0}
        for operator in layer.operators:
            seconds[operator.direction] += self._operator_seconds(operator, peak, device)
        traffic = layer.parameter_bytes * OPTIMIZER_BYTES_PER_PARAMETER_BYTE[self.optimizer.name]
        return LayerCost(
            forward_seconds=seconds["forward"],
            backward_seconds=seconds["backward"],
            optimizer_seconds=traffic / (self.memory_efficiency * device.memory_bytes_per_second),
            relative_error=RELATIVE_ERROR,
            source="roofline",
        )

    def _operator_seconds(self, operator: Operator, peak_flops_per_second: float, device: DeviceType) -> float:
        arithmetic = operator.flops / (self.compute_efficiency * peak_flops_per_second)
        traffic = (operator.read_bytes + operator.written_bytes) / (
            self.memory_efficiency * device.memory_bytes_per_second
        )
        return max(arithmetic, traffic) + self.launch_seconds
