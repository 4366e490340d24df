"""What other processes read: files while they are written, numbers that are none, and how large a file may be."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

ASIDE = ".artifact-"  # how folders in .dejavu begin in which an artifact is made before it is recorded


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error of its disk that names none: that of a write does not, as that of opening does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as file:
        json.dump(content, file, indent=1)


@contextmanager
def written_aside(path: Path) -> Iterator[TextIO]:
    """Write a file beside this one that takes its place at the end: the old one stays where that fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), aside.open("w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.is_file():
            shutil.copymode(path, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def largest_file_bytes() -> int | None:
    """Return how large a file of this process may be (`ulimit -f`); None: as large as its disk takes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def finite(content: Any) -> Any:
    """Return content with None for numbers that JSON does not have, as the loss of a training that has diverged."""
    if isinstance(content, Mapping):
        return {name: finite(one) for name, one in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(one) for one in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
