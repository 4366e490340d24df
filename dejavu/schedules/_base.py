"""What a pipeline schedule of the literature is: who runs which pass when, on which version of the weights.

P = pipeline ranks, S = stages, B = microbatches of a step (the papers' N). A rank's *share* is what it has of the
model, 1/P of it where stages are alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural
from dejavu.plans.schedule import Pass
from dejavu.simulation import StageSeconds

UPDATE = "update"  # of a stage's weights, in place of a pass


class WeightRule(StrEnum):
    """Which version of a stage's weights a microbatch meets."""

    FLUSHED = "flushed"  # the pipeline is empty at every update: one version, no staleness
    STASHED = "stashed"  # forward the newest; backward the one of its own forward, kept until then (PipeDream)
    DOUBLE_BUFFERED = "double_buffered"  # both the one before the newest, of the whole step (PipeDream-2BW)
    NEWEST = "newest"  # both the newest there is: the backward pass may meet other weights (PipeMare, AMPNet)


class Task(NamedTuple):
    """One pass of one microbatch through one stage, or one update of a stage's weights.

    Attributes:
        kind: a `Pass`, or `UPDATE`.
        number: the microbatch, counted over all steps; of an update, how many came before it.
        copy: which copy of the stage, where the model is on the ranks more than once (Chimera).
    """

    stage: int
    kind: str
    number: int
    copy: int = 0


@dataclass(frozen=True)
class Theory:
    """What the schedule's paper says of it where all stages take the same; None where it says nothing.

    Attributes:
        bubble_fraction: of the ranks' time, in the steady state where there is one.
        activations_P: microbatches whose activations a rank holds at most, each counted as far as its share goes.
        weight_versions_P: copies of its share's weights that a rank holds at most.
        staleness_steps_P: updates of the weights between those that a gradient's forward pass met and those that it
            is added to, on average.
    """

    bubble_fraction: float | None = None
    activations_P: tuple[float, ...] | None = None
    weight_versions_P: tuple[float, ...] | None = None
    staleness_steps_P: tuple[float, ...] | None = None


class PipelineSchedule(ABC):
    """A pipeline schedule: planned and simulated on demand, whether or not there is a runtime for it.

    Attributes:
        source: the paper, and where in it.
        weights: which weights a microbatch meets.
    """

    source: ClassVar[str] = ""
    weights: ClassVar[WeightRule] = WeightRule.FLUSHED

    @property
    def is_synchronous(self) -> bool:
        """Whether a step's gradients are all of the weights that it updates, as in one process."""
        return self.weights is WeightRule.FLUSHED

    @property
    def runs_as(self) -> str | None:
        """The name in `SCHEDULES` under which searches and trainings have it; None: it is simulated only."""
        return None

    @property
    def stages_per_rank(self) -> int:
        """How many stages a rank runs of each copy of the model."""
        return 1

    @property
    def num_copies(self) -> int:
        """How often the whole model is on the ranks."""
        return 1

    def rank_of(self, stage: int, num_ranks: int, copy: int = 0) -> int:
        """Return the rank that runs the stage."""
        return stage % num_ranks

    def microbatches_per_update(self, num_microbatches: int) -> int:
        """Return how many microbatches' gradients an update of a stage adds up."""
        return num_microbatches

    def check(self, num_ranks: int, num_microbatches: int) -> None:
        """Check that the schedule has an order for so many ranks and microbatches.

        Raises:
            InputError: it has none.
        """
        if num_ranks < 1 or num_microbatches < 1:
            raise InputError(
                f"{plural(num_microbatches, 'microbatch')} on {plural(num_ranks, 'rank')}; wanted one or more of each"
            )

    @abstractmethod
    def orders(
        self, num_ranks: int, num_microbatches: int, num_steps: int, stages: Sequence[StageSeconds]
    ) -> tuple[tuple[Task, ...], ...]:
        """Return each rank's tasks in their order, of so many steps.

        Args:
            stages: what stages take, for schedules that choose while they run; others do not look at it.

        Raises:
            InputError: the schedule has no order for so many ranks and microbatches.
        """

    @abstractmethod
    def theory(self, num_ranks: int, num_microbatches: int) -> Theory:
        """Return what the paper says of stages that take the same, forward as long as backward where that matters."""


def flushed(rows: Sequence[Sequence[Task]], num_microbatches: int, num_steps: int) -> tuple[tuple[Task, ...], ...]:
    """Return each rank's tasks of several steps from those of one, every stage updated at the end of each."""
    found = []
    for row in rows:
        held = sorted({(task.stage, task.copy) for task in row})  # by stage on all ranks: copies wait for each other
        tasks: list[Task] = []
        for step in range(num_steps):
            tasks += [task._replace(number=task.number + step * num_microbatches) for task in row]
            tasks += [Task(stage, UPDATE, step, copy) for stage, copy in held]
        found.append(tuple(tasks))
    return tuple(found)


def one_by_one(depth: int, num_microbatches: int, stage: int, per_update: int) -> tuple[Task, ...]:
    """Return a stage's tasks without flushes: `depth` forward passes, then one backward and one forward in turn.

    An update comes after the forward pass that follows its last backward pass: both are of the same round.
    """
    tasks = [Task(stage, Pass.FORWARD, m) for m in range(min(depth, num_microbatches))]
    for m in range(num_microbatches):
        tasks.append(Task(stage, Pass.BACKWARD, m))
        if m + depth < num_microbatches:
            tasks.append(Task(stage, Pass.FORWARD, m + depth))
        if (m + 1) % per_update == 0:
            tasks.append(Task(stage, UPDATE, m // per_update))
    return tuple(tasks)
