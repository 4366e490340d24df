"""What all flows of one run share: the project, the cluster as read at the start, and MLflow's run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.runtime import deployment, flow_run

from dejavu.cluster import Cluster
from dejavu.foundation.dask_workers import queue_of
from dejavu.launch.training_lock import alone_in
from dejavu.track import Tracker
from dejavu.trials import Jobs, started_jobs
from dejavu.workload import Workload
from flows.endings import interrupts_as_such, recorded_log, without_tracebacks, without_waiting_for_heartbeats
from tasks.pricing import read_cluster
from tasks.recording import record_question

ABSENT = (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT)  # what a record is to be made under is not there
LOOK_SECONDS = 5.0  # between two looks whether a run is still there: each is a request to the server


@dataclass(frozen=True)
class Session:
    """One run: the flow that was started and the flows that it calls.

    Attributes:
        file: the cluster file as it was named.
        cluster: as read at the start; later edits of its file do not affect this run.
        log: of the flow that was started, whose log a person watches.
        dask: address of a Dask scheduler; empty: this machine only.
        jobs: whose processes are that scheduler's workers, until the session ends; None: its workers are others'.
    """

    project: Path
    file: str
    cluster: Cluster
    run: Tracker
    log: Any
    dask: str = ""
    jobs: Jobs | None = None

    @property
    def database(self) -> Path:
        return self.project / "profiles_db"

    @property
    def work(self) -> Path:
        """Folder of the files of runs and trials."""
        return self.project / ".dejavu"


_CURRENT: ContextVar[Session | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def session(
    workload: Workload,
    file: str,
    *,
    cluster: Cluster | None = None,
    measures: bool = False,
    trains: bool = False,
    dask: str = "",
    wait: bool = False,
) -> Iterator[Session]:
    """Return the session of the flow that called this one, or open a new one.

    Args:
        file: the cluster file, relative to the project folder.
        cluster: as it is now, where that is not what the file says.
        measures: take the folder's lock: nobody else may measure or train in it meanwhile.
        trains: the cluster's devices have to be here, or have workers that are connected to `dask`.
        dask: address of a Dask scheduler, or the batch system whose jobs are to be its workers.
        wait: until nobody else measures or trains here, instead of raising an error.
    """
    outer = _CURRENT.get()
    if outer is not None:
        with interrupts_as_such(), ended_when_deleted(outer.log):
            yield outer
        return
    without_tracebacks()
    without_waiting_for_heartbeats()
    project = Path.cwd()
    path = project / file
    text = path.read_text(errors="replace") if path.is_file() else ""  # now: a run that waits may find another file
    machines = cluster or read_cluster(path, trains, dask)
    title = f"{workload.model} on {machines.name}"
    with interrupts_as_such(), ExitStack() as stack:
        if measures:
            stack.enter_context(alone_in(project, title, wait=wait, on_wait=get_run_logger().info))
        name = f"{title}, {datetime.now():%Y-%m-%d %H:%M:%S}"
        run = stack.enter_context(Tracker.open(project, name, tags=_prefect_tags()))
        stack.enter_context(recorded_log(run, project / ".dejavu" / "logs" / f"flow-{flow_run.id}.log"))
        record_question(run, workload, machines, text)
        jobs, queue, log = None, queue_of(dask), get_run_logger()
        if queue is not None:
            work = project / ".dejavu"
            jobs = stack.enter_context(started_jobs(queue, machines, work, trains=trains, say=log.info))
        here = Session(project, file, machines, run, log, dask if jobs is None else jobs.address, jobs)
        token = _CURRENT.set(here)
        try:
            with ended_when_deleted(log):
                yield here
        finally:
            _CURRENT.reset(token)


@contextmanager
def ended_when_deleted(log: Any) -> Iterator[None]:
    """End this process by SIGTERM, as Prefect's worker does where its run is cancelled, when its run is deleted.

    Each task and flow is recorded under its run: the next one fails at that, which may be before the next look.

    Args:
        log: of the flow that was started, which may be there still where one that it called was deleted.
    """
    run, is_over = flow_run.id, Event()

    def is_there() -> bool:
        with suppress(Exception), get_client(sync_client=True) as client:  # the server may be away
            try:
                client.read_flow_run(run)
            except ObjectNotFound:
                return False
        return True

    def end(found: str = "was deleted in Prefect") -> None:
        log.error("run %s %s: this ends, as where it is cancelled", run, found)
        os.kill(os.getpid(), signal.SIGTERM)

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            if not is_there() and not is_over.is_set():
                end()
                return

    Thread(target=copy_context().run, args=(look,), name=f"is {run} there", daemon=True).start()
    try:
        yield
    except (ObjectNotFound, PrefectHTTPStatusError) as error:
        is_over.set()
        if isinstance(error, ObjectNotFound) or error.response.status_code in ABSENT:
            if is_there():
                end("lacks a part in Prefect that was asked for, as after it was deleted")
            else:
                end()
        raise
    finally:
        is_over.set()


def _prefect_tags() -> dict[str, str]:
    """Return what leads from MLflow to Prefect; the server of `dejavu run` ends with it, so its pages are no link."""
    tags = {"prefect.flow_run": str(flow_run.id), "dejavu.attempt": str(flow_run.run_count)}
    if deployment.id:  # the process's own command is Prefect's
        tags["mlflow.source.name"] = f"prefect deployment run {flow_run.flow_name}/{deployment.name}"
    return tags | ({"prefect.url": str(flow_run.ui_url)} if deployment.id and flow_run.ui_url else {})
