"""The manifest: which data files count. Also the one function that writes any file here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.profiles.measurement import SCHEMA_VERSION, ProfileError

MANIFEST = "manifest.json"
TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True)
class DataFile:
    """One line of the manifest. The name follows from the hash, so that a damaged manifest can be made again."""

    sha256: str
    rows: int
    num_bytes: int
    device_types: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.sha256[:16]}.parquet"


class DamagedManifest(Exception):
    """The manifest exists, but cannot be used."""


def read_manifest(path: Path) -> list[DataFile]:
    """Return the data files that count; none if there is no manifest.

    Raises:
        DamagedManifest: it is no manifest.
        ProfileError: a newer version wrote it, or it cannot be read, as where the database's path is a file's.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ProfileError(f"{path.parent}: the cost database cannot be read: {error}") from error
    try:
        manifest = json.loads(text)
        version = int(manifest["schema_version"])
        if version > SCHEMA_VERSION:
            raise ProfileError(
                f"{path}: expected schema version {SCHEMA_VERSION} or older, found {version}; "
                "a newer Pipe-Déjàvu wrote it"
            )
        if not isinstance(manifest["files"], list):
            raise ValueError(f"expected a list of files, found {str(manifest['files'])[:40]}")
        return [_file_from(line) for line in manifest["files"]]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedManifest(f"it cannot be read: {type(error).__name__}: {error}") from error


def state_of(database: Path) -> str:
    """Return a hash of what a cost database has measured: its manifest lists files by the hash of their content."""
    path = database / MANIFEST
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()[:16]


def write_manifest(path: Path, files: Sequence[DataFile]) -> None:
    lines = [
        {"name": f.name, "rows": f.rows, "bytes": f.num_bytes, "sha256": f.sha256, "device_types": f.device_types}
        for f in files
    ]
    text = json.dumps({"schema_version": SCHEMA_VERSION, "files": lines}, indent=1, ensure_ascii=False)
    write_atomically(path, text.encode() + b"\n", "manifest")


def _file_from(line: Any) -> DataFile:
    file = DataFile(line["sha256"], int(line["rows"]), int(line["bytes"]), tuple(line["device_types"]))
    if not re.fullmatch(r"[0-9a-f]{64}", file.sha256) or line["name"] != file.name:
        raise ValueError(f"expected a file named by its sha256, found {line['name']!r}")
    if not isinstance(line["device_types"], list) or not all(isinstance(name, str) for name in file.device_types):
        raise ValueError(f"expected the names of device types, found {str(line['device_types'])[:40]}")
    return file


def _step(name: str) -> None:
    """Mark a named point of a write; does nothing. Tests replace it to kill the writer there."""


def write_atomically(path: Path, payload: Any, what: str) -> None:
    """Write the file atomically: on failure the old file is intact.

    Raises:
        ProfileError: it cannot be written, for example on a full disk.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            _step(f"{what} opened")
            file.write(payload)
            file.flush()
            _step(f"{what} written")
            os.fsync(file.fileno())
        _step(f"{what} synced")
        temporary.replace(path)
        _step(f"{what} renamed")
        _sync_folder(path.parent)
        _step(f"{what} folder synced")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ProfileError(
            f"{path}: {len(payload)} bytes could not be written: {error}; what was there is kept"
        ) from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
