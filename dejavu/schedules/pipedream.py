"""PipeDream and PipeDream-2BW: no flush; forward and backward a microbatch meets the same version of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural
from dejavu.schedules._base import PipelineSchedule, Task, Theory, WeightRule, one_by_one
from dejavu.simulation import StageSeconds


@dataclass(frozen=True)
class PipeDream(PipelineSchedule):
    """1F1B without flushes, an update after every microbatch, with weight stashing (Narayanan et al., SOSP 2019).

    Stage s of P keeps the weights of every microbatch under way, P − s versions, and its gradients are P − 1 − s
    updates old: w(t+1) = w(t) − ν ∇f(w₁(t − P + 1), …, w_P(t)) (section 3.3).
    """

    source: ClassVar[str] = "Narayanan et al., SOSP 2019, section 3.3"
    weights: ClassVar[WeightRule] = WeightRule.STASHED

    def microbatches_per_update(self, num_microbatches: int) -> int:
        return 1

    def orders(
        self, num_ranks: int, num_microbatches: int, num_steps: int, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[Task, ...], ...]:
        self.check(num_ranks, num_microbatches)
        count = num_microbatches * num_steps
        return tuple(_updated_first(one_by_one(num_ranks - s, count, s, 1)) for s in range(num_ranks))

    def theory(self, num_ranks: int, num_microbatches: int) -> Theory:
        P = num_ranks
        held = tuple(float(P - s) for s in range(P))
        return Theory(0.0, held, held, tuple(float(P - 1 - s) for s in range(P)))


@dataclass(frozen=True)
class PipeDream2BW(PipelineSchedule):
    """1F1B without flushes, gradients of a step added up, two versions of the weights (Narayanan et al., ICML 2021).

    Every stage computes a step with the weights from before the last update: w(t+1) = w(t) − ν ∇f(w(t − 1))
    (section 3.1). A step has as many microbatches as there are stages, or more.
    """

    source: ClassVar[str] = "Narayanan et al., ICML 2021, section 3.1"
    weights: ClassVar[WeightRule] = WeightRule.DOUBLE_BUFFERED

    def check(self, num_ranks: int, num_microbatches: int) -> None:
        super().check(num_ranks, num_microbatches)
        if num_microbatches < num_ranks:
            asked = f"{plural(num_ranks, 'rank')} and {plural(num_microbatches, 'microbatch')}"
            raise InputError(
                f"pipedream_2bw with {asked}; wanted as many or more: two versions of the weights are enough then"
            )

    def orders(
        self, num_ranks: int, num_microbatches: int, num_steps: int, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[Task, ...], ...]:
        self.check(num_ranks, num_microbatches)
        count = num_microbatches * num_steps
        rows = (one_by_one(num_ranks - s, count, s, num_microbatches) for s in range(num_ranks))
        return tuple(_updated_first(row) for row in rows)

    def theory(self, num_ranks: int, num_microbatches: int) -> Theory:
        P = num_ranks
        return Theory(0.0, tuple(float(P - s) for s in range(P)), (2.0,) * P, (1.0,) * P)


def _updated_first(row: tuple[Task, ...]) -> tuple[Task, ...]:
    """Return the tasks with each update right after its last backward pass, before the forward pass that follows."""
    tasks = list(row)
    for i in range(2, len(tasks)):
        if tasks[i].kind == "update" and tasks[i - 1].kind == "forward":
            tasks[i - 1], tasks[i] = tasks[i], tasks[i - 1]
    return tuple(tasks)
