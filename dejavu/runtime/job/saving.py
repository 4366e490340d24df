"""When a training's checkpoints are due, and what they take."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dejavu.runtime.job import Saved
from dejavu.workload import Workload

FEWEST_STEPS = 10  # between two checkpoints, and to the first
SHARE = 0.02  # of the training's time, which they may take
FAILURE_SECONDS = 24 * 3600.0  # from one failure to the next, where checkpoints take minutes


class Saving:
    """Decides after which steps checkpoints are written, on all ranks alike, and times them.

    Args:
        steps: of this attempt. A number of steps between checkpoints counts from step 0, as `evaluate_every` does, and
            not from the first that the trials left: where both are the same number, each checkpoint is evaluated.
    """

    def __init__(self, workload: Workload, steps: range) -> None:
        self._every, self._evaluate_every = workload.checkpoint_every, workload.evaluate_every
        self._last_step = steps.stop
        self._saved_step, self._next_step = steps.start, self._evaluated(steps.start + FEWEST_STEPS)
        self._began = self._ended = time.perf_counter()
        self._seconds: list[float] = []

    def is_due(self, done: int) -> bool:
        """Return whether a checkpoint is written when so many steps are done."""
        if self._every == "auto":
            return done in (self._next_step, self._last_step)
        return done == self._last_step or done % self._every == 0

    @contextmanager
    def after(self, done: int) -> Iterator[None]:
        """Write a checkpoint in this block. All ranks enter it together."""
        entered = time.perf_counter()
        yield
        trained_seconds, seconds = entered - self._ended, time.perf_counter() - entered
        if self._every == "auto":
            step_seconds = trained_seconds / (done - self._saved_step)
            chosen = [done + steps_between(seconds, step_seconds)]
            dist.broadcast_object_list(chosen)
            self._next_step = self._evaluated(chosen[0])
        self._seconds.append(seconds)
        self._saved_step, self._ended = done, time.perf_counter()

    def _evaluated(self, step: int) -> int:
        """Return the next step that is evaluated, if any are: only what was evaluated can be the best."""
        every = self._evaluate_every
        return math.ceil(step / every) * every if every else step

    @property
    def told(self) -> Saved | None:
        """What they took; None: there was none."""
        if not self._seconds:
            return None
        whole = sum(self._seconds)
        return Saved(len(self._seconds), whole / len(self._seconds), whole / (self._ended - self._began))


def steps_between(checkpoint_seconds: float, step_seconds: float) -> int:
    """Return how many steps are trained from one checkpoint to the next: so many that they take little of the time.

    Checkpoints that take C seconds come every C / `SHARE` seconds; or, where that is sooner, every √(2 C M): with a
    failure every M seconds this loses least, by writing and by training again what was lost (Young, CACM 17(9), 1974).
    """
    C, M = checkpoint_seconds, FAILURE_SECONDS
    return max(FEWEST_STEPS, math.ceil(min(C / SHARE, math.sqrt(2 * C * M)) / step_seconds))
