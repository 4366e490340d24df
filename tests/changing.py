"""What tests of changing clusters share: a problem at made-up prices, on hosts of equal devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dejavu.cluster import Cluster, DeviceType, Link, NodeGroup
from dejavu.cluster.islands import Island
from dejavu.cost.collectives.transfer import TransferCost
from dejavu.migration import RunningProblem
from dejavu.plans import Problem, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.stage_costs import AdditiveCosts

CORE = DeviceType("core", "cpu", {"float32": 1e10}, 2**30, 1e10, None, None, "here")
BYTES_PER_SECOND, LATENCY_SECONDS = 1e9, 1e-5


def running_problem(
    layers: Sequence[str],
    hosts: Sequence[str],
    num_microbatches: int,
    *,
    per_host: int = 1,
    replicas: Sequence[int] = (1,),
    state_bytes: float = 1e6,
) -> RunningProblem:
    """Equal layers of 10 ms for a microbatch; replicas are on hosts of their own, and share the work equally."""
    far = Link(BYTES_PER_SECOND, LATENCY_SECONDS)
    group = NodeGroup("g", len(hosts), tuple(hosts), (("core", per_host),), Link(1e10, 1e-6))
    cluster = Cluster("test", (group,), {"core": CORE}, {("g", "g"): far})
    configurations = tuple(StageConfiguration("core", r, 1, r) for r in replicas)
    C, L = len(configurations), len(layers)
    forward_CL = np.full((C, L), 0.004) / np.array(replicas, dtype=float)[:, None]
    costs = AdditiveCosts(
        seconds_CL=forward_CL * 2.5,
        per_step_seconds_CL=np.full((C, L), 1e-4),
        per_step_latency_seconds_C=np.zeros(C),
        fixed_bytes_CL=np.full((C, L), state_bytes),
        activation_bytes_CL=np.full((C, L), 1e5),
        temporary_bytes_CL=np.zeros((C, L)),
        capacity_bytes_C=np.full(C, 2.0**30),
    )
    problem = Problem(
        layers=tuple(layers),
        configurations=configurations,
        device_counts=cluster.device_counts,
        costs=costs,
        cut_bytes_L1=np.full(L + 1, 1e4),
        link_latency_seconds_CC=np.full((C, C), LATENCY_SECONDS),
        link_seconds_per_byte_CC=np.full((C, C), 1 / BYTES_PER_SECOND),
        schedule="1f1b",
        num_microbatches=num_microbatches,
        max_stages=num_microbatches,
    )
    transfer = TransferCost(LATENCY_SECONDS, 1 / BYTES_PER_SECOND, "declared")
    priced = PricedProblem(problem, forward_CL, forward_CL * 1.5)
    return RunningProblem(priced, cluster, ("1f1b",), {(Island("core"), Island("core")): transfer})
