"""A training that goes on with other examples says so before it does, and is not compared with one process."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dejavu.foundation.errors import InputError
from dejavu.runtime.job import Begun, TrainingJob, TrainingResult, job_to_resume
from dejavu.runtime.job.migration import Migration
from dejavu.runtime.job.resume import earlier_training
from dejavu.runtime.single import train_single
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.data.text import _read
from flows.__main__ import app
from tasks import training
from tests.conftest import TINY
from tests.launching import DRAW, job_of

OTHER = {
    "as it was": lambda text: text,
    "longer": lambda text: text + "and more of it. " * 50,
    "shorter": lambda text: text[: len(text) // 2],
    "one letter": lambda text: text.replace("o", "0", 1),
}


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    (tmp_path / "mine.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return TINY.model_copy(update={"data": "text", "text": tmp_path / "mine.txt"})


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the tasks warned of, not what libraries did (transformers hands its warnings on where CI is set)."""
    return [one.getMessage() for one in caplog.records if one.name == "test" and one.levelno == logging.WARNING]


@pytest.mark.parametrize("name", OTHER)
def test_other_examples_are_told_before_a_training_goes_on(
    name: str, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change: Callable[[str], str] = OTHER[name]
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("test"))
    folder, text = tmp_path / "run", tmp_path / "mine.txt"
    binding = job_of(workload, folder).binding
    training.prepare_training.fn(workload, binding, None, folder)
    text.write_text(change(text.read_text()))
    _read.cache_clear()  # another process reads it again
    with caplog.at_level(logging.INFO, logger="test"):
        training.resume_training.fn(workload, binding, folder)
        job = training.read_job.fn(folder)
        compared = training.compare_with_one_process.fn(job, _result(), tmp_path / "trials")
    warned = _warned(caplog)
    told = [one for one in warned if one.startswith("the examples of data: text are not those that this training")]
    is_other = change("o") != "o" or name in ("longer", "shorter")
    assert (len(told), compared is None) == (int(is_other), is_other)
    for _ in range(2):  # also when it is resumed once more
        assert training.has_other_data(training.resume_training.fn(workload, binding, folder)) == is_other


@pytest.mark.parametrize("how", ["--torchrun", "--slurm"])
@pytest.mark.parametrize("name", OTHER)
def test_other_examples_are_told_where_a_training_is_launched_elsewhere(
    name: str, how: str, workload: Workload, tmp_path: Path
) -> None:
    """Standard output has the lines alone."""
    folder, text = tmp_path / "run", tmp_path / "mine.txt"
    replace(job_of(workload, folder), data_fingerprint=dataset_of(workload).fingerprint).write()
    text.write_text(OTHER[name](text.read_text()))
    _read.cache_clear()
    done = CliRunner().invoke(app, ["launch", str(folder), how, *(["--dry-run"] if how == "--slurm" else [])])
    assert done.exit_code == 0 and "the examples" not in done.stdout
    told = "warning: the examples of data: text are not those that this training began with" in done.stderr
    assert told == (name != "as it was")


def test_a_job_of_before_says_nothing_of_its_examples(workload: Workload, tmp_path: Path) -> None:
    path = job_of(workload, tmp_path).write()
    row = json.loads(path.read_text())
    assert row.pop("data_fingerprint") == ""
    path.write_text(json.dumps(row))
    assert not training.has_other_data(job_to_resume(tmp_path))


def _result() -> TrainingResult:
    return TrainingResult(0, (1.0, 1.0, 1.0), None, (), 0, None, "")


def test_every_field_of_a_job_is_read_back(workload: Workload, tmp_path: Path) -> None:
    job = replace(
        job_of(workload, tmp_path), data_fingerprint="abc", model_code={"mine": "0f"}, pretrained_fingerprint="1a"
    )
    longer = replace(job, begun=Begun(workload, job.binding, 5), workload=workload.model_copy(update={"num_steps": 9}))
    for one in (job, longer):
        assert TrainingJob.read(one.write()) == one


