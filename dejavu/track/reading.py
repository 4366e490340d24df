"""Read recorded runs back: all of a project in short, and one in full."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities import Run as MlflowRun

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.registry import did_you_mean
from dejavu.track.identity import KEY_TAG
from dejavu.track.server import FAILURE_TAG, PARENT_TAG, Server, why_killed
from dejavu.track.spool import ends_that_wait

VERDICT_TAG, FOLDER_TAG, FLOW_RUN_TAG = "dejavu.verdict", "dejavu.folder", "prefect.flow_run"
PLAN, REPORT = ("plan/plan.json", "plan.json"), ("report/report.html", "report.html")  # the latter: of older runs
OLD_METRICS = {"optimality_gap_percent": "simulated_gap_percent"}  # their names now
LAST = "last"
MOST_SEARCHED = 1000
FLOWS = f"tags.`{PARENT_TAG}` IS NULL"
WAITING = "its last records wait in .dejavu/mlflow-spool: the next run sends them"


@dataclass(frozen=True)
class RunSummary:
    """A flow's run in short; a number that was not recorded is None, a text that was not is empty.

    Attributes:
        status: RUNNING, FINISHED, FAILED or KILLED.
        start_seconds: since the epoch.
        verdict: what the run says of its plan, or why it failed.
        loss: after the last step.
        folder: of the training's checkpoints and logs.
        flow_run: Prefect's id of it.
        is_waiting: it has ended, and MLflow has not got its last records yet.
    """

    run_id: str
    name: str
    status: str
    start_seconds: float
    model: str
    cluster: str
    verdict: str
    predicted_step_seconds: float | None
    measured_step_seconds: float | None
    loss: float | None
    folder: str
    flow_run: str
    is_waiting: bool = False


@dataclass(frozen=True)
class RecordedRun:
    """All that is compared of a run.

    Attributes:
        plan: as `Plan.to_dict` writes it; None where the run got no plan.
    """

    summary: RunSummary
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]
    plan: Mapping[str, Any] | None


def runs(project: Path, most: int = 20) -> list[RunSummary]:
    """Return the project's flow runs, the latest first; none where nothing was ever recorded.

    Raises:
        DejavuError: MLflow, or its database, does not answer.
    """
    server = Server(project)
    ends = ends_that_wait(project)
    return [] if server.is_empty else [_summary(project, run, ends) for run in _search(server, most)]


def find_run(project: Path, wanted: str, may_be_last: Callable[[RunSummary], bool] = lambda run: True) -> RunSummary:
    """Return the run that a person named: an id or its beginning, a name, a training's folder, or `last`.

    Args:
        may_be_last: of which runs `last` is the last one; where none is such a run, it is the last of all.

    Raises:
        InputError: there is none, or the beginning is that of several; the message has the likest.
    """
    known = runs(project, MOST_SEARCHED)
    if not known:
        raise InputError(f"no run is recorded for {project.resolve()}; `dejavu run` makes one")
    if wanted == LAST:
        return next(filter(may_be_last, known), known[0])
    word = Path(wanted).name  # of a folder its last part, which is the id of the flow's run
    ids = [(run.run_id, run.flow_run, Path(run.folder).name) for run in known]
    whole = [run for run, own in zip(known, ids, strict=True) if word and (word in own or wanted == run.name)]
    begun = [run for run, own in zip(known, ids, strict=True) if word and any(each.startswith(word) for each in own)]
    folders = {Path(run.folder).name for run in begun}
    is_folder = len(folders) == 1 and folders.pop().startswith(word)
    found = whole[:1] or (begun[:1] if is_folder else begun)  # a resumed folder has several: the last
    if len(found) > 1:
        raise InputError(f"{wanted!r} is the beginning of {len(found)} runs: {_listed(found)}; wanted more of one's id")
    if not found:
        names = [name for run in known for name in (run.run_id, run.run_id[: max(8, len(word))], run.name)]
        near = did_you_mean(wanted, names) or f"; wanted {LAST!r}, or the beginning of an id, as {_listed(known)}"
        raise InputError(f"unknown run {wanted!r}{near}")
    return found[0]


def recorded(project: Path, summary: RunSummary) -> RecordedRun:
    """Read a run in full."""
    server = Server(project)
    try:
        (run,) = server.search(f"attributes.run_id = '{summary.run_id}'", most=1)
        path = server.artifact(summary.run_id, PLAN, _copies(project, summary))
    except Exception as error:
        raise _failed(server, error) from error
    plan = json.loads(path.read_text()) if path is not None and path.is_file() else None
    metrics = {OLD_METRICS.get(name, name): value for name, value in run.data.metrics.items()}
    return RecordedRun(summary, run.data.params, metrics, plan)


def report_of(project: Path, summary: RunSummary) -> Path:
    """Return the path of a run's report page; a copy of it, where its artifacts are on a server.

    Raises:
        InputError: the run has none.
    """
    path = _report(project, summary)
    if path is None:
        why = {"RUNNING": "it is still running", "FINISHED": "its flow writes none"}
        said = WAITING if summary.is_waiting else why.get(summary.status, f"it ended as {summary.status}")
        raise InputError(
            f"run {summary.run_id[:8]} ({summary.name}) has no report: {said}; wanted a finished run of `dejavu run`"
        )
    return path


def writes_report(project: Path, summary: RunSummary) -> bool:
    """Return whether a run's flow writes a page, as far as can be seen: the run has one, or did not finish."""
    return summary.status != "FINISHED" or summary.is_waiting or _report(project, summary) is not None


