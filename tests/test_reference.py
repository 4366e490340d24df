"""The single process beside a pipeline is trained once for each start, and never taken for another's."""

from __future__ import annotations

import json
import logging
import math
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dejavu.cluster import load_cluster
from dejavu.foundation.errors import InputError
from dejavu.foundation.processes.files import write_json
from dejavu.graphs.capture import capture
from dejavu.init import Draw
from dejavu.runtime.job import TrainingJob, TrainingResult, resumed
from dejavu.runtime.job.resume import earlier_training
from dejavu.runtime.single import NUM_COMPARED, largest_difference, reference_losses, train_single
from dejavu.trials import TrialSpec, remembered_reference, what_other_parts_change, what_replicas_do_apart
from dejavu.workload import TrialSettings, Workload
from tasks.training import read_job, remember_times
from tests.conftest import TINY, some, spread
from tests.launching import TOLERANCE, job_of
from tests.test_models import ZOO

STEPS = 2  # of the trial
ROOT = Path(__file__).parents[1]


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.reference"))


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    return job_of(TINY, tmp_path / "run")


@pytest.fixture
def from_trial(job: TrainingJob, tmp_path: Path) -> TrainingJob:
    """A training that starts where a trial stopped."""
    state = tmp_path / "trials" / f"{TrialSpec(job.workload, job.draw, STEPS).key}.safetensors"
    train_single(job.workload, job.draw, range(STEPS), save_to=state)
    return replace(job, start_from=str(state), first_step=STEPS)


def test_it_is_what_one_process_loses_and_is_not_trained_twice(job: TrainingJob, tmp_path: Path) -> None:
    expected = train_single(job.workload, job.draw, range(NUM_COMPARED))
    assert remembered_reference(job, tmp_path) == expected == reference_losses(job)
    (path,) = kept(tmp_path)
    path.write_text(json.dumps([1.0, 2.0, 3.0]))
    assert remembered_reference(job, tmp_path) == [1.0, 2.0, 3.0]  # read, not trained
    path.write_text("[1.0, 2.0")  # torn
    assert remembered_reference(job, tmp_path) == expected


