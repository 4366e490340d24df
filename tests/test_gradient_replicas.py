"""Real ranks that combine their replicas' gradients by a rule: as one process that does the same, faulty or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gradients.in_process import Replicated, train
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_all
from dejavu.init import Draw
from dejavu.launch.launcher import LaunchError, launch
from dejavu.launch.preflight import check_spreading
from dejavu.plans import StageConfiguration
from dejavu.runtime.gradients.faults import GradientFault, in_environment
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.job.suspects import Suspect
from dejavu.workload import OptimizerSettings, TrialSettings, Workload

TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
DRAW = Draw("xavier", seed=7)
MLP = Workload(
    model="mlp",
    model_options={"num_blocks": 3, "width": 16},
    data="digits",
    batch_size=24,
    num_microbatches=2,
    held_out=0.25,
    num_steps=6,
    checkpoint_every=40,
    optimizer=OptimizerSettings(name="sgd", learning_rate=0.1, momentum=0.9),
    trials=TrialSettings(count=0),
)
Gradients = dict[str, Any]
Losses = dict[str, list[tuple[float, ...]]]


def with_rule(gradients: Gradients | str, **changes: Any) -> Workload:
    return Workload.model_validate({**MLP.model_dump(), "gradients": gradients, **changes})


def job(workload: Workload, *ranks: StageConfiguration) -> TrainingJob:
    bounds = (0, 2, 4) if len(ranks) == 2 else (0, 4)
    return job_of(workload, by_hand("1f1b", bounds, ranks, workload.num_microbatches), workload.num_steps, DRAW)


RULES: dict[str, Gradients | str] = {
    "suspicion": {"rule": "suspicion", "alpha": 0.2},
    "suspicion by layer": {"rule": "suspicion", "per": "layer"},
    "median": "median",
    "trimmed mean": "trimmed_mean",
    "krum": "krum",
    "zeno": {"rule": "zeno", "held_out_every": 2},
}


OF_FIVE = [*(with_rule(rule) for rule in RULES.values()), with_rule("suspicion", accumulate=2)]
ALIKE = [
    with_rule("mean", batch_size=12),
    with_rule({"rule": "trimmed_mean", "num_suspected": 0}, batch_size=12),
    with_rule({"rule": "suspicion", "num_suspected": 0, "alpha": 1e9}, batch_size=12),
]
GPT = Workload.model_validate(
    {
        **MLP.model_dump(),
        "model": "gpt",
        "model_options": {"num_blocks": 2, "width": 16, "num_heads": 2},
        "data": "synthetic",
        "synthetic": {"num_classes": 50},
        "sequence_length": 8,
        "batch_size": 12,
        "gradients": {"rule": "suspicion", "alpha": 0.1},
    }
)
WAYS = (one_device(3, 2), one_device(3, 2, sequence_parallel=True), one_device(3))


@pytest.fixture(scope="module")
def losses() -> Losses:
    """What ranks find, all in one launch."""
    jobs = {
        "of five": [job(workload, one_device(5)) for workload in OF_FIVE],
        "alike": [job(workload, one_device(3), one_device(3)) for workload in ALIKE],
        "shards": [job_of(GPT, by_hand("1f1b", (0, 4), [way], 2), 4, DRAW) for way in WAYS],
    }
    trained = iter(train_all([one for own in jobs.values() for one in own]))
    return {name: [next(trained).losses for _ in own] for name, own in jobs.items()}


@pytest.mark.integration
def test_ranks_train_as_one_process_that_applies_the_same_rule(losses: Losses) -> None:
    """Five replicas of the whole model, with unequal shares of microbatches of 12 (of 6 in two runs)."""
    for workload, found in zip(OF_FIVE, losses["of five"], strict=True):
        expected = train(Replicated(workload, 5), DRAW, workload.num_steps).losses
        assert found == pytest.approx(expected, abs=TOLERANCE), workload.gradients


@pytest.mark.integration
def test_where_nothing_is_left_out_the_losses_are_the_mean_s(losses: Losses) -> None:
    """Two stages, three replicas each; of tensor-parallel shards both take part in each judgement."""
    mean, *others = losses["alike"]
    for found in others:
        assert found == pytest.approx(mean, abs=TOLERANCE)


@pytest.mark.integration
def test_shards_of_replicas_judge_alike(losses: Losses) -> None:
    """Three replicas of two tensor-parallel shards train as three of one device, to rounding."""
    by_shards, by_sequence, whole = losses["shards"]
    assert by_shards == pytest.approx(whole, abs=TOLERANCE)
    assert by_sequence == pytest.approx(whole, abs=TOLERANCE)


@pytest.mark.integration
def test_a_faulty_replica_is_outvoted_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage in one rank's gradients from a step on: the mean's training ends there, and suspicion's does not."""
    faults = (GradientFault("nan", 4, first_step=5), GradientFault("nan", 4, first_step=90))
    for name, value in in_environment(*faults).items():
        monkeypatch.setenv(name, value)
    workload = with_rule("suspicion", num_steps=40, batch_size=12)
    trained = launch(replace(job(workload, one_device(3), one_device(3)), folder=str(tmp_path)))
    assert len(trained.losses) == 40 and trained.losses[-1] < trained.losses[0]
    (suspect,) = trained.suspects
    assert (suspect.stage, suspect.replica, suspect.rank, suspect.host) == (1, 1, 4, "localhost")
    assert suspect.num_not_finite == 35 and suspect.last_step == 39
    assert any("replica 1 (rank 4 on localhost" in warning for warning in trained.warnings)
    assert TrainingResult.from_dict(trained.to_dict()) == trained


