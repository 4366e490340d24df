"""Look at the cluster, and decide what comes of a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from dejavu.cluster import Cluster, load_cluster
from dejavu.foundation.errors import InputError
from dejavu.planning import Choice
from dejavu.plans import Plan
from dejavu.trials import client_of
from dejavu.watching import (
    Decided,
    Decision,
    Notes,
    Planned,
    as_present,
    decide,
    fastest,
    look_at_workers,
    slow_links,
    try_links,
    with_slow_links,
    workers_by_host,
)
from dejavu.workload import Workload


@task(name="look", task_run_name="look-at-the-cluster", cache_policy=NO_CACHE)
def look_at_cluster(file: Path, dask: str, notes: Notes | None = None) -> Cluster:
    """Read the cluster file now; with a scheduler's address, keep the hosts that have a worker, and add new ones.

    Args:
        notes: also try the links between the workers' hosts; what is usual is kept there.
    """
    cluster = load_cluster(file)
    with client_of(dask) if dask else nullcontext() as client:
        if client is not None:
            workers = look_at_workers(client)
            cluster = as_present(cluster, workers)
            if notes is not None:
                cluster = _with_links_tried(cluster, client, workers_by_host(cluster, workers), notes)
    counts = ", ".join(f"{count} × {name}" for name, count in cluster.device_counts.items())
    get_run_logger().info("cluster %s, as it is now: %s", cluster.name, counts)
    return cluster


def _with_links_tried(cluster: Cluster, client: Any, workers: Mapping[str, str], notes: Notes) -> Cluster:
    known = notes.links
    tried = try_links(client, workers)
    changed = slow_links(known["usual"], tried, known["slow"])
    slow = {host: factor for host, factor in {**known["slow"], **changed}.items() if factor != 1}
    notes.tried(fastest(known["usual"], tried), slow)
    for host, factor in slow.items():
        get_run_logger().info("messages from and to host %s take %g × as long as they did", host, factor)
    return with_slow_links(cluster, slow)


@task(name="decide", cache_policy=NO_CACHE)
def decide_on(
    choice: Choice, workload: Workload, before: Planned | None, change: str, run: str, *, is_running: bool
) -> Decision:
    """Compare the plan that is there with the new one, both predicted on the changed cluster; log and show why."""
    cluster = choice.request.cluster
    old_seconds = _step_seconds(choice, before.plan) if before is not None and _fits_on(before.plan, cluster) else None
    settings = workload.replan
    if before is None:
        decided, why = Decided.PLANNED, "the first plan of this workload on this cluster"
    else:
        decided, why = decide(settings.action, old_seconds, choice.step_seconds, settings.margin, is_running=is_running)
    decision = Decision(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=workload.model,
        change=change,
        old_fingerprint=before.cluster.fingerprint if before else "",
        new_fingerprint=cluster.fingerprint,
        old_step_seconds=old_seconds,
        new_step_seconds=choice.step_seconds,
        margin=settings.margin,
        decided=str(decided),
        why=why,
        run=run,
    )
    get_run_logger().info("%s: %s (%s)", decided, why, change)
    create_markdown_artifact(f"**{decided}**: {why}.\n\nChanged: {change}.", key="decision", description=change)
    return decision


def _fits_on(plan: Plan, cluster: Cluster) -> bool:
    """Return whether the cluster has the devices that the plan counts."""
    configurations = [plan.rank_configuration(rank) for rank in range(len(plan.ranks))]
    wanted: Counter[str] = Counter()
    for configuration in configurations:
        wanted[configuration.device_type] += configuration.num_devices
    return all(count <= cluster.device_counts.get(name, 0) for name, count in wanted.items())


def _step_seconds(choice: Choice, plan: Plan) -> float | None:
    """Predict a step of a plan made for another cluster; None: it does not fit this one's memory or meshes."""
    try:
        candidate = choice.candidate(plan)
    except InputError:
        return None
    return candidate.step_seconds if candidate.fits else None
