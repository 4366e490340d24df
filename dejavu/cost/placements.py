"""From a traced module and a cluster to a placement problem: kernels priced by the predictor, links by the cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dejavu.cluster import Cluster, Device
from dejavu.cost.kernels.roofline import peak_flops_per_second
from dejavu.cost.memory.layers import ForEachByte
from dejavu.cost.sources.predicted import Predicted
from dejavu.foundation.errors import InputError
from dejavu.graphs.dataflow import Dataflow
from dejavu.graphs.kernels import kernel_of
from dejavu.placement import Devices, Operation, PlacementProblem, Tensor
from dejavu.profiles.kernel import Kernel


def placement_problem(flow: Dataflow, cluster: Cluster, predicted: Predicted) -> PlacementProblem:
    """Return what a placer is asked.

    Operators that read a weight, or write its gradient, are one group. An operator keeps, in training, what the
    backward pass reads of its results; a weight that is trained has its gradient and the optimizer's states besides.

    Raises:
        InputError: a device has no peak for the module's type, or some operator or group fits on no device.
    """
    devices = cluster.devices()
    columns = {name: _seconds(flow, cluster, name, predicted) for name in cluster.device_counts}
    group_N, held_N = _groups(flow), np.zeros(len(flow.operators))
    trains = any(operator.direction == "backward" for operator in flow.operators)
    each = ForEachByte.of(predicted.optimizer)
    besides = each.gradient_bytes + each.optimizer_bytes
    for weight in flow.weights:
        if weight.operators:
            held_N[weight.operators[0]] += (1.0 + besides * (trains and weight.is_trained)) * weight.size_bytes
    for value in flow.values:
        if value.is_saved:
            held_N[value.producer] += value.size_bytes
    operations = tuple(
        Operation(name, tuple(columns[device.type_name][n] for device in devices), float(held_N[n]), group_N[n])
        for n, name in enumerate(flow.names)
    )
    tensors = tuple(
        Tensor(flow.names[value.producer], tuple(flow.names[r] for r in value.readers), float(value.size_bytes))
        for value in flow.values
    )
    return PlacementProblem(operations, tensors, _devices(cluster, devices))


def _seconds(flow: Dataflow, cluster: Cluster, name: str, predicted: Predicted) -> list[float]:
    """Return each operator's seconds on a type of device; 0 for those that only name memory."""
    device_type = cluster.device_types[name]
    if peak_flops_per_second(device_type, flow.dtype) is None:
        known = ", ".join(sorted(device_type.peak_flops_per_second))
        raise InputError(f"device {name!r}: found no peak for {flow.dtype}; wanted a module of {known}")
    kernels = [kernel_of(operator) for operator in flow.operators]
    distinct: list[Kernel] = list(dict.fromkeys(kernel for kernel in kernels if kernel is not None))
    if not distinct:
        return [0.0] * len(kernels)
    price = dict(zip(distinct, predicted.prices(distinct, device_type).seconds_K.tolist(), strict=True))
    return [0.0 if kernel is None else price[kernel] for kernel in kernels]


def _groups(flow: Dataflow) -> list[str]:
    """Return each operator's group: operators of a weight are together, and so are those of weights that share one."""
    leader = list(range(len(flow.operators)))

    def find(n: int) -> int:
        while leader[n] != n:
            leader[n] = n = leader[leader[n]]
        return n

    tied: set[int] = set()
    for weight in flow.weights:
        tied |= set(weight.operators)
        for n in weight.operators[1:]:
            first, other = sorted((find(weight.operators[0]), find(n)))
            leader[other] = first
    return [flow.names[find(n)] if n in tied else "" for n in range(len(leader))]


def _devices(cluster: Cluster, devices: Sequence[Device]) -> Devices:
    D = len(devices)
    latency_DD, rate_DD = np.zeros((D, D)), np.full((D, D), math.inf)
    for a in range(D):
        for b in range(D):
            if a != b:
                link = cluster.link(devices[a], devices[b])
                latency_DD[a, b], rate_DD[a, b] = link.latency_seconds, link.bytes_per_second
    return Devices(
        tuple(f"{device.host}/{device.index}" for device in devices),
        np.array([cluster.device_types[device.type_name].memory_bytes for device in devices], dtype=np.float64),
        latency_DD,
        rate_DD,
    )
