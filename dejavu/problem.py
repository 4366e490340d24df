"""Posing the search's question: stage configurations, priced from costs, links and memory."""

from __future__ import annotations

import numpy as np

from dejavu.cluster import Cluster
from dejavu.cost import CostTable, TransferCost
from dejavu.cost.memory import example_bytes, fixed_bytes, message_bytes, step_bytes
from dejavu.plan import Problem, StageConfiguration
from dejavu.stage_costs import AdditiveCosts
from dejavu.workload import Workload


def pose(
    table: CostTable, cluster: Cluster, workload: Workload, transfers: dict[tuple[str, str], TransferCost]
) -> Problem:
    """The problem of cutting the workload's layers into stages of one device each.

    A plan has at most as many stages as microbatches: torch's pipeline schedules refuse fewer microbatches than stages.

    Args:
        transfers: (sender's type, receiver's type) -> what a message costs, for every pair of the table's types.
    """
    configurations = tuple(StageConfiguration(device_type=name) for name in table.device_types)
    C, L = len(configurations), len(table.layers)
    devices = [cluster.device_types[name] for name in table.device_types]
    held = np.array([fixed_bytes(size, workload.optimizer) for size in table.parameter_bytes_L])

    def link(field: str) -> np.ndarray:
        return np.array([[getattr(transfers[a, b], field) for b in table.device_types] for a in table.device_types])

    return Problem(
        layers=table.layers,
        configurations=configurations,
        device_counts=cluster.device_counts,
        costs=AdditiveCosts(
            seconds_CL=(table.forward.seconds_LD + table.backward.seconds_LD).T,
            once_seconds_CL=table.optimizer.seconds_LD.T,
            once_latency_seconds_C=np.zeros(C),
            fixed_bytes_CL=np.broadcast_to(held, (C, L)),
            activation_bytes_CL=np.broadcast_to(table.activation_bytes_L, (C, L)),
            temporary_bytes_CL=np.broadcast_to(table.temporary_bytes_L + example_bytes(workload), (C, L)),
            capacity_bytes_C=np.array([float(device.memory_bytes) for device in devices]),
            message_bytes_CL1=np.broadcast_to(message_bytes(table.cut_bytes_L1, workload.num_microbatches), (C, L + 1)),
            step_bytes_CL=np.array(
                [step_bytes(table.parameter_bytes_L, workload.optimizer, device) for device in devices]
            ),
        ),
        cut_bytes_L1=table.cut_bytes_L1,
        link_latency_seconds_CC=link("latency_seconds"),
        link_seconds_per_byte_CC=link("seconds_per_byte"),
        schedule=workload.schedule,
        num_microbatches=workload.num_microbatches,
        max_stages=workload.num_microbatches,
    )
