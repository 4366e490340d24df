"""The records of one flow: a parent run, and a child run for each of its parts."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dejavu.foundation.errors import interrupt_of
from dejavu.foundation.processes.files import ASIDE, finite
from dejavu.track.database import local_path
from dejavu.track.identity import KEY_TAG, identity_tags, source_tags
from dejavu.track.server import FAILURE_TAG, Server
from dejavu.track.spool import Recorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PARAMETER_CHARACTERS = 6000  # MLflow's own limit
MOST_TAG_CHARACTERS = 5000
MOST_NAME_CHARACTERS = 250
FIGURE_DOTS_PER_INCH = 120
_TERMINATED = "TerminationSignal"  # Prefect's exception for a signal, which has its number
_CANCELLED = {"CancelledRun", _TERMINATED, "CancelledError"}  # Prefect's and asyncio's ways to be cancelled

log = logging.getLogger("dejavu.track")


class Metric(NamedTuple):
    """One number of a run; `step` orders a curve.

    Attributes:
        epoch_seconds: when it was found; None: now.
    """

    name: str
    value: float
    step: int | None = None
    epoch_seconds: float | None = None


class DataSet(NamedTuple):
    """What a run read.

    Attributes:
        digest: a hash of the contents, at most 36 characters.
        source: where they are: a path, or what made them.
        context: what they were used for, `training` or `planning`.
        profile: numbers about them.
    """

    name: str
    digest: str
    source: str
    context: str
    profile: Mapping[str, Any] = {}


class Run:
    """One MLflow run. Its methods never raise because of MLflow or a full disk: what cannot be sent is sent later."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        parameters: Mapping[str, Any],
        tags: Mapping[str, Any],
        parent: Run | None = None,
        *,
        seconds_ago: float = 0.0,
    ) -> None:
        self.name = name
        self._recorder = recorder
        self._key = uuid.uuid4().hex
        self._not_finite: set[str] = set()
        recorder.record(
            {
                "kind": "create",
                "run": self._key,
                "name": name,
                "parent": parent._key if parent else None,
                "tags": _tags({**tags, **identity_tags(), KEY_TAG: self._key}),
                "start_milliseconds": _now_milliseconds() - round(seconds_ago * 1e3),
            }
        )
        self.parameters(parameters)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None while MLflow has not answered."""
        return self._recorder.server.run_id(self._key)

    @contextmanager
    def child(
        self, name: str, parameters: Mapping[str, Any] | None = None, tags: Mapping[str, Any] | None = None
    ) -> Iterator[Run]:
        """Open a nested run for one part of the flow; it ends with the block, as FINISHED, FAILED or KILLED."""
        run = Run(self._recorder, name, parameters or {}, tags or {}, parent=self)
        with run._ending():
            yield run

    def add_child(
        self,
        name: str,
        parameters: Mapping[str, Any],
        metrics: Iterable[Metric],
        tags: Mapping[str, Any],
        seconds: float = 0.0,
    ) -> None:
        """Record a part that has ended already, and took so long, as a nested run of its own."""
        run = Run(self._recorder, name, parameters, tags, parent=self, seconds_ago=seconds)
        with run._ending():
            run.metrics(metrics)

    def parameters(self, parameters: Mapping[str, Any]) -> None:
        """Record settings, nested ones under dotted names; if a value is too long for MLflow, also all in a file."""
        if not parameters:
            return
        flat = {_name(name): _text(value) for name, value in _flat(parameters)}
        if any(len(value) > MOST_PARAMETER_CHARACTERS for value in flat.values()):
            self.artifact_json("parameters.json", flat)
        self._batch(parameters={name: _cut(value, MOST_PARAMETER_CHARACTERS) for name, value in flat.items()})

    def tags(self, tags: Mapping[str, Any]) -> None:
        self._batch(tags=_tags(tags))

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self.metrics([Metric(name, value, step)])

    def metrics(self, rows: Iterable[Metric | tuple[str, float, int | None]]) -> None:
        """Record many numbers at once, far faster than one by one; one that is not finite becomes a tag."""
        now, finite, tags = _now_milliseconds(), [], {}
        for row in rows:
            name, value, step, epoch_seconds = Metric(*row)
            name, value = _name(name), float(value)
            if math.isfinite(value):
                found = now if epoch_seconds is None else round(epoch_seconds * 1e3)
                finite.append([name, value, found, step or 0])
            elif name not in self._not_finite:
                self._not_finite.add(name)
                tags[f"dejavu.not_finite.{name}"] = f"{value} at first at step {step or 0}"
        if finite or tags:
            self._batch(metrics=finite, tags=tags)

    def data_sets(self, data_sets: Iterable[DataSet]) -> None:
        """Record what the run read."""
        rows = [
            {
                "name": one.name,
                "digest": one.digest,
                "context": one.context,
                "source_type": "local",
                "source": json.dumps({"uri": one.source}),
                "profile": json.dumps(one.profile),
            }
            for one in data_sets
        ]
        self._batch(datasets=rows)

    def model(self, folder: Path, name: str, step: int, tags: Mapping[str, Any]) -> None:
        """Record a model that `save_model` saved as the run's output, and register it under the name.

        Args:
            step: how many steps it was trained.
        """
        entry = {"kind": "model", "folder": str(folder.resolve()), "name": _model_name(name), "step": step}
        self._recorder.record({**entry, "run": self._key, "tags": _tags(tags)})

    @property
    def registered_models(self) -> dict[int, str]:
        """The run's registered models, as `gpt version 3`, by their steps; none, too, where MLflow does not answer."""
        try:
            found = self._recorder.server.models_of(self.run_id) if self.run_id else {}
        except Exception as error:
            log.debug("no registered model: %s", error)
            return {}
        return {step: f"{version.name} version {version.version}" for step, version in sorted(found.items())}

    def artifact_file(self, path: Path, name: str | None = None) -> None:
        """Record a file, under its own name or another, which may contain folders (`search/plan.json`)."""
        if not path.is_file():
            raise FileNotFoundError(f"the artifact {path} is not a file")
        target = Path(name or path.name)
        is_open = bool(path.stat().st_mode & 0o077)  # MLflow copies the mode, too
        if target.name != path.name or is_open:
            self._artifact(str(target), lambda copy: copy.write_bytes(path.read_bytes()))
        else:
            self._record_artifact(path, target)

    def artifact_text(self, name: str, text: str) -> None:
        self._artifact(name, lambda path: path.write_text(text, encoding="utf-8"))

    def artifact_json(self, name: str, content: Any) -> None:
        """Record a JSON document; numbers that are not finite, which JSON does not have, are null."""
        text = json.dumps(finite(content), indent=1, default=str, ensure_ascii=False, allow_nan=False)
        self.artifact_text(name, text)

    def artifact_table(self, name: str, table: pa.Table) -> None:
        """Record a table as Parquet; the name ends in .parquet."""
        self._artifact(name, lambda path: pq.write_table(table, path))

    def figure(self, name: str, figure: Figure) -> None:
        """Record a figure as an image; the name ends in .png."""
        self._artifact(name, lambda path: figure.savefig(path, dpi=FIGURE_DOTS_PER_INCH))

    def _artifact(self, name: str, write: Callable[[Path], Any]) -> None:
        """Record what `write` writes; where the disk does not take it, that is a warning, and the run goes on."""
        work = self._recorder.folder.parent  # of the project: temporary files may be on a disk that is small or full
        try:
            work.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=ASIDE, dir=work) as folder:
                path = Path(folder) / Path(name).name
                write(path)
                self._record_artifact(path, Path(name))
        except OSError as error:
            log.warning("%s is not recorded: it could not be written in %s: %s", name, work, error)

    def _record_artifact(self, path: Path, target: Path) -> None:
        folder = None if target.parent == Path() else target.parent.as_posix()
        self._recorder.record(
            {"kind": "artifact", "run": self._key, "file": str(path.resolve()), "folder": folder},
        )

    def _batch(
        self,
        metrics: list[list[Any]] | None = None,
        parameters: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        datasets: list[dict[str, Any]] | None = None,
    ) -> None:
        entry = {"metrics": metrics or [], "parameters": parameters or {}, "tags": tags or {}}
        self._recorder.record({"kind": "batch", "run": self._key, **entry, "datasets": datasets or []})

    @contextmanager
    def _ending(self) -> Iterator[None]:
        status = "FINISHED"
        try:
            yield
        except BaseException as error:
            ended = _what_ended(error)
            status = "KILLED" if ended else "FAILED"
            self.tags({FAILURE_TAG: ended or str(error) or type(error).__name__})
            raise
        finally:
            self._recorder.record(
                {"kind": "end", "run": self._key, "status": status, "end_milliseconds": _now_milliseconds()}
            )