CHANGED_CODE = {
    "as it was": ("", ""),
    "its file": ("code_of_one/model.py", "code_of_one.model"),
    "what it imports": ("code_of_one/parts.py", "code_of_one.parts"),
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workload]:
    """A model whose file imports another one."""
    package = tmp_path / "code_of_one"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("from torch import nn\n\nkind = nn.ReLU\n")
    (package / "model.py").write_text(
        "from torch import nn\n\nfrom code_of_one.parts import kind\n\n\n"
        "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), kind(), nn.Linear(8, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield Workload(model="code_of_one.model:make", data="digits", batch_size=4, num_microbatches=2, num_steps=4)
    for name in [name for name in sys.modules if name.partition(".")[0] == "code_of_one"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", CHANGED_CODE)
def test_a_model_whose_code_has_changed_is_told_before_a_training_goes_on(
    name: str, own: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, module = CHANGED_CODE[name]
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(training, "remembered_reference", lambda *_: (2.0, 1.0, 1.0))
    folder = tmp_path / "run"
    binding = job_of(own, folder).binding
    training.prepare_training.fn(own, binding, None, folder)
    if file:
        path = tmp_path / file
        path.write_text(path.read_text().replace("nn.ReLU", "nn.Tanh").replace("nn.Flatten()", "nn.Flatten(1)"))
    for _ in range(2):  # also when it is resumed once more
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="test"):
            training.resume_training.fn(own, binding, folder)
            job = training.read_job.fn(folder)
            training.compare_with_one_process.fn(job, _result(), tmp_path / "trials")
        *told, differ = _warned(caplog)
        said = f"he code of model {own.model} is not that with which this training began (module {module})"
        assert told == ([f"t{said}: it goes on with what is there now"] if file else [])
        assert differ.endswith(f"rounding. T{said}" if file else "rounding")


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_a_config_that_has_changed_is_told_before_a_training_goes_on(
    activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "activation_function": "gelu_new"}))
    workload = TINY.model_copy(update={"model": f"hf:{file}", "model_options": {}, "sequence_length": 16})
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(training, "remembered_reference", lambda *_: (2.0, 1.0, 1.0))
    folder = tmp_path / "run"
    binding = job_of(workload, folder).binding
    training.prepare_training.fn(workload, binding, None, folder)
    file.write_text(json.dumps({**config, "activation_function": activation}))
    with caplog.at_level(logging.WARNING, logger="test"):
        training.resume_training.fn(workload, binding, folder)
        job = training.read_job.fn(folder)
        training.compare_with_one_process.fn(job, _result(), tmp_path / "trials")
    *told, differ = _warned(caplog)
    said = f"he config of model hf:{file} is not that with which this training began"
    is_other = activation != "gelu_new"
    assert told == ([f"t{said}: it goes on with what is there now"] if is_other else [])
    assert differ.endswith(f"rounding. T{said}" if is_other else "rounding")


def _leave(weights: Path) -> None:
    """Change nothing."""


def _write_others(weights: Path) -> None:
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)


WEIGHTS: dict[str, Callable[[Path], None]] = {"as they were": _leave, "gone": Path.unlink, "others": _write_others}


@pytest.mark.parametrize("name", WEIGHTS)
def test_saved_weights_that_are_others_by_now_are_compared_with_nothing(
    name: str, own: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, folder = tmp_path / "saved.safetensors", tmp_path / "run"
    save_file(import_module("code_of_one.model").make().state_dict(), weights)
    started = own.model_copy(update={"pretrained": weights})
    binding = job_of(started, folder).binding
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("test"))
    training.prepare_training.fn(started, binding, None, folder)
    monkeypatch.setattr(training, "complete_checkpoints", lambda _: [folder / "step-2"])
    monkeypatch.setattr(training, "checkpoint_step", lambda _: 2)
    WEIGHTS[name](weights)
    for asked in (started, own):  # with a checkpoint it has its own, whatever is asked for now
        job = training.resume_training.fn(asked, binding, folder)
        assert job.workload.pretrained == weights
        compared = training.compare_with_one_process.fn(job, _result(), tmp_path / "trials")
        assert (compared is None) == (name != "as they were")


def test_without_a_checkpoint_the_saved_weights_have_to_be_there(own: Workload, tmp_path: Path) -> None:
    weights = tmp_path / "saved.safetensors"
    job_of(own, tmp_path / "run").write()
    with pytest.raises(InputError, match="has no weights: no such folder or file"):
        earlier_training(tmp_path / "run", own.model_copy(update={"pretrained": weights}))


