"""The data files of the cost database: checked before use, set aside when damaged."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dejavu.profiles.manifest import MANIFEST, TEMPORARY_PREFIX, DataFile
from dejavu.profiles.measurement import check_schema

DATA_NAME = re.compile(r"[0-9a-f]{16}\.parquet")
LOCK, SHIPPED = ".lock", "shipped"  # what a database has beside them


@dataclass(frozen=True)
class Finding:
    """Something in the folder that a user should know: what it is, and what to do about it."""

    path: Path
    what: str
    remedy: str


def set_aside(path: Path) -> None:
    """Keep the file in the folder's `set_aside/`. Data is moved, a manifest is copied and stays until replaced."""
    folder = path.parent / "set_aside"
    folder.mkdir(exist_ok=True)
    if DATA_NAME.fullmatch(path.name):
        path.replace(folder / path.name)
    else:
        shutil.copyfile(path, folder / path.name)


def file_at(path: Path) -> DataFile:
    payload = path.read_bytes()
    return DataFile(hashlib.sha256(payload).hexdigest(), 0, len(payload), ())


def damage_of(folder: Path, file: DataFile) -> str | None:
    """Return why this file cannot be used, or None.

    Raises:
        ProfileError: it is intact, but of another schema.
    """
    path = folder / file.name
    try:
        stat = path.stat()
        return _damage_seen(path, file.sha256, file.num_bytes, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    except FileNotFoundError:
        return "it is missing"


@lru_cache(maxsize=4096)  # a file is hashed once per process, and again when its size, time or inode changes
def _damage_seen(path: Path, sha256: str, num_bytes: int, size_bytes: int, mtime_ns: int, inode: int) -> str | None:
    if size_bytes != num_bytes:
        return f"it is truncated or altered: expected {num_bytes} bytes, found {size_bytes}"
    payload = path.read_bytes()
    found = hashlib.sha256(payload).hexdigest()
    if found != sha256:
        return f"it is altered: expected sha256 {sha256[:16]}…, found {found[:16]}…"
    try:
        schema = pq.read_schema(pa.BufferReader(payload))
    except (pa.ArrowInvalid, OSError) as error:
        return f"it is no Parquet file: {error}"
    check_schema(schema, str(path), require_version=True)
    return None


def measure_again(file: DataFile) -> str:
    """Return the remedy for lost rows: only such devices can measure them."""
    where = f" on {', '.join(file.device_types)}" if file.device_types else ""
    return f"measure again{where}: `dejavu profile`"


def has_costs(folder: Path) -> bool:
    """Return whether files of a database are in this folder, which is there."""
    names = {one.name for one in folder.iterdir()}
    return bool(names & {MANIFEST, SHIPPED}) or any(map(DATA_NAME.fullmatch, names))


def is_of_others(path: Path) -> bool:
    """Return whether something else than a database is there: a file, or a folder with other files and no manifest."""
    if not path.is_dir():
        return path.exists()
    names = {one.name for one in path.iterdir()}
    if names & {MANIFEST, SHIPPED}:
        return False
    return not all(name.startswith((LOCK, TEMPORARY_PREFIX)) or DATA_NAME.fullmatch(name) for name in names)