def test_a_full_disk_is_no_reason_to_end_a_training_that_is_complete(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What follows its last step is its page: neither the losses beside it nor its times have to be kept for that."""
    expected = reference_losses(job)
    monkeypatch.setattr("tasks.training.get_run_logger", lambda: logging.getLogger("of the flow"))
    graph, cluster = capture(job.workload), load_cluster(ROOT / "cluster.yaml")
    result = TrainingResult(0, (1.0,), 0.5, (), 0, None, "")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        assert remembered_reference(job, tmp_path) == expected
        remember_times.fn(job, result, graph, tmp_path / "database", cluster)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not kept(tmp_path)
    assert "no times are remembered: " in caplog.text and "File too large" in caplog.text


def test_from_a_trial_s_state_it_is_the_same_training(from_trial: TrainingJob, tmp_path: Path) -> None:
    whole = train_single(from_trial.workload, from_trial.draw, range(STEPS + NUM_COMPARED))
    for _ in range(2):
        assert remembered_reference(from_trial, tmp_path / "trials") == whole[STEPS:]
    assert len(kept(tmp_path / "trials")) == 1


@pytest.mark.parametrize("name", ["there", "a folder", "it's 50% ü"])
@pytest.mark.parametrize("is_copied", [False, True], ids=["moved", "copied"])
def test_a_training_finds_its_start_where_its_project_is_now(name: str, is_copied: bool, tmp_path: Path) -> None:
    """Its trial's state moves with the project; where a training's folder alone is moved, it stays where it was."""
    old, new = tmp_path / "here", tmp_path / name / "deep"
    state = old / ".dejavu" / "trials" / "0f-2.safetensors"
    job = replace(job_of(TINY, old / ".dejavu" / "runs" / "7"), start_from=str(state), first_step=STEPS)
    job.write()
    write_json(state, {})
    shutil.copytree(old / ".dejavu" / "runs" / "7", tmp_path / "alone")
    assert TrainingJob.read(tmp_path / "alone" / "job.json", tmp_path / "alone").start_from == str(state)
    new.parent.mkdir()
    (shutil.copytree if is_copied else shutil.move)(old, new)
    folder = new / ".dejavu" / "runs" / "7"
    launched = TrainingJob.read(folder / "job.json", folder)
    for found in (launched, resumed(folder, TINY, job.binding), read_job.fn(folder)):
        assert (found.folder, found.start_from) == (str(folder), str(new / ".dejavu" / "trials" / state.name))
    assert earlier_training(folder, TINY).step == STEPS
    (new / ".dejavu" / "trials" / state.name).unlink()
    if not is_copied:
        with pytest.raises(InputError, match=r"has no checkpoint, and .*0f-2\.safetensors, the trial's state"):
            earlier_training(folder, TINY)


def changed(workload: Workload, **fields: object) -> Workload:
    return workload.model_copy(update=fields)


def test_whatever_decides_the_losses_has_a_reference_of_its_own(from_trial: TrainingJob, tmp_path: Path) -> None:
    folder, base = tmp_path / "trials", replace(from_trial, start_from=None, first_step=0)
    workload = base.workload
    jobs = [
        base,
        from_trial,
        replace(base, draw=Draw("xavier", seed=8)),
        replace(base, draw=Draw("normal", seed=7)),
        replace(base, first_step=1),
        replace(base, last_step=2),
        replace(base, workload=changed(workload, seed=5)),
        replace(base, workload=changed(workload, num_microbatches=2)),
    ]
    found = [remembered_reference(one, folder) for one in jobs]
    assert len(kept(folder)) == len(jobs)
    assert found == [reference_losses(one) for one in jobs]
    assert [remembered_reference(one, folder) for one in jobs] == found
    longer = replace(base, workload=changed(workload, num_steps=99, checkpoint_every=1), folder=str(tmp_path / "else"))
    assert remembered_reference(longer, folder) == found[0] and len(kept(folder)) == len(jobs)


def test_a_start_of_another_origin_is_looked_at_every_time(from_trial: TrainingJob, tmp_path: Path) -> None:
    """Its name says nothing of what is in it."""
    elsewhere = tmp_path / "mine" / Path(str(from_trial.start_from)).name
    elsewhere.parent.mkdir()
    shutil.copy(str(from_trial.start_from), elsewhere)
    first = remembered_reference(replace(from_trial, start_from=str(elsewhere)), tmp_path / "trials")
    train_single(from_trial.workload, Draw("normal", seed=1), range(STEPS), save_to=elsewhere)
    second = remembered_reference(replace(from_trial, start_from=str(elsewhere)), tmp_path / "trials")
    assert first != second and not kept(tmp_path / "trials") and not kept(elsewhere.parent)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the trials", "on another host"])
@pytest.mark.parametrize("known", [False, True])
def test_where_the_start_is_gone_only_what_is_known_is_compared(
    from_trial: TrainingJob, tmp_path: Path, elsewhere: bool, known: bool
) -> None:
    """A longer trial went on from it, or the training was fetched from another host."""
    folder, start = tmp_path / "trials", Path(str(from_trial.start_from))
    expected = remembered_reference(from_trial, folder) if known else None
    start.unlink()
    if elsewhere:
        from_trial, expected = replace(from_trial, start_from=f"/nowhere/else/{start.name}"), None
    assert remembered_reference(from_trial, folder) == expected
    assert len(kept(folder)) == known


def test_nothing_is_said_to_be_equal_where_nothing_was_compared(job: TrainingJob) -> None:
    for losses in ((), (1.0,), (1.0, 2.5), (1.0, math.nan)):
        result = TrainingResult(0, losses, None, (), 0, None, "")
        found = largest_difference([1.0, 2.0, 3.0], result)
        assert found == {0: None, 1: 0.0}.get(len(losses), 0.5 if losses[-1:] == (2.5,) else math.inf)


@pytest.mark.parametrize("model", ["weights_here_and_there", "wide_stack"])
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("replicas", some([(1, 1), (2, 1), (1, 2), (2, 2)], [(1, 1), (1, 2)]))
def test_a_batch_norm_of_a_part_of_a_microbatch_is_named(
    replicas: tuple[int, int], cut: int, model: str, tmp_path: Path
) -> None:
    """The one of layer 1 normalizes a replica's examples alone where its stage has several."""
    workload = Workload(model=f"tests.own_models:{model}", data="digits", batch_size=8, num_microbatches=2)
    job = job_of(workload, tmp_path, (cut,))
    stages = tuple(
        replace(stage, configuration=replace(stage.configuration, devices_per_node=r, data_parallel=r))
        for stage, r in zip(job.binding.plan.stages, replicas, strict=True)
    )
    job = replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, stages=stages)))
    splits = replicas[0 if cut > 1 else 1] > 1 and model == "weights_here_and_there"
    said = "Layer '1' has a batch norm of each replica's own examples"
    assert what_replicas_do_apart(job) == (said if splits else "")


