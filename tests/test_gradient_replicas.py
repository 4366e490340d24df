"""Real ranks that combine their replicas' gradients by a rule: as one process that does the same, faulty or not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gradients.in_process import Replicated, train
from benchmarks.operators.losses import found_job
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_all
from dejavu.init import Draw
from dejavu.launch.launcher import LaunchError, launch
from dejavu.launch.preflight import check_spreading
from dejavu.plans import StageConfiguration
from dejavu.runtime.batches.held_out import held_out_examples
from dejavu.runtime.gradients.faults import GradientFault, in_environment
from dejavu.runtime.gradients.held_out import HeldOutGradient
from dejavu.runtime.gradients.remembered import Remembered
from dejavu.runtime.gradients.watching import Watch
from dejavu.runtime.job import TrainingJob, TrainingResult, resumed
from dejavu.runtime.job.suspects import Suspect
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.process.failures import DivergedError
from dejavu.runtime.single import train_single
from dejavu.runtime.state import first_not_finite
from dejavu.runtime.training import build_layers
from dejavu.workload import GradientSettings, OptimizerSettings, TrialSettings, Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import model_of
from tests.launching import once, ranks

TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
SHARDED_TOLERANCE = 1e-6  # only what rules measure is
BFLOAT16_TOLERANCE = 2**-6  # the step between neighbours of a loss from 2 to 4 that is computed in bfloat16
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


# What one of five replicas does from the third step on, and another one from the fifth.
FAULTS = (GradientFault("noise", 3, first_step=2), GradientFault("nan", 1, "block1", first_step=4))


@pytest.mark.integration
@pytest.mark.slow
def test_ranks_train_as_one_process_that_applies_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five replicas of the whole model, with unequal shares of microbatches of 12 (of 6 in two runs).

    They have whole gradients or, under ZeRO, shards of all; without faults, then with one and with two.
    """
    for name, value in in_environment(*FAULTS).items():
        monkeypatch.setenv(name, value)
    cases = [(with_rule(rule), level) for rule in RULES.values() for level in (0, 1)]
    cases += [(with_rule(rule), level) for rule, level in (("median", 2), (RULES["zeno"], 2), ("suspicion", 3))]
    cases += [(with_rule("suspicion", accumulate=2), level) for level in (0, 1, 2)]
    trained = train_all([job(workload, one_device(5, zero_level=level)) for workload, level in cases])
    whole: dict[str, tuple[float, ...]] = {}
    for (workload, level), found in zip(cases, trained, strict=True):
        expected = train(Replicated(workload, 5, FAULTS), DRAW, workload.num_steps).losses
        about = (workload.gradients, level)
        assert found.losses == pytest.approx(expected, abs=TOLERANCE), about
        twin = whole.setdefault(workload.model_dump_json(), found.losses)
        assert found.losses == pytest.approx(twin, abs=SHARDED_TOLERANCE), about


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
MASTERS = GPT.model_copy(update={"dtype": "bfloat16", "optimizer": OptimizerSettings(master_weights=True)})
WAYS = (
    one_device(3),
    *(one_device(3, 2, sequence_parallel=sp, zero_level=zero) for sp in (False, True) for zero in (0, 1, 2)),
)


@pytest.fixture(scope="module")
def losses() -> Losses:
    """What ranks find, all in one launch."""
    jobs = {
        "alike": [job(workload, one_device(3), one_device(3)) for workload in ALIKE],
        "shards": [job_of(GPT, by_hand("1f1b", (0, 4), [way], 2), 4, DRAW) for way in WAYS],
        # The weights' gradients in passes of their own; ZeRO 1 exchanges them after the last.
        "in parts": [
            job_of(GPT, by_hand("zbv", (0, 2, 4), [one_device(3, zero_level=zero)], 2), 4, DRAW) for zero in (0, 1)
        ],
        # Under ZeRO the masters are what is sharded.
        "masters": [
            job_of(MASTERS, by_hand("1f1b", (0, 4), [one_device(3, zero_level=zero)], 2), 4, DRAW) for zero in range(4)
        ],
    }
    trained = iter(train_all([one for own in jobs.values() for one in own]))
    return {name: [next(trained).losses for _ in own] for name, own in jobs.items()}


