"""A training that goes on with other examples says so before it does, and is not compared with one process."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dejavu.runtime.job import TrainingJob, TrainingResult, job_to_resume
from dejavu.workload import Workload
from dejavu.workload.data.text import _read
from tasks import training
from tests.conftest import TINY
from tests.launching import job_of

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
        job = training.resume_training.fn(workload, binding, folder)
        compared = training.compare_with_one_process.fn(job, _result(), tmp_path / "trials")
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    told = [one for one in warned if one.startswith("the examples of data: text are not those that this training")]
    is_other = change("o") != "o" or name in ("longer", "shorter")
    assert (len(told), compared is None) == (int(is_other), is_other)
    for _ in range(2):  # also when it is resumed once more
        assert training.has_other_data(training.resume_training.fn(workload, binding, folder)) == is_other


def test_a_job_of_before_says_nothing_of_its_examples(workload: Workload, tmp_path: Path) -> None:
    path = job_of(workload, tmp_path).write()
    row = json.loads(path.read_text())
    assert row.pop("data_fingerprint") == ""
    path.write_text(json.dumps(row))
    assert not training.has_other_data(job_to_resume(tmp_path))


def _result() -> TrainingResult:
    return TrainingResult(0, (1.0, 1.0, 1.0), None, (), 0, None, "")


def test_every_field_of_a_job_is_read_back(workload: Workload, tmp_path: Path) -> None:
    job = replace(job_of(workload, tmp_path), data_fingerprint="abc", model_code={"mine": "0f"})
    assert TrainingJob.read(job.write()) == job


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
            job = training.resume_training.fn(own, binding, folder)
            training.compare_with_one_process.fn(job, _result(), tmp_path / "trials")
        *told, differ = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        said = f"he code of model {own.model} is not that with which this training began (module {module})"
        assert told == ([f"t{said}: it goes on with what is there now"] if file else [])
        assert differ.endswith(f"rounding. T{said}" if file else "rounding")
