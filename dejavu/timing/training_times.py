"""What a training measured of itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dejavu.timing.clock import Timed
from dejavu.timing.step_times import StepTimes


@dataclass(frozen=True)
class StageTimes:
    """What one rank measured of one stage: median seconds of a microbatch, and of the optimizer per step.

    Attributes:
        backward_seconds: of the whole pass; 0.0 where the schedule splits every one.
        backward_input_seconds, backward_weight_seconds: its two parts; 0.0 where the schedule never splits it.
        peak_bytes: the process's largest resident memory (CPU) or the allocator's (GPU).
        worker: the virtual worker whose stage it is.
        pipeline_rank: that measured it; with two copies of the model two ranks have the stage. None: not known.
    """

    stage: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    peak_bytes: int
    backward_input_seconds: float = 0.0
    backward_weight_seconds: float = 0.0
    replica: int = 0
    worker: int = 0
    pipeline_rank: int | None = None

    @property
    def is_split(self) -> bool:
        """Whether every backward pass ran in its two parts."""
        return not self.backward_seconds and self.backward_input_seconds + self.backward_weight_seconds > 0

    @property
    def all_backward_seconds(self) -> float:
        """Seconds of a whole backward pass, or of its two parts where every one was split; 0.0 where none ran."""
        return self.backward_seconds or self.backward_input_seconds + self.backward_weight_seconds


def slowest_of_stages(rows: Iterable[StageTimes]) -> dict[int, StageTimes]:
    """Return the most that any rank of each stage took and held: of its replicas, or in the two copies of the model."""
    measured = (
        *("forward_seconds", "backward_seconds", "backward_input_seconds", "backward_weight_seconds"),
        *("optimizer_seconds", "peak_bytes"),
    )
    found = dict[int, StageTimes]()
    for row in rows:
        known = found.get(row.stage, row)
        most = {name: max(getattr(known, name), getattr(row, name)) for name in measured}
        found[row.stage] = StageTimes(row.stage, **most)
    return found


@dataclass(frozen=True)
class TrainingTimes:
    """The times of the last attempt at a training.

    Attributes:
        step_seconds: the median step, as `step_times` counts them; None: it had no steps left.
        num_steps: of all attempts together.
        stages: each stage's times; empty where there are none.
        last_step_passes: when each pass ran in the last step, a row for each rank of the world.
    """

    step_seconds: float | None
    step_times: StepTimes | None
    num_steps: int
    stages: tuple[StageTimes, ...]
    last_step_passes: tuple[tuple[Timed, ...], ...]
