"""Impossible times of trainings, found by comparison with today's prices of the same stage or step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from dejavu.foundation.units import format_seconds
from dejavu.profiles import Measurement

MOST_FACTOR = 100.0  # anything so far from its price was measured on another machine, or not at all

log = logging.getLogger(__name__)


def believable(rows: Iterable[Measurement], expected_seconds: float) -> list[Measurement]:
    """Return the rows within a factor of `MOST_FACTOR` of the expected time; warn of others, once per process."""
    found = []
    for row in rows:
        if expected_seconds / MOST_FACTOR <= row.seconds <= expected_seconds * MOST_FACTOR:
            found.append(row)
            continue
        said = (
            f"{row.kind} {row.name!r} ({row.direction}) on {row.device_type} was measured at "
            f"{format_seconds(row.seconds)} on {row.measured_at:%Y-%m-%d %H:%M}, and its layers cost "
            f"{format_seconds(expected_seconds)}; wanted a time within a factor of {MOST_FACTOR:g}: it is not used; "
            "train such a plan again: `dejavu run`"
        )
        _tell(said)
    return found


@cache  # rows are read many times in a run
def _tell(said: str) -> None:
    log.warning("%s", said)
