"""What a launch survives, with real ranks: killed, stopped and stuck ones, a killed agent, a full disk."""

from __future__ import annotations

import itertools
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from benchmarks.pipeline.plans import by_hand, one_device
from dejavu.foundation.errors import DejavuError
from dejavu.launch.launcher import LaunchError, RankError, _failed, launch
from dejavu.launch.preflight import check_spreading
from dejavu.launch.running import training_in
from dejavu.launch.torchrun import torchrun_words
from dejavu.launch.watchdog import waits
from dejavu.migration.launching import launch_changing
from dejavu.migration.training import ChangingTraining
from dejavu.plans import Plan
from dejavu.plans.schedule import SCHEDULES, allowed_microbatches
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.process import attempt_number, end_agent, named_parent, rank_environment
from dejavu.runtime.process.failures import Failure, failures_path, read_failures, write_failure
from dejavu.runtime.process.heartbeat import Heartbeat, read_beats
from dejavu.runtime.single import train_single
from dejavu.runtime.state import checkpoint_step, complete_checkpoints, first_not_finite, read_checkpoint
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of
from tests.changing import running_problem
from tests.conftest import TINY
from tests.launching import job_of, largest_difference, once, ranks, runtime_processes
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.integration
TOLERANCE = 1e-4  # after hundreds of steps, in float32


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process of a launch outlives it."""
    yield
    assert not runtime_processes()


@pytest.fixture
def long() -> Workload:
    return TINY.model_copy(update={"num_steps": 90, "checkpoint_every": 20})


def test_a_killed_rank_and_then_a_stopped_one_are_named_and_cost_nothing_but_time(
    long: Workload, tmp_path: Path
) -> None:
    long = long.model_copy(update={"num_steps": 300})  # the launcher, which is told late, still meets ranks that train
    job = job_of(long, tmp_path, (1, 3))
    kill, stop = once(lambda: ranks()[1].kill(), 30), once(lambda: ranks()[1].suspend(), 70)

    def on_step(step: int, loss: float) -> None:
        kill(step, loss)
        stop(step, loss)

    result = launch(job, stall_seconds=5.0, on_step=on_step)
    killed, stopped = result.failures
    assert killed == "attempt 0: rank 1 (stage 1 on localhost) was ended by SIGKILL"
    assert stopped.startswith("attempt 1: rank 1 (stage 1 on localhost) was ended by SIGKILL: no progress for")
    assert "its process is stopped; its last step was " in stopped
    log = (tmp_path / "ranks.log").read_text()
    assert killed in log and "rank 1:\nno stack: it did not answer" in log
    assert log.count("Current thread") == 2, "of both others"
    assert result.restarts == 2 and result.resumed_from_step in range(60, 301, 20)
    assert largest_difference(long, result.losses) < TOLERANCE


class HangsOnce(nn.Linear):
    """Stops for ever in the middle of the first attempt."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "RANK" in os.environ and next(self.calls) == 100 and attempt_number() == 0:
            time.sleep(1e6)
        return super().forward(x)


def hangs_once() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), HangsOnce(16, 16), nn.Linear(16, 10))


