"""What tests of the cost database share: a sound row, of which each test says what matters to it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dejavu.profiles import Measurement, ProfileDatabase

START = datetime(2026, 1, 1, tzinfo=UTC)


def row(**fields: Any) -> Measurement:
    common: dict[str, Any] = {
        "name": "x",
        "device_type": "T4",
        "dtype": "float32",
        "repeats": 9,
        "host_fingerprint": "h",
        "torch_version": "t",
        "source": "measured",
        "how": "test",
        "measured_at": START,
    }
    return Measurement(**{**common, **fields})


def fast_hosts(folder: Path, *device_types: str) -> Path:
    """Say in a database that hosts launch as fast as is plausible: small models are then the devices' to compute."""
    passes = ("forward", "backward", "optimizer")
    rows = [row(kind="launch", subject=one, seconds=5e-7, device_type=name) for name in device_types for one in passes]
    ProfileDatabase(folder).append(rows)
    return folder
