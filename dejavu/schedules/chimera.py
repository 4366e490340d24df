"""Chimera: two pipelines in opposite directions on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural
from dejavu.plans.orders import BACKWARD, FORWARD, both_ways_orders
from dejavu.plans.schedule import Pass
from dejavu.schedules._base import PipelineSchedule, Task, Theory, flushed
from dejavu.simulation import StageSeconds


@dataclass(frozen=True)
class Chimera(PipelineSchedule):
    """Half of the microbatches go down the ranks, half go up: copy 0 and copy 1 of the model (Li and Hoefler, SC 2021).

    Each direction is 1F1B; the passes are those that a training with `schedule: chimera` runs (`both_ways_orders`).
    Every rank holds two stages' weights, whose gradients the two copies add up at the end of the step.
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
            asked = f"{plural(num_ranks, 'rank')} and {plural(num_microbatches, 'microbatch')}"
            raise InputError(f"chimera with {asked}; wanted even numbers of both")

    def orders(
        self, num_ranks: int, num_microbatches: int, num_steps: int, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[Task, ...], ...]:
        self.check(num_ranks, num_microbatches)
        kinds = {FORWARD: Pass.FORWARD, BACKWARD: Pass.BACKWARD}
        rows = [
            [Task(one.stage, kinds[one.direction], one.microbatch, one.copy) for one in order]
            for order in both_ways_orders(num_ranks, num_microbatches)
        ]
        return flushed(rows, num_microbatches, num_steps)

    def theory(self, num_ranks: int, num_microbatches: int) -> Theory:
        P, B = num_ranks, num_microbatches
        if B % P:
            return Theory(None, None, (2.0,) * P, (0.0,) * P)
        held = tuple(P / 2 + 1 + min(r, P - 1 - r) for r in range(P))
        return Theory((P - 2) / (2 * B + P - 2), held, (2.0,) * P, (0.0,) * P)
