"""How many cores there are to work with."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
