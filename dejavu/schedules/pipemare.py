"""PipeMare: no flush and no stash; the learning rate and the weights of the backward pass are corrected instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dejavu.schedules._base import PipelineSchedule, Task, Theory, WeightRule, one_by_one
from dejavu.simulation import StageSeconds


@dataclass(frozen=True)
class PipeMare(PipelineSchedule):
    """Every stage one forward and one backward pass a round, on the newest weights (Yang et al., MLSys 2021).

    A microbatch is 2(P − 1 − s) + 1 rounds away between its forward and its backward pass at stage s, so its forward
    pass is τ = (2(P − 1 − s) + 1) / B updates old on average and its backward pass none (section 2, table 1, where
    stages count from 1). Made stable by learning rates divided by τ at first (T1) and by weights of the backward pass
    extrapolated to those of the forward pass (T2): `staleness_corrections`.
    """

    source: ClassVar[str] = "Yang et al., MLSys 2021, table 1"
    weights: ClassVar[WeightRule] = WeightRule.NEWEST

    def orders(
        self, num_ranks: int, num_microbatches: int, num_steps: int, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[Task, ...], ...]:
        self.check(num_ranks, num_microbatches)
        count = num_microbatches * num_steps
        return tuple(one_by_one(_rounds(s, num_ranks), count, s, num_microbatches) for s in range(num_ranks))

    def theory(self, num_ranks: int, num_microbatches: int) -> Theory:
        P, rounds = num_ranks, [_rounds(s, num_ranks) for s in range(num_ranks)]
        return Theory(0.0, tuple(map(float, rounds)), (1.0,) * P, tuple(one / num_microbatches for one in rounds))


def _rounds(stage: int, num_ranks: int) -> int:
    return 2 * (num_ranks - 1 - stage) + 1
