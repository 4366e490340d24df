"""Look at an earlier training before anything is started to resume it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.foundation.tracing import fake_tensors
from dejavu.runtime.job import TrainingJob, earlier_job, job_to_resume
from dejavu.runtime.job.progress import read_losses
from dejavu.runtime.state import checkpoint_step, complete_checkpoints, weight_shapes
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of, own_code
from dejavu.workload.models.hugging_face import PREFIX
from dejavu.workload.pretrained import check_pretrained

PAGE_IS_DUE = "page-is-due"  # in a training's folder, until its run has recorded what was trained


@dataclass(frozen=True)
class EarlierTraining:
    """A training that was started in this folder.

    Attributes:
        step: how many steps its last complete checkpoint has; without one, its first step.
        num_steps: how many are wanted now.
        loss: of the last step before `step`; None: unknown.
        page_is_due: the run that trained it ended before its page was made.
    """

    folder: Path
    step: int
    num_steps: int
    loss: float | None
    page_is_due: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether no step is left to train."""
        return self.step >= self.num_steps

    @property
    def has_nothing_left(self) -> bool:
        """Whether all is trained and recorded."""
        return self.is_complete and not self.page_is_due

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", the last at loss {self.loss:.4f}"
        if not self.is_complete:
            return f"{self.folder} continues from step {self.step} of {self.num_steps}{loss}"
        trained = "1 step is trained" if self.step == 1 else f"{self.step} steps are trained"
        complete = f"{self.folder} is complete: {trained}{loss}"
        if self.page_is_due:
            return f"{complete}; its page is not made yet, which `dejavu run --resume {self.folder}` does"
        return (
            f"{complete}, and the workload wants {self.num_steps}. "
            f"Nothing was started; to train further, set num_steps above {self.step} in its workload file, and "
            f"`dejavu run --resume {self.folder} --workload FILE`"
        )


def earlier_training(folder: Path, workload: Workload) -> EarlierTraining:
    """Read the state of the training that `--resume` names; nothing is started or changed.

    Raises:
        InputError: there is no training, it is of another model, data, batch or optimizer, a file of it is damaged, or
            it has neither a checkpoint nor the state or the saved weights that it starts from.
    """
    job = earlier_job(folder, workload)
    complete, step = complete_checkpoints(folder / job.checkpoints.name), job.first_step
    if complete:
        step = checkpoint_step(complete[-1])
    elif job.start_from and not Path(job.start_from).exists():
        raise InputError(
            f"{folder} has no checkpoint, and {job.start_from}, the trial's state that it starts from, is not there "
            "any more; wanted one of both. Start a new training: results of trials are kept, and only the best "
            "one runs again"
        )
    elif not job.start_from:
        check_pretrained(workload)
    progress = folder / job.progress_path.name
    loss = read_losses(progress).get(step - 1)
    page_is_due = step >= job.last_step and (folder / PAGE_IS_DUE).is_file()
    return EarlierTraining(folder, step, workload.num_steps, loss, page_is_due)


def tell_of_page(training: str, *, is_due: bool) -> None:
    """Note in a training's folder that its run is still to make its page, or has made it."""
    path = Path(training) / PAGE_IS_DUE
    if is_due:
        path.touch()
    else:
        with suppress(OSError):  # a disk that is read-only by now: the page is made once more
            path.unlink(missing_ok=True)


def job_to_record(earlier: EarlierTraining | None) -> TrainingJob | None:
    """Return the job of a training that has its result, so that only its page is to be made; None: it has steps left.

    Raises:
        InputError: it cannot be read.
    """
    if earlier is None or not earlier.is_complete:
        return None
    job = job_to_resume(earlier.folder)
    return job if job.result_path.is_file() else None


def what_is_other(job: TrainingJob) -> Iterator[str]:
    """Say of its examples and of its model's code that they are not those that the training began with."""
    if has_other_data(job):
        yield (
            f"the examples of data: {job.workload.data} are not those that this training began with: it goes on with "
            "what is there now, and its losses are not those of an undisturbed training"
        )
    if changed := changed_code(job):
        yield f"{changed}: it goes on with what is there now"


def has_other_data(job: TrainingJob) -> bool:
    """Return whether the examples are not those that the training began with."""
    return job.data_fingerprint not in ("", dataset_of(job.workload).fingerprint)


def changed_code(job: TrainingJob) -> str:
    """Say what of the model is not what the training began with; "": nothing is known to have changed."""
    was, now = job.model_code, own_code(job.workload) if job.model_code else {}
    changed = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
    if not changed:
        return ""
    if job.workload.model.startswith(PREFIX):
        return f"the config of model {job.workload.model} is not that with which this training began"
    modules = f"module{'' if len(changed) == 1 else 's'} {', '.join(changed)}"
    return f"the code of model {job.workload.model} is not that with which this training began ({modules})"


def check_checkpoint(training: Path, workload: Workload) -> None:
    """Check that the last checkpoint of a training, if it has one, is whole and of this workload's model.

    The numbers in it are not read.

    Raises:
        InputError: a file of it is damaged, or it is of another model; the message names the file or the weight.
    """
    complete = complete_checkpoints(training / earlier_job(training, workload).checkpoints.name)
    if not complete:
        return
    last = complete[-1]
    try:
        found = weight_shapes(last)
    except InputError as error:
        goes_on = f"from {complete[-2].name}" if len(complete) > 1 else "at its first step"
        raise InputError(f"{error}. Delete {last}, and the training continues {goes_on}") from error
    for builder in layers_of(workload):
        with fake_tensors():
            wanted = nn.ModuleDict({builder.name: builder.build()}).state_dict()
        for name, tensor in wanted.items():
            if (has := found.get(name)) != tuple(tensor.shape):
                what = f"it has no weight {name!r}" if has is None else f"its weight {name!r} has shape {has}"
                raise InputError(f"{last} is of another model: {what}; wanted one of shape {tuple(tensor.shape)}")
