"""MLflow itself: apply entries to it, close runs that killed processes left open, list runs.

An entry is a dict of plain values, `{"kind": "create" | "batch" | "artifact" | "end", "run": key, ...}`. A run is
identified by our own key, kept in a tag, so that an entry can be made before MLflow answers. Applying an entry is
idempotent: a run is looked up by its key, and MLflow keeps a value of equal time and step once.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import psutil
from filelock import FileLock

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read by the import below, which would send telemetry
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException

Entry = dict[str, Any]
T = TypeVar("T")

EXPERIMENT = "dejavu"
KEY_TAG, HOST_TAG, PID_TAG, START_TAG = "dejavu.key", "dejavu.host", "dejavu.pid", "dejavu.process_start_seconds"
FAILURE_TAG = "dejavu.failure"
PARENT_TAG = "mlflow.parentRunId"
METRICS_PER_BATCH, PARAMETERS_PER_BATCH = 1000, 100  # MLflow's own limits
LOCK_SECONDS = 60.0  # a fresh database takes a few seconds to make
HTTP_SETTINGS = {  # MLflow's own are 120 s and 7 retries, with which a flow would hang for many minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
START_TOLERANCE_SECONDS = 2.0  # the kernel gives the boot time in whole seconds
_REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST"}


@dataclass(frozen=True)
class RunSummary:
    """Summary of a flow's run; a number that was not recorded is None.

    Attributes:
        start_seconds: since the epoch.
    """

    run_id: str
    name: str
    status: str
    start_seconds: float
    predicted_step_seconds: float | None
    measured_step_seconds: float | None


def tracking_uri(project: Path) -> str:
    """Return the tracking URI: MLFLOW_TRACKING_URI, or a SQLite file in the project."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project.resolve() / 'mlflow.db'}"


def runs(project: Path, most: int = 20) -> list[RunSummary]:
    """Return the project's flow runs, the latest first; none where nothing was ever recorded."""
    server = Server(project)
    if server.database is not None and not server.database.exists():
        return []
    found = server.search("attributes.status != ''", most=1000)
    return [_summary(run) for run in found if PARENT_TAG not in run.data.tags][:most]


def sweep_killed(project: Path) -> list[str]:
    """Set to KILLED the runs that processes of this host left open when they were killed; return their names."""
    server = Server(project)
    if server.database is not None and not server.database.exists():
        return []
    return server.sweep_killed()


def identity_tags() -> dict[str, str]:
    """Return tags that identify this process; a pid alone is reused."""
    return {
        HOST_TAG: socket.gethostname(),
        PID_TAG: str(os.getpid()),
        START_TAG: f"{_process_start_seconds(os.getpid()):.2f}",
    }


def is_refusal(error: Exception) -> bool:
    """Return whether MLflow responded and rejected this for good, so that a retry is useless."""
    return isinstance(error, MlflowException) and error.error_code in _REFUSALS


