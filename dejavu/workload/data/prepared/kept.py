"""Where prepared data are kept: a folder of the project for each content, renamed when it is whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock

from dejavu.foundation.errors import InputError
from dejavu.foundation.hashing import stable_hash
from dejavu.foundation.units import format_bytes

FOLDER = Path(".dejavu/data")
ABOUT = "about.json"
SAMPLES, SAMPLE_BYTES = 1024, 64 * 2**10  # of a file: what its hash is of; a file of 64 MiB or less is hashed in full
SAID_SECONDS = 5.0  # between two lines about how far it is


class Kept(NamedTuple):
    """Prepared data.

    Attributes:
        about: what their maker said of them.
    """

    folder: Path
    about: dict[str, Any]


def kept(key: Any, field: tuple[str, ...], make: Callable[[Path], dict[str, Any]]) -> Kept:
    """Return what is kept under this key, made now if it is not there: by one process, whoever waits for it.

    Args:
        key: everything that decides the content; what JSON can write.
        field: of the workload, for an error.
        make: writes its files into a folder, and returns what is to be known of them.

    Raises:
        InputError: there is no room, or the project's folder cannot be written.
    """
    folder = FOLDER.absolute() / stable_hash(key)
    try:
        if not (folder / ABOUT).is_file():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):
                if not (folder / ABOUT).is_file():
                    _make(folder, make)
        return Kept(folder, json.loads((folder / ABOUT).read_text()))
    except (OSError, ValueError) as error:
        free = shutil.disk_usage(FOLDER if FOLDER.exists() else Path()).free
        raise InputError(
            f"prepared data cannot be kept in {folder}: {error}; wanted a folder that can be written, with room "
            f"({format_bytes(free)} are free)",
            field,
        ) from error


def _make(folder: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        about = make(aside)
        (aside / ABOUT).write_text(json.dumps(about))
        for path in aside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def files_of(path: Path, suffixes: Iterable[str], field: tuple[str, ...]) -> list[Path]:
    """Return the file itself, or a folder's files with one of these suffixes in the order of their names.

    Raises:
        InputError: there is none.
    """
    if path.is_file():
        return [path]
    wanted, inside = set(suffixes), path.rglob("*") if path.is_dir() else ()
    found = sorted(file for file in inside if file.suffix in wanted and file.is_file())
    if not found:
        raise InputError(f"{path} has no file that ends in {' '.join(sorted(wanted))}; wanted one, or a file", field)
    return found


def hash_of_files(paths: Iterable[Path]) -> str:
    """Hash the files' contents, large ones by samples all over them with their size and time of change."""
    found = [(path, path.stat()) for path in paths]
    return stable_hash([_hash_of_file(path, about.st_size, about.st_mtime_ns) for path, about in found])


@lru_cache(maxsize=4096)  # a process asks for the shape of its data often
def _hash_of_file(path: Path, size: int, changed_ns: int) -> str:
    digest = hashlib.sha256(f"{size} ".encode())
    with path.open("rb") as file:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
            return digest.hexdigest()
        digest.update(f"{changed_ns} ".encode())
        for start in np.linspace(0, size - SAMPLE_BYTES, SAMPLES).astype(np.int64):
            file.seek(int(start))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


class Said:
    """Says every few seconds how far a preparation is, and how long it will still take."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total = what, max(1, total_bytes)
        self._began = self._last = time.monotonic()

    def __call__(self, done_bytes: int, made: str) -> None:
        now = time.monotonic()
        if now - self._last < SAID_SECONDS:
            return
        self._last, share = now, min(1.0, done_bytes / self._total)
        left = f", about {(now - self._began) * (1 / share - 1):.0f} s left" if share else ""
        of = f"{share:.0%} of {format_bytes(self._total)}"
        print(f"{self._what}: {of}, {made}{left}", file=sys.stderr, flush=True)
