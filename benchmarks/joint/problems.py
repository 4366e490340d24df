"""Problems whose prices are wrong in a known way: what is planned with, and what is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dejavu.cluster import Cluster, DeviceType, Link, NodeGroup
from dejavu.cluster.islands import Island
from dejavu.cost.collectives.transfer import TransferCost
from dejavu.migration import ClusterNow, RunningProblem
from dejavu.plans import Problem, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.stage_costs import AdditiveCosts

CORE = "core"
DEVICE = DeviceType(CORE, "cpu", {"float32": 1e11}, 2**34, 1e10, None, None, "generated")
BYTES_PER_SECOND, LATENCY_SECONDS = 1e9, 1e-4
LAYER_SECONDS, STATE_BYTES, CUT_BYTES = 0.004, 2e7, 1e6
BACKWARD = 2.0  # times the forward pass


@dataclass(frozen=True, eq=False)
class Wrong:
    """A problem as it is planned with, and as it is.

    Attributes:
        planned: with wrong prices; `now`: its cluster as it is planned for.
        true, true_now: the prices that passes really have, and devices that are really slower.
    """

    planned: RunningProblem
    now: ClusterNow
    true: RunningProblem
    true_now: ClusterNow


def cluster_of(hosts: Sequence[str], device: DeviceType = DEVICE) -> Cluster:
    """One device on each host."""
    link = Link(BYTES_PER_SECOND, LATENCY_SECONDS)
    group = NodeGroup("hosts", len(hosts), tuple(hosts), ((device.name, 1),), link)
    return Cluster("generated", (group,), {device.name: device}, {("hosts", "hosts"): link})


def scaled(running: RunningProblem, factor_L: np.ndarray) -> RunningProblem:
    """Multiply the prices of each layer's passes."""
    priced = running.priced
    costs = priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    problem = replace(priced.problem, costs=replace(costs, seconds_CL=costs.seconds_CL * factor_L))
    forward_CL, backward_CL = priced.forward_seconds_CL * factor_L, priced.backward_seconds_CL * factor_L
    return replace(
        running,
        priced=replace(priced, problem=problem, forward_seconds_CL=forward_CL, backward_seconds_CL=backward_CL),
    )


def generated(num_layers: int, num_hosts: int, spread: float, slowness: float, seed: int) -> Wrong:
    """Draw layers of different sizes, and wrong prices of them.

    Args:
        spread: standard deviation of the logarithm of each layer's price over its truth.
        slowness: of one device that is planned with as if it were like the others.
    """
    rng = np.random.default_rng(seed)
    hosts = tuple(f"h{k}" for k in range(num_hosts))
    cluster, configuration = cluster_of(hosts), StageConfiguration(CORE)
    forward_CL = LAYER_SECONDS * rng.lognormal(0.0, 0.5, (1, num_layers))
    costs = AdditiveCosts(
        seconds_CL=forward_CL * (1 + BACKWARD),
        per_step_seconds_CL=np.full((1, num_layers), 1e-4),
        per_step_latency_seconds_C=np.zeros(1),
        fixed_bytes_CL=np.full((1, num_layers), STATE_BYTES),
        activation_bytes_CL=np.full((1, num_layers), 1e6),
        temporary_bytes_CL=np.zeros((1, num_layers)),
        capacity_bytes_C=np.full(1, DEVICE.memory_bytes),
    )
    num_microbatches = 4 * num_hosts
    problem = Problem(
        layers=tuple(f"layer {k}" for k in range(num_layers)),
        configurations=(configuration,),
        device_counts=cluster.device_counts,
        costs=costs,
        cut_bytes_L1=np.full(num_layers + 1, CUT_BYTES),
        link_latency_seconds_CC=np.full((1, 1), LATENCY_SECONDS),
        link_seconds_per_byte_CC=np.full((1, 1), 1 / BYTES_PER_SECOND),
        schedule="1f1b",
        num_microbatches=num_microbatches,
        max_stages=num_microbatches,
    )
    priced = PricedProblem(problem, forward_CL, forward_CL * BACKWARD)
    transfer = TransferCost(LATENCY_SECONDS, 1 / BYTES_PER_SECOND, "declared")
    true = RunningProblem(priced, cluster, ("1f1b",), {(Island(CORE), Island(CORE)): transfer})
    planned = scaled(true, rng.lognormal(0.0, spread, num_layers))
    slow = {(hosts[int(rng.integers(num_hosts))], 0): slowness} if slowness != 1 else {}
    return Wrong(planned, ClusterNow(cluster), true, ClusterNow(cluster, slowness=slow))
