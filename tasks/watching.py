"""Look at the cluster as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dejavu.cluster import Cluster, load_cluster
from dejavu.foundation.errors import InputError
from dejavu.watching import (
    Notes,
    as_present,
    fastest,
    look_at_workers,
    slow_links,
    try_links,
    with_slow_links,
    workers_by_host,
)


@task(name="look", task_run_name="look-at-the-cluster", cache_policy=NO_CACHE)
def look_at_cluster(file: Path, dask: str, notes: Notes | None = None) -> Cluster:
    """Read the cluster file now; with a scheduler's address, keep the hosts that have a worker, and add new ones.

    Args:
        notes: also try the links between the workers' hosts; what is usual is kept there.

    Raises:
        InputError: the file has a mistake, no host has a worker, or no scheduler answers: nothing is there to plan for.
    """
    cluster = load_cluster(file)
    if dask:
        from dejavu.trials import TrialError, client_of  # with torch: seconds

        try:
            with client_of(dask) as client:
                workers = look_at_workers(client)
                cluster = as_present(cluster, workers)
                if notes is not None:
                    cluster = _with_links_tried(cluster, client, workers_by_host(cluster, workers), notes)
        except TrialError as error:
            raise InputError(str(error)) from error
    counts = ", ".join(f"{count} × {name}" for name, count in cluster.device_counts.items())
    get_run_logger().info("cluster %s, as it is now: %s", cluster.name, counts)
    return cluster


def _with_links_tried(cluster: Cluster, client: Any, workers: Mapping[str, str], notes: Notes) -> Cluster:
    known = notes.links
    tried = try_links(client, workers)
    changed = slow_links(known["usual"], tried.moved, known["slow"])
    slow = {host: factor for host, factor in {**known["slow"], **changed}.items() if factor != 1}
    notes.tried(fastest(known["usual"], tried.took), slow)
    for host, factor in slow.items():
        get_run_logger().info("messages from and to host %s take %g × as long as they did", host, factor)
    return with_slow_links(cluster, slow)