@pytest.mark.parametrize("decay", ["constant", "linear"])
def test_a_training_that_goes_on_for_more_steps_is_compared_as_it_began(
    decay: str, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its learning rate, which decays to the end, and what its microbatches draw are those of other numbers by now."""
    optimizer = workload.optimizer.model_copy(update={"decay": decay, "learning_rate": 0.01})
    started = workload.model_copy(update={"optimizer": optimizer, "num_steps": 6, "num_microbatches": 4})
    longer = started.model_copy(update={"num_steps": 12, "num_microbatches": 2})
    folder, binding = tmp_path / "run", job_of(started, tmp_path / "run").binding
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("test"))
    first = training.prepare_training.fn(started, binding, None, folder)
    losses = tuple(train_single(started, first.draw, range(3)))
    monkeypatch.setattr(training, "complete_checkpoints", lambda _: [folder / "step-6"])
    monkeypatch.setattr(training, "checkpoint_step", lambda _: 6)
    with caplog.at_level(logging.WARNING, logger="test"):
        for asked in (longer, longer.model_copy(update={"num_steps": 24})):
            job = training.resume_training.fn(asked, binding, folder)
            found = replace(_result(), first_step=0, losses=losses)
            difference = training.compare_with_one_process.fn(job, found, tmp_path / "trials")
            assert difference is not None and difference < 1e-6
            assert job.workload == asked and job.last_step == asked.num_steps
    told = [one.partition(", and losses")[0] for one in _warned(caplog)]
    rates = (("12 in place of 6", "0.00417", "0"), ("24 in place of 12", "0.00708", "0.005"))
    decays = "the learning rate decays to the end of the training: with num_steps"
    said = [f"{decays} {steps} it is {now} in step 7, after {was} in step 6" for steps, now, was in rates]
    assert told == ([] if decay == "constant" else said)


@pytest.mark.parametrize(("model", "num_microbatches"), [("with_dropout", 4), ("with_dropout", 2), ("wide_stack", 2)])
def test_other_microbatches_are_told_where_losses_are_others_under_them(
    model: str, num_microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a training goes on under another plan: its first losses, which are compared, do not tell."""
    started = Workload(model=f"tests.own_models:{model}", data="digits", batch_size=8, num_microbatches=4, num_steps=4)
    now, folder = started.model_copy(update={"num_microbatches": num_microbatches}), tmp_path / "run"
    binding = job_of(started, folder).binding
    monkeypatch.setattr(training, "get_run_logger", lambda: logging.getLogger("test"))
    training.prepare_training.fn(started, binding, None, folder)
    monkeypatch.setattr(training, "complete_checkpoints", lambda _: [folder / "step-2"])
    monkeypatch.setattr(training, "checkpoint_step", lambda _: 2)
    with caplog.at_level(logging.WARNING, logger="test"):
        training.resume_training.fn(now, binding, folder)
    losses = [train_single(one, DRAW, range(1)) for one in (started, now)]
    said = "the plan has other microbatches or replicas than the one before, and losses are not those under that. Layer"
    assert [one.startswith(f"{said} '2' draws") for one in _warned(caplog)] == [True] * (losses[0] != losses[1])


@pytest.mark.parametrize("model", ["with_dropout", "wide_stack"])
def test_replicas_are_told_where_losses_are_others_with_them(model: str, tmp_path: Path) -> None:
    """As where a training migrates."""
    job = job_of(Workload(model=f"tests.own_models:{model}", data="digits", batch_size=8, num_microbatches=4), tmp_path)
    plan = job.binding.plan
    two = replace(plan.stages[1].configuration, devices_per_node=2, data_parallel=2)
    both = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], configuration=two)))
    moves = tuple(Migration(2, "a host went", *plans, 1.0, 0) for plans in ((plan, both), (both, both), (both, plan)))
    of_first, *others = training.went_on(job, replace(_result(), migrations=moves))
    assert of_first == str(moves[0])
    said = "the plan has other microbatches or replicas than the one before, and losses are not those under that. Layer"
    told = [one for one in others if one.startswith(f"{said} '2' draws")]
    assert len(told) == (2 if model == "with_dropout" else 0) and len(others) == 2 + len(told)
