"""MLflow itself: apply entries to it, close runs that killed processes left open, look runs up.

An entry is a dict of plain values, `{"kind": "create" | "batch" | "artifact" | "model" | "end", "run": key, ...}`. A
run is identified by our own key, kept in a tag, so that an entry can be made before MLflow answers. Applying an entry
is idempotent: a run is looked up by its key, MLflow keeps a value of equal time and step once and a data set of equal
digest once, and a run has at most one registered model of a step.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read by the import below, which would send telemetry
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # one file a bar, between the lines of a log
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # of each run, where programs read our lines
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, LoggedModelStatus, Metric, Param, RunTag
from mlflow.entities import Run as MlflowRun
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from dejavu.foundation.units import plural
from dejavu.track.database import EXPERIMENT, alone_with, artifacts_of, local_path
from dejavu.track.identity import BOOT_TAG, HOST_TAG, KEY_TAG, PID_TAG, START_TAG, has_ended

Entry = dict[str, Any]
T = TypeVar("T")

# MLflow's pages then offer runs, charts and models; without it they take an experiment for a GenAI application's.
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
FAILURE_TAG = "dejavu.failure"
PARENT_TAG = "mlflow.parentRunId"
# MLflow's own limits are 100 parameters, 100 tags, and 1,000 of all together.
METRICS_PER_BATCH, PARAMETERS_PER_BATCH, TAGS_PER_BATCH = 800, 100, 100
MODEL_FILE = "MLmodel"
STEP_TAG = "dejavu.step"  # of a version of a registered model: how many steps it was trained
VERSIONS_TAG = "mlflow.modelVersions"  # by which the page of a run finds its registered models
HTTP_SETTINGS = {  # MLflow's own are 120 s and 7 retries, with which a flow would hang for many minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
_REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST"}


def tracking_uri(project: Path) -> str:
    """Return the tracking URI: MLFLOW_TRACKING_URI, or a SQLite file in the project."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project.resolve() / 'mlflow.db'}"


def _login(uri: str) -> str:
    """Return the user and the password in a URI, with the @ after them; empty: it has none."""
    place = uri.partition("://")[2]
    if uri.startswith("http"):  # the path may have an @; of a database the password may have a slash
        place = place.partition("/")[0]
    return "" if place.startswith("/") else "".join(place.rpartition("@")[:2])


def sweep_killed(project: Path) -> list[str]:
    """Set to KILLED the runs that processes of this host left open when they were killed; return their names."""
    server = Server(project)
    return [] if server.is_empty else server.sweep_killed()


