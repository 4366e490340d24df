"""`compile: true`: ranks train compiled layers to the same losses, and these are measured and priced apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.cluster import load_cluster
from dejavu.cost.work import Work
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import COMPILED, capture
from dejavu.launch.launcher import launch
from dejavu.planning import PlanRequest
from dejavu.plans import StageConfiguration
from dejavu.plans.schedule import CHIMERA, PARTS, SCHEDULES, default_schedules
from dejavu.profiling.layers import measure_layers
from dejavu.runtime.job import TrainingResult, resumed
from dejavu.workload import OptimizerSettings, Workload
from tests.conftest import TINY
from tests.launching import DRAW, largest_difference
from tests.launching import job_of as launched
from tests.test_pipeline import DROPOUT

TOLERANCE = 1e-5
EAGER = TINY.model_copy(
    update={
        "model_options": {"num_blocks": 2, "width": 16, "num_heads": 2},
        "sequence_length": 16,
        "held_out": 0.2,
        "evaluate_every": 3,
        "optimizer": OptimizerSettings(learning_rate=1e-2, clip_norm=0.5),
    }
)
GPT = EAGER.model_copy(update={"compile": True})
MLP = EAGER.model_copy(update={"model": "mlp", "model_options": {"num_blocks": 2, "width": 16}, "data": "digits"})
DRAWN = DROPOUT.model_copy(update={"compile": True})
one = one_device()
Case = tuple[Workload, str, tuple[int, ...], Sequence[StageConfiguration]]
CASES: dict[str, Case] = {
    "uneven cuts": (GPT, "1f1b", (0, 1, 4), [one, one]),
    "two replicas, recomputed": (GPT, "gpipe", (0, 2, 4), [one_device(2, recompute=True), one]),
    "two stages a rank": (GPT, "interleaved_1f1b", (0, 1, 2, 3, 4), [one, one]),
    "ZeRO 1": (GPT, "1f1b", (0, 2, 4), [one_device(2, zero_level=1), one]),
    "dropout": (DRAWN, "1f1b", (0, 3, 6), [one, one]),
}


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_a_single_process_s_without_the_compiler(name: str, tmp_path: Path) -> None:
    workload, schedule, bounds, ranks = CASES[name]
    binding = by_hand(schedule, bounds, ranks, workload.num_microbatches)
    job = job_of(workload, binding, workload.num_steps, DRAW)
    result = launch(replace(job, folder=str(tmp_path / "run")))
    assert largest_difference(workload.model_copy(update={"compile": False}), result.losses) < TOLERANCE


@pytest.mark.integration
@pytest.mark.slow
def test_a_compiled_training_says_how_long_it_compiled(tmp_path: Path) -> None:
    job = launched(MLP.model_copy(update={"compile": True}), tmp_path / "run", (2,))
    result = launch(job)
    assert largest_difference(MLP, result.losses) < TOLERANCE
    assert len(result.compile_seconds) == 2 and min(result.compile_seconds) > 0
    assert TrainingResult.from_dict(json.loads(job.result_path.read_text())) == result
    assert resumed(tmp_path / "run", MLP.model_copy(update={"num_steps": 9}), job.binding).first_step == 0


@pytest.mark.integration
@pytest.mark.slow
def test_compiled_layers_are_measured_as_such() -> None:
    graph = capture(GPT)
    middle = graph.layers[1]
    rows = list(measure_layers(GPT, graph, [middle.signature], "core"))
    layers = [row for row in rows if row.kind == "layer"]
    assert {row.direction for row in layers} == {"forward", "backward", "optimizer"}, "and not in parts"
    assert not set(PARTS) & {row.direction for row in layers}
    assert all(row.subject == middle.signature for row in layers if row.direction != "optimizer")
    assert all("compiled" in row.how for row in layers)


def test_compiled_layers_are_other_work_of_the_same_operators() -> None:
    plain, made = capture(EAGER), capture(GPT)
    for a, b in zip(plain.layers, made.layers, strict=True):
        assert a.signature != b.signature and a.family != b.family
        assert (a.operators, a.parameter_bytes, a.footprint) == (b.operators, b.parameter_bytes, b.footprint)
    works = [Work.of(graph.layers, "forward", "float32", GPT.optimizer) for graph in (plain, made)]
    assert works[0].flops == works[1].flops and works[1].num_kernels == len(made.layers) < works[0].num_kernels
    assert COMPILED in made.notes and COMPILED not in plain.notes
    assert plain.fingerprint != made.fingerprint


SPLIT = [name for name, schedule in SCHEDULES.items() if schedule.splits_backward]


@pytest.mark.parametrize("schedule", SPLIT)
def test_schedules_with_a_split_backward_pass_are_refused(schedule: str, tmp_path: Path) -> None:
    said = rf"schedule {schedule} runs the backward pass in two parts, and .*; wanted one of 1f1b, gpipe"
    with pytest.raises(ValidationError, match=said):
        Workload.model_validate(GPT.model_dump() | {"schedule": schedule})
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: a, count: 1, devices: {type: T4, count: 2}}]\n")
    cluster = load_cluster(tmp_path / "cluster.yaml")
    with pytest.raises(InputError, match=said):
        PlanRequest(GPT, cluster, schedules=(schedule,))
    allowed = PlanRequest(GPT, cluster).allowed_schedules
    assert set(allowed) == set(default_schedules()) - set(SPLIT)
    assert PlanRequest(EAGER, cluster).allowed_schedules == (*default_schedules(), CHIMERA)
    job = launched(TINY.model_copy(update={"compile": True}), tmp_path, (1, 2, 3))
    binding = by_hand(schedule, (0, 1, 2, 3, 5), [one_device()] * 2, job.workload.num_microbatches)
    with pytest.raises(InputError, match=rf"schedule {schedule} runs the backward pass in two parts"):
        launch(replace(job, binding=binding))


def test_a_compiler_that_is_not_there_is_told_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "absent-c++")
    with pytest.raises(InputError, match=r"compile is true, and absent-c\+\+ is not on the path; wanted a C\+\+ comp"):
        launch(launched(GPT, tmp_path, (2,)))
    assert not (tmp_path / "ranks.log").exists()