SINGLE = {"model": "tests.own_models:tempered", "model_options": {}, "batch_size": 12, "num_steps": 4}


@pytest.mark.integration
def test_weights_that_fsdp_does_not_take_are_trained_with_the_others() -> None:
    """Single numbers, nothing at all, transposed matrices, at ZeRO levels: the losses of one process."""
    mean = with_rule("mean", **SINGLE)
    adam = OptimizerSettings(master_weights=True, clip_norm=0.5)
    masters = mean.model_copy(update={"dtype": "bfloat16", "optimizer": adam})
    cases = [(workload, level) for workload in (mean, masters) for level in (1, 2, 3)]
    in_parts = job_of(mean, by_hand("zbv", (0, 2, 4), [one_device(3, zero_level=1)], 2), 4, DRAW)
    trained = train_all([*(job(workload, one_device(3, zero_level=level)) for workload, level in cases), in_parts])
    for (workload, level), found in zip([*cases, (mean, 1)], trained, strict=True):
        tolerance = TOLERANCE if workload is mean else BFLOAT16_TOLERANCE
        assert found.losses == pytest.approx(train_single(workload, DRAW, range(4)), abs=tolerance), level


@pytest.mark.integration
def test_hooks_of_weights_change_the_gradients_of_split_weights_too() -> None:
    """Sharded over replicas, over devices that share a layer, and where the backward pass comes in parts."""
    workload = with_rule("mean", **{**SINGLE, "model": "tests.own_models:masked"})
    ways = [("1f1b", one_device(2, zero_level=level)) for level in (1, 2, 3)]
    ways += [("zbv", one_device(2, zero_level=1)), ("1f1b", one_device(1, 2))]
    jobs = [found_job(workload, name, (0, 5) if name == "1f1b" else (0, 2, 5), [way]) for name, way in ways]
    assert jobs[-1].binding.plan.splits
    for way, one, found in zip(ways, jobs, train_all(jobs), strict=True):
        expected = train_single(one.workload, one.draw, range(one.last_step))
        assert found.losses == pytest.approx(expected, abs=TOLERANCE), way


@pytest.mark.integration
def test_hooks_of_weights_stay_where_a_layer_declares_its_split() -> None:
    """They were lost there: the last losses were 0.3 off."""
    fields = {"num_blocks": 1, "width": 16, "num_heads": 2}
    text = {"data": "text", "sequence_length": 8, "batch_size": 8, "num_microbatches": 2, "num_steps": 3}
    workload = Workload(model="tests.own_losses:Hooked", model_options=fields, **text, trials=TrialSettings(count=0))
    ways = [one_device(1, 2, sequence_parallel=True), one_device(2, 2, zero_level=3)]
    jobs = [job_of(workload, by_hand("1f1b", (0, 3), [way], 2), 3, DRAW) for way in ways]
    expected = train_single(workload, DRAW, range(3))
    for way, found in zip(ways, train_all(jobs), strict=True):
        assert found.losses == pytest.approx(expected, abs=TOLERANCE), way


@pytest.mark.integration
@pytest.mark.slow
def test_rules_judge_them_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in in_environment(GradientFault("noise", 1, first_step=1)).items():
        monkeypatch.setenv(name, value)
    cases = [(with_rule(RULES[rule], **SINGLE), level) for rule in ("suspicion", "zeno") for level in (0, 1, 3)]
    trained = train_all([job(workload, one_device(3, zero_level=level)) for workload, level in cases])
    for first, found in zip((0, 0, 0, 3, 3, 3), trained, strict=True):
        assert found.losses == pytest.approx(trained[first].losses, abs=SHARDED_TOLERANCE), cases[first][0].gradients
    assert trained[0].losses != trained[3].losses


