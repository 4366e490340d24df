"""What the watch keeps in a project's folder: the cluster that the last plan is for, and every decision since.

`.dejavu/watch/<key>.json` is about one question: a workload, a cluster file and a Dask address. Decisions are appended
to `.dejavu/watch/decisions.jsonl`, one JSON object a line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from dejavu.cluster import Cluster
from dejavu.foundation.errors import DejavuError
from dejavu.foundation.processes.files import write_json
from dejavu.plans import Plan
from dejavu.watching.changes import differences
from dejavu.watching.decision import Decided, Decision
from dejavu.workload import Workload
from dejavu.workload.training_settings import ReplanSettings

_ADDED = ("lacked_in",)  # texts that older decisions lack
_TEXTS = ("at", "model", "change", "old_fingerprint", "new_fingerprint", "decided", "why", "run")
_SECONDS = ("old_step_seconds", "new_step_seconds")  # null: of a plan that is none
SETTLED_SECONDS = 4.0  # what changed must have stayed so for as long: a nanny restarts a worker, an editor saves twice


@dataclass(frozen=True)
class Planned:
    """A plan, and the cluster that it is for.

    Attributes:
        step_seconds: as predicted on that cluster.
        at_seconds: when it was made, since the epoch.
        run: the id of the flow run that made it.
    """

    cluster: Cluster
    plan: Plan
    step_seconds: float
    at_seconds: float
    run: str

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "cluster": self.cluster.to_dict(), "plan": self.plan.to_dict()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Planned:
        _check(content, text=("run",), numbers=("step_seconds", "at_seconds"))
        return cls(
            **{**content, "cluster": Cluster.from_dict(content["cluster"]), "plan": Plan.from_dict(content["plan"])}
        )


def changed_since(planned: Planned | None, now: Cluster) -> tuple[str, ...]:
    """Say what the last plan may not find in the cluster as it is now; empty: it is for this one."""
    return differences(planned.cluster, now) if planned else ("there is no plan yet",)


class Notes:
    """The notes about one question, in the folder `.dejavu/watch` of a project.

    Args:
        work: the project's `.dejavu`.
        workload: of one that cannot be read, its file's name. What its `replan` says about a new plan is no part of
            the question, but for whether trainings migrate: these have plans of fewer kinds.
        cluster_file: absolute, or relative to the project's folder; the same file, however it is written.
    """

    def __init__(self, work: Path, workload: Workload | str, cluster_file: str, dask: str) -> None:
        project = work.absolute().parent
        file = Path(os.path.normpath(project / cluster_file))
        told = file.relative_to(project) if file.is_relative_to(project) else file  # a project may be moved
        asked: Any = workload
        if isinstance(workload, Workload):
            action = "migrate" if workload.replan.action == "migrate" else "notify"  # which allows other plans
            asked = workload.model_copy(update={"replan": ReplanSettings(action=action)}).model_dump(mode="json")
        content = [asked, str(told), dask]
        self.key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        self._folder = work / "watch"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other process write a note meanwhile."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / ".lock", is_singleton=True):
            yield

    @property
    def planned(self) -> Planned | None:
        """The last plan; None: there was none yet.

        Raises:
            DejavuError: the file is damaged.
        """
        path = self._folder / f"{self.key}.json"
        try:
            return Planned.from_dict(json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, DejavuError) as error:
            raise DejavuError(f"{path} is no record of a plan ({error}); delete it, and the next look plans") from error

    def keep(self, cluster: Cluster, plan: Plan, step_seconds: float, run: str) -> None:
        """Make this the last plan."""
        planned = Planned(cluster, plan, step_seconds, time.time(), run)
        with self.alone():
            write_json(self._folder / f"{self.key}.json", planned.to_dict())

    @property
    def links(self) -> dict[str, Any]:
        """What `tried` kept; nothing was tried yet: both empty.

        Raises:
            DejavuError: the file is damaged.
        """
        path = self._folder / f"{self.key}-links.json"
        try:
            content = json.loads(path.read_text())
            usual = {host: _numbers(heard) for host, heard in content["usual"].items()}
            return {"usual": usual, "slow": _numbers(content["slow"])}
        except FileNotFoundError:
            return {"usual": {}, "slow": {}}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DejavuError(
                f"{path} is no record of links ({error}); delete it, and the next look learns what is usual"
            ) from error

    def tried(self, usual: Mapping[str, Mapping[str, float]], slow: Mapping[str, float]) -> None:
        """Keep the usual seconds of messages between hosts, and how many times slower some hosts' links are."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._folder / f"{self.key}-links.json", {"usual": usual, "slow": slow})

    def decided(self, decision: Decision) -> None:
        """Append a decision, in place of one that was half written."""
        with self.alone(), (self._folder / "decisions.jsonl").open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps({"question": self.key, **asdict(decision)}).encode() + b"\n")

    @property
    def last(self) -> Decision | None:
        """The last decision about this question; None: there was none yet.

        Raises:
            DejavuError: a line of the file is damaged.
        """
        last = None
        for question, decision in _decisions(self._folder):
            last = decision if question == self.key else last
        return last

    def without_plan(self, cluster: Cluster, database: str) -> Decision | None:
        """Return the last decision about this question, if it is that there is no plan for this cluster.

        Not where a cost was not known, and the cost database has others by now: its state is `database`.
        """
        last = self.last
        if last is None or last.decided != Decided.NONE or last.new_fingerprint != cluster.fingerprint:
            return None
        return last if last.lacked_in in ("", database) else None

    @staticmethod
    def decisions(work: Path) -> Iterator[Decision]:
        """Read every decision of a project, the oldest first; a last line that is half written is left out.

        Raises:
            DejavuError: another line is damaged.
        """
        return (decision for _, decision in _decisions(work / "watch"))


def _decisions(folder: Path) -> Iterator[tuple[str, Decision]]:
    """Read every decision, and the key of the question that it is about."""
    path = folder / "decisions.jsonl"
    *lines, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            question = content.pop("question")
            seconds = [name for name in _SECONDS if content[name] is not None]
            _check(content, text=[*_TEXTS, *(name for name in _ADDED if name in content)], numbers=("margin", *seconds))
            decision = Decision(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DejavuError(
                f"line {number} of {path} is no record of a decision ({error}); delete the line"
            ) from error
        yield question, decision


def _numbers(content: Any) -> dict[str, float]:
    _check(content, numbers=content)
    return {name: float(number) for name, number in content.items()}


def _check(content: Any, *, text: Iterable[str] = (), numbers: Iterable[str] = ()) -> None:
    """Check values of a record that somebody may have edited.

    Raises:
        TypeError, KeyError: one is missing, or of another kind.
    """
    for name in text:
        if not isinstance(content[name], str):
            raise TypeError(f"{name} is {content[name]!r:.60}; wanted text")
    for name in numbers:
        value = content[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise TypeError(f"{name} is {value!r:.60}; wanted a number")
