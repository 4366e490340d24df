"""From a model and a cluster to costs: read, capture, measure what is missing."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dejavu.cluster import Cluster, load_cluster
from dejavu.foundation.dask_workers import queue_of
from dejavu.foundation.units import plural
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.graphs.kept_layers import KeptInUserCache
from dejavu.launch.preflight import check_cluster
from dejavu.profiles import ProfileDatabase
from dejavu.profiling.profiler import MeasureResult, Profiler
from dejavu.trials import CONNECT_SECONDS, check_queue, client_of
from dejavu.workload import Workload
from tasks.events import tell
from tasks.shown import Progress

KINDS_OF_A_PLAN = ("layers", "transfers", "passes")


@task(name="read-cluster", task_run_name="read-cluster", cache_policy=NO_CACHE)
def read_cluster(path: Path, train: bool, dask: str = "") -> Cluster:
    """Read the cluster once; later edits of the file do not affect the run."""
    cluster, queue, log = load_cluster(path), queue_of(dask), get_run_logger()
    if queue is not None:
        check_queue(queue, cluster, trains=train)
    elif dask:
        log.info("connecting to Dask at %s, for at most %g s", dask, CONNECT_SECONDS)
        with client_of(dask):  # fail before measuring if nothing answers there: searches run there, too
            pass
    elif train:
        check_cluster(cluster)
    log.info("cluster %s: %s", cluster.name, ", ".join(f"{n} × {name}" for name, n in cluster.device_counts.items()))
    for assumption in cluster.assumptions:
        log.info("assumed: %s", assumption)
    return cluster


@task(name="capture", task_run_name="capture", cache_policy=NO_CACHE)
def capture_model(workload: Workload, cluster: Cluster) -> Graph:
    """Capture the model as layers, without weights, with the kernels of the cluster's kind of devices."""
    graph, log = capture(workload, cluster.kind, kept=KeptInUserCache()), get_run_logger()
    layers = plural(len(graph.layers), "layer")
    log.info("model %s: %s, %.2f million parameters", workload.model, layers, graph.num_parameters / 1e6)
    for note in graph.notes:
        log.info("%s", note)
    return graph


@task(name="measure", task_run_name="measure", cache_policy=NO_CACHE, retries=1)
def measure_what_is_missing(
    graph: Graph,
    workload: Workload,
    cluster: Cluster,
    database: Path,
    kinds: Collection[str] = KINDS_OF_A_PLAN,
    log: Any = None,
) -> MeasureResult:
    """Measure on this machine what the database lacks; what it knows is not measured again.

    Args:
        log: where its progress goes; None: the task's own.
    """
    log = log or get_run_logger()
    bar = Progress("measuring", f"layers, transfers and passes of {workload.model} that were not known")

    def on_task(name: str, done: int, total: int) -> None:
        log.info("measuring %s (%d of %d)", name, done + 1, total)
        bar(done, total)
        left = (time.monotonic() - began) / done * (total - done) if done else None
        tell("measuring", what=name, done=done, total=total, left_seconds=left)

    began = time.monotonic()
    measured = Profiler(graph, workload, cluster, ProfileDatabase(database)).run(kinds, progress=on_task)
    bar.end()
    log.info("%s", measured)
    return measured
