"""The process boundary of training: one JSON file in (`TrainingJob`), one out (`TrainingResult`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from dejavu.binding.binding import Binding
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.processes.files import write_json
from dejavu.foundation.units import plural
from dejavu.init import Draw
from dejavu.plans.schedule import Pass
from dejavu.runtime.job.migration import Migration
from dejavu.runtime.job.progress import Evaluation
from dejavu.runtime.job.suspects import Suspect
from dejavu.timing.clock import Span, Timed
from dejavu.timing.step_times import StepTimes
from dejavu.timing.training_times import StageTimes, TrainingTimes
from dejavu.workload import Workload
from dejavu.workload.record import AbsentError

_NOTHING = object()
DIVERGED = ".diverged"  # of a file beside a rank's error: it was a loss or gradient that is no number
LONG_WAIT = 0.02  # of the time: data and checkpoints that are waited for longer are told


class Begun(NamedTuple):
    """How the steps before `last_step` were trained: it may have gone on under another plan, or for more steps."""

    workload: Workload
    binding: Binding
    last_step: int

    def to_dict(self) -> dict[str, Any]:
        told = {"workload": self.workload.model_dump(mode="json"), "binding": self.binding.to_dict()}
        return {**told, "last_step": self.last_step}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Begun:
        workload, binding = Workload.model_validate(data["workload"]), Binding.from_dict(data["binding"])
        return cls(workload, binding, data["last_step"])


@dataclass(frozen=True)
class TrainingJob:
    """Everything that a rank needs to know.

    Attributes:
        draw: the initial weights, if `start_from` is None.
        start_from: a trial's state (safetensors), or None.
        first_step, last_step: the steps to train, `last_step` not included.
        folder: checkpoints, progress and the result go here; an absolute path that every host sees.
        least_sample_seconds: the fastest look at a core that is known of a kind of host, by its fingerprint
            (`profiling.measuring.least_samples`): steps beside slower ones have other work beside them.
        data_fingerprint: of the examples that the training began with (`Dataset.fingerprint`); empty where they were
            not told yet.
        model_code: of each module of a model of one's own, by its name, a hash of its text as the training began
            (`workload.models.own_code`), of one of transformers its config.json's; empty where it was not told yet.
        pretrained_fingerprint: of the files of the saved weights that the training started from
            (`workload.pretrained.fingerprint`); empty where it started from none, or they were not told yet.
        begun: how its first steps were trained, where it went on from a checkpoint; None: as the others.
    """

    workload: Workload
    binding: Binding
    draw: Draw
    start_from: str | None
    first_step: int
    last_step: int
    folder: str
    least_sample_seconds: Mapping[str, float] = field(default_factory=dict)
    data_fingerprint: str = ""
    model_code: Mapping[str, str] = field(default_factory=dict)
    pretrained_fingerprint: str = ""
    begun: Begun | None = None

    @property
    def at_its_beginning(self) -> TrainingJob:
        """The job as it was when its first steps were trained."""
        return self if self.begun is None else replace(self, **self.begun._asdict(), begun=None)

    @property
    def result_path(self) -> Path:
        return Path(self.folder) / "result.json"

    @property
    def progress_path(self) -> Path:
        """File with a JSON line for each step, and a second one where it was evaluated, by the rank with the loss."""
        return Path(self.folder) / "progress.jsonl"

    @property
    def warnings_path(self) -> Path:
        """File with a line for each warning of a rank."""
        return Path(self.folder) / "warnings.txt"

    def warnings(self) -> tuple[str, ...]:
        """Return the sentences of ranks that are in the file; some come after the result, as of a copy that failed."""
        return tuple(self.warnings_path.read_text().splitlines()) if self.warnings_path.exists() else ()

    def error_path(self, attempt: int, rank: int) -> Path:
        """Return the file with the error of a rank that failed by itself."""
        return Path(self.folder) / f"error-{attempt}-{rank}.txt"

    def errors(self) -> list[Path]:
        """Return the error files of ranks that failed in the last attempt, the first to fail first."""
        found = [(int(path.name.split("-")[1]), path) for path in Path(self.folder).glob("error-*-*.txt")]
        last = max((attempt for attempt, _ in found), default=0)
        return sorted((path for attempt, path in found if attempt == last), key=lambda path: path.stat().st_mtime_ns)

    @property
    def checkpoints(self) -> Path:
        return Path(self.folder) / "checkpoints"

    def to_dict(self) -> dict[str, Any]:
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "workload": self.workload.model_dump(mode="json"),
            "binding": self.binding.to_dict(),
            "draw": asdict(self.draw),
            "begun": None if self.begun is None else self.begun.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingJob:
        return cls(
            **{
                **data,
                "workload": Workload.model_validate(data["workload"]),
                "binding": Binding.from_dict(data["binding"]),
                "draw": Draw(**data["draw"]),
                "begun": Begun.from_dict(data["begun"]) if data.get("begun") else None,
            }
        )

    def write(self) -> Path:
        """Write the job as a file into its folder."""
        path = Path(self.folder) / "job.json"
        write_json(path, self.to_dict())
        return path

    @classmethod
    def read(cls, path: Path, folder: Path | None = None) -> TrainingJob:
        """Read a job, to run in its own folder or another."""
        job = cls.from_dict(json.loads(path.read_text()))
        if folder is None:
            return job
        folder.mkdir(parents=True, exist_ok=True)
        return job.moved_to(folder)

    def moved_to(self, folder: Path) -> TrainingJob:
        """Return the job as it runs in a folder, which may have been moved or copied, perhaps with its whole project.

        The trial's state that it starts from is then looked for as far from the folder as it was.
        """
        before, now = Path(self.folder), folder.resolve()
        if before.resolve() == now:
            return self
        job = replace(self, folder=str(now))
        if self.start_from is None:
            return job
        there = Path(os.path.normpath(now / os.path.relpath(self.start_from, before)))
        return replace(job, start_from=str(there)) if there.is_file() else job


def job_in(folder: Path) -> TrainingJob:
    """Read the job of a training's folder, as it runs where the folder is now.

    Raises:
        InputError: the file cannot be read, or what was trained on is gone.
    """
    path = folder / "job.json"
    try:
        return TrainingJob.read(path).moved_to(folder)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, DejavuError) as error:
        if _is_of_its_data(error):
            raise InputError(
                f"what {folder} is trained on is not there: {_why(error)}; wanted where it was when the training began"
            ) from error
        raise InputError(
            f"{path} cannot be read: {_why(error)}; wanted the file that a training of this version wrote"
        ) from error


def prepared_job(folder: Path) -> TrainingJob:
    """Read the job of a training's folder, to be trained where that is: a copied or moved one names another folder.

    Raises:
        InputError: there is none, it cannot be read, or a folder is where one of its files belongs.
    """
    path = folder / "job.json"
    if not path.is_file():
        raise InputError(f"{folder} has no prepared training: {path} is not there; wanted a folder of .dejavu/runs")
    job = _writable_job(folder)
    if TrainingJob.read(path).folder != job.folder:
        job.write()
    return job


def _is_of_its_data(error: Exception) -> bool:
    """Return whether a workload is not valid any more because its data, or its tokenizer, are gone."""
    if not isinstance(error, ValidationError):
        return False
    return isinstance(error.errors(include_url=False)[0].get("ctx", {}).get("error"), AbsentError)


def _why(error: Exception) -> str:
    """Say it in a line: of a workload that is not valid any more, which part and why."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def job_to_resume(folder: Path) -> TrainingJob:
    """Read the job of an earlier training.

    Raises:
        InputError: there is no training, it cannot be read, or a folder is where one of its files belongs.
    """
    path = folder / "job.json"
    if not path.is_file():
        raise InputError(f"{folder} has no training to resume: {path} is not there; wanted a folder of .dejavu/runs")
    return _writable_job(folder)