class Server:
    """A lazy connection, opened again after a failure."""

    def __init__(self, project: Path) -> None:
        self.project = project.resolve()
        self.uri = tracking_uri(project)
        local = self.uri.startswith("sqlite:///")
        self.database = Path(self.uri.removeprefix("sqlite:///")) if local else None
        self._connected: tuple[MlflowClient, str] | None = None
        self._ids: dict[str, str] = {}
        if self.uri.startswith("http"):
            for name, value in HTTP_SETTINGS.items():
                os.environ.setdefault(name, value)

    def run_id(self, key: str) -> str | None:
        """Return MLflow's own id of a run, where this process knows it."""
        return self._ids.get(key)

    def artifact_uri(self, key: str) -> str | None:
        client, _ = self._connect()
        found = self._ids.get(key)
        return client.get_run(found).info.artifact_uri if found else None

    def find(self, key: str) -> str | None:
        """Find a run by our key, whichever process created it."""
        if key not in self._ids:
            for run in self.search(f"tags.`{KEY_TAG}` = '{key}'", most=1):
                self._ids[key] = run.info.run_id
        return self._ids.get(key)

    def search(self, wanted: str, *, most: int) -> list[MlflowRun]:
        client, experiment = self._connect()
        return list(client.search_runs([experiment], wanted, max_results=most))

    def apply(self, entry: Entry, *, again: bool = False) -> None:
        """Apply one entry.

        Args:
            again: it may have been applied before (a replay).

        Raises:
            Exception: of many kinds, MLflow's, its database's or its connection's.
        """
        client, experiment = self._connect()
        key, kind = entry["run"], entry["kind"]
        if kind == "create":
            if again and self.find(key):
                return
            tags = dict(entry["tags"])
            if entry["parent"] is not None:
                tags[PARENT_TAG] = self._known(entry["parent"])
            run = client.create_run(experiment, entry["start_milliseconds"], tags, entry["name"])
            self._ids[key] = run.info.run_id
            return
        run_id = self._known(key)
        if kind == "batch":
            for rows in _batched(entry["metrics"], METRICS_PER_BATCH):
                client.log_batch(run_id, metrics=[Metric(*row) for row in rows], synchronous=True)
            for items in _batched(entry["parameters"].items(), PARAMETERS_PER_BATCH):
                client.log_batch(run_id, params=[Param(*item) for item in items], synchronous=True)
            for items in _batched(entry["tags"].items(), PARAMETERS_PER_BATCH):
                client.log_batch(run_id, tags=[RunTag(*item) for item in items], synchronous=True)
        elif kind == "artifact":
            client.log_artifact(run_id, entry["file"], entry["folder"])
        else:
            client.set_terminated(run_id, entry["status"], entry["end_milliseconds"])

    def sweep_killed(self) -> list[str]:
        client, _ = self._connect()
        mine = f"attributes.status = 'RUNNING' and tags.`{HOST_TAG}` = '{socket.gethostname()}'"
        swept = []
        for run in self.search(mine, most=1000):
            pid, started = int(run.data.tags[PID_TAG]), float(run.data.tags[START_TAG])
            now = _process_start_seconds(pid)
            if now is None or abs(now - started) > START_TOLERANCE_SECONDS:
                client.set_tag(run.info.run_id, FAILURE_TAG, f"process {pid} ended without closing this run")
                client.set_terminated(run.info.run_id, "KILLED")
                swept.append(run.info.run_name)
        return swept

    def _known(self, key: str) -> str:
        run_id = self.find(key)
        if run_id is None:
            raise MlflowException(f"no run with key {key}", error_code=5)  # RESOURCE_DOES_NOT_EXIST
        return run_id

    def _connect(self) -> tuple[MlflowClient, str]:
        if self._connected is None:
            with self._alone():
                client = MlflowClient(self.uri)
                self._connected = client, self._experiment(client)
        return self._connected

    def _experiment(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            # A server has its own artifact store; a database file has none.
            artifacts = (self.project / "mlartifacts").as_uri() if self.database is not None else None
            try:
                return client.create_experiment(EXPERIMENT, artifacts)
            except MlflowException:  # some other process was first
                found = client.get_experiment_by_name(EXPERIMENT)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return found.experiment_id

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock while a SQLite file may have to be created: two processes that migrate a new one corrupt it."""
        if self.database is None:
            yield
            return
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it logs every table that it creates
        self.database.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.database}.lock", timeout=LOCK_SECONDS):
            # MLflow retries for minutes if the file is no database or cannot be written; SQLite fails at once.
            with closing(sqlite3.connect(self.database)) as connection:
                connection.execute("PRAGMA user_version")
            yield


def _batched(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


def _process_start_seconds(pid: int) -> float | None:
    """Return seconds from boot to the process's start, independent of the clock; None: there is no such process."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        started: float = process.create_time() - psutil.boot_time()
        return started
    except psutil.NoSuchProcess:
        return None


def _summary(run: MlflowRun) -> RunSummary:
    return RunSummary(
        run_id=run.info.run_id,
        name=run.info.run_name,
        status=run.info.status,
        start_seconds=run.info.start_time / 1000,
        predicted_step_seconds=run.data.metrics.get("predicted_step_seconds"),
        measured_step_seconds=run.data.metrics.get("measured_step_seconds"),
    )
