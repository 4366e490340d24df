"""What a rank tells its launcher while it trains: when the passes of a step ran, a few times a second.

From passes of all ranks the launcher sees a device that has become slower, and a link (`dejavu.migration.watching`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

from dejavu.plans.schedule import Pass
from dejavu.timing.clock import Clock, Timed

PACE = "DEJAVU_PACE"  # in a rank's environment, where the launcher wants to be told
EVERY_SECONDS = 0.1  # ten reports have to agree, and a device that is slow for 30 steps is to be seen


@dataclass(frozen=True)
class Paced:
    """One step of one rank.

    Attributes:
        began_seconds: its start, on its host's clock; passes are timed from there.
    """

    step: int
    began_seconds: float
    passes: tuple[Timed, ...]

    @property
    def busy_seconds(self) -> float:
        """The time inside passes, waiting for messages not included."""
        return sum(one.stop_seconds - one.start_seconds for one in self.passes)


class Pace:
    """Reports a rank's steps to the store of its launcher.

    Every so many steps, a power of two: so different ranks report the same steps, and passes of neighbours compare.
    """

    def __init__(self, attempt: int, rank: int) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(host, port, is_master=False)
        self._key, self._stride = pace_key(attempt, rank), 1
        self._last: tuple[int, float] | None = None

    def report(self, step: int, clock: Clock) -> None:
        if step % self._stride:
            return
        now = time.monotonic()
        if self._last is not None:
            step_seconds = (now - self._last[1]) / (step - self._last[0])
            self._stride = 2 ** max(0, math.ceil(math.log2(EVERY_SECONDS / step_seconds)))
        self._last = (step, now)
        self._store.set(self._key, json.dumps([step, clock.began_seconds, clock.last_step]))


def pace_key(attempt: int, rank: int) -> str:
    return f"pace/{attempt}/{rank}"


def read_pace(store: Store, attempt: int, ranks: Sequence[int]) -> dict[int, Paced]:
    """Return the last step that each rank has reported; a rank that has reported none is absent."""
    found = {}
    for rank in ranks:
        key = pace_key(attempt, rank)
        if store.check([key]):
            step, began, rows = json.loads(store.get(key))
            passes = (Timed(stage, Pass(way), *rest) for stage, way, *rest in rows)
            found[rank] = Paced(step, began, tuple(passes))
    return found
