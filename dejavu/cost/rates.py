"""What a step's time means for a training: samples and tokens a second, and the share of the devices' peak."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dejavu.cluster import Cluster
from dejavu.graphs.graph import Graph
from dejavu.plans import Plan
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of


@dataclass(frozen=True)
class Rates:
    """Rates of a training under a plan.

    Attributes:
        tokens_per_second: None: the examples are no tokens.
        utilization: model FLOP/s over the peak of all devices of the plan (MFU: Chowdhery et al., PaLM, 2022,
            appendix B): of one forward and one backward pass of each example, whatever is computed again. None: a
            device's peak in this dtype is not known.
        dtype: that the products are computed in, and the peak is of.
    """

    samples_per_second: float
    tokens_per_second: float | None
    utilization: float | None
    dtype: str


def rates(workload: Workload, graph: Graph, cluster: Cluster, plan: Plan, step_seconds: float) -> Rates:
    """Return the rates of a step that takes so long.

    Args:
        graph: of the plan's microbatch size.
    """
    shape = dataset_of(workload).shape
    samples = workload.batch_size / step_seconds if step_seconds > 0 else math.inf
    is_text = not shape.input_dtype.is_floating_point
    dtype = "bfloat16" if workload.mixed_precision else workload.dtype
    ranks = [plan.rank_configuration(rank) for rank in range(len(plan.ranks))]
    peaks = [cluster.device_types[one.device_type].peak_flops_per_second.get(dtype) for one in ranks]
    utilization = None
    if all(peaks) and step_seconds > 0:
        peak = sum((peak or 0.0) * one.num_devices for peak, one in zip(peaks, ranks, strict=True))
        utilization = _flops(graph) * plan.num_microbatches / step_seconds / peak
    return Rates(samples, samples * math.prod(shape.input_shape) if is_text else None, utilization, dtype)


def _flops(graph: Graph) -> float:
    return sum(layer.flops(way) for layer in graph.layers for way in ("forward", "backward"))
