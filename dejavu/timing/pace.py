"""How fast a training goes lately, and how long it still takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_STEPS = 100
LEAST_SECONDS = 0.5  # steps are read from a file now and then, several at once: over less time their number says little


@dataclass
class Pace:
    """Steps as they are reported while a training runs, checkpoints and restarts between them included.

    Attributes:
        last_step: how many steps the whole training has.
        now: the clock.
    """

    last_step: int
    now: Callable[[], float] = time.monotonic
    _seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def add(self, step: int) -> None:
        """Take in that this step is done; one that is trained again begins anew."""
        if self._seen and step <= self._seen[-1][0]:
            self._seen.clear()
        self._seen.append((step, self.now()))

    @property
    def step_seconds(self) -> float | None:
        """The mean of the latest steps; None: too few are known."""
        if len(self._seen) < 2:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return (ended - began) / (last - first) if ended - began >= LEAST_SECONDS else None

    @property
    def left_seconds(self) -> float | None:
        """Until the last step, at that pace; None: it is not known yet."""
        if self.step_seconds is None:
            return None
        return (self.last_step - self._seen[-1][0] - 1) * self.step_seconds


def in_words(seconds: float) -> str:
    """Write a time that is left: `35 s`, `12 min`, `3 h 20 min`, `2 days 4 h`."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} days {hours % 24} h"
