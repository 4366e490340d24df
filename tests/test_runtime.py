"""Real ranks over gloo: the same losses as one process, and what happens when ranks are killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.pipeline.plans import by_hand, one_device
from benchmarks.pipeline.plans import job_of as by_hand_job
from dejavu.cost.sources.measured import subject_of
from dejavu.cost.trainings.remember import MESSAGE, remember
from dejavu.cost.trainings.steps import Basis, remembered_plans, remembered_step_seconds, step_factor
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.init import Draw
from dejavu.launch.launcher import LaunchError, launch, torchrun_line
from dejavu.plans.schedule import PARTS
from dejavu.profiles import Measurement, ProfileDatabase, host_fingerprint
from dejavu.profiling.collectives import measure_collectives
from dejavu.profiling.layer_passes import DIRECTIONS
from dejavu.profiling.layers import LOOP, Conditions, measure_layers
from dejavu.profiling.links import SIZES_BYTES, measure_link
from dejavu.profiling.pass_overhead import measure_passes
from dejavu.runtime.job import TrainingJob, TrainingResult, resumed
from dejavu.runtime.job.export import kept_checkpoint
from dejavu.runtime.job.resume import earlier_training
from dejavu.runtime.process import PARENT
from dejavu.runtime.single import largest_difference, reference_losses, train_single
from dejavu.runtime.state import checkpoint_step, complete_checkpoints, read_checkpoint, read_trial
from dejavu.runtime.training import Layers
from dejavu.runtime.worker import _diverged
from dejavu.workload import OptimizerSettings, TrialSettings, Workload
from dejavu.workload.models import layers_of
from tasks.training import read_job
from tests.conftest import TINY, local_binding
from tests.launching import once, runtime_processes

pytestmark = pytest.mark.integration
TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process of a launch outlives it, those in a session of their own included."""
    before = set(psutil.pids())
    yield
    left = [p for p in runtime_processes() if p.pid not in before]
    assert not left, f"left behind: {left}"


def job_of(workload: Workload, folder: Path, cuts: tuple[int, ...], **fields: object) -> TrainingJob:
    binding = local_binding(workload, cuts, len(layers_of(workload)))
    values: dict = {
        "draw": Draw("xavier", seed=7),
        "start_from": None,
        "first_step": 0,
        "last_step": workload.num_steps,
    }
    return TrainingJob(workload=workload, binding=binding, folder=str(folder), **{**values, **fields})


DIGITS = Workload(
    model="cnn",
    model_options={"num_blocks": 2, "width": 8},
    data="digits",
    batch_size=16,
    num_microbatches=4,
    num_steps=8,
    trials=TrialSettings(count=0),
)


def test_images_and_a_stage_without_weights_train_too_and_the_weights_end_equal(tmp_path: Path) -> None:
    model = "tests.own_models:weights_here_and_there"
    workload = DIGITS.model_copy(update={"model": model, "model_options": {}})
    job = job_of(workload, tmp_path / "run", (2, 4))
    result = launch(job)
    state = tmp_path / "single.safetensors"
    expected = train_single(workload, job.draw, range(workload.num_steps), save_to=state)
    assert len(result.losses) == workload.num_steps and len(result.stages) == 3
    assert max(abs(a - b) for a, b in zip(result.losses, expected, strict=True)) < TOLERANCE
    assert largest_difference(reference_losses(job), result) < TOLERANCE
    layers = {builder.name for builder in layers_of(workload)}
    saved = read_checkpoint(Path(result.final_checkpoint), layers)
    whole = read_trial(state, layers)
    assert saved.keys() == whole.keys() and any("running_mean" in name for name in saved)
    assert all(torch.allclose(saved[name], whole[name], atol=1e-5) for name in whole)


