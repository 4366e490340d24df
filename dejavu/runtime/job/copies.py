"""Copies of a training's checkpoints where fsspec writes: a shared folder, or `s3://…`; another host resumes from them.

A copy is complete when its marker is there, which is written last, as on a disk.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dejavu.foundation.errors import InputError
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.state import MARKER, complete_checkpoints, held_out_loss_in, named_step

FIELD = ("checkpoints",)
STEP = re.compile(r"step-\d+")
BESIDE = ("job.json", "progress.jsonl", "result.json")
POLL_SECONDS = 5.0


def check_copies(url: str) -> None:
    """Check that checkpoints can be copied to this URL, before a training starts that does.

    Raises:
        InputError: its kind is unknown or lacks a library, or it cannot be written.
    """
    files, root = _opened(url)
    probe = f"{root}/.writable"
    try:
        files.makedirs(root, exist_ok=True)
        files.pipe_file(probe, b"")
        files.rm_file(probe)
    except Exception as error:  # of many kinds: each service has its own
        raise InputError(f"{url} cannot be written: {_line(error)}; wanted a place for copies", FIELD) from error


def fetch(url: str, runs: Path) -> Path:
    """Copy a training's job, progress, last complete checkpoint and the best into a new folder of `runs`; return it.

    Copies of checkpoints that are not here are deleted there when the training goes on. A folder that is there is
    returned as it is, where its last checkpoint is no older.

    Raises:
        InputError: there is no such training, or it cannot be read.
    """
    files, root = _opened(url)
    if Path(root).name in ("", ".."):
        raise InputError(f"{url} names no training; wanted the folder of one")
    folder = runs / Path(root).name
    try:
        there = {name: content for name in BESIDE[:2] if (content := _content(files, f"{root}/{name}")) is not None}
        if "job.json" not in there:
            raise InputError(
                f"{url} has no training to resume: {url}/job.json is not there; wanted a training's copies"
            )
        complete = _complete(files, f"{root}/checkpoints")
        last = max(complete, key=named_step, default=None)
        own = {path.name for path in complete_checkpoints(folder / "checkpoints")}
        if folder.exists() and (last is None or (own and max(map(named_step, own)) >= named_step(last))):
            return folder
        for name in sorted({last, _best(files, root, complete)} - own - {None}, key=str):
            _fetch(files, f"{root}/checkpoints/{name}", folder / "checkpoints" / str(name))
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in there.items():
            (folder / name).write_bytes(content)
    except (InputError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise InputError(f"{url} cannot be read: {_line(error)}") from error
    return folder


def _best(files: Any, root: str, complete: Iterable[str]) -> str | None:
    """Return the copied checkpoint with the least loss on what is held out, as `best_checkpoint` does of those here."""
    by_step = sorted(complete, key=named_step)
    markers = {name: _content(files, f"{root}/checkpoints/{name}/{MARKER}") for name in by_step}
    losses = {name: loss for name, held in markers.items() if (loss := held_out_loss_in(held or b"")) is not None}
    return min(losses, key=lambda name: losses[name], default=None)


def _fetch(files: Any, copied: str, checkpoint: Path) -> None:
    """Copy a complete checkpoint to here, where it is complete or not there."""
    aside = checkpoint.with_name(f"{checkpoint.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name in _names(files, copied):
        files.get_file(f"{copied}/{name}", str(aside / name))
    shutil.rmtree(checkpoint, ignore_errors=True)  # what is there has no marker
    aside.rename(checkpoint)


class Copier:
    """Copies complete checkpoints in a thread of their own, the newest first; what is deleted here is deleted there.

    It never stops a training: what cannot be copied is a warning, and the next checkpoint is tried again.
    """

    def __init__(self, job: TrainingJob, warn: Callable[[str], None]) -> None:
        assert job.workload.checkpoints is not None
        self._job, self._warn = job, warn
        self._url = f"{job.workload.checkpoints.rstrip('/')}/{Path(job.folder).name}"
        self._due, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that there is a new checkpoint."""
        self._due.set()

    def close(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Copy what is left, the result too.

        Args:
            on_wait: called every few seconds meanwhile.
        """
        self._ended.set()
        self._due.set()
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            on_wait()

    def _run(self) -> None:
        has_ended = False
        while not has_ended:
            self._due.wait()
            self._due.clear()
            has_ended = self._ended.is_set()  # asked before: what came while one was copied wants another round
            try:
                copy_training(self._job, self._url)
            except Exception as error:  # of many kinds: each service has its own
                self._warn(f"the checkpoints are not copied to {self._url}: {_line(error)}; they are kept here")


def copy_training(job: TrainingJob, url: str) -> None:
    """Copy the complete checkpoints that are not there yet, and what is beside them; delete those that are gone here.

    Raises:
        Exception: of many kinds, as the service has them.
    """
    files, root = _opened(url)
    there = _complete(files, f"{root}/checkpoints")
    for checkpoint in reversed(complete_checkpoints(job.checkpoints)):
        if checkpoint.name not in there:
            with suppress(FileNotFoundError):  # deleted meanwhile, because there are newer ones
                _copy(checkpoint, files, f"{root}/checkpoints/{checkpoint.name}")
    for name in BESIDE:
        if (Path(job.folder) / name).is_file():
            files.put_file(str(Path(job.folder) / name), f"{root}/{name}")
    kept = {path.name for path in complete_checkpoints(job.checkpoints)}
    for name in _steps(files, f"{root}/checkpoints") - kept:  # also of those that were deleted while they were copied
        _delete(files, f"{root}/checkpoints/{name}")


def _delete(files: Any, copied: str) -> None:
    """Delete a copy, its marker first, file by file: fsspec's `rm` takes brackets and stars in a path for patterns."""
    for name in sorted(_names(files, copied), key=lambda name: name != MARKER):
        files.rm_file(f"{copied}/{name}")
    files.invalidate_cache()
    if files.exists(copied):  # in an object store it was no more than what was in it
        files.rmdir(copied)


def _copy(checkpoint: Path, files: Any, target: str) -> None:
    files.makedirs(target, exist_ok=True)
    for name in sorted((path.name for path in checkpoint.iterdir()), key=lambda name: name == MARKER):  # it is the last
        files.put_file(str(checkpoint / name), f"{target}/{name}")


def _opened(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise InputError(
            f"{url} cannot be opened: {_line(error)}; wanted a URL that fsspec knows, as file:///shared/runs, or "
            "s3://bucket/runs with the library s3fs",
            FIELD,
        ) from error
    return files, str(path)


def _complete(files: Any, folder: str) -> set[str]:
    return {name for name in _steps(files, folder) if files.exists(f"{folder}/{name}/{MARKER}")}


def _steps(files: Any, folder: str) -> set[str]:
    """Return the names of all copies of checkpoints, complete or not."""
    return {name for name in _names(files, folder) if STEP.fullmatch(name)} if files.exists(folder) else set()


def _names(files: Any, folder: str) -> list[str]:
    """Return what is in a folder, by its last name; fsspec remembers listings, which other hosts change."""
    files.invalidate_cache()
    return [Path(path).name for path in files.ls(folder, detail=False) if Path(path).name not in ("", ".", "..")]


def _content(files: Any, path: str) -> bytes | None:
    return bytes(files.cat_file(path)) if files.exists(path) else None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