def _report(project: Path, summary: RunSummary) -> Path | None:
    server = Server(project)
    try:
        path = server.artifact(summary.run_id, REPORT, _copies(project, summary))
    except Exception as error:
        raise _failed(server, error) from error
    return path if path is not None and path.is_file() else None


def _search(server: Server, most: int) -> list[MlflowRun]:
    try:
        return server.search(FLOWS, most=most)
    except Exception as error:
        raise _failed(server, error) from error


def _failed(server: Server, error: Exception) -> DejavuError:
    if isinstance(error, DejavuError):
        return error
    why = server.without_login(" ".join(str(error).split()))[:200]
    return DejavuError(f"MLflow at {server.address} does not answer ({why})")


def _copies(project: Path, summary: RunSummary) -> Path:
    return project / ".dejavu" / "reports" / summary.run_id


def _listed(found: list[RunSummary]) -> str:
    most = 5
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(f"{run.run_id[:8]} ({run.name})" for run in found[:most]) + more


def _summary(project: Path, run: MlflowRun, ends: Mapping[str, str]) -> RunSummary:
    tags, parameters, metrics = run.data.tags, run.data.params, run.data.metrics
    waits = ends.get(tags.get(KEY_TAG, "")) if run.info.status == "RUNNING" else None
    killed = "" if waits else why_killed(run)  # the next run writes it down
    return RunSummary(
        run_id=run.info.run_id,
        name=run.info.run_name,
        status=waits or ("KILLED" if killed else run.info.status),
        start_seconds=run.info.start_time / 1000,
        model=parameters.get("workload.model", ""),
        cluster=parameters.get("cluster", ""),
        verdict=killed or (WAITING if waits else tags.get(FAILURE_TAG) or tags.get(VERDICT_TAG, "")),
        predicted_step_seconds=metrics.get("predicted_step_seconds"),
        measured_step_seconds=metrics.get("measured_step_seconds"),
        loss=metrics.get("loss"),
        folder=_folder(project, tags.get(FOLDER_TAG, "")),
        flow_run=tags.get(FLOW_RUN_TAG, ""),
        is_waiting=waits is not None,
    )


def _folder(project: Path, told: str) -> str:
    """Return the folder of a training; where the project was moved or copied since, the one that it has now."""
    here = project.resolve() / ".dejavu" / "runs" / Path(told).name
    return str(here) if told and here.is_dir() else told
