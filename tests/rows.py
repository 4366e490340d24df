"""What tests of the cost database share: a sound row, of which each test says what matters to it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dejavu.profiles import Measurement

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