class Tracker(Run):
    """The parent run of a flow, and the connection that its children share."""

    @classmethod
    @contextmanager
    def open(
        cls,
        project: Path,
        name: str,
        parameters: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> Iterator[Tracker]:
        """Start a flow's run, after sending what earlier runs could not send and closing those that were killed."""
        os.environ.pop("MLFLOW_RUN_ID", None)  # or our child processes would write into some other run
        recorder = Recorder(Server(project))
        recorder.catch_up()
        try:
            tracker = cls(recorder, name, parameters or {}, {**source_tags(project), **(tags or {})})
            with tracker._ending():
                yield tracker
        finally:
            recorder.close()

    @property
    def address(self) -> str:
        """Where MLflow is, without the user and the password that its URI may have."""
        return self._recorder.server.address

    @property
    def page(self) -> str:
        """The address of the run's page, relative to MLflow's; empty while MLflow does not answer."""
        try:
            return self._recorder.server.page(self._key)
        except Exception as error:
            log.debug("no page: %s", error)
            return ""

    @property
    def artifact_folder(self) -> Path | None:
        """The parent run's artifacts on this machine; None if they are on a server."""
        try:
            uri = self._recorder.server.artifact_uri(self._key) or ""
        except Exception as error:
            log.debug("no artifact folder: %s", error)
            return None
        return local_path(uri)


def _what_ended(error: BaseException) -> str:
    """Say what ended a run that did not fail by itself; empty: it did.

    A library may fail at an interrupt, or a signal, in its own words.
    """
    interrupt = interrupt_of(error)
    if interrupt is not None:
        return f"it was {str(interrupt) or 'interrupted'}"
    if isinstance(error, SystemExit):
        return f"its process exited with code {error.code}"
    one: BaseException | None = error
    while one is not None:
        if type(one).__name__ == _TERMINATED and isinstance(number := getattr(one, "signal", None), int):
            return f"it was ended by {signal.Signals(number).name}"
        one = one.__context__
    if isinstance(error, Exception) and type(error).__name__ not in _CANCELLED:
        return ""
    return str(error) or "it was ended from outside"


def _now_milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in parameters.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, (list, tuple, dict)) else str(value)


def _cut(text: str, most: int) -> str:
    """Truncate the text, and say so at its end."""
    note = f" … cut, {len(text):,} characters in all"
    return text if len(text) <= most else text[: most - len(note)] + note


def _name(name: str) -> str:
    """Make a valid MLflow name: letters, digits, spaces and `_ - . : /`, as in a path that stays in its folder."""
    parts = (re.sub(r"[^\w.\- :]", "_", part) for part in name.split("/") if part.strip(".") or part == "")
    return "/".join(part for part in parts if part)[:MOST_NAME_CHARACTERS] or "_"


def _model_name(name: str) -> str:
    """Make a valid name of a registered model, which has no `/`, `:` or `.`."""
    return re.sub(r"[^\w\-]+", "-", name).strip("-") or "model"


def _tags(tags: Mapping[str, Any]) -> dict[str, str]:
    return {_name(name): _cut(_text(value), MOST_TAG_CHARACTERS) for name, value in tags.items()}
