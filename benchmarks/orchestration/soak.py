"""Runs in a row and at once: how they end, what the servers' memory does meanwhile, and what is left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

from benchmarks.orchestration.overhead import spent
from benchmarks.orchestration.served import Served, served

WORKLOAD: dict[str, Any] = {  # three layers, two steps: what is left is orchestration
    "model_options": {"num_blocks": 1, "width": 16, "num_heads": 1},
    "sequence_length": 16,
    "batch_size": 2,
    "num_microbatches": 2,
    "num_steps": 2,
    "checkpoint_every": 2,
    "compare": False,
    "trials": {"count": 0},
}
PARAMETERS = {"workload": WORKLOAD, "microbatches": [2]}
WORDS = ("run", "--workload", "workload.yaml", "--microbatches", "2")
AT_ONCE = ("dejavu/full", "dejavu/plan")  # the first run one after the other, by their limit; the others side by side
BETWEEN_LOOKS = 5  # runs
SETTLED_SECONDS = 60.0  # for the process of a run that has ended to end, too


@dataclass
class Found:
    """What a soak found.

    Attributes:
        rows: of the table.
        states: of every run, in their order.
        memory_bytes: of all servers together, by how many runs had ended.
        left: after `dejavu down`.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    memory_bytes: dict[int, int] = field(default_factory=dict)
    locked_messages: int = 0
    left: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(state != "COMPLETED" for state in self.states)

    @property
    def growth_bytes_per_run(self) -> float | None:
        """What the servers grew by, for each run after the first look; None: there was one look only."""
        looks = sorted(self.memory_bytes)
        if len(looks) < 2:
            return None
        return (self.memory_bytes[looks[-1]] - self.memory_bytes[looks[0]]) / (looks[-1] - looks[0])

    def summary(self) -> dict[str, Any]:
        """Return the figures below the table: medians of the repeats, and counts."""
        full = [row for row in self.rows if row["what"] == "dejavu/full"]
        typed = [row for row in self.rows if row["what"] == "dejavu run"]
        return {
            "overhead_seconds": _median(full, "overhead_seconds"),
            "overhead_seconds_of_dejavu_run": _median(typed, "overhead_seconds"),
            "own_processor_seconds": _median(full, "own_processor_seconds"),
            "submitted_to_running_seconds": _median(full, "until_running_seconds"),
            "submitted_to_completed_seconds": _median(full, "total_seconds"),
            "runs": len(self.states),
            "failed": self.failed,
            "locked_messages": self.locked_messages,
            "server_memory_growth_bytes_per_run": self.growth_bytes_per_run,
            "left_over": len(self.left),
            "left": "; ".join(self.left) or "nothing",
        }


def soak(*, repeats: int, in_a_row: int, at_once: int) -> Found:
    """Run whole flows of an empty workload in a project of their own.

    Args:
        repeats: of dejavu/full and `dejavu run` in turn, whose seconds are reported; one of each before does not count.
        in_a_row: runs of dejavu/full one after the other.
        at_once: runs that are submitted together, of each of `AT_ONCE`.
    """
    found = Found()
    with served() as project:
        ports = project.ports
        if repeats:
            found.rows += _overheads(project, found, repeats)
        _look(project, found, "before")
        for number in range(in_a_row):
            found.states += project.ends([project.submit("dejavu/full", **PARAMETERS)]).values()
            if (number + 1) % BETWEEN_LOOKS == 0:
                _look(project, found, f"{number + 1} in a row")
        for deployment in AT_ONCE if at_once else ():
            found.states += project.ends([project.submit(deployment, **PARAMETERS) for _ in range(at_once)]).values()
            _look(project, found, f"{at_once} × {deployment} at once")
        found.locked_messages = project.locked_messages()
        project.down()
        found.left = project.left(ports)
    return found


def _overheads(project: Served, found: Found, repeats: int) -> Iterator[dict[str, Any]]:
    (project.folder / "workload.yaml").write_text(json.dumps(WORKLOAD))  # JSON is YAML
    for repeat in range(1 + repeats):
        run = project.submit("dejavu/full", **PARAMETERS)
        found.states += project.ends([run]).values()
        if repeat and found.states[-1] == "COMPLETED":
            yield _row("dejavu/full", project, run)
        known = {one["id"] for one in project.ask("/flow_runs/filter", {})}
        asked = datetime.now(UTC).timestamp()  # Prefect's records are dates
        done = project.command(*WORDS)
        found.states.append("COMPLETED" if done.returncode == 0 else f"exit {done.returncode}")
        runs = [one for one in project.ask("/flow_runs/filter", {}) if one["id"] not in known]
        outermost = [one for one in runs if not one["parent_task_run_id"]]
        if repeat and done.returncode == 0:
            yield _row("dejavu run", project, outermost[0]["id"], asked)


def _row(what: str, project: Served, run: str, asked: float | None = None) -> dict[str, Any]:
    return {"what": what, **spent(project, run, asked).row(), "own_processor_seconds": project.processor_seconds}


def _look(project: Served, found: Found, what: str) -> None:
    """Add a row about memory and messages, once the processes of all runs have ended."""
    stop = time.monotonic() + SETTLED_SECONDS
    while project.run_processes() and time.monotonic() < stop:
        time.sleep(0.2)
    held = project.server_bytes()
    found.memory_bytes[len(found.states)] = sum(held.values())
    found.rows.append(
        {
            "what": what,
            "runs": len(found.states),
            "failed": found.failed,
            **{f"{name}_MiB": number / 2**20 for name, number in sorted(held.items())},
            "locked_messages": project.locked_messages(),
        }
    )


def _median(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return median(row[name] for row in rows) if rows else None
