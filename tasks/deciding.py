"""Decide what comes of a cluster's change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from dejavu.cluster import Cluster
from dejavu.cluster.islands import Island
from dejavu.cluster.meshes import on_nodes
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.planning import Choice
from dejavu.plans import Plan
from dejavu.watching import Decided, Decision, Planned, decide
from dejavu.workload import Workload


@task(name="decide", cache_policy=NO_CACHE)
def decide_on(
    choice: Choice, workload: Workload, before: Planned | None, change: str, run: str, *, is_followed: bool
) -> Decision:
    """Compare the plan that is there with the new one, both predicted on the changed cluster; log and show why."""
    cluster, settings = choice.request.cluster, workload.replan
    old_seconds = _step_seconds(choice, before.plan) if before is not None and _fits_on(before.plan, cluster) else None
    if before is None:
        decided, why = Decided.PLANNED, "the first plan of this workload on this cluster"
    else:
        decided, why = decide(
            settings.action, old_seconds, choice.step_seconds, settings.margin, is_followed=is_followed
        )
    decision = _decision(workload, cluster, before, change, run, str(decided), why)
    decision = replace(decision, old_step_seconds=old_seconds, new_step_seconds=choice.step_seconds)
    get_run_logger().info("%s: %s (%s)", decided, why, change)
    create_markdown_artifact(f"**{decided}**: {why}.\n\nChanged: {change}.", key="decision", description=change)
    return decision


def without_plan(
    workload: Workload, cluster: Cluster, before: Planned | None, change: str, run: str, why: Exception
) -> Decision:
    """Return the decision that there is no plan for the changed cluster, so that looks announce it once."""
    said = str(why) if isinstance(why, DejavuError) else f"{type(why).__name__}: {why}"
    return _decision(workload, cluster, before, change, run, Decided.NONE, said)


def without_cluster(workload: Workload, before: Planned | None, run: str, why: InputError) -> Decision:
    """Return the decision that there is no cluster to plan for, so that looks fail for this reason once."""
    return _decision(workload, None, before, "there is no cluster to plan for", run, Decided.NONE, str(why))


def without_workload(file: str, run: str, why: InputError) -> Decision:
    """Return the decision that there is no workload to plan, likewise; its file, or what it names, is wrong."""
    decision = _decision(Workload(), None, None, "there is no workload to plan", run, Decided.NONE, str(why))
    return replace(decision, model=file)


def with_its_workload_back(workload: Workload, before: Planned, run: str) -> Decision:
    """Return the decision that the plan stays, whose workload can be read again."""
    change, why = "the workload can be read again", "the plan that is there is for this workload"
    decision = _decision(workload, before.cluster, before, change, run, Decided.KEPT, why)
    return replace(decision, old_step_seconds=before.step_seconds)


def with_its_cluster_back(workload: Workload, before: Planned, run: str) -> Decision:
    """Return the decision that the plan stays, whose cluster is there again after one without a plan, or none."""
    change, why = "the cluster is again that of the plan that is there", "the plan that is there is for this cluster"
    decision = _decision(workload, before.cluster, before, change, run, Decided.KEPT, why)
    return replace(decision, old_step_seconds=before.step_seconds)


def _decision(
    workload: Workload, cluster: Cluster | None, before: Planned | None, change: str, run: str, decided: str, why: str
) -> Decision:
    """Return a decision without the steps of plans."""
    return Decision(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=workload.model,
        change=change,
        old_fingerprint=before.cluster.fingerprint if before else "",
        new_fingerprint=cluster.fingerprint if cluster else "",
        old_step_seconds=None,
        new_step_seconds=None,
        margin=workload.replan.margin,
        decided=str(decided),
        why=why,
        run=run,
    )


def _fits_on(plan: Plan, cluster: Cluster) -> bool:
    """Return whether the cluster has the devices that the plan counts."""
    wanted: Counter[Island] = Counter()
    for rank in range(len(plan.ranks)):
        configuration = plan.rank_configuration(rank)
        wanted[Island.of(configuration)] += configuration.num_devices
    return all(count <= sum(on_nodes(cluster, island)) for island, count in wanted.items())


def _step_seconds(choice: Choice, plan: Plan) -> float | None:
    """Predict a step of a plan made for another cluster; None: it does not fit this one's memory or nodes."""
    try:
        candidate = choice.candidate(plan)
    except InputError:
        return None
    return candidate.step_seconds if candidate.fits else None
