"""One file with what a project keeps, and back.

In it: the cost database, MLflow's records and artifacts, runs with their checkpoints, trials, and Prefect's database.
Not in it: caches, logs, locks, and what is being written. SQLite files are copied by SQLite's own online backup.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import gzip
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.processes.files import naming
from dejavu.foundation.units import format_bytes, plural
from dejavu.launch.training_lock import alone_in
from flows import service_record
from flows.server_settings import MLFLOW_DATABASE, PREFECT_DATABASE

FORMAT = 1
CONTENTS = "backup.json"
STATE = ".dejavu"
MLFLOW_RECORDS = "MLFLOW_TRACKING_URI"  # MLflow's own variable; it may have a password
DATABASES = ("mlflow.db", f"{STATE}/prefect/prefect.db")
FOLDERS = ("profiles_db", "mlartifacts", STATE)
# Prefect's results are pickles, which are never taken from a file that somebody hands over; they are a cache.
METADATA = ".metadata"  # torch's list of what is in a checkpoint, without which nobody can read it
LEFT_OUT = (
    *(PurePosixPath(STATE, name) for name in ("prefect", "logs", "trials/dask", "jobs", "benchmarks")),
    *(PurePosixPath("profiles_db", name) for name in ("README.md", "shipped", "set_aside")),  # git's, or damaged
)
READ_BYTES = 2**20
DAMAGED = (
    *(tarfile.TarError, gzip.BadGzipFile, zlib.error),
    *(EOFError, ValueError, AttributeError, IndexError, KeyError, TypeError),
)
SIDE_FILES = ("-wal", "-shm", "-journal")  # of a SQLite file; those of another one would damage it


@dataclass(frozen=True)
class Saved:
    """What is in a backup."""

    num_files: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{plural(self.num_files, 'file')}, {format_bytes(self.size_bytes)}"


def backup(project: Path, file: Path, *, wait: bool = False) -> Saved:
    """Write the backup; where that fails, what was at `file` is kept. A name ending in `.tar` is not compressed.

    Args:
        wait: for a run that measures or trains here to end, instead of raising an error.

    Raises:
        BusyError: a run measures or trains here: its files change meanwhile.
        InputError: there is no folder for the file, or it is one itself.
    """
    project = project.resolve()
    if not file.absolute().parent.is_dir():
        raise InputError(f"{file} cannot be written: there is no folder {file.absolute().parent}")
    if file.is_dir():
        raise InputError(f"{file} is a folder; wanted a file in it, as {file / 'dejavu.tar.gz'}")
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    count = total_bytes = 0
    try:
        with (
            alone_in(project, "dejavu backup", is_upkeep=True, wait=wait),
            tempfile.TemporaryDirectory(dir=project / STATE, prefix=".backup-") as scratch,
            naming(file),
            _written(aside, compressed=file.suffix != ".tar") as archive,
        ):
            _add_contents(archive, project)
            for name, path in _kept(project, Path(scratch)):
                with contextlib.suppress(FileNotFoundError):  # a service removed it meanwhile
                    archive.add(path, name, recursive=False)
                    count, total_bytes = count + 1, total_bytes + path.stat().st_size
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    return Saved(count, total_bytes)


def restore(project: Path, file: Path, *, force: bool = False, wait: bool = False) -> Saved:
    """Put back what a backup has; all of it is read and checked before anything is replaced.

    Args:
        force: also replace files that are there and differ.
        wait: for a run that measures or trains here to end, instead of raising an error.

    Raises:
        InputError: it is no backup, or has what no backup has; or files would be replaced.
        DejavuError: services run here, which have those files open.
        BusyError: a run measures or trains here.
    """
    project = project.resolve()
    found = service_record.recorded(project)
    if found and found.dead != service_record.SERVICES:
        raise DejavuError(f"services run in {project}; wanted `dejavu down` before what they have open is replaced")
    with (
        alone_in(project, "dejavu restore", is_upkeep=True, wait=wait),
        tempfile.TemporaryDirectory(dir=project / STATE, prefix=".restore-") as scratch,
    ):
        names, contents = _extracted(file, Path(scratch))
        if contents["project"] != str(project) and (Path(scratch) / "mlflow.db").is_file():
            from dejavu.track.database import artifacts_of, move_artifacts  # with MLflow: seconds

            move_artifacts(Path(scratch) / "mlflow.db", *map(artifacts_of, (Path(contents["project"]), project)))
        new = [name for name in names if not _is_same(Path(scratch) / name, project / name)]
        replaced = [name for name in new if (project / name).exists()]
        if replaced and not force:
            raise InputError(
                f"{len(replaced)} of {len(names)} files of {file} are here and differ, {replaced[0]} the first; wanted "
                "an empty project, or --force to replace them"
            )
        size_bytes = sum((Path(scratch) / name).stat().st_size for name in new)
        for name in new:
            target = project / name
            target.parent.mkdir(parents=True, exist_ok=True)
            for end in SIDE_FILES if name in DATABASES else ():
                target.with_name(target.name + end).unlink(missing_ok=True)
            _put(Path(scratch) / name, target)
    return Saved(len(new), size_bytes)


def kept_elsewhere(project: Path) -> str:
    """Say what this project keeps that no backup of its folder has; empty: nothing.

    Services that run know of their databases, where the environment is another one by now.
    """
    up = service_record.recorded(project)
    needs = up.needs if up is not None else ()
    names = [name for name in (PREFECT_DATABASE, MLFLOW_DATABASE) if os.environ.get(name) or name in needs]
    places = [f"the databases of {' and '.join(names)}; `pg_dump` saves them"] if names else []
    records = os.environ.get(MLFLOW_RECORDS, "")
    is_served = up is not None and records == up.mlflow_url  # from the project's own database, or one that has a name
    if records and not is_served and not _is_own(records, project):
        places.append(f"MLflow's records, which are where {MLFLOW_RECORDS} says")
    return f"not in it: {'; '.join(places)}" if places else ""


def _is_own(records: str, project: Path) -> bool:
    """Return whether this tracking URI is the project's own database."""
    file = records.removeprefix("sqlite:///")
    return file != records and (project / file).resolve() == project.resolve() / "mlflow.db"