def _writable_job(folder: Path) -> TrainingJob:
    """Read the job of a training that is to write its files: where one is a folder it would end as soon as it began."""
    job = job_in(folder)
    for path in (job.progress_path, job.result_path, job.warnings_path):
        if path.is_dir():
            raise InputError(f"{path} is a folder; wanted a file that a training wrote, or nothing. Move it away")
    return job


def earlier_job(folder: Path, workload: Workload) -> TrainingJob:
    """Read the job of an earlier training that this workload may continue.

    Raises:
        InputError: there is no training, it cannot be read, or it is of another model, data, batch or optimizer.
    """
    before = job_to_resume(folder)
    free = {"num_steps", "checkpoint_every", "accumulate", "num_microbatches", "schedule", "trials", "compare"}
    free |= {"slices", "both_ways", "replan", "evaluate_every", "evaluation_examples", "pretrained", "compile"}
    free |= {"checkpoints", "gradients"}
    old, new = (one.model_dump(mode="json", exclude=free) for one in (before.workload, workload))
    if differences := list(_differences(old, new)):
        had, found = (", ".join(each) for each in zip(*differences, strict=True))
        raise InputError(f"{folder} was trained with {had}; wanted the same, found {found}")
    return before


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Say of each setting that is not the same what it was and is, of those under one key each by its own name."""
    for name in dict.fromkeys([*new, *old]):
        was, now = (one.get(name, _NOTHING) for one in (old, new))
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _differences(was, now, f"{within}{name}.")
        elif was != now:
            had, found = (
                f"{within}{name} {one[name]!r}" if name in one else f"no {within}{name}" for one in (old, new)
            )
            yield had, found


def resumed(folder: Path, workload: Workload, binding: Binding) -> TrainingJob:
    """Continue the training of this folder from its last checkpoint: on another plan, or for more steps.

    Raises:
        InputError: as `earlier_job`.
    """
    return replace(earlier_job(folder, workload), workload=workload, binding=binding, last_step=workload.num_steps)


class Waited(NamedTuple):
    """How long a rank's steps waited for their examples.

    Attributes:
        seconds: a step's mean, the first step left out.
        share: of the steps' time, waiting included.
        ahead: whether they are read in a thread beside the step before.
    """

    seconds: float
    share: float
    ahead: bool


class Saved(NamedTuple):
    """How long the steps of a rank waited for checkpoints to be written.

    Attributes:
        checkpoints: how many, in the last attempt.
        seconds: of one, in the mean.
        share: of the attempt's time from its first step to its last checkpoint.
    """

    checkpoints: int
    seconds: float
    share: float


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    Attributes:
        first_step: the step of `losses[0]`: the job's, unless earlier ones are lost with their file.
        losses: of every step from there, in order, across restarts.
        step_seconds: the median step of the last attempt, as `step_times` counts them; None: it had no steps left.
        stages: each stage's times; empty where there are none.
        restarts: how often the ranks were restarted.
        resumed_from_step: the checkpoint that the last attempt resumed from; None: none.
        final_checkpoint: the folder of the last complete checkpoint.
        failures: a sentence for each rank that caused a restart: attempt, rank, stages, host, and how it ended.
        last_step_passes: when each pass ran in the last step, a row for each rank of the world, each row's seconds from
            the first start of the step on that rank's host.
        last_step_once: when each rank, in that step, summed gradients over replicas and ran its optimizer.
        step_times: how long the last attempt's steps took, and whether other work ran at the same time.
        migrations: the changes of the plan, or of the ranks under it, while the training ran.
        warnings: sentences of ranks about what they saw, and went on.
        was_slowed: a device or a link was seen to take longer than usual, so that its times are none of its type's.
        evaluations: the losses on what is held out, in the order of their steps.
        waited_for_data: how long each rank's steps waited for their examples, in the order of the world's ranks.
        saved: how long each rank waited for checkpoints, likewise.
        compile_seconds: how long each rank compiled its layers, nearly all in the first step; empty: they are not.
        suspects: replicas whose gradients were not like the others', in the last attempt; of the mean none is known.
        left_out_steps: those whose gradients overflowed in float16, which changed no weight.
    """

    first_step: int
    losses: tuple[float, ...]
    step_seconds: float | None
    stages: tuple[StageTimes, ...]
    restarts: int
    resumed_from_step: int | None
    final_checkpoint: str
    failures: tuple[str, ...] = ()
    last_step_passes: tuple[tuple[Timed, ...], ...] = ()
    last_step_once: tuple[tuple[Span, ...], ...] = ()
    step_times: StepTimes | None = None
    migrations: tuple[Migration, ...] = ()
    warnings: tuple[str, ...] = ()
    was_slowed: bool = False
    evaluations: tuple[Evaluation, ...] = ()
    waited_for_data: tuple[Waited, ...] = ()
    saved: tuple[Saved, ...] = ()
    compile_seconds: tuple[float, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    left_out_steps: tuple[int, ...] = ()

    @property
    def times(self) -> TrainingTimes:
        """The measured step and stage times."""
        return TrainingTimes(self.step_seconds, self.step_times, len(self.losses), self.stages, self.last_step_passes)

    @property
    def kept_its_plan(self) -> bool:
        """Whether all steps ran under the job's plan on devices as they are, so that times can be told of it."""
        return not self.was_slowed and not any(migration.changes_plan for migration in self.migrations)

    @property
    def of_its_plan(self) -> TrainingResult:
        """The same without times, where some steps ran under another plan, or slower: they would be told wrongly."""
        if self.kept_its_plan:
            return self
        return replace(self, step_seconds=None, step_times=None, stages=(), last_step_passes=(), last_step_once=())

    @property
    def waits_for_data(self) -> tuple[int, Waited] | None:
        """The rank of the world that waited most for its examples, if that is worth a word; None: it is not."""
        rank, most = max(enumerate(self.waited_for_data), key=lambda one: one[1].share, default=(0, None))
        return (rank, most) if most is not None and most.share > LONG_WAIT else None

    @property
    def long_saved(self) -> Saved | None:
        """What checkpoints took on the rank that waited longest for them, if that is worth a word; None: it is not."""
        most = max(self.saved, key=lambda one: one.share, default=None)
        return most if most is not None and most.share > LONG_WAIT else None

    @property
    def said_of_left_out(self) -> str:
        """How many steps changed no weight, and why, in words; "": all did."""
        left_out, steps = len(self.left_out_steps), len(self.losses)
        if not left_out:
            return ""
        if left_out == steps:
            return f"all {plural(steps, 'step')}, so no weight was changed: gradients overflowed in float16 in each"
        return f"{left_out} of {plural(steps, 'step')}, whose gradients overflowed in float16: they changed no weight"

    @property
    def origin(self) -> str:
        """Where the last attempt resumed from."""
        return "the beginning" if self.resumed_from_step is None else f"step {self.resumed_from_step}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingResult:
        stages = tuple(StageTimes(**row) for row in data["stages"])
        passes = tuple(
            tuple(Timed(stage, Pass(direction), *rest) for stage, direction, *rest in rank)
            for rank in data["last_step_passes"]
        )
        known = {
            "losses": tuple(data["losses"]),
            "failures": tuple(data["failures"]),
            "warnings": tuple(data.get("warnings", ())),
            "step_times": StepTimes(**data["step_times"]) if data.get("step_times") else None,
            "stages": stages,
            "last_step_passes": passes,
            "last_step_once": tuple(tuple(Span(*span) for span in rank) for rank in data.get("last_step_once", ())),
            "migrations": tuple(map(Migration.from_dict, data.get("migrations", ()))),
            "evaluations": tuple(Evaluation(*row) for row in data.get("evaluations", ())),
            "compile_seconds": tuple(data.get("compile_seconds", ())),
            "suspects": tuple(map(Suspect.from_dict, data.get("suspects", ()))),
            "left_out_steps": tuple(data.get("left_out_steps", ())),
            "waited_for_data": tuple(Waited(*row) for row in data.get("waited_for_data", ())),
            "saved": tuple(Saved(*row) for row in data.get("saved", ())),
        }
        return cls(**{**data, **known})
