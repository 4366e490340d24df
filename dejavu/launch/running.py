"""The training that runs in a folder, or else the last: read from its files, by any process, at any time."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.launch.training_lock import STOPPED, Holder, holder_in
from dejavu.runtime.job import DIVERGED, TrainingJob, TrainingResult, job_in
from dejavu.runtime.process.failures import read_failures
from dejavu.runtime.process.heartbeat import last_attempt
from dejavu.runtime.state import checkpoint_step, complete_checkpoints
from dejavu.timing.pace import WINDOW_STEPS
from dejavu.workload.data import dataset_of

TAIL_BYTES = 1 << 16  # of the file of progress: more lines than the pace is taken of


@dataclass(frozen=True, eq=False)
class Training:
    """What the files of a training say.

    Attributes:
        done: how many steps of `of` are trained.
        loss: of the last one; None: it has none yet.
        step_seconds: the median of the last ones, and of a training that has ended what its page shows; None: none is
            timed.
        checkpoint: how many steps its last complete checkpoint has; None: there is none.
        last_seconds: when it was last heard of, since the epoch.
        ended: whether it wrote its result.
        stopped: whether it was last heard of by a command that trained it and has ended, as where it was cancelled.
        failure: the error of the rank that ended its last attempt by itself; None: none did.
        diverged: whether that was a loss or gradient that is no number: it would fail so again.
    """

    folder: Path
    job: TrainingJob
    done: int
    loss: float | None
    step_seconds: float | None
    checkpoint: int | None
    last_seconds: float
    ended: bool
    stopped: bool
    failure: str | None = None
    diverged: bool = False

    @property
    def of(self) -> int:
        return self.job.last_step

    @property
    def left_seconds(self) -> float | None:
        """Until the last step at this pace, without checkpoints; None: the pace is not known."""
        return None if self.step_seconds is None else (self.of - self.done) * self.step_seconds

    @property
    def per_second(self) -> tuple[float, str] | None:
        """What is trained a second, and what that is: tokens, or samples."""
        if not self.step_seconds:
            return None
        samples, shape = self.job.workload.batch_size / self.step_seconds, dataset_of(self.job.workload).shape
        if shape.input_dtype.is_floating_point:
            return samples, "samples"
        length = 1
        for size in shape.input_shape:
            length *= size
        return samples * length, "tokens"

    @property
    def ranks_by_host(self) -> dict[str, int]:
        return dict(Counter(placement.device.host for placement in self.job.binding.placements))


@dataclass(frozen=True, eq=False)
class Status:
    """What goes on in a folder.

    Attributes:
        holder: who measures, plans or trains there now; None: nobody.
        training: that is running where `is_training`; else the last one that can be read; None: there is none.
        unread: why a training after that one cannot be read, as where its data are gone; empty: there is none.
    """

    holder: Holder | None
    training: Training | None
    unread: str = ""

    @property
    def is_training(self) -> bool:
        """Whether the holder has got as far as to train; before that it measures, plans and tries."""
        return self._is_of_holder and self.training is not None and not self.training.ended

    @property
    def follows_its_cluster(self) -> bool:
        """Whether the training that runs was started to migrate by itself where its cluster changes."""
        return self.is_training and self.training is not None and self.training.job.workload.replan.action == "migrate"

    @property
    def has_trained(self) -> bool:
        """Whether the holder's training has ended, and what it left is being recorded."""
        return self._is_of_holder and self.training is not None and self.training.ended

    @property
    def _is_of_holder(self) -> bool:
        if self.holder is None or self.training is None:
            return False
        if self.holder.training:
            return Path(self.holder.training) == self.training.folder.resolve()
        return (self.training.folder / "job.json").stat().st_mtime >= self.holder.since_seconds


def status_of(project: Path) -> Status:
    """Look at the folder of a project; trainings whose files cannot be read are passed over, the last of them told."""
    holder = holder_in(project)
    jobs = filter(Path.is_file, (project / ".dejavu" / "runs").glob("*/job.json"))  # a link may lead nowhere
    latest = [path.parent for path in sorted(jobs, key=lambda path: path.stat().st_mtime, reverse=True)]
    if holder is not None and holder.training:  # of an older job, or of one that is in another folder
        own = Path(holder.training)
        latest = [next((folder for folder in latest if folder.resolve() == own), own), *latest]
    unread = ""
    for folder in latest:
        try:
            return Status(holder, training_in(folder), unread)
        except InputError as error:
            unread = unread or str(error)
    return Status(holder, None, unread)


def training_in(folder: Path) -> Training:
    """Read the state of a training in its folder.

    Raises:
        InputError: its job cannot be read.
    """
    job = job_in(folder)
    progress = folder / job.progress_path.name
    rows = list(_last_rows(progress))[-WINDOW_STEPS:]
    last = rows[-1] if rows else None
    checkpoints = complete_checkpoints(folder / job.checkpoints.name)
    files = [path for path in (folder / "job.json", progress) if path.exists()]
    last_seconds = max((path.stat().st_mtime for path in files), default=time.time())
    ended = (folder / job.result_path.name).is_file()
    lately = median(times) if (times := [row["seconds"] for row in rows if row.get("seconds")]) else None
    stopped, error = folder / STOPPED, _error_of(replace(job, folder=str(folder)))
    return Training(
        folder=folder,
        job=job,
        done=last["step"] + 1 if last is not None else job.first_step,
        loss=last["loss"] if last is not None else None,
        step_seconds=(_measured_seconds(folder / job.result_path.name) if ended else None) or lately,
        checkpoint=_step_of(checkpoints[-1]) if checkpoints else None,
        last_seconds=last_seconds,
        ended=ended,
        stopped=stopped.exists() and stopped.stat().st_mtime >= last_seconds,
        failure=error.read_text() if error else None,
        diverged=error is not None and error.with_suffix(DIVERGED).exists(),
    )


def _measured_seconds(result: Path) -> float | None:
    """Return a step's time as the result has it; None: it has none, or not of one plan, or cannot be read."""
    try:
        return TrainingResult.from_dict(json.loads(result.read_text())).of_its_plan.step_seconds
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _error_of(job: TrainingJob) -> Path | None:
    """Return the error's file of the rank that ended the last attempt; None where a signal did, or none failed."""
    failures = read_failures(job.folder)
    if not failures or failures[-1].by_signal or failures[-1].attempt < last_attempt(job.folder):
        return None
    return next((path for path in job.errors() if path.stat().st_size), None)


def _step_of(checkpoint: Path) -> int | None:
    try:
        return checkpoint_step(checkpoint)
    except DejavuError:
        return None


def _last_rows(progress: Path) -> Iterator[dict[str, Any]]:
    """Read the last lines of progress; one that is being written is left out."""
    if not progress.is_file():
        return
    with progress.open("rb") as file:
        file.seek(max(0, progress.stat().st_size - TAIL_BYTES))
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # cut off, at the beginning or the end
                continue
            if isinstance(row, dict) and {"step", "loss"} <= set(row):
                yield row