# Writing


@contextlib.contextmanager
def _written(path: Path, *, compressed: bool) -> Iterator[tarfile.TarFile]:
    """Open a new archive that only its user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        if compressed:
            # Checkpoints hardly shrink. Two names of one file, and links to others, are files of their own in it.
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1, dereference=True) as archive:
                yield archive
        else:
            with tarfile.open(fileobj=file, mode="w", dereference=True) as archive:
                yield archive
        file.flush()
        os.fsync(file.fileno())


def _add_contents(archive: tarfile.TarFile, project: Path) -> None:
    contents = {"format": FORMAT, "project": str(project), "version": version("pipe-dejavu"), "seconds": time.time()}
    text = json.dumps(contents, indent=1).encode()
    member = tarfile.TarInfo(CONTENTS)
    member.size, member.mode, member.mtime = len(text), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(text))


def _kept(project: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield names in the backup, and the files that they are read from."""
    for number, name in enumerate(DATABASES):
        if (project / name).is_file():
            yield name, _copied(project / name, scratch / str(number))
    for folder in FOLDERS:
        # A manifest comes before the files it lists, which are never changed and stay for an hour after it is.
        paths = sorted(_below(project / folder), key=lambda path: (path.name != "manifest.json", path))
        for path in paths:
            name = path.relative_to(project).as_posix()
            if path.is_file() and _belongs(PurePosixPath(name)):
                yield name, path


def _below(folder: Path) -> Iterator[Path]:
    """Yield all that is in a folder and in those that links in it lead to, as of runs that are kept on another disk."""
    seen = set[Path]()
    for place, inside, files in os.walk(folder, followlinks=True):
        if (real := Path(place).resolve()) in seen:  # a link to where it is itself
            inside.clear()
            continue
        seen.add(real)
        yield from (Path(place, name) for name in files)


def _belongs(name: PurePosixPath) -> bool:
    """Return whether a backup has a file of this name, other than the databases."""
    of_processes = name.parent == PurePosixPath(STATE) and name.name.startswith(("services.", "training."))
    ours = name.parts[1:] if name.parts[0] != "mlartifacts" else ()  # MLflow's files have their names at once
    unfinished = any((part.startswith(".") and part != METADATA) or part.endswith(".partial") for part in ours)
    left_out = any(name.is_relative_to(folder) for folder in LEFT_OUT)
    return not (of_processes or unfinished or left_out or name.suffix == ".lock" or name.name == "lock")


def _copied(database: Path, copy: Path) -> Path:
    try:
        with (
            contextlib.closing(sqlite3.connect(database, timeout=60)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise DejavuError(f"{database} cannot be copied: {error}; `dejavu doctor` looks at it") from error
    return copy


# Reading


def _extracted(file: Path, scratch: Path) -> tuple[list[str], dict[str, Any]]:
    """Extract the backup; return the names of its files, and what it says of itself.

    Raises:
        InputError: it is no backup, is cut, or has what `backup` does not write.
    """
    names = []
    try:
        with tarfile.open(file) as archive:
            first = archive.next()
            text = archive.extractfile(first) if first is not None and first.name == CONTENTS else None
            contents = json.loads(text.read()) if text else {}
            if contents.get("format") != FORMAT:
                raise InputError(f"{file}: found format {contents.get('format')}; wanted a backup of format {FORMAT}")
            for member in archive:
                if member is first:
                    continue
                name = PurePosixPath(member.name)
                known = member.name in DATABASES or (name.parts[0] in FOLDERS and _belongs(name))
                if not member.isreg() or not known or ".." in name.parts:
                    raise InputError(f"{file} has {member.name!r}, which no backup has; nothing was restored")
                archive.extract(member, scratch, filter="data")
                names.append(member.name)
            _check_end(archive)
    except FileNotFoundError:
        raise InputError(f"there is no {file}") from None
    except IsADirectoryError:
        raise InputError(f"{file} is a folder; wanted a file that `dejavu backup` wrote") from None
    except DAMAGED as error:
        raise InputError(f"{file} is no whole backup: {' '.join(str(error).split())}; nothing was restored") from error
    return names, {**contents, "project": str(contents["project"])}


def _check_end(archive: tarfile.TarFile) -> None:
    """Read it to its end, where a compressed one has its checksum.

    Raises:
        tarfile.ReadError: members are missing: tarfile takes a damaged header, or the end of the file, for the end.
    """
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    rest = archive.fileobj.read(READ_BYTES)
    if len(rest) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it is cut off")
    while rest:
        if rest.strip(b"\0"):
            raise tarfile.ReadError(f"it is damaged at byte {archive.offset:,}")
        rest = archive.fileobj.read(READ_BYTES)


def _put(new: Path, target: Path) -> None:
    """Put a file in its place, which may be on another disk."""
    try:
        new.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copy2(new, aside)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)


def _is_same(new: Path, old: Path) -> bool:
    return old.is_file() and filecmp.cmp(new, old, shallow=False)