@pytest.mark.parametrize("parts", [1, 2])
def test_hooks_of_weights_that_replicas_have_are_named(parts: int, tmp_path: Path) -> None:
    workload = Workload(model="tests.own_models:masked", data="digits", batch_size=4, num_microbatches=1)
    job = job_of(workload, tmp_path, ())
    (alone,) = job.binding.plan.stages
    all_of = replace(alone, configuration=replace(alone.configuration, devices_per_node=parts, data_parallel=parts))
    job = replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, stages=(all_of,))))
    said = "Layer '1' has hooks of weights, which are given gradients of each replica's own examples"
    assert what_replicas_do_apart(job) == (said if parts > 1 else "")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("model", "layer"), [("Centring", "1"), ("wide_stack", "")])
def test_buffers_that_replicas_change_are_named(model: str, layer: str, parts: int, tmp_path: Path) -> None:
    """Each keeps the mean of what its own examples give, where one process has that of the whole microbatch."""
    workload = Workload(model=f"tests.own_models:{model}", data="digits", batch_size=4, num_microbatches=1)
    job = job_of(workload, tmp_path, ())
    (alone,) = job.binding.plan.stages
    all_of = replace(alone, configuration=replace(alone.configuration, devices_per_node=parts, data_parallel=parts))
    job = replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, stages=(all_of,))))
    said = f"Layer {layer!r} changes its buffers by each replica's own examples"
    assert what_replicas_do_apart(job) == (said if layer and parts > 1 else "")


DRAWING: dict[str, tuple[str, dict[str, float], str]] = {  # a model, its options, and its first layer that draws
    "modules": ("with_dropout", {}, "2"),
    "a traced graph, and in attention": ("Decoder", {"dropout": 0.5}, "blocks_0"),
    "a rate of zero": ("Decoder", {"dropout": 0.0}, ""),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", spread(DRAWING, 2))
def test_dropout_of_a_part_of_a_microbatch_is_named(kind: str, parts: int, tmp_path: Path) -> None:
    model, options, layer = DRAWING[kind]
    data = {"data": "text", "sequence_length": 12} if model == "Decoder" else {"data": "digits"}
    workload = Workload(
        model=f"tests.own_models:{model}", model_options=options, **data,
        batch_size=4, num_microbatches=1, num_steps=1, trials=TrialSettings(count=0),
    )  # fmt: skip
    job = job_of(workload, tmp_path, ())
    (alone,) = job.binding.plan.stages
    all_of = replace(alone, configuration=replace(alone.configuration, devices_per_node=parts, data_parallel=parts))
    job = replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, stages=(all_of,))))
    said = what_replicas_do_apart(job)
    drawn = f"Layer {layer!r} draws random numbers for each replica's own examples, as dropout does"
    assert said == (drawn if layer and parts > 1 else "")


