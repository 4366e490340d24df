"""Look at an earlier training before anything is started to resume it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dejavu.foundation.errors import InputError
from dejavu.runtime.job import earlier_job, read_losses
from dejavu.runtime.state import checkpoint_step, complete_checkpoints
from dejavu.workload import Workload


@dataclass(frozen=True)
class EarlierTraining:
    """A training that was started in this folder.

    Attributes:
        step: how many steps its last complete checkpoint has; without one, its first step.
        num_steps: how many are wanted now.
        loss: of the last step before `step`; None: unknown.
    """

    folder: Path
    step: int
    num_steps: int
    loss: float | None

    @property
    def is_complete(self) -> bool:
        """Whether no step is left to train."""
        return self.step >= self.num_steps

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", the last at loss {self.loss:.4f}"
        if not self.is_complete:
            return f"{self.folder} continues from step {self.step} of {self.num_steps}{loss}"
        return (
            f"{self.folder} is complete: {self.step} steps are trained{loss}, and the workload wants {self.num_steps}. "
            f"Nothing was started; to train further, set num_steps above {self.step} in the workload"
        )


def earlier_training(folder: Path, workload: Workload) -> EarlierTraining:
    """Read the state of the training that `--resume` names; nothing is started or changed.

    Raises:
        InputError: there is no training, it is of another model, data, batch or optimizer, or a file of it is damaged.
    """
    job = earlier_job(folder, workload)
    complete, step = complete_checkpoints(folder / job.checkpoints.name), job.first_step
    if complete:
        try:
            step = checkpoint_step(complete[-1])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{complete[-1]} cannot be read: its marker is damaged ({type(error).__name__}: {error}); delete the "
                "folder, and the training continues from the checkpoint before it"
            ) from error
    progress = folder / job.progress_path.name
    return EarlierTraining(folder, step, workload.num_steps, read_losses(progress).get(step - 1))
