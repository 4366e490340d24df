"""Faults in the middle of a training: is the resumed loss curve the unbroken one, and how long until it goes on.

A rank is killed, a rank is stopped (the watchdog has to notice), the agent is killed, the disk is full during a
checkpoint. The time to recover is from the fault to the first step that was not there before it.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from benchmarks.pipeline.full_disk import small_disk
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.single import train_single
from dejavu.workload import SyntheticSettings, TrialSettings, Workload

STALL_SECONDS = 8.0  # many times a step of this workload
WORKLOAD = Workload(
    model_options={"num_blocks": 3, "width": 32, "num_heads": 2},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=50),
    sequence_length=32,
    batch_size=8,
    num_microbatches=4,
    checkpoint_every=25,
    trials=TrialSettings(count=0),
)
FAULT_AT = 60  # step
QUICK: dict[str, Any] = {"num_steps": 150}


class Watch:
    """Watches steps, causes the fault once, and records when training continued after it."""

    def __init__(self, fault: Callable[[], None]) -> None:
        self._fault, self._furthest = fault, -1
        self._went_back = False
        self.began = 0.0
        self.recovered_seconds: float | None = None

    def __call__(self, step: int, loss: float) -> None:
        if self.began and step <= self._furthest:
            self._went_back = True  # to the last checkpoint; steps seen before were trained before the fault
        if self._went_back and self.recovered_seconds is None and step > self._furthest:
            self.recovered_seconds = time.monotonic() - self.began
        self._furthest = max(self._furthest, step)
        if not self.began and step >= FAULT_AT:
            self.began = time.monotonic()
            self._fault()


def table(*, num_steps: int = 300) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Each fault in a training of its own on two ranks."""
    expected = train_single(WORKLOAD, Draw(), range(num_steps))
    rows = [
        _row(name, run, num_steps, expected)
        for name, run in (
            ("kill -9 a rank", _killed_rank),
            ("SIGSTOP a rank", _stopped_rank),
            ("kill -9 the agent", _killed_agent),
            ("disk full during a checkpoint", _full_disk),
        )
    ]
    known = [row["recovery_seconds"] for row in rows if row["recovery_seconds"] is not None]
    summary = {
        "recovery_seconds": max(known, default=None),
        "recovery_seconds_by_fault": {row["fault"]: row["recovery_seconds"] for row in rows},
        "worst_resumed_difference": max(
            (row["largest_difference"] for row in rows if row["largest_difference"] is not None), default=None
        ),
    }
    return "Faults, and the training after them", rows, summary


Outcome = tuple[TrainingResult, Watch, str]


def _row(name: str, run: Callable[[TrainingJob], Outcome], num_steps: int, expected: list[float]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dejavu-fault-") as folder:
        workload = WORKLOAD.model_copy(update={"num_steps": num_steps})
        binding = by_hand("1f1b", (0, 2, 5), [one_device()] * 2, workload.num_microbatches)
        try:
            result, watch, said = run(replace(job_of(workload, binding, num_steps), folder=folder))
        except PermissionError as error:
            empty = {"steps": 0, "resumed_from": None, "largest_difference": None, "recovery_seconds": None}
            return {"fault": name, **empty, "said": f"skipped: {error}"}
    return {
        "fault": name,
        "steps": len(result.losses),
        "resumed_from": result.resumed_from_step,
        "largest_difference": max(abs(a - b) for a, b in zip(result.losses, expected, strict=True)),
        "recovery_seconds": watch.recovered_seconds,
        "said": said,
    }


def _killed_rank(job: TrainingJob) -> Outcome:
    watch = Watch(lambda: _ranks()[1].send_signal(signal.SIGKILL))
    result = launch(job, on_step=watch)
    return result, watch, "; ".join(result.failures)


def _stopped_rank(job: TrainingJob) -> Outcome:
    watch = Watch(lambda: _ranks()[1].send_signal(signal.SIGSTOP))
    result = launch(job, on_step=watch, stall_seconds=STALL_SECONDS)
    return result, watch, "; ".join(result.failures)


def _killed_agent(job: TrainingJob) -> Outcome:
    watch = Watch(lambda: _agent().send_signal(signal.SIGKILL))
    return _launched_again(job, watch)


def _full_disk(job: TrainingJob) -> Outcome:
    with small_disk(job.folder) as fill:
        watch = Watch(fill)
        return _launched_again(job, watch, fill.free)


def _launched_again(job: TrainingJob, watch: Watch, repair: Callable[[], None] = lambda: None) -> Outcome:
    try:
        launch(job, on_step=watch)
    except LaunchError as error:
        said = str(error).splitlines()[0]
    else:
        raise RuntimeError("the fault had no effect")
    repair()
    return launch(job, on_step=watch), watch, said


def _ranks() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return sorted((p for p in children if p.name().startswith("rank ")), key=lambda p: int(p.name().split()[1]))


def _agent() -> psutil.Process:
    (agent,) = (p for p in psutil.Process().children() if "dejavu.launch.agent" in p.cmdline())
    return agent