def test_a_suspect_is_a_sentence() -> None:
    suspect = Suspect(1, 2, 5, "alpha", 3, 9, 39, 28, 30, 4.04, 0, ("block1", "head"))
    assert str(suspect) == (
        "stage 1: the gradients of replica 2 (rank 5 on alpha, device 3, in block1, head) were the least like the "
        "others' in 28 of 30 steps, 10 to 40, 4 times as far off as the median replica; its device may be faulty, or "
        "its data differ: try the stage without it"
    )
    assert Suspect.from_dict({**vars(suspect), "layers": ["block1", "head"]}) == suspect


@pytest.mark.parametrize(
    ("rule", "ranks", "said"),
    [
        ("suspicion", (one_device(2),), r"suspicion with num_suspected 1 is for 3 replicas or more .* has 2; wanted"),
        ({"rule": "krum", "num_suspected": 2}, (one_device(6),), "is for 7 replicas or more"),
        ("median", (one_device(3), one_device()), "median is for 3 replicas or more .* has 1"),
        ("median", (one_device(3, zero_level=1),), "ZeRO level 1 .* wanted zero_level 0"),
        ("zeno", (one_device(3), one_device(3)), "the plan has 2 stages, .* wanted a plan of one stage"),
        ("zeno", (one_device(3, 2),), "zeno .* wanted tensor_parallel 1"),
        ("median", (one_device(6, context_parallel=2),), "2 replicas share theirs; wanted context_parallel 1"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    rule: Gradients | str, ranks: tuple[StageConfiguration, ...], said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        check_spreading(job(with_rule(rule), *ranks))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gradients": "medain"}, "Input should be 'mean', 'suspicion', 'median'"),
        ({"gradients": {"rule": "median", "alpha": 2.0}}, "alpha is given, but the rule is 'median'; wanted rule: sus"),
        ({"gradients": {"rule": "suspicion", "alpha": 0.0}}, "greater than 0"),
        ({"gradients": "median", "mixed_precision": "float16"}, "wanted mixed_precision: bfloat16, or gradients: mean"),
        ({"gradients": "zeno", "held_out": 0.0}, "held_out is 0 and data 'digits' has no test part"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Workload.model_validate({**MLP.model_dump(), **changes})