@pytest.mark.integration
@pytest.mark.slow
def test_where_nothing_is_left_out_the_losses_are_the_mean_s(losses: Losses) -> None:
    """Two stages, three replicas each; of tensor-parallel shards both take part in each judgement."""
    mean, *others = losses["alike"]
    for found in others:
        assert found == pytest.approx(mean, abs=TOLERANCE)


@pytest.mark.integration
@pytest.mark.slow
def test_shards_of_replicas_judge_alike(losses: Losses) -> None:
    """Three replicas of two tensor-parallel shards train as three of one device, to rounding; so under ZeRO."""
    whole, *others = losses["shards"]
    for number, found in enumerate(others):
        assert found == pytest.approx(whole, abs=TOLERANCE), number
    in_parts, in_sharded_parts = losses["in parts"]
    assert in_sharded_parts == pytest.approx(in_parts, abs=SHARDED_TOLERANCE)  # its two stages judge by themselves
    beside, *instead = losses["masters"]
    for found in instead:
        assert found == pytest.approx(beside, abs=BFLOAT16_TOLERANCE)


@pytest.mark.integration
@pytest.mark.slow
def test_a_faulty_replica_is_outvoted_and_named_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage in one rank's gradients from a step on: the mean's training ends there, and suspicion's does not.

    A rank is killed meanwhile. From the checkpoint on the training has the same trust and the same counts as one that
    was not; so has one that is resumed for more steps. The faulty rank's stage is sharded, the other one is not.
    """
    faults = (GradientFault("nan", 4, first_step=5, seconds=0.04), GradientFault("nan", 4, first_step=90))
    for name, value in in_environment(*faults).items():
        monkeypatch.setenv(name, value)
    rule = {"rule": "suspicion", "alpha": 0.2}
    workload = with_rule(rule, num_steps=40, batch_size=12, checkpoint_every=10)
    asked = replace(job(workload, one_device(3), one_device(3, zero_level=1)), folder=str(tmp_path))
    (unbroken,) = train_all([asked])
    trained = launch(asked, on_step=once(lambda: ranks()[1].kill(), 20))
    assert trained.restarts == 1 and trained.resumed_from_step in (10, 20, 30)
    assert trained.losses == tuple(unbroken.losses)
    assert max(trained.losses[-3:]) < trained.losses[0]
    longer = with_rule(rule, num_steps=44, batch_size=12, checkpoint_every=10)
    for last, found in ((40, trained), (44, launch(resumed(tmp_path, longer, asked.binding)))):
        (suspect,) = found.suspects
        assert (suspect.stage, suspect.replica, suspect.rank, suspect.host) == (1, 1, 4, "localhost")
        assert (suspect.watched_steps, suspect.num_not_finite, suspect.last_step) == (last, last - 5, last - 1)
        assert any("stage 1: the gradients of replica 1 (rank 4 on localhost" in one for one in found.warnings)
        assert TrainingResult.from_dict(found.to_dict()) == found


@pytest.mark.integration
def test_a_replica_whose_loss_is_no_number_ends_no_training(tmp_path: Path) -> None:
    """Its device computes garbage forward: the loss is that of the others, whose gradients the steps are made of."""
    options = {"rank": 0, "call": 5}  # from the third step on; rank 0 is the one that tells the loss
    model = {"model": "tests.own_models:without_numbers", "model_options": options}
    workload = with_rule("median", **model, batch_size=12, num_steps=8)
    plan = by_hand("1f1b", (0, 5), [one_device(3)], 2)
    trained = launch(replace(job_of(workload, plan, 8, DRAW), folder=str(tmp_path)))
    assert len(trained.losses) == 8 and all(map(math.isfinite, trained.losses)) and not trained.restarts
    assert trained.losses[-1] < trained.losses[0]
    (suspect,) = trained.suspects
    assert (suspect.rank, suspect.num_not_finite) == (0, 6)


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("unused", range(5))
def test_a_weight_that_no_loss_depends_on_has_a_gradient_of_zeros(unused: int, master_weights: bool) -> None:
    """The gradient of held-out examples has the numbers of all gradients that are compared with it, in their order."""
    optimizer = {"name": "sgd", "master_weights": master_weights}
    workload = with_rule("zeno", dtype="bfloat16" if master_weights else "float32", optimizer=optimizer)
    module = build_layers(workload, DRAW, torch.device("cpu"))
    dtype = next(module.parameters()).dtype
    if unused < len(module):
        own = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        module[unused].register_parameter("unused", own)
        if not master_weights:
            own.grad = torch.zeros_like(own)  # as of a weight that an earlier step used
    make_optimizer(workload.optimizer, module.parameters())
    inputs, targets = dataset_of(workload).batch(0, 4, seed=0)
    model_of(workload).loss(module(inputs.to(dtype)), targets).float().backward()
    found = HeldOutGradient(workload, module, torch.device("cpu"))(0)
    compared = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    parts = dict(zip(compared, found.split([one.numel() for one in compared.values()]), strict=True))
    for name, one in compared.items():
        assert parts[name].dtype == one.dtype
        assert (parts[name] == 0).all() == name.endswith("unused"), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("example", [0, 11, 12, 40])
def test_held_out_examples_without_a_loss_are_said(bad: float, example: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the turn that they come in, and in no other: replicas would all be suspected, and the step be no number."""
    workload = with_rule(RULES["zeno"])
    inputs, targets = held_out_examples(workload)
    inputs[example] = bad
    monkeypatch.setattr("dejavu.runtime.gradients.held_out.held_out_examples", lambda workload: (inputs, targets))
    module = build_layers(workload, DRAW, torch.device("cpu"))
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight)
    gradient, size = HeldOutGradient(workload, module, torch.device("cpu")), workload.microbatch_size
    for step in range(12):
        turn = step // 2  # `held_out_every` of the rule
        if example in [(turn * size + k) % len(inputs) for k in range(size)]:
            with pytest.raises(DivergedError, match=f"judges replicas in step {step + 1}, is not finite; wanted held-"):
                gradient(step)
        else:
            assert gradient(step).isfinite().all()


