"""What all records of a workload share, however they are made: from YAML, a form, JSON or Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict


class Record(BaseModel):
    """A part of a workload: it does not change, and has no fields of other names."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def _not_empty(path: Any) -> Any:
    if isinstance(path, str) and not path.strip():
        raise ValueError(f"found {path!r}, wanted a path; `.` is the current folder")
    return path


# Python takes true for 1, and an empty path for the current folder.
Whole = Annotated[int, Strict()]
Positive = Annotated[int, Strict(), Field(ge=1)]
Number = Annotated[float, Strict()]
GivenPath = Annotated[Path, BeforeValidator(_not_empty)]


class AbsentError(ValueError):
    """A file or folder that a workload names is not there."""
