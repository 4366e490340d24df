"""The cost database: what was measured, on which device, how, and when, kept in a folder of Parquet files.

`profiles_db/README.md` says what the columns mean and how files and manifest work.
"""

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