def test_what_is_known_of_replicas_goes_with_their_devices() -> None:
    """To the last bit; in another order of them, and not to others, other layers or another rule."""
    watch, chance = Watch(1, 3, 1), torch.Generator().manual_seed(0)
    for step in range(60):
        watch.look(step, torch.rand(1, 3, generator=chance) * torch.tensor([1.0, 1.0, 500.0]))
    trust_N, settings = torch.rand(3, generator=chance, dtype=torch.float64), GradientSettings(rule="suspicion")
    state = Remembered(settings, ["a:0", "a:1", "b:0"]).to_state(["first", "second"], trust_N, watch.tallies[0])
    assert list(state) == ["gradients.first.judged"] and first_not_finite(state) is None
    for order in itertools.permutations(range(3)):
        devices = [("a:0", "a:1", "b:0")[n] for n in order]
        known = Remembered(settings, devices).of_state(state, ["first", "second"])
        assert known is not None
        assert torch.equal(known[0], trust_N[list(order)])
        assert known[1] == [watch.tallies[0][n] for n in order]
        assert [tally.is_named for tally in known[1]] == [n == 2 for n in order]
    same = Remembered(settings, ["a:0", "a:1", "b:0"])
    assert same.of_state({}, ["first", "second"]) is None and same.of_state(state, ["first"]) is None
    for other in (Remembered(settings, ["a:0", "a:1"]), Remembered(settings, ["a:0", "a:1", "c:0"])):
        assert other.of_state(state, ["first", "second"]) is None
    wider = GradientSettings(rule="suspicion", alpha=2.0)
    assert Remembered(wider, ["a:0", "a:1", "b:0"]).of_state(state, ["first", "second"]) is None


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
