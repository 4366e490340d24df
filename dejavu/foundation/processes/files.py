"""What other processes read: files while they are written, and numbers that are none."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def finite(content: Any) -> Any:
    """Return content with None for numbers that JSON does not have, as the loss of a training that has diverged."""
    if isinstance(content, Mapping):
        return {name: finite(one) for name, one in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(one) for one in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
