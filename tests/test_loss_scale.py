"""Layers that compute in float16: the loss is scaled, steps whose gradients overflow are left out on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.pipeline.plans import by_hand, even_bounds, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_in_turn
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.plans.schedule import SCHEDULES
from dejavu.runtime.gradients.scaling import FIRST_SCALE, GOOD_STEPS, LEAST_SCALE, LossScale, ScaleError
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.job.progress import read_left_out
from dejavu.runtime.single import probe, train_single
from dejavu.runtime.state import OF_ALL, gather_state, restore_state, states_of
from dejavu.runtime.training import build_layers
from dejavu.runtime.worker import tell
from dejavu.trials.halving import unsafe
from dejavu.workload import OptimizerSettings, TrialSettings, Workload
from dejavu.workload.data import dataset_of

STEPS, MICROBATCHES, BLOCKS = 4, 4, 6
DRAW = Draw("depth_scaled", seed=2)
FLOAT16 = 2e-3  # of a loss: what rounding in float16 is, where sums are taken in another order


def workload(mixed_precision: bool | str = "float16", **fields: object) -> Workload:
    options = {"num_blocks": BLOCKS, "width": 32, "num_heads": 2}
    given = {"model_options": options, "sequence_length": 16, "batch_size": 24, "num_microbatches": MICROBATCHES}
    optimizer = OptimizerSettings(learning_rate=0.003, clip_norm=0.5)
    trials = TrialSettings(count=0)
    return Workload(
        **{**given, "optimizer": optimizer, "num_steps": STEPS, "trials": trials, **fields},
        mixed_precision=mixed_precision,
    )


def by_torch(workload: Workload) -> list[float]:
    """Losses of torch's own GradScaler, in plain torch."""
    module = build_layers(workload, DRAW, torch.device("cpu"))
    settings, dataset, scaler = workload.optimizer, dataset_of(workload), torch.amp.GradScaler("cpu", FIRST_SCALE)
    optimizer = torch.optim.AdamW(module.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    losses = []
    for step in range(workload.num_steps):
        inputs, targets = dataset.batch(step, workload.batch_size, seed=workload.seed)
        optimizer.zero_grad()
        parts = []
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = nn.functional.cross_entropy(module(x).flatten(0, -2), y.flatten())
            scaler.scale(loss / MICROBATCHES).backward()
            parts.append(loss.item())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(sum(parts) / len(parts))
    return losses


def test_one_process_trains_as_with_torch_s_own_scaler() -> None:
    assert train_single(workload(), DRAW, range(STEPS)) == pytest.approx(by_torch(workload()), abs=1e-6)


def scaled(values: list[float], scale: float, good_steps: int = 0) -> tuple[LossScale, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(len(values)))
    weight.grad = torch.tensor(values)
    optimizer = torch.optim.SGD([weight])
    states_of(optimizer)[OF_ALL] = {"scale": torch.tensor(scale), "good_steps": torch.tensor(good_steps)}
    return LossScale(optimizer, torch.device("cpu")), optimizer


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_step_that_overflowed_is_left_out_and_the_scale_halved(bad: float) -> None:
    scale, _ = scaled([1.0, bad], 1024.0, good_steps=7)
    assert not scale.unscale(0) and scale.scale == 512.0


@pytest.mark.parametrize("power", range(-13, 20))
def test_gradients_are_divided_without_rounding(power: int) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(power)).tolist()
    scale, optimizer = scaled(values, 2.0**power)
    assert scale.unscale(0)
    (weight,) = optimizer.param_groups[0]["params"]
    assert torch.equal(weight.grad * 2.0**power, torch.tensor(values))


def test_after_many_good_steps_the_scale_is_doubled_and_counting_begins_anew() -> None:
    scale, optimizer = scaled([1.0], 8.0, good_steps=GOOD_STEPS - 1)
    assert scale.unscale(0) and scale.scale == 16.0
    assert int(states_of(optimizer)[OF_ALL]["good_steps"]) == 0


def test_gradients_that_are_finite_at_no_scale_end_the_training_in_a_sentence() -> None:
    scale, _ = scaled([float("nan")], LEAST_SCALE)
    with pytest.raises(
        ScaleError, match=r"gradients of step 52 are not finite, at a loss scale of .*lower the learning"
    ):
        scale.unscale(51)


def test_where_no_step_was_made_the_learning_rate_is_not_blamed() -> None:
    scale, optimizer = scaled([float("inf")], FIRST_SCALE)
    (weight,) = optimizer.param_groups[0]["params"]
    with pytest.raises(ScaleError, match=r"of all steps before it were not, so that no weight was changed") as raised:
        for step in range(100):
            weight.grad = torch.full_like(weight, float("inf"))
            assert not scale.unscale(step)
    assert "gradients of step 31 " in str(raised.value) and "learning rate" not in str(raised.value)


def test_an_overflow_changes_no_weight_and_no_moment() -> None:
    """The first scale is far too large for these losses: steps are left out until it fits."""
    huge = workload(optimizer=OptimizerSettings(name="sgd", learning_rate=1e-9), num_steps=3)
    module = build_layers(huge, DRAW, torch.device("cpu"))
    optimizer = torch.optim.AdamW(module.parameters())
    scale = LossScale(optimizer, torch.device("cpu"))
    before = {name: one.clone() for name, one in module.state_dict().items()}
    for one in module.parameters():
        one.grad = torch.full_like(one, float("inf"))
    assert not scale.unscale(0)
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    assert set(states_of(optimizer)) == {OF_ALL}


