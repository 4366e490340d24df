"""Costs: f(communication, model, hardware) → (time, memory), each number with its source.

To add a cost source: its file, and its place in `sources`, the best first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dejavu.cluster import Cluster
from dejavu.cost._base import CostError, CostSource, CostTable, LayerCost
from dejavu.cost.communication import TransferCost, transfer_cost, transfer_costs
from dejavu.cost.measured import Measured
from dejavu.cost.roofline import Roofline
from dejavu.graph import Graph
from dejavu.profiles import ProfileDatabase
from dejavu.workload import OptimizerSettings

__all__ = [
    "CostError",
    "CostSource",
    "CostTable",
    "LayerCost",
    "TransferCost",
    "cost_table",
    "sources",
    "transfer_cost",
    "transfer_costs",
]


def sources(database: ProfileDatabase, optimizer: OptimizerSettings) -> tuple[CostSource, ...]:
    """All ways to know a cost, the best first: a measurement overrides a prediction."""
    return (Measured(database, optimizer), Roofline(optimizer))


def cost_table(graph: Graph, cluster: Cluster, known: Sequence[CostSource]) -> CostTable:
    """Price every layer on every device type, each number from the first source that knows it.

    Raises:
        CostError: no source knows it; the message names layer and device.
    """
    names = tuple(cluster.device_counts)
    costs: list[list[LayerCost]] = []
    for layer in graph.layers:
        row = []
        for name in names:
            device = cluster.device_types[name]
            found = (source.layer_cost(layer, graph, device) for source in known)
            cost = next((cost for cost in found if cost is not None), None)
            if cost is None:
                raise CostError(
                    f"no cost for layer {layer.name!r} on {name!r} in {graph.dtype}; "
                    f"run `dejavu profile` on such a device, or give its peak FLOP/s in {graph.dtype}"
                )
            row.append(cost)
        costs.append(row)

    def grid(field: str) -> np.ndarray:
        return np.array([[getattr(cost, field) for cost in row] for row in costs])

    return CostTable(
        layers=tuple(layer.name for layer in graph.layers),
        device_types=names,
        forward_seconds_LD=grid("forward_seconds"),
        backward_seconds_LD=grid("backward_seconds"),
        optimizer_seconds_LD=grid("optimizer_seconds"),
        relative_error_LD=grid("relative_error"),
        source_LD=grid("source"),
        parameter_bytes_L=np.array([float(layer.parameter_bytes) for layer in graph.layers]),
        activation_bytes_L=np.array([float(layer.activation_bytes) for layer in graph.layers]),
        temporary_bytes_L=np.array([float(layer.temporary_bytes) for layer in graph.layers]),
        cut_bytes_L1=np.array([0.0, *(float(layer.output_bytes) for layer in graph.layers[:-1]), 0.0]),
    )
