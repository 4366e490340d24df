"""The cost database: what was measured, on which device, how, and when, kept in a folder of Parquet files.

`profiles_db/README.md` says what the columns mean and how files and manifest work.

Names are imported when they are first used: the records of kernels and collectives are wanted where nothing else is,
and pyarrow takes half a second and a thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejavu.profiles.database import ProfileDatabase
    from dejavu.profiles.files import Finding
    from dejavu.profiles.findings import OUTLIER_RATIO
    from dejavu.profiles.host import host_fingerprint
    from dejavu.profiles.measurement import (
        DIRECTIONS,
        KINDS,
        MOST_DISTURBED_SHARE,
        SAME_MEASUREMENT,
        SCHEMA,
        SCHEMA_VERSION,
        Measurement,
        ProfileError,
    )

__all__ = [
    "DIRECTIONS",
    "KINDS",
    "MOST_DISTURBED_SHARE",
    "OUTLIER_RATIO",
    "SAME_MEASUREMENT",
    "SCHEMA",
    "SCHEMA_VERSION",
    "Finding",
    "Measurement",
    "ProfileDatabase",
    "ProfileError",
    "host_fingerprint",
]
_ELSEWHERE = {
    "Finding": "files",
    "OUTLIER_RATIO": "findings",
    "ProfileDatabase": "database",
    "host_fingerprint": "host",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'measurement')}"), name)