def test_the_scale_is_part_of_what_is_saved(tmp_path: Path) -> None:
    module = build_layers(workload(), DRAW, torch.device("cpu"))
    optimizer = torch.optim.AdamW(module.parameters())
    scale = LossScale(optimizer, torch.device("cpu"))
    states_of(optimizer)[OF_ALL]["scale"].fill_(64.0)
    other = torch.optim.AdamW(module.parameters())
    restore_state(module, other, gather_state(module, optimizer))
    assert LossScale(other, torch.device("cpu")).scale == scale.scale == 64.0


def test_a_trial_s_training_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = train_single(workload(), DRAW, range(STEPS))
    train_single(workload(), DRAW, range(2), save_to=tmp_path / "state")
    rest = train_single(workload(), DRAW, range(2, STEPS), start_from=tmp_path / "state")
    assert rest == whole[2:]


def test_weights_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float16 keeps weights and gradients in float32, and dtype is 'bfloat16'"):
        workload(dtype="bfloat16")


def cases() -> dict[str, TrainingJob]:
    found = {}
    for name in ("1f1b", "interleaved_1f1b", "zbv"):
        bounds = even_bounds(BLOCKS + 2, 2 * SCHEDULES[name].stages_per_rank)
        found[name] = job_of(workload(), by_hand(name, bounds, [one_device()] * 2, MICROBATCHES), STEPS, DRAW)
    ranks = [one_device(data_parallel=2, zero_level=2), one_device()]
    found["zero_2"] = job_of(workload(), by_hand("1f1b", (0, 5, BLOCKS + 2), ranks, MICROBATCHES), STEPS, DRAW)
    return found


CASES = cases()


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    order = sorted(CASES, key=lambda name: -len(CASES[name].binding.placements))
    return dict(zip(order, train_in_turn([CASES[name] for name in order]), strict=True))


@pytest.mark.integration
@pytest.mark.parametrize("name", CASES)
def test_pipelines_train_as_one_process_does(name: str, trained: dict[str, Trained]) -> None:
    assert trained[name].losses == pytest.approx(train_single(workload(), DRAW, range(STEPS)), abs=FLOAT16)


@pytest.mark.integration
def test_steps_that_were_left_out_are_counted_also_those_before_a_training_went_on(tmp_path: Path) -> None:
    """The first scales are too large for its gradients."""
    options = {"model": "tests.own_models:with_large_gradients", "data": "digits"}
    own = Workload(**options, batch_size=8, num_microbatches=2, num_steps=16, trials=TrialSettings(count=0)).model_copy(
        update={"mixed_precision": "float16"}
    )
    job = job_of(own, by_hand("1f1b", (0, 4, 7), [one_device()] * 2, 2), 4, Draw())
    job = replace(job, folder=str(tmp_path))
    assert launch(job).left_out_steps == tuple(range(4))
    whole = launch(replace(job, last_step=16))
    count = len(whole.left_out_steps)
    assert whole.left_out_steps == tuple(range(count)) and 4 < count < 12
    assert (
        whole.said_of_left_out == f"{count} of 16 steps, whose gradients overflowed in float16: they changed no weight"
    )
    assert whole.losses == pytest.approx(train_single(own, Draw(), range(16)), rel=FLOAT16)
    assert TrainingResult.from_dict(whole.to_dict()).left_out_steps == whole.left_out_steps
    none = replace(whole, left_out_steps=tuple(range(16)))
    assert none.said_of_left_out == "all 16 steps, so no weight was changed: gradients overflowed in float16 in each"


def test_steps_that_were_trained_again_are_left_out_as_the_last_time(tmp_path: Path) -> None:
    for step, left_out in ((0, True), (1, True), (2, True), (1, True), (2, False)):
        told = {"left_out": True} if left_out else {}
        tell(tmp_path / "progress.jsonl", step=step, loss=1.0, seconds=0.1, **told)
    assert read_left_out(tmp_path / "progress.jsonl") == (0, 1)


@pytest.mark.parametrize("gain", [1.0, 2.0, 2.8, 3.5, 4.0])
def test_a_first_step_that_overflows_at_its_scale_says_nothing_of_the_draw(gain: float) -> None:
    """A trial is told what it is told in float32, of the first step that is made: weights are as drawn until then."""
    draw = Draw(gain=gain, seed=3)
    exact = Workload(model="mlp", data="digits", batch_size=8, num_microbatches=2, num_steps=40)
    (loss, norm), told = probe(exact, draw), list[tuple[float, float]]()
    scaled = exact.model_copy(update={"mixed_precision": "float16"})
    losses = train_single(scaled, draw, range(24), on_first=lambda *one: told.append(one))
    assert told == [probe(scaled, draw)]
    assert losses[0] == told[0][0] == pytest.approx(loss, rel=0.05)
    assert unsafe(loss, norm) == unsafe(*told[0]) == ""
    assert 0.1 < told[0][1] / norm < 10, "it may be of another batch"
