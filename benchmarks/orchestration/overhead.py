"""Where the seconds of one run go, by what Prefect's server and the run's folder have recorded of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.orchestration.served import Served

# What the flow is for, by the names of its tasks; everything else is orchestration. Of "train" only the ranks count,
# from their launch to their end: what follows are records.
WORK = {"measure": "measuring", "search": "searching", "trials": "trying", "train": "training", "compare": "comparing"}
Span = tuple[str, float, float]


@dataclass(frozen=True)
class Spent:
    """Seconds of one run.

    Attributes:
        until_running_seconds, total_seconds: from its submission.
        work_seconds: by kind; no second counts twice.
        steps_seconds: of training, what the steps themselves took; the rest starts and ends the ranks.
    """

    until_running_seconds: float
    total_seconds: float
    work_seconds: dict[str, float]
    steps_seconds: float

    @property
    def overhead_seconds(self) -> float:
        """What is neither work nor a wait for it."""
        return self.total_seconds - sum(self.work_seconds.values())

    def row(self) -> dict[str, float]:
        """Return the columns of the table."""
        return {
            "until_running_seconds": self.until_running_seconds,
            "total_seconds": self.total_seconds,
            **{f"{kind}_seconds": self.work_seconds[kind] for kind in ("measuring", "searching", "training")},
            "steps_seconds": self.steps_seconds,
            "overhead_seconds": self.overhead_seconds,
        }


def spent(project: Served, run: str, submitted: float | None = None) -> Spent:
    """Read where the time of a completed run went.

    Args:
        submitted: when it was asked for, in seconds of the epoch; None: when the server was asked for it.
    """
    states = project.get(f"/flow_run_states/?flow_run_id={run}")
    first = {state["type"]: moment(state["timestamp"]) for state in reversed(states)}  # of equal types, the earliest
    began = first["SCHEDULED"] if submitted is None else submitted
    folder = project.folder / ".dejavu" / "runs" / run
    ended = (folder / "result.json").stat().st_mtime  # written when all ranks have ended
    spans = [(task, start, min(stop, ended) if task == "train" else stop) for task, start, stop in _spans(project, run)]
    return Spent(first["RUNNING"] - began, first["COMPLETED"] - began, seconds_by_kind(spans), steps_seconds(folder))


def seconds_by_kind(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of each kind of work; a second of two kinds counts as the first of them."""
    given, taken, found = list(spans), list[tuple[float, float]](), {}
    for name, kind in WORK.items():
        before = covered(taken)
        taken += [(start, stop) for task, start, stop in given if task == name]
        found[kind] = covered(taken) - before
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of these spans lasted."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def steps_seconds(folder: Path) -> float:
    """Return what the steps of a training took together."""
    return sum(float(json.loads(row)["seconds"]) for row in (folder / "progress.jsonl").read_text().splitlines())


def moment(text: str) -> float:
    """Return seconds of the epoch of a time in Prefect's records."""
    return datetime.fromisoformat(text).timestamp()


def _spans(project: Served, run: str) -> Iterator[Span]:
    """Yield name, start and end of every task of a run, and of the flows that it calls."""
    flows = [run]
    while flows:
        tasks = project.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": flows}}})
        called: dict[str, Any] = {"parent_task_run_id": {"any_": [task["id"] for task in tasks]}}
        runs = project.ask("/flow_runs/filter", {"flow_runs": called}) if tasks else []
        flows = [one["id"] for one in runs]
        for task in tasks:
            if task["start_time"] and task["end_time"]:
                yield task["name"].partition(":")[0], moment(task["start_time"]), moment(task["end_time"])