def why_killed(run: MlflowRun) -> str:
    """Say that the process of an open run of this host has ended; empty: it runs, or the run is another or not open."""
    tags = run.data.tags
    if run.info.status != "RUNNING" or tags.get(HOST_TAG) != socket.gethostname():
        return ""
    pid, started = int(tags[PID_TAG]), float(tags[START_TAG])
    return f"process {pid} ended without closing this run" if has_ended(pid, started, tags.get(BOOT_TAG, "")) else ""


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

    @property
    def address(self) -> str:
        """Where MLflow is, for people and records."""
        return self.without_login(self.uri)

    def without_login(self, text: str) -> str:
        """Return a text, as MLflow's errors are, without the user and the password of the tracking URI."""
        return text.replace(_login(self.uri), "")

    def run_id(self, key: str) -> str | None:
        """Return MLflow's own id of a run, where this process knows it."""
        return self._ids.get(key)

    def artifact_uri(self, key: str) -> str | None:
        client, _ = self._connect()
        found = self._ids.get(key)
        return client.get_run(found).info.artifact_uri if found else None

    def page(self, key: str) -> str:
        """Return the address of a run's page, relative to MLflow's; empty where this process does not know the run."""
        _, experiment = self._connect()
        found = self._ids.get(key)  # without its mode of work a browser gets the page for GenAI
        return f"#/experiments/{experiment}/runs/{found}?workflowType=machine_learning" if found else ""

    def find(self, key: str) -> str | None:
        """Find a run by our key, whichever process created it."""
        if key not in self._ids:
            for run in self.search(f"tags.`{KEY_TAG}` = '{key}'", most=1):
                self._ids[key] = run.info.run_id
        return self._ids.get(key)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever recorded; looking makes no database."""
        return self.database is not None and not self.database.exists()

    def search(self, wanted: str, *, most: int) -> list[MlflowRun]:
        """Return the runs that MLflow's filter finds, the latest first."""
        client, experiment = self._connect()
        return list(client.search_runs([experiment], wanted, max_results=most))

    def models_of(self, run_id: str) -> dict[int, ModelVersion]:
        """Return the versions of a registered model that a run made, by their step."""
        client, _ = self._connect()
        found = client.search_model_versions(f"run_id = '{run_id}'")
        return {int(version.tags[STEP_TAG]): version for version in found if STEP_TAG in version.tags}

    def artifact(self, run_id: str, paths: Iterable[str], to: Path) -> Path | None:
        """Return the first of these artifacts that the run has: where it is on this machine, or a copy in `to`."""
        client, _ = self._connect()
        for path in paths:
            folder = str(Path(path).parent) if "/" in path else None
            if any(item.path == path for item in client.list_artifacts(run_id, folder)):
                local = local_path(client.get_run(run_id).info.artifact_uri)
                if local is not None:
                    return local / path
                to.mkdir(parents=True, exist_ok=True)
                return Path(client.download_artifacts(run_id, path, str(to)))
        return None

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
            self._log_batch(client, run_id, entry)
        elif kind == "artifact":
            client.log_artifact(run_id, entry["file"], entry["folder"])
        elif kind == "model":
            self._register(run_id, entry)
        else:
            client.set_terminated(run_id, entry["status"], entry["end_milliseconds"])

    def _log_batch(self, client: MlflowClient, run_id: str, entry: Entry) -> None:
        """Log all that an entry has, in as few calls as MLflow's limits allow: a call is a transaction."""
        parts = zip_longest(
            _batched((Metric(*row) for row in entry["metrics"]), METRICS_PER_BATCH),
            _batched((Param(*item) for item in entry["parameters"].items()), PARAMETERS_PER_BATCH),
            _batched((RunTag(*item) for item in entry["tags"].items()), TAGS_PER_BATCH),
            fillvalue=(),
        )
        for metrics, parameters, tags in parts:
            client.log_batch(run_id, metrics=metrics, params=parameters, tags=tags, synchronous=True)
        if entry.get("datasets"):
            client.log_inputs(run_id, [_dataset(row) for row in entry["datasets"]])

    def _register(self, run_id: str, entry: Entry) -> None:
        """Log a saved model as the run's output, and register it as a new version."""
        from mlflow.models import Model  # with pandas: a second that only a training pays

        client, experiment = self._connect()
        if entry["step"] in self.models_of(run_id):
            return
        folder, name = Path(entry["folder"]), entry["name"]
        logged = client.create_logged_model(experiment, name=name, source_run_id=run_id, model_type="pytorch")
        saved = Model.load(str(folder))
        saved.run_id, saved.model_id = run_id, logged.model_id
        saved.save(str(folder / MODEL_FILE))
        client.log_model_artifacts(logged.model_id, str(folder))
        client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, entry["step"])])
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # Where the files are: MLflow would look `models:/…` up in the store of its global settings, which is not ours.
        where = logged.artifact_location
        made = client.create_model_version(
            name,
            where,
            run_id,
            tags={**entry["tags"], STEP_TAG: str(entry["step"])},
            description=f"Trained for {plural(entry['step'], 'step')}; `mlflow.pytorch.load_model` reads it.",
            model_id=logged.model_id,
        )
        versions = json.dumps([{"name": name, "version": made.version}])
        client.set_logged_model_tags(logged.model_id, {VERSIONS_TAG: versions})

    def sweep_killed(self) -> list[str]:
        client, _ = self._connect()
        mine = f"attributes.status = 'RUNNING' and tags.`{HOST_TAG}` = '{socket.gethostname()}'"
        swept = []
        for run in self.search(mine, most=1000):
            if why := why_killed(run):
                client.set_tag(run.info.run_id, FAILURE_TAG, why)
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
            with alone_with(self.database) if self.database is not None else nullcontext():
                client = MlflowClient(self.uri)
                self._connected = client, self._experiment(client)
        return self._connected

    def _experiment(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            # A server has its own artifact store; a database file has none.
            artifacts = artifacts_of(self.project) if self.database is not None else None
            try:
                made: str = client.create_experiment(EXPERIMENT, artifacts, tags={KIND_TAG: KIND})
                return made
            except MlflowException:  # some other process was first
                found = client.get_experiment_by_name(EXPERIMENT)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        if KIND_TAG not in found.tags:
            client.set_experiment_tag(found.experiment_id, KIND_TAG, KIND)
        return found.experiment_id


def _dataset(row: dict[str, Any]) -> DatasetInput:
    entity = Dataset(row["name"], row["digest"], row["source_type"], row["source"], profile=row["profile"])
    return DatasetInput(entity, [InputTag("mlflow.data.context", row["context"])])


def _batched(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch
