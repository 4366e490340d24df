"""AMPNet: stages that work on whatever has arrived, and update by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dejavu.foundation.errors import InputError
from dejavu.plans.orders import FORWARD, list_scheduled
from dejavu.plans.schedule import Pass
from dejavu.schedules._base import UPDATE, PipelineSchedule, Task, Theory, WeightRule
from dejavu.simulation import StageSeconds


@dataclass(frozen=True)
class AMPNet(PipelineSchedule):
    """Messages between workers, backward ones first; the newest weights in both passes (Gaunt et al., 2017).

    Its order depends on what stages take. Nothing bounds how old a gradient is but the messages under way (section 4);
    the paper states no formula, so what it comes to is simulated.

    Attributes:
        max_active_keys: microbatches under way at most, the paper's name; None: as many as there are ranks.
        min_update_frequency: gradients that a stage adds up before it updates, the paper's name; None: a step's.
    """

    max_active_keys: int | None = None
    min_update_frequency: int | None = None

    source: ClassVar[str] = "Gaunt et al., arXiv 1705.09786, section 4"
    weights: ClassVar[WeightRule] = WeightRule.NEWEST

    def __post_init__(self) -> None:
        for name in ("max_active_keys", "min_update_frequency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} of ampnet is {value}; wanted 1 or more")

    def microbatches_per_update(self, num_microbatches: int) -> int:
        return self.min_update_frequency or num_microbatches

    def orders(
        self, num_ranks: int, num_microbatches: int, num_steps: int, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[Task, ...], ...]:
        self.check(num_ranks, num_microbatches)
        rows = list_scheduled(
            range(num_ranks),
            num_microbatches * num_steps,
            most_in_flight=self.max_active_keys or num_ranks,
            forward_seconds_S=[stage.forward_seconds for stage in stages],
            backward_seconds_S=[stage.backward_seconds for stage in stages],
        )
        every, found = self.microbatches_per_update(num_microbatches), []
        for row in rows:
            tasks, backwards = list[Task](), 0
            for one in row:
                kind = Pass.FORWARD if one.direction == FORWARD else Pass.BACKWARD
                tasks.append(Task(one.stage, kind, one.microbatch))
                backwards += one.direction != FORWARD
                if one.direction != FORWARD and backwards % every == 0:
                    tasks.append(Task(one.stage, UPDATE, backwards // every - 1))
            found.append(tuple(tasks))
        return tuple(found)

    def theory(self, num_ranks: int, num_microbatches: int) -> Theory:
        return Theory(weight_versions_P=(1.0,) * num_ranks)
