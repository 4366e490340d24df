"""The what-if door: what it answers, how sure it is, and what it says to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dejavu.cluster import load_cluster
from dejavu.parallelism import Parallelism
from dejavu.plan import NoPlanError, price
from dejavu.planning import Choice, Question, print_choice
from dejavu.planning.question import PROVERS
from dejavu.search import SEARCHES
from dejavu.workload import Workload
from flows.__main__ import _with_json_target
from flows.inputs import read_what_if, whole_numbers

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = {
    "model": "gpt",
    "model_options": {"num_blocks": 4, "width": 256, "num_heads": 4},
    "data": "synthetic",
    "synthetic": {"num_classes": 256},
    "sequence_length": 64,
    "batch_size": 16,
    "num_microbatches": 8,
    "trials": {"count": 0},
}
NODES = """
nodes:
  - {name: a, count: 2, devices: {type: V100-SXM2-16GB, count: 2}, link: {bandwidth: 150 GB/s, latency: 5 us}}
  - {name: b, count: 1, devices: {type: T4, count: 3}, link: {bandwidth: 12 GB/s, latency: 8 us}}
links: {default: {bandwidth: 25 Gbit/s, latency: 25 us}}
"""
KEYS = {
    *("step_seconds", "lower_bound_seconds", "gap_percent", "uniform_step_seconds", "stages", "schedule"),
    *("microbatches", "search", "considered"),
}
PROVER = next(name for name in PROVERS if name in SEARCHES)


@cache
def workload() -> Workload:
    return Workload.model_validate(WORKLOAD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("what-if")
    (made / "cluster.yaml").write_text(NODES)
    (made / "mine.yaml").write_text(json.dumps(WORKLOAD))
    return made


@pytest.fixture(scope="module")
def choice(folder: Path) -> Choice:
    return question(folder).answer()


def question(folder: Path, **changes: Any) -> Question:
    asked: dict[str, Any] = {"microbatches": (2, 8), "budget_seconds": 10.0, "database": folder / "profiles_db"}
    return Question(load_cluster(folder / "cluster.yaml"), workload(), **{**asked, **changes})


def test_the_choice_is_the_cheapest_and_its_bound_holds_for_all(choice: Choice) -> None:
    found = [row for row in choice.considered if row.result]
    assert {row.search for row in choice.considered} >= {PROVER, "uniform"}
    assert {row.num_microbatches for row in choice.considered} == {2, 8}
    for row in found:
        assert price(row.posed.problem, row.found.plan).step_seconds == pytest.approx(row.found.step_seconds)
        assert choice.step_seconds <= row.found.step_seconds
    assert 0 < choice.lower_bound_seconds <= choice.step_seconds
    assert choice.lower_bound_seconds == min(choice.step_seconds, choice.bound_seconds(2), choice.bound_seconds(8))
    even = choice.uniform_step_seconds
    assert even is not None
    assert even >= choice.step_seconds


def test_every_stage_says_what_it_needs(choice: Choice) -> None:
    found = choice.to_dict()
    assert set(found) >= KEYS
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    layers = [name for stage in found["stages"] for name in stage["layers"]["names"]]
    assert layers == ["embedding", "block0", "block1", "block2", "block3", "head"]
    for stage in found["stages"]:
        assert 0 < stage["peak_bytes"] <= stage["capacity_bytes"]
        assert stage["seconds"] > 0
        assert stage["device_type"] == stage["configuration"]["device_type"]
        assert stage["layers"]["stop"] - stage["layers"]["start"] == len(stage["layers"]["names"])
    assert sum(row["chosen"] for row in found["considered"]) == 1
    for row in found["considered"]:
        assert set(row) >= {"search", "microbatches", "step_seconds", "lower_bound_seconds"}


def test_the_schedules_are_those_that_fit_the_fastest_first(choice: Choice) -> None:
    assert choice.plan in [one.plan for one in choice.schedules]
    seconds = [one.simulation.step_seconds for one in choice.schedules]
    assert seconds == sorted(seconds)
    rows = choice.to_dict()["schedules"]
    assert [row["simulated_step_seconds"] for row in rows] == seconds
    assert {row["schedule"] for row in rows} > {"1f1b"}
    for one in choice.schedules:
        devices = {how for stages in one.plan.ranks for how in {one.plan.stages[s].configuration for s in stages}}
        assert devices == {stage.configuration for stage in choice.plan.stages}


def test_a_played_plan_holds_what_the_price_says(choice: Choice) -> None:
    for row in choice.considered:
        if row.result is None:
            continue
        peaks = price(row.posed.problem, row.found.plan).peak_bytes
        for played, priced in zip(row.simulation.peak_bytes, peaks, strict=True):
            assert 0 < played <= priced * (1 + 1e-9)  # the optimizer's step may need more than the passes


def test_it_reads_like_a_sentence(choice: Choice, capsys: pytest.CaptureFixture[str]) -> None:
    print_choice(choice)
    printed = capsys.readouterr().out
    assert "✔" in printed
    assert "certified gap" in printed
    assert "of 7 devices" in printed or "All 7 devices are used" in printed


def test_more_may_be_done_and_is_never_dearer(folder: Path, choice: Choice) -> None:
    """One device a stage is among what may be done."""
    alone = question(folder, parallelism=Parallelism.one_device()).answer()
    assert all(stage.configuration.num_devices == 1 for stage in alone.plan.stages)
    assert choice.lower_bound_seconds <= alone.step_seconds
    assert choice.step_seconds <= alone.step_seconds * (1 + 1e-9)


def test_one_search_is_asked_where_one_is_named(folder: Path) -> None:
    found = question(folder, search="uniform", microbatches=(8,)).answer()
    assert {row.search for row in found.considered} == {"uniform"}
    assert found.lower_bound_seconds == 0
    assert found.gap_percent == 100


def test_too_little_memory_is_said_with_what_would_do(folder: Path) -> None:
    huge = workload().model_copy(
        update={"model_options": {"num_blocks": 2, "width": 16384, "num_heads": 4}, "batch_size": 2}
    )
    asked = Question(
        load_cluster(folder / "cluster.yaml"),
        huge.model_copy(update={"num_microbatches": 2}),
        database=folder / "profiles_db",
        microbatches=(2,),
        parallelism=Parallelism.one_device(),
    )
    with pytest.raises(NoPlanError, match=r"in 2 microbatches: no plan fits.*bytes"):
        asked.answer()


def test_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _with_json_target(["plan", "--json"]) == ["plan", "--json", "-"]
    assert _with_json_target(["plan", "--json", "--seed", "3"]) == ["plan", "--json", "-", "--seed", "3"]
    assert _with_json_target(["plan", "--json", "x.json"]) == ["plan", "--json", "x.json"]
    assert whole_numbers("--microbatches", "16, 8,8") == (8, 16)
    monkeypatch.chdir(ROOT)
    cluster = Path("examples/clusters/4x8-v100.yaml")
    assert read_what_if(cluster, "t5-11b", None, "gpipe")[1].model_options["feedforward"] == 65536
    assert read_what_if(cluster, "t5-11b", None, "gpipe")[1].schedule == "gpipe"
    for name in ("gpt", "bert", "t5", "moe", "cnn", "mlp", "vgg", "wide_resnet"):
        assert read_what_if(cluster, name, None, None)[1].model == name


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows", "plan", "--cluster", str(folder / "cluster.yaml"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_from_end_to_end(folder: Path) -> None:
    words = ("--workload", str(folder / "mine.yaml"), "--microbatches", "4,8", "--tensor-parallel", "1", "--json")
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) >= KEYS
    assert all(stage["configuration"]["tensor_parallel"] == 1 for stage in found["stages"])
    assert "prefect" not in done.stderr.lower()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--model", "nothing"), "unknown model 'nothing'"),
        (("--model", "gpt", "--workload", "x.yaml"), "wanted one of them"),
        (("--microbatches", "0"), "whole numbers ≥ 1"),
        (("--search", "exat"), "did you mean 'exact'?"),
        (("--schedule", "1f2b"), "unknown schedule '1f2b'"),
        (("--workload", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_mistakes_are_sentences(
    folder: Path,
    words: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from flows.__main__ import INPUT_ERROR, main

    monkeypatch.setattr(sys, "argv", ["dejavu", "plan", "--cluster", str(folder / "cluster.yaml"), *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == INPUT_ERROR
    assert sentence in capsys.readouterr().err


def test_nothing_heavy_is_needed() -> None:
    """Neither Prefect, MLflow, Dask nor matplotlib is imported to plan."""
    code = (
        "import sys, flows.__main__, flows.inputs, dejavu.planning; "
        "print([n for n in ('prefect', 'mlflow', 'distributed', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
