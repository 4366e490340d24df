"""Whether work on a CPU core was disturbed by somebody whom this machine cannot see.

The core of a virtual machine is often one of two hardware threads, and its sibling may be another guest's. Nothing
shows it: no steal time, and processor time counts in full. A loop of plain Python suffers most, so it tells: on the
machine of docs/log.md it takes twice as long, for a second or a few, while convolutions take 1.4 × and matrix products
1.1 × as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

LOOPS, TURNS = 5_000, 3  # a tenth of a millisecond each
DISTURBED = 1.25  # times what the loop takes when nobody disturbs it


def look_seconds() -> float:
    """What the loop takes now on this core."""
    return median(_loop_seconds() for _ in range(TURNS))


def _loop_seconds() -> float:
    started, total = time.perf_counter(), 0
    for number in range(LOOPS):
        total += number
    return time.perf_counter() - started


class Quiet:
    """Looks before and after each piece of work on one core.

    Attributes:
        least_seconds: the fastest look so far, which is taken for one that nobody disturbed.
    """

    def __init__(self) -> None:
        self.least_seconds, self._before = math.inf, 0.0

    def look(self, seconds: float | None = None) -> float:
        """The slower look of now and the last call, so of those before and after a piece of work.

        Args:
            seconds: what the loop takes now, where another process has looked.
        """
        before, self._before = self._before, look_seconds() if seconds is None else seconds
        self.least_seconds = min(self.least_seconds, self._before)
        return max(before, self._before)

    def slowdown(self, seconds: float) -> float:
        """Of a piece of work with this look; 1.0 where nobody disturbed it, as far as is known by now."""
        return seconds / self.least_seconds


def undisturbed(slowdowns: Sequence[float], least: int = 0) -> list[int]:
    """Which pieces of work with these slowdowns nobody disturbed; at least as many as `least`, the best ones."""
    best = set(sorted(range(len(slowdowns)), key=slowdowns.__getitem__)[:least])
    return [k for k, slowdown in enumerate(slowdowns) if k in best or slowdown <= DISTURBED]
