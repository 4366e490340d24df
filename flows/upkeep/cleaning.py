"""What old runs left: find it, and delete it.

The newest runs stay with their checkpoints and with the trials that they start from; results of trials (small files of
losses) stay too, so that no trial runs again only to be known.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dejavu.foundation.processes.files import ASIDE
from dejavu.foundation.units import format_bytes, plural
from dejavu.launch.training_lock import alone_in
from flows import service_record
from flows.processes import RecordedProcess

DAY_SECONDS = 86_400.0
KEPT_DAYS = 30  # of results that Prefect keeps to answer again, and of logs
STATE_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Leftovers:
    """Files and folders of one kind that nothing needs."""

    what: str
    paths: tuple[Path, ...]
    size_bytes: int

    def __str__(self) -> str:
        return f"{plural(len(self.paths), self.what)}, {format_bytes(self.size_bytes)}"


def clean(project: Path, keep: int, *, dry_run: bool = False, wait: bool = False) -> list[Leftovers]:
    """Delete what only runs older than the newest `keep` need; return what was deleted.

    Args:
        dry_run: delete nothing, only find it.
        wait: for a run that measures or trains here to end, instead of raising an error.

    Raises:
        BusyError: a run measures or trains here; what it needs cannot be told.
    """
    project = project.resolve()
    with alone_in(project, "dejavu gc", is_upkeep=True, wait=wait):
        found = [one for one in leftovers(project, keep) if one.paths]
        for path in (path for one in found for path in one.paths if not dry_run):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return found


def leftovers(project: Path, keep: int, now_seconds: float | None = None) -> list[Leftovers]:
    """Find what only runs older than the newest `keep` need.

    Args:
        now_seconds: since the epoch; None: now.
    """
    state = project / ".dejavu"
    folders = sorted((path for path in (state / "runs").glob("*") if path.is_dir()), key=_changed_seconds)
    runs = [path for path in folders if not path.is_symlink()]  # what others lead to is not here, and not ours
    old = runs[: max(0, len(runs) - keep)]
    needed = {start for run in folders if run not in old and (start := _started_from(run))}
    states = [path for path in (state / "trials").glob(f"*{STATE_SUFFIX}") if path.name not in needed]
    before = (time.time() if now_seconds is None else now_seconds) - KEPT_DAYS * DAY_SECONDS
    results = [path for path in _files(state / "prefect" / "storage") if path.stat().st_mtime < before]
    written = {Path(process.log).name for process in _running(project)}
    logs = [path for path in _files(state / "logs") if path.stat().st_mtime < before and path.name not in written]
    of_killed = [path for path in state.glob(f"{ASIDE}*") if path.stat().st_mtime < before]
    return [
        _sized("run", old),
        _sized("trial state", states),
        _sized("cached result", results),
        _sized("old log", logs),
        _sized("unfinished record", of_killed),
    ]


def _changed_seconds(run: Path) -> float:
    """Return when a run was prepared, resumed, or last trained a step."""
    marks = [path for name in ("job.json", "progress.jsonl", "result.json") if (path := run / name).exists()]
    return max(path.stat().st_mtime for path in marks or [run])


def _started_from(run: Path) -> str | None:
    """Return the file name of the trial's state that a run starts from; None: it starts from a draw."""
    try:
        start = json.loads((run / "job.json").read_text())["start_from"]
    except (OSError, ValueError, KeyError, TypeError):  # not prepared to its end: it starts from nothing
        return None
    return Path(start).name if start else None


def _running(project: Path) -> list[RecordedProcess]:
    found = service_record.recorded(project)
    return [process for process in found.processes if process.find()] if found else []


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _sized(what: str, paths: Iterable[Path]) -> Leftovers:
    found = tuple(paths)
    size_bytes = sum(one.stat().st_size for path in found for one in (_files(path) if path.is_dir() else [path]))
    return Leftovers(what, found, size_bytes)