def test_training_goes_on_from_a_trial_and_under_another_plan(tiny: Workload, tmp_path: Path) -> None:
    """Trial → two stages → three stages from the checkpoint: the losses of one unbroken process."""
    draw = Draw("default", seed=1)
    unbroken = train_single(tiny, draw, range(8))
    state = tmp_path / "trial.safetensors"
    train_single(tiny, draw, range(3), save_to=state)
    folder = tmp_path / "run"
    begin = job_of(tiny, folder, (2,), draw=draw, start_from=str(state), first_step=3, last_step=6)
    first = launch(begin)
    assert first.losses == pytest.approx(unbroken[3:6], abs=TOLERANCE)
    second = launch(job_of(tiny, folder, (1, 3), draw=draw, first_step=3, last_step=8))
    assert second.resumed_from_step == 6
    assert second.losses == pytest.approx(unbroken[3:8], abs=TOLERANCE)


class Turned(nn.Module):
    """Its output's dimensions are in another order in memory, as those of `transpose` or of channels_last are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_drawn_is_the_same_after_a_message(tiny: Workload, recompute: bool) -> None:
    """A message has its dimensions in their order; numbers are drawn in the order of memory."""
    parts = {"turned": Turned(), "act": nn.Tanh(), "dropped": nn.Dropout(0.5)}
    whole = Layers(OrderedDict(parts), tiny, 0, recompute=recompute)
    after = Layers(OrderedDict(list(parts.items())[1:]), tiny, 1, recompute=recompute)
    for step in range(3):
        whole.step = after.step = step
        x = torch.randn(2, 4, 3)
        assert torch.equal(whole(x), after(x.transpose(1, 2).contiguous()))


AT_TIMES = DIGITS.model_copy(
    update={
        "model": "tests.own_models:used_every_third_step",
        "model_options": {"microbatches": DIGITS.num_microbatches},
        "num_steps": 5,
    }
)


DECAYED_ALONE = {"name": "sgd", "weight_decay": 0.5}  # without momentum the optimizer knows nothing of a weight


@pytest.mark.parametrize("step", range(1, 5))
@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.5},
        {"name": "sgd", "momentum": 0.9, "clip_norm": 0.5},
        DECAYED_ALONE,
        {**DECAYED_ALONE, "decayed": "matrices"},
    ],
)
def test_what_is_unused_for_some_steps_goes_on_from_any_step(
    settings: dict[str, Any], step: int, tmp_path: Path
) -> None:
    """A weight that had a gradient before moves on by its moments, and decays, in steps that make none of it."""
    workload = AT_TIMES.model_copy(update={"optimizer": OptimizerSettings(learning_rate=1e-2, **settings)})
    whole, part, rest = (tmp_path / name for name in ("whole", "part", "rest"))
    unbroken = train_single(workload, Draw(), range(5), save_to=whole)
    train_single(workload, Draw(), range(step), save_to=part)
    assert train_single(workload, Draw(), range(step, 5), start_from=part, save_to=rest) == unbroken[step:]
    expected, found = load_file(whole), load_file(rest)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("settings", [{}, DECAYED_ALONE], ids=["adamw", "sgd"])
def test_what_is_unused_for_some_steps_goes_on_in_any_plan(settings: dict[str, Any], tmp_path: Path) -> None:
    """Replicas that sum gradients, and those that shard them and make them anew."""
    workload = AT_TIMES.model_copy(update={"optimizer": OptimizerSettings(**settings)})
    unbroken, folder = train_single(workload, Draw(), range(5), save_to=tmp_path / "whole"), str(tmp_path / "run")
    ways = (one_device(2, zero_level=1), one_device(2), one_device(2, zero_level=3))
    for way, last in zip(ways, (1, 2, 5), strict=True):
        result = launch(
            replace(by_hand_job(workload, by_hand("1f1b", (0, 2, 4), [way, one_device()], 4), last), folder=folder)
        )
        assert result.losses == pytest.approx(unbroken[:last], abs=TOLERANCE)
    saved, whole = read_checkpoint(Path(result.final_checkpoint), {"0", "1", "2", "3"}), load_file(tmp_path / "whole")
    assert saved.keys() == whole.keys()
    assert all(torch.allclose(saved[name], whole[name], atol=1e-5) for name in whole)


@pytest.mark.slow
def test_by_itself_a_training_has_few_checkpoints_and_of_what_it_evaluates(tiny: Workload, tmp_path: Path) -> None:
    """At most after the steps 12, 24 … 84 and 90: ten steps or more apart, and each where the loss is evaluated."""
    often = {"num_steps": 90, "checkpoint_every": "auto", "evaluate_every": 3, "held_out": 0.25}
    job = job_of(tiny.model_copy(update=often), tmp_path / "run", (2,), last_step=90)
    result = launch(job)
    assert len(result.evaluations) == 30
    steps = [checkpoint_step(one) for one in complete_checkpoints(job.checkpoints)]
    assert steps[-1] == 90 and all(step % 3 == 0 for step in steps)
    counts = {one.checkpoints for one in result.saved}
    assert len(result.saved) == 2 and len(counts) == 1 and 2 <= max(counts) <= 8


@pytest.fixture
def long(tiny: Workload) -> Workload:
    return tiny.model_copy(update={"num_steps": 1500, "checkpoint_every": 50})


def test_an_interrupted_launch_leaves_no_rank(long: Workload, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(job_of(long, tmp_path, (2,)), on_step=once(interrupt, 10))


def test_a_failing_rank_is_told_with_the_end_of_its_log(tiny: Workload, tmp_path: Path) -> None:
    job = job_of(tiny, tmp_path, (2,), start_from=str(tmp_path / "absent.safetensors"))
    with pytest.raises(LaunchError, match=r"absent\.safetensors"):
        launch(job)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingJob, TrainingResult]:
    """A training of two stages that several tests look at; none changes its folder."""
    job = job_of(TINY, tmp_path_factory.mktemp("trained") / "run", (2,))
    return job, launch(job)


def test_the_torchrun_line_repeats_the_training(trained: tuple[TrainingJob, TrainingResult]) -> None:
    job, result = trained
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        f"env {torchrun_line(job)}", shell=True, capture_output=True, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    again = TrainingResult.from_dict(json.loads(Path(f"{job.folder}-again/result.json").read_text()))
    assert again.losses == result.losses
    assert json.loads(job.result_path.read_text())["losses"] == list(result.losses)


# The step, three passes of two stages, and messages one way or both: whether a gradient was waited for is not certain.
PLAIN_ROWS = (1 + 2 * 3 + 1, 1 + 2 * 3 + 2)


def test_a_training_of_one_step_and_then_of_none(tiny: Workload, tmp_path: Path) -> None:
    job = job_of(tiny, tmp_path / "run", (2,), first_step=7)
    result = launch(job)
    assert len(result.losses) == 1
    assert result.step_seconds is not None and result.step_seconds > 0
    database = ProfileDatabase(tmp_path / "profiles_db")
    assert remember(job.workload, job.binding, result.times, capture(tiny), database) in PLAIN_ROWS
    again = launch(job)  # its last checkpoint is the end: nothing is left to do
    assert (again.step_seconds, again.stages, again.losses) == (None, (), result.losses)
    assert remember(job.workload, job.binding, again.times, capture(tiny), database) == 0


FAMILY = f"""
import os, signal
from dejavu.runtime.process import die_with_parent, named_parent

