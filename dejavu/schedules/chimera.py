"""Chimera: two pipelines in opposite directions on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dejavu.foundation.errors import InputError
from dejavu.plans.schedule import Pass
from dejavu.schedules._base import PipelineSchedule, Task, Theory, flushed
from dejavu.simulation import StageSeconds


@dataclass(frozen=True)
class Chimera(PipelineSchedule):
    """Half of the microbatches go down the ranks, half go up: copy 0 and copy 1 of the model (Li and Hoefler, SC 2021).

    Each direction is 1F1B. With as many microbatches as ranks the two fill each other's bubbles without a conflict
    (section 3.1); more are run as so many such units, the next begun in the end of the one before (section 3.5, direct
    concatenation). Every rank holds two stages' weights, whose gradients the two copies add up at the end of the step.
    """

    source: ClassVar[str] = "Li and Hoefler, SC 2021, table 2"

    @property
    def num_copies(self) -> int:
        return 2

    def rank_of(self, stage: int, num_ranks: int, copy: int = 0) -> int:
        return num_ranks - 1 - stage if copy else stage

    def check(self, num_ranks: int, num_microbatches: int) -> None:
        super().check(num_ranks, num_microbatches)
        if num_ranks % 2 or num_microbatches % 2:
            raise InputError(
                f"chimera with {num_ranks} ranks and {num_microbatches} microbatches; wanted even numbers of both"
            )

    def orders(
        self, num_ranks: int, num_microbatches: int, num_steps: int, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[Task, ...], ...]:
        self.check(num_ranks, num_microbatches)
        P = num_ranks
        slots: list[list[tuple[int, Task]]] = [[] for _ in range(P)]
        for microbatch in range(num_microbatches):
            # In slots of one pass each: a unit of P microbatches, half down and half up in turn, begins every 2P slots.
            unit, place = divmod(microbatch, P)
            half = min(P, num_microbatches - unit * P) // 2
            copy, m = divmod(place, half)
            for s in range(P):
                row = slots[self.rank_of(s, P, copy)]
                row.append((2 * P * unit + s + 2 * m, Task(s, Pass.FORWARD, microbatch, copy)))
                row.append((2 * P * unit + 2 * P - 1 - s + 2 * m, Task(s, Pass.BACKWARD, microbatch, copy)))
        rows = [[task for _, task in sorted(row)] for row in slots]
        return flushed(rows, num_microbatches, num_steps)

    def theory(self, num_ranks: int, num_microbatches: int) -> Theory:
        P, B = num_ranks, num_microbatches
        if B % P:
            return Theory(None, None, (2.0,) * P, (0.0,) * P)
        held = tuple(P / 2 + 1 + min(r, P - 1 - r) for r in range(P))
        return Theory((P - 2) / (2 * B + P - 2), held, (2.0,) * P, (0.0,) * P)