PARTED = {  # a model, and what of it depends on how a step's examples are parted
    "with_dropout": "Layer '2' draws random numbers for each part's own examples, as dropout does",
    "weights_here_and_there": "Layer '1' has a batch norm of each part's own examples",
    "wide_stack": "",
}


@pytest.mark.parametrize("model", PARTED)
@pytest.mark.parametrize(
    ("microbatches", "replicas"),
    [((2, 2), (1, 1)), ((2, 4), (1, 1)), ((4, 2), (1, 1)), ((4, 4), (1, 2)), ((4, 4), (2, 1)), ((2, 2), (2, 2))],
)
def test_what_another_plan_changes_for_a_training_that_goes_on_is_named(
    model: str, microbatches: tuple[int, int], replicas: tuple[int, int], tmp_path: Path
) -> None:
    jobs = []
    for number, parts in zip(microbatches, replicas, strict=True):
        workload = Workload(model=f"tests.own_models:{model}", data="digits", batch_size=8, num_microbatches=number)
        job = job_of(workload, tmp_path, ())
        (alone,) = job.binding.plan.stages
        both = replace(alone, configuration=replace(alone.configuration, devices_per_node=parts, data_parallel=parts))
        jobs.append(replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, stages=(both,)))))
    is_other = microbatches[0] != microbatches[1] or replicas[0] != replicas[1]
    assert what_other_parts_change(*jobs) == (PARTED[model] if is_other else "")


@pytest.mark.parametrize("heads", some([1, 2, 3, 4], [1, 2]))
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_loss_that_is_no_mean_of_examples_is_named(heads: int, parts: int, tmp_path: Path) -> None:
    """What replicas find is averaged: a sum, or a mean of what is not ignored, is another loss than one process's."""
    fields = {"num_blocks": 1, "width": 24, "num_heads": heads}
    workload = Workload(
        model="tests.own_losses:Summed", model_options=fields, data="text", sequence_length=12,
        batch_size=6, num_microbatches=1, num_steps=1, trials=TrialSettings(count=0),
    )  # fmt: skip
    job = job_of(workload, tmp_path, ())
    (alone,) = job.binding.plan.stages
    all_of = replace(alone, configuration=replace(alone.configuration, devices_per_node=parts, data_parallel=parts))
    job = replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, stages=(all_of,))))
    said = f"The model's loss of a microbatch is not the mean of those of its {parts} parts"
    assert what_replicas_do_apart(job) == (said if parts > 1 and heads in (2, 3) else "")


@pytest.mark.parametrize("name", spread(ZOO, 6))
def test_what_a_model_does_with_a_microbatch_as_one_is_named(name: str, tmp_path: Path) -> None:
    """Losses of halves of a microbatch, as two replicas have them, are those of the whole; or it is said why not."""
    plain = {"batch_size": 4, "num_steps": 1, "trials": TrialSettings(count=0), "num_microbatches": 1}
    whole = ZOO[name].model_copy(update=plain)
    if "moe" in name:  # more tokens than an expert has places for
        whole = whole.model_copy(update={"model_options": {**whole.model_options, "capacity_factor": 0.5}})
    losses = [
        train_single(whole.model_copy(update={"num_microbatches": parts}), Draw("xavier", seed=7), range(1))[0]
        for parts in (1, 2)
    ]
    (alone,) = (job := job_of(whole, tmp_path, ())).binding.plan.stages
    both = replace(alone, configuration=replace(alone.configuration, devices_per_node=2, data_parallel=2))
    assert what_replicas_do_apart(job) == ""
    job = replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, stages=(both,))))
    assert bool(what_replicas_do_apart(job)) == (abs(losses[0] - losses[1]) > TOLERANCE)
