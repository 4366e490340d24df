"""From a workload and a cluster to the question for the searches: every layer priced in every way it may be spread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dejavu.cluster import Cluster
from dejavu.cost import cost_table, remember_stages, sources, transfer_costs
from dejavu.cost.parallel import ParallelPrices
from dejavu.cost.parts import Priced
from dejavu.cost.passes import backward_parts, pass_cost
from dejavu.cost.predicted import Predicted
from dejavu.cost.stage_collectives import StageCollectives
from dejavu.errors import InputError
from dejavu.graph import CaptureError, capture
from dejavu.parallelism import Parallelism
from dejavu.problem import Posed, pose_parallel, split_into
from dejavu.profiles import ProfileDatabase
from dejavu.workload import Workload


def parallel_prices(
    workload: Workload, cluster: Cluster, database: Path, known: Mapping[int, Priced] | None = None
) -> ParallelPrices:
    """Prices of the workload's layers under any stage configuration, corrected by remembered trainings.

    Args:
        known: by microbatch size, what was captured and priced already.
    """
    rows, given = ProfileDatabase(database), dict(known or {})
    found = sources(rows, workload.optimizer)

    def at(microbatch_size: int) -> Priced:
        if microbatch_size in given:
            return given[microbatch_size]
        split = split_into(workload, workload.batch_size // microbatch_size)
        try:
            graph = capture(split, cluster.kind)
        except CaptureError as error:
            raise InputError(str(error), ("model",)) from error
        table, _ = remember_stages(cost_table(graph, cluster, found), graph, rows, workload.optimizer)
        return Priced(graph, table)

    collectives = StageCollectives(cluster, rows, workload.dtype)
    return ParallelPrices(cluster, at, Predicted(rows, workload.optimizer), collectives)


def pose_workload(
    workload: Workload, cluster: Cluster, database: Path, parallelism: Parallelism, known: Mapping[int, Priced]
) -> Posed:
    """The question of one workload as it is, and what playing its plans needs besides.

    Raises:
        CostError: a number is missing; it names layer and device.
    """
    rows = ProfileDatabase(database)
    prices, transfers = parallel_prices(workload, cluster, database, known), transfer_costs(cluster, rows)
    costs = {name: pass_cost(rows, name) for name in cluster.device_counts}
    graph = prices.at(workload.microbatch_size).graph
    parts = {name: backward_parts(rows, graph, name) for name in cluster.device_counts}
    return pose_parallel(prices, cluster, workload, transfers, parallelism, costs, parts)
