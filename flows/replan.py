"""`replan/on-change`: look at the cluster by a schedule, and plan again when it is not the last plan's any more.

A look that finds a change emits the event `dejavu.cluster.changed` after its own end. The deployment's trigger answers
it with a run that has a reason, and that one plans. So every re-planning has an event that says what changed, an event
of somebody else's (a node's health check) starts one as well, and looks that overlap are cancelled without harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.runtime import flow_run
from prefect.states import Completed

from dejavu.foundation.errors import InputError
from dejavu.foundation.gc_frozen import gc_frozen
from dejavu.plans.answers import BUDGET_SECONDS
from dejavu.workload.settings import Workload
from flows.parameters import BudgetSeconds, ClusterFile, DaskAddress, TryLinks, WatchedWorkload

if TYPE_CHECKING:
    from dejavu.watching import Decision, Notes

CHANGED = "dejavu.cluster.changed"
_to_announce: dict[str, dict[str, Any]] = {}  # by flow run: the event that its look calls for


def _announce(flow: Any, flow_run: Any, state: Any) -> None:
    """Emit the event, now that the look has ended and its place in the deployment's concurrency limit is free."""
    payload = _to_announce.pop(str(flow_run.id), None)
    if payload is not None:
        resource = {"prefect.resource.id": f"dejavu.cluster.{payload['cluster']}"}
        emit_event(CHANGED, resource=resource, payload=payload)
        EventsWorker.instance().wait_until_empty()


def _deciding() -> ModuleType:
    """Import what makes decisions, with torch: a look that makes none does without."""
    with gc_frozen():
        from tasks import deciding
    return deciding


def _said_once(notes: Notes, error: InputError, reason: str, decision: Callable[[], Decision]) -> State[Any]:
    """Note what is wrong, and fail for it once: later looks complete with it, until it is right, or wrong otherwise.

    Raises:
        InputError: it is new, or an event asks.
    """
    last = notes.last
    if last is None or last.why != str(error):
        notes.decided(decision())
    elif not reason:
        return Completed(message=f"{last.change} ({last.at}): {last.why}", data=None)
    raise error


def _run_name() -> str:
    given = flow_run.parameters
    return f"{given['cluster']}: {given['reason'] or 'a look'}"[:200]


@flow(name="replan", flow_run_name=_run_name, on_completion=[_announce])
def replan(
    workload: WatchedWorkload = Workload(),  # noqa: B008
    cluster: ClusterFile = "cluster.yaml",
    dask: DaskAddress = "",
    budget_seconds: BudgetSeconds = BUDGET_SECONDS,
    links: TryLinks = False,
    reason: str = "",
) -> State[Any]:
    """Compare the cluster with the last plan's; with a reason, plan again for it as it is now, and decide.

    What is done with the new plan, and how much faster it has to be, says the workload's `replan`.

    Args:
        workload: what is planned: its fields; or a file of the project, or the name of an example or a model.
        cluster: the cluster file, relative to the project folder.
        dask: address of a Dask scheduler; of the file's hosts those with a worker are there, and other workers are
            new hosts. Empty: the file alone says what is there.
        budget_seconds: for all searches together, which run on this machine.
        links: also send messages between the workers' hosts, and plan for those that have become slower.
        reason: what changed; empty: look, and only announce a change.
    """
    with gc_frozen():  # imports of seconds: the run is Running before them
        from dejavu.profiles.manifest import state_of
        from dejavu.watching import Decided, Notes, changed_since
        from dejavu.watching.notes import SETTLED_SECONDS
        from tasks.watching import look_at_cluster

    project, log, run, of_file = Path.cwd(), get_run_logger(), str(flow_run.id), None
    if isinstance(workload, str):
        with gc_frozen():
            from dejavu.workload.loader import load_workload  # with torch: a second
        typed, of_file = workload, Notes(project / ".dejavu", workload, cluster, dask)
        try:
            workload = load_workload(typed)
        except InputError as error:
            why = error
            return _said_once(of_file, error, reason, lambda: _deciding().without_workload(typed, run, why))
    notes = Notes(project / ".dejavu", workload, cluster, dask)
    look = partial(look_at_cluster, project / cluster, dask, notes if links else None)
    before = notes.planned
    if before and of_file and (last := of_file.last) and last.decided == Decided.NONE:
        of_file.decided(_deciding().with_its_workload_back(workload, before, run))
    try:
        now = look()
    except InputError as error:  # the file is wrong, or no worker or scheduler is there
        planned, what = workload, error
        return _said_once(notes, error, reason, lambda: _deciding().without_cluster(planned, before, run, what))
    changes = changed_since(before, now)
    if not changes:
        if before and (last := notes.last) and last.decided == Decided.NONE:  # what is wrong again later is said again
            notes.decided(_deciding().with_its_cluster_back(workload, before, run))
        return Completed(message="nothing changed since the last plan", data=None)
    if reason:
        with gc_frozen():  # with torch and all searches, which a look does without
            from flows.replanned import replanned
        decision = replanned(workload, cluster, now, notes, budget_seconds, "; ".join(changes))
        return Completed(message=f"{decision.decided}: {decision.why}", data=decision)
    none = notes.without_plan(now, state_of(project / "profiles_db"))
    if none is not None:  # announced once: another search would find none either
        said = f"no plan was found for {now.name} as it is ({none.at}): {none.why}"
        return Completed(message=f"{said}; another cluster or workload is planned for", data=None)
    time.sleep(SETTLED_SECONDS)
    if look().fingerprint != now.fingerprint:
        return Completed(message="the cluster is changing; the next look decides", data=None)
    log.info("changed since the last plan: %s", "; ".join(changes))
    _to_announce[str(flow_run.id)] = {
        "cluster": now.name,
        "change": "; ".join(changes),
        "old_fingerprint": before.cluster.fingerprint if before else "",
        "new_fingerprint": now.fingerprint,
    }
    return Completed(message=f"changed: {'; '.join(changes)}", data=None)