class EndsItself(nn.Linear):
    """Of no use on any attempt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "RANK" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def ends_itself() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), EndsItself(16, 10))


def digits(model: str) -> Workload:
    return TINY.model_copy(
        update={"model": f"tests.test_launcher:{model}", "model_options": {}, "data": "digits", "num_steps": 60}
    )


@pytest.mark.slow
def test_of_ranks_that_all_sleep_the_one_that_waits_for_nobody_is_ended(tmp_path: Path) -> None:
    workload = digits("hangs_once")
    result = launch(job_of(workload, tmp_path, (1, 3, 4)), stall_seconds=2.0)
    (failure,) = result.failures
    assert "rank 2 (stage 2 on localhost) was ended by SIGKILL: no progress" in failure
    assert "the others waited for it" in failure
    assert "in forward" in (tmp_path / "ranks.log").read_text()
    assert largest_difference(workload, result.losses) < TOLERANCE


@pytest.mark.parametrize("seconds", [0.0, 0.2, 1.0])
def test_an_agent_that_is_ended_leaves_no_temporary_folder(seconds: float, tmp_path: Path) -> None:
    """Also before torch, which ends the ranks by a handler of its own, has put that there."""
    aside = tmp_path / "aside"
    aside.mkdir()
    environment = {**rank_environment(), **named_parent(), "TMPDIR": str(aside)}
    words = torchrun_words(2, job_of(TINY, tmp_path).write())
    with (tmp_path / "agent.log").open("wb") as log:
        command = [sys.executable, "-m", "dejavu.launch.agent", *words]
        agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    while not list(aside.glob("dejavu-agent-*")):
        assert agent.poll() is None, (tmp_path / "agent.log").read_text()
        time.sleep(0.01)
    time.sleep(seconds)
    end_agent(agent)
    assert not list(aside.iterdir())


@pytest.mark.slow
def test_ranks_that_always_die_by_a_signal_are_told_and_may_be_tried_again(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"attempt 3: rank \d \(stage \d on localhost\) was ended by SIGKILL"
    ) as caught:
        launch(job_of(digits("ends_itself"), tmp_path))
    assert not isinstance(caught.value, RankError)
    assert {failure.attempt for failure in read_failures(tmp_path)} == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_killed_agent_takes_its_ranks_with_it_and_the_next_launch_goes_on(long: Workload, tmp_path: Path) -> None:
    job = job_of(long, tmp_path)

    def kill() -> None:
        (agent,) = (p for p in psutil.Process().children() if "dejavu.launch.agent" in p.cmdline())
        agent.kill()

    with pytest.raises(LaunchError, match="did not finish") as caught:
        launch(job, on_step=once(kill, 50))
    assert not isinstance(caught.value, RankError)
    psutil.wait_procs(runtime_processes(), timeout=PATIENCE_SECONDS)
    assert not runtime_processes()
    assert not list(tmp_path.glob(".launch-*"))
    result = launch(job)
    assert result.resumed_from_step in (40, 60) and result.failures == ()
    assert largest_difference(long, result.losses) < TOLERANCE


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_told_and_the_checkpoint_before_is_kept(long: Workload, small_disk: Path) -> None:
    endless = long.model_copy(update={"num_steps": 2000})  # far more than go on until the disk is full
    job, ballast = job_of(endless, small_disk / "run"), small_disk / "ballast"

    def fill() -> None:
        while not ballast.exists():
            free = psutil.disk_usage(str(small_disk)).free
            try:
                ballast.write_bytes(b"x" * (free - 200_000))  # a checkpoint takes more; logs and progress still fit
            except OSError:  # a checkpoint was just being written
                ballast.unlink()

    with pytest.raises(RankError, match=r"step-\d+\.partial was not saved.* needs [\d,]+ bytes.* free") as caught:
        launch(job, on_step=once(fill, 22))
    assert "attempt 1" in str(caught.value) and "attempt 2" not in str(caught.value), "it got no further"
    kept = complete_checkpoints(job.checkpoints)
    assert kept and [path for path in job.checkpoints.iterdir() if path not in kept] == []
    ballast.unlink()
    step = int(kept[-1].name.removeprefix("step-"))
    result = launch(replace(job, last_step=step + 10))
    assert result.resumed_from_step == step
    assert result.losses == pytest.approx(train_single(endless, job.draw, range(step + 10)), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("error", "changes"),
    [(KeyboardInterrupt, False), (DejavuError, True)],
    ids=["interrupted", "failed, under a plan that may change"],
)
def test_what_ranks_were_writing_when_a_training_was_ended_is_removed(
    error: type[BaseException], changes: bool, tmp_path: Path
) -> None:
    """Nothing else would: a training that nobody resumes kept it for ever, and it is as large as a checkpoint."""
    endless = TINY.model_copy(update={"num_steps": 2000, "checkpoint_every": 5})
    job = job_of(endless, tmp_path, (2,))

    def end() -> None:
        while not complete_checkpoints(job.checkpoints):
            time.sleep(0.01)
        for name in ("step-00009998.partial", "step-00009999"):  # before the files were renamed, and before the marker
            (job.checkpoints / name).mkdir()
        raise error

    names = [builder.name for builder in layers_of(endless)]
    running = running_problem(names, ("localhost",), endless.num_microbatches, per_host=2)
    begin = partial(launch_changing, running=running) if changes else launch
    with pytest.raises(error):
        begin(job, on_step=once(end, 0))
    kept = complete_checkpoints(job.checkpoints)
    assert kept and sorted(job.checkpoints.iterdir()) == kept


def test_a_limit_on_files_that_a_checkpoint_does_not_keep_is_named(tmp_path: Path) -> None:
    """The disk had room for it, and the message no cause."""
    job = job_of(TINY, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # logs fit, and no stage's state
    try:
        with pytest.raises(
            RankError, match=r"not saved: .* free\), where no file may be larger than 100,000 \(`ulimit"
        ):
            launch(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_a_byte_left_is_told_by_who_needs_none_to_say_it(long: Workload, small_disk: Path) -> None:
    """Ranks can write neither their error nor their log: what was said of the training ended in "; ;"."""
    job = job_of(long.model_copy(update={"num_steps": 2000}), small_disk / "run")

    def fill() -> None:
        with (small_disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))

    with pytest.raises(
        LaunchError, match=r"no rank could write why: the disk of .*run has [\d,]+ bytes free"
    ) as caught:
        launch(job, on_step=once(fill, 22))
    assert str(complete_checkpoints(job.checkpoints)[-1]) in str(caught.value)


@pytest.mark.parametrize("said", [("",), ("", ""), ("", "image 7 is none"), ("image 7 is none", "")], ids=str)
def test_what_a_rank_could_write_is_said(said: tuple[str, ...], tmp_path: Path) -> None:
    job = job_of(TINY, tmp_path)
    for rank, text in enumerate(said):
        job.error_path(0, rank).write_text(text)
    told = str(_failed(job, 1))
    assert ("image 7 is none" in told) == any(said) and ("no rank could write why: " in told) == (not any(said))
    assert "; ;" not in told and told.endswith("there is no checkpoint yet")


def planned(job: TrainingJob, **fields: object) -> TrainingJob:
    return replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, **fields)))


def test_what_cannot_run_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    job = job_of(TINY, tmp_path, (1, 2))
    stages = job.binding.plan.stages
    placements = job.binding.placements
    gpu = replace(placements[1], device=replace(placements[1].device, type_name="H100-SXM5-80GB", index=64))
    gone = replace(job, binding=replace(job.binding, placements=(placements[0], gpu, placements[2])))
    cases = [
        (planned(job, num_microbatches=2), "2 microbatches for 3 stages under 1f1b; wanted 3 or more; 4 microbatches"),
        (planned(job, num_microbatches=5), "batch of 8 does not divide into 5 microbatches; 4 microbatches would do"),
        (planned(job, stages=stages * 2), "6 stages for 5 layers; wanted at most 5 stages"),
        (planned(job, stages=stages[:2]), "wanted each of the model's 5 layers once, in order"),
        (
            planned(job, stages=(stages[0], replace(stages[1], stop=1), replace(stages[2], start=1))),
            "0–0, none, 1–4; wanted",
        ),
        (gone, "rank 1 is to run on device 64 .*H100.* which is gone: torch sees"),
    ]
    for refused, message in cases:
        with pytest.raises(LaunchError, match=message):
            launch(refused)
    with pytest.raises(LaunchError, match=r"the ranks on localhost need 3 PiB by the prediction; .* are free now"):
        launch(job, needed_bytes=[2.0**50] * 3)
    assert not (tmp_path / "ranks.log").exists()
    assert not list(tmp_path.glob(".launch-*"))


V = by_hand("zbv", range(5), [one_device()] * 2, 4).plan
BAD_JOBS: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "compiled in two parts": ({"compile": True}, {"stages": V.stages, "schedule": "zbv"}, "zbv runs the backward pass"),
    "no number of microbatches": ({}, {"num_microbatches": 3}, "batch of 8 does not divide into 3 microbatches"),
    "other microbatches": ({}, {"num_microbatches": 8}, "the workload has 4 microbatches a step, the plan 8"),
    "nothing held out": ({"held_out": 1e-9, "evaluate_every": 1}, {}, "and 0 to test on"),
}


@pytest.mark.parametrize("name", BAD_JOBS)
@pytest.mark.parametrize("changes", [False, True])
def test_both_ways_to_launch_refuse_the_same_jobs(changes: bool, name: str, tmp_path: Path) -> None:
    """Whether or not the plan may change while it runs."""
    of_workload, of_plan, said = BAD_JOBS[name]
    of_mlp = {"data": "digits", "model": "mlp", "model_options": {"num_blocks": 3}, **of_workload}
    job = planned(job_of(TINY.model_copy(update=of_mlp), tmp_path, (2,)), **of_plan)
    with pytest.raises(DejavuError, match=said):
        if changes:
            ChangingTraining._prepare(SimpleNamespace(job=job))  # type: ignore[arg-type]
        else:
            launch(job)


@pytest.mark.parametrize("frozen", [[], [0], [3], [2, 3], [0, 2], [0, 2, 3]])
def test_a_model_of_which_nothing_is_trained_is_refused_before_any_rank_starts(
    frozen: list[int], tmp_path: Path
) -> None:
    fields = {"model": "tests.own_models:with_frozen", "model_options": {"layers": frozen}, "text": None}
    job = job_of(TINY.model_copy(update=fields), tmp_path, (1, 2))
    if len(frozen) < 3:
        check_spreading(job)
        return
    with pytest.raises(LaunchError, match="with_frozen': its output has no gradient, so nothing can be"):
        launch(job)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_the_microbatches_that_are_said_to_do_do(schedule: str, tmp_path: Path) -> None:
    workload = TINY.model_copy(update={"batch_size": 16})
    per_rank = SCHEDULES[schedule].stages_per_rank
    job = job_of(workload, tmp_path, tuple(range(1, 4)))
    for number in (1, 3, 5):
        plan: Plan = replace(job.binding.plan, schedule=schedule, num_microbatches=number)
        assert len(plan.stages) % per_rank == 0
        if allowed_microbatches(schedule, len(plan.stages), number) and 16 % number == 0:
            continue
        with pytest.raises(LaunchError, match=r"(\d+) microbatches would do") as caught:
            launch(replace(job, binding=replace(job.binding, plan=plan)))
        words = str(caught.value).split("; ")[-1].split()
        assert 16 % int(words[0]) == 0 and allowed_microbatches(schedule, len(plan.stages), int(words[0]))


def test_of_an_attempt_the_ranks_that_a_signal_ended_are_its_cause(tmp_path: Path) -> None:
    victims = [Failure(0, 0, (0,), "a", 1), Failure(1, 2, (2,), "b", 1), Failure(1, 0, (0,), "a", 1)]
    cause = Failure(0, 1, (1, 3), "b", -signal.SIGKILL, "no progress for 9.0 s")
    for failure in (*victims[:1], cause, *victims[1:]):
        write_failure(tmp_path, failure)
    assert [str(failure) for failure in read_failures(tmp_path)] == [
        "attempt 0: rank 1 (stages 1, 3 on b) was ended by SIGKILL: no progress for 9.0 s",
        "attempt 1: rank 2 (stage 2 on b) failed (exit 1)",
    ]


def test_heartbeats_are_of_their_attempt(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    earlier, later = Heartbeat(tmp_path, 0, 0), Heartbeat(tmp_path, 1, 1)
    try:
        later.beat(7)
        first = read_beats(tmp_path, 1)
        later.beat(7)
        assert {rank: beat.step for rank, beat in first.items()} == {1: 7}
        assert read_beats(tmp_path, 1) != first, "a checkpoint after the step is progress too"
        assert read_beats(tmp_path, 0)[0].step < 0
    finally:
        earlier.close()
        later.close()
        signal.signal(signal.SIGUSR1, before)  # a rank ignores it until it has exited


def test_who_waits_is_seen_by_the_line_that_is_run(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("work.wait()\ncompute()\n")
    stack = 'Thread 0x1:\n  File "other.py", line 1 in x\n\nCurrent thread 0x2 (most recent call first):\n'
    assert waits(f'{stack}  File "{source}", line 1 in run\n')
    assert not waits(f'{stack}  File "{source}", line 2 in run\n')
    assert waits(f'{stack}  File "/lib/torch/distributed/distributed_c10d.py", line 1 in recv\n')
    assert not waits("")


class DivergesAt(nn.Linear):
    """Gives NaN from a step on, whichever attempt it is: how often it trained is part of its state."""

    def __init__(self, calls: int, *arguments: int) -> None:
        super().__init__(*arguments)
        self.most = calls
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / (self.calls <= self.most)


def diverges(steps: int = 34) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), DivergesAt(steps * TINY.num_microbatches, 16, 10))


def test_a_loss_that_is_no_number_ends_at_the_last_good_checkpoint(tmp_path: Path) -> None:
    """Fault 35; what is kept is finite, and is named."""
    job = job_of(digits("diverges"), tmp_path, (2,))
    with pytest.raises(RankError, match=r"the loss of step 35 is nan, wanted a finite number; .*step-00000033") as said:
        launch(job)
    assert "Traceback" not in str(said.value)
    found = training_in(tmp_path)
    assert found.diverged and "the loss of step 35 is nan" in (found.failure or "")
    kept = complete_checkpoints(job.checkpoints)[-1]
    state = read_checkpoint(kept, {builder.name for builder in layers_of(job.workload)})
    assert first_not_finite(state) is None and checkpoint_step(kept) == 33
    assert first_not_finite({**state, "model.x": torch.tensor([1.0, math.nan])}) == "model.x"


@pytest.mark.slow  # of a later loss: above
def test_a_first_loss_that_is_no_number_is_not_put_down_to_the_learning_rate(tmp_path: Path) -> None:
    job = job_of(digits("diverges").model_copy(update={"model_options": {"steps": 0}}), tmp_path, (2,))
    with pytest.raises(RankError, match=r"the loss of step 1 is nan, .*; no weight had been changed by then") as said:
        launch(job)
    assert "learning rate" not in str(said.value) and str(said.value).count("no checkpoint") == 1


def test_data_that_fail_in_a_step_end_the_training_and_its_last_checkpoint_is_named(tmp_path: Path) -> None:
    """Fault 37; the example is the first that only the last step wants."""
    fields = {"model": "mlp", "model_options": {"num_blocks": 3, "width": 8}, "data": "examples"}

    def late(bad: int) -> Workload:
        examples = {"factory": "tests.own_data:late", "options": {"count": 64, "bad": bad}, "num_classes": 3}
        return Workload(**{**TINY.model_dump(mode="json"), **fields, "examples": examples})

    good = late(-1)
    wanted = [set(dataset_of(good).batch(step, 8, seed=good.seed)[0][:, 0].int().tolist()) for step in range(8)]
    bad = min(wanted[-1] - set.union(*wanted[:-1]))
    job = job_of(late(bad), tmp_path, (2,))
    said = rf"own_data:late\[{bad}\] fails: OSError: the bucket is gone; the last checkpoint is .*step-00000006\n"
    with pytest.raises(RankError, match=said):
        launch(job)
    assert launch(replace(job, workload=good)).resumed_from_step == 6


@pytest.mark.parametrize("end", [0, 1, 20, 60, -1])
@pytest.mark.parametrize("before", [0, 2])
def test_a_failure_that_is_being_written_costs_no_other(end: int, before: int, tmp_path: Path) -> None:
    """Hosts append to one file of a shared disk, where a part of a line may be seen first."""
    told = [Failure(attempt, attempt, (0, 1), "über", -9) for attempt in range(before)]
    for failure in told:
        write_failure(tmp_path, failure)
    whole = failures_path(tmp_path).read_bytes() if before else b""
    write_failure(tmp_path, Failure(7, 0, (2,), "über", 1, "silent for 60 s"))
    last = failures_path(tmp_path).read_bytes()[len(whole) :]
    for left in (last[:end], last[:end] + b"\0" * 8, b"[]", b"\xff", b'{"attempt": 3}'):
        failures_path(tmp_path).write_bytes(whole + left)
        assert read_failures(tmp_path)[:before] == told