os.environ.pop("{PARENT}", None)
for named in (named_parent(), {{"{PARENT}": "1"}}, {{}}):
    child = os.fork()
    if not child:
        os.environ.update(named)
        die_with_parent(signal.SIGKILL)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) * -1)
"""


def test_children_live_under_any_parent_that_names_itself() -> None:
    """Also under one with the number 1, as in a container, and not under one that has gone."""
    done = subprocess.run([sys.executable, "-c", FAMILY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", str(int(signal.SIGKILL)), "0"]


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_are_measured_and_companions_end(tiny: Workload, shared: bool) -> None:
    num_busy = (2 if shared else 1) * len(os.sched_getaffinity(0))
    graph = capture(tiny)
    signatures = sorted({layer.signature for layer in graph.layers})
    rows = list(measure_layers(tiny, graph, signatures, "core", Conditions(num_busy)))
    probe = rows.pop()
    assert (probe.kind, probe.subject) == ("probe", LOOP) and 0 < probe.seconds < 1
    wanted = {(subject_of(s, d, tiny.optimizer), d) for s in signatures for d in DIRECTIONS}
    wanted |= {(layer.signature, part) for layer in graph.layers[1:] for part in PARTS}  # tokens have no gradient
    assert {(row.subject, row.direction) for row in rows} == wanted
    for row in rows:
        row.check()
        assert "processor seconds" in row.how and row.disturbed_share is not None


def test_a_link_is_measured() -> None:
    rows = list(measure_link("core"))
    assert [row.size_bytes for row in rows] == list(SIZES_BYTES)
    for row in rows:
        row.check()


def one_collective(device_type: str, least_sample_seconds: float) -> Iterator[Measurement]:
    return measure_collectives(
        ["all_reduce"], 2, device_type, sizes_bytes=[4096], least_sample_seconds=least_sample_seconds
    )


@pytest.mark.parametrize(
    "measured",
    [
        measure_link,
        pytest.param(measure_passes, marks=pytest.mark.slow),
        pytest.param(one_collective, marks=pytest.mark.slow),
    ],
)
def test_what_is_measured_on_cores_slower_than_is_known_is_disturbed(
    measured: Callable[[str, float], Iterator[Measurement]],
) -> None:
    """All of it, where the fastest look that is known of this host is faster than any core."""
    rows = list(measured("core", 1e-9))
    assert rows and all(row.disturbed_share == 1.0 for row in rows)


def test_measured_times_come_back(trained: tuple[TrainingJob, TrainingResult], tmp_path: Path) -> None:
    job, result = trained
    graph, database = capture(TINY), ProfileDatabase(tmp_path / "profiles_db")
    assert remembered_step_seconds(graph, job.binding.plan, database) is None
    assert result.step_times is not None and result.step_times.seconds == result.step_seconds
    assert result.step_times.num_counted <= result.step_times.num_steps == len(result.losses) - 1
    result = replace(result, step_times=replace(result.step_times, disturbed_share=0.0))
    assert remember(job.workload, job.binding, result.times, graph, database) in PLAIN_ROWS
    messages = database.latest(kind="transfer")
    assert {row.size_bytes for row in messages} == {graph.layers[1].output_bytes}
    assert all(row.subject == MESSAGE and row.seconds > 0 for row in messages)
    assert remembered_step_seconds(graph, job.binding.plan, database) == result.step_seconds
    other = job_of(TINY, tmp_path / "run", (3,)).binding.plan
    assert remembered_step_seconds(graph, other, database) is None


@pytest.mark.slow
def test_a_training_beside_other_work_is_remembered_as_one(tiny: Workload, tmp_path: Path) -> None:
    """Its rows are there, its step is not what the plan takes, and a quiet training before it is not overruled."""
    job = replace(job_of(tiny, tmp_path / "run", (2,)), least_sample_seconds={host_fingerprint(): 1e-9})
    result, graph = launch(job), capture(tiny)
    assert result.step_times is not None
    # A faster core than any is known of: nothing that was timed here is of a quiet machine.
    assert result.step_times.num_disturbed == result.step_times.num_steps and result.step_times.beside_other_work
    database, plan = ProfileDatabase(tmp_path / "profiles_db"), job.binding.plan
    seconds = 3 * result.step_times.high_seconds
    slow = replace(result.step_times, seconds=seconds, high_seconds=seconds, disturbed_share=1.0, num_disturbed=2)
    busy = replace(result, step_seconds=slow.seconds, step_times=slow)
    assert str(slow).startswith("measured beside other work: 2 of") and TrainingResult.from_dict(busy.to_dict()) == busy
    assert remember(job.workload, job.binding, busy.times, graph, database) in PLAIN_ROWS
    assert remembered_step_seconds(graph, plan, database) is None and remembered_plans(graph, database) == []
    assert step_factor(graph, plan, database, lambda _: result.step_seconds).basis == Basis.NOTHING
    calm = replace(result, step_times=replace(result.step_times, disturbed_share=0.0))
    remember(job.workload, job.binding, calm.times, graph, database)
    remember(job.workload, job.binding, busy.times, graph, database)
    assert remembered_step_seconds(graph, plan, database) == result.step_seconds
    assert step_factor(graph, plan, database, lambda _: result.step_seconds).num_trainings == 1


def test_ranks_import_neither_prefect_nor_mlflow() -> None:
    unwanted = ("prefect", "mlflow", "distributed")
    code = f"import sys, dejavu.runtime.worker; print([m for m in {unwanted} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"


def test_an_earlier_training_is_resumed_under_another_plan_or_refused(tiny: Workload, tmp_path: Path) -> None:
    """What is asked of a folder is what was trained there, for more steps or under another plan."""
    job = job_of(tiny, tmp_path / "run", (2,), last_step=4)
    job.write()
    longer = tiny.model_copy(update={"num_steps": 12, "num_microbatches": 8})
    binding = local_binding(longer, (1, 3), len(layers_of(longer)))
    again = resumed(tmp_path / "run", longer, binding)
    assert (again.draw, again.first_step, again.last_step, again.binding) == (job.draw, 0, 12, binding)
    with pytest.raises(InputError, match="was trained with seed 0; wanted the same, found seed 5"):
        resumed(tmp_path / "run", longer.model_copy(update={"seed": 5}), binding)
    with pytest.raises(InputError, match="no training to resume"):
        resumed(tmp_path, longer, binding)


# What is asked of `TINY`'s training, by key, and what is said of it: (was, is).
OTHER: dict[str, dict[str, tuple[Any, Any]]] = {
    "seed": {"seed": (0, 5)},
    "batch_size": {"batch_size": (8, 16)},
    "dtype": {"dtype": ("float32", "bfloat16")},
    "optimizer": {"optimizer.learning_rate": (1e-3, 0.5), "optimizer.epsilon": (1e-8, 0.5)},
    "model_options": {"model_options.width": (32, 64), "model_options.num_heads": (2, None)},
}


@pytest.mark.parametrize(
    "keys", [*itertools.combinations(OTHER, 1), *itertools.combinations(OTHER, 2), tuple(OTHER)], ids="-".join
)
def test_what_differs_from_an_earlier_training_is_named_and_nothing_else(
    keys: Sequence[str], tiny: Workload, tmp_path: Path
) -> None:
    """All of it, of a part of the workload each setting by its own name: whole dicts were printed, of the first key."""
    job_of(tiny, tmp_path / "run", (2,)).write()
    values = {"optimizer": OptimizerSettings(learning_rate=0.5, epsilon=0.5)}
    values |= {"model_options": {"num_blocks": 3, "width": 64}}
    values |= {key: OTHER[key][key][1] for key in set(OTHER) - set(values)}
    with pytest.raises(InputError) as refused:
        earlier_training(tmp_path / "run", tiny.model_copy(update={key: values[key] for key in keys}))
    said = str(refused.value).removeprefix(f"{tmp_path / 'run'} was trained with ")
    had, found = (set(part.split(", ")) for part in said.split("; wanted the same, found "))
    every = {name: pair for key in keys for name, pair in OTHER[key].items()}
    assert had == {f"{name} {was!r}" for name, (was, _) in every.items()}
    assert found == {f"no {name}" if now is None else f"{name} {now!r}" for name, (_, now) in every.items()}


def checkpoint_at(run: Path, step: int) -> Path:
    marker = run / "checkpoints" / f"step-{step:08d}" / "COMPLETE.json"
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"step": step, "world_size": 2}))
    return marker


def test_an_earlier_training_is_looked_at_before_anything_starts(tiny: Workload, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job_of(tiny, run, (2,), first_step=1).write()
    assert (earlier_training(run, tiny).step, earlier_training(run, tiny).loss) == (1, None)
    checkpoint_at(run, 3)
    (run / "checkpoints" / "step-00000006").mkdir()  # killed before it was complete
    (run / "progress.jsonl").write_text("".join(f'{{"step": {k}, "loss": {9 - k}.5}}\n' for k in (1, 2, 3, 1, 2)) + "{")
    found = earlier_training(run, tiny)
    assert (found.step, found.loss, found.is_complete) == (3, 7.5, False)
    assert str(found) == f"{run} continues from step 3 of 8, the last at loss 7.5000"
    for num_steps in (3, 2):  # as many as are trained, or fewer
        found = earlier_training(run, tiny.model_copy(update={"num_steps": num_steps}))
        assert found.is_complete
        assert "is complete: 3 steps are trained, the last at loss 7.5000" in str(found)
        assert f"num_steps above 3 in its workload file, and `dejavu run --resume {run} --workload FILE`" in str(found)


@pytest.mark.parametrize("change", [{"learning_rate": 1e-5}, {"clip_norm": 1.0}], ids=str)
def test_what_a_diverged_training_advises_is_said_of_where_it_can_be_done(
    change: dict[str, float], tiny: Workload, tmp_path: Path
) -> None:
    """It was said beside the last checkpoint, from which no training goes on with another learning rate."""
    job = job_of(tiny, tmp_path / "run", (2,))
    job.write()
    said = str(_diverged(job, "the loss of step 3 is nan", updates=2))
    (field,) = change
    assert field.replace("learning_rate", "the learning rate") in said
    other = tiny.model_copy(update={"optimizer": tiny.optimizer.model_copy(update=change)})
    try:
        earlier_training(tmp_path / "run", other)
    except InputError:
        assert "in a new training" in said
    else:
        assert "in a new training" not in said


def test_an_earlier_training_that_cannot_go_on_is_refused_by_a_sentence(tiny: Workload, tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = tmp_path / "file"
    file.write_text("not a folder")
    for folder in (tmp_path / "absent", file, tmp_path):
        with pytest.raises(InputError, match=r"no training to resume.* wanted a folder of .dejavu/runs"):
            earlier_training(folder, tiny)
    path = job_of(tiny, run, (2,)).write()
    with pytest.raises(InputError, match="was trained with seed 0; wanted the same, found seed 5"):
        earlier_training(run, tiny.model_copy(update={"seed": 5}))
    whole = json.loads(path.read_text())
    for damaged in ("", path.read_text()[:200], "[]", "{}", json.dumps({**whole, "workload": {"model": 7}}), "null"):
        path.write_text(damaged)
        for read in (lambda: earlier_training(run, tiny), lambda: read_job.fn(run), lambda: kept_checkpoint(run, None)):
            with pytest.raises(InputError, match=r"job\.json cannot be read.*; wanted the file") as refused:
                read()
            assert "\n" not in str(refused.value)
    path.write_text(json.dumps(whole))
    gone = tmp_path / "trials" / "a-10.safetensors"
    path.write_text(json.dumps({**whole, "start_from": str(gone)}))
    with pytest.raises(InputError, match=r"has no checkpoint, and .*a-10\.safetensors, .* is not there any more"):
        earlier_training(run, tiny)
    gone.parent.mkdir()
    gone.touch()
    assert earlier_training(run, tiny).step == 0
    gone.unlink()
    path.write_text(json.dumps(whole))
    checkpoint_at(run, 4).write_text("{")
    with pytest.raises(InputError, match=r"step-00000004 cannot be read.* continues from the checkpoint before it"):
        earlier_training(run, tiny)
