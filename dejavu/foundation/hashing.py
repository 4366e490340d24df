"""Stable hashes of values: the same on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def stable_hash(value: Any) -> str:
    """Return a JSON-like value's hash, 16 hexadecimal digits: the order of keys does not matter.

    Raises:
        TypeError, ValueError: the value is not JSON (NaN is not).
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
