"""The loss on what is held out, while a training runs: where it is written, and that the training stays as it is."""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dejavu.foundation.errors import InputError
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.report.summary import held_out
from dejavu.runtime.batches.held_out import HeldOut, evaluating, held_out_examples
from dejavu.runtime.job import TrainingResult
from dejavu.runtime.job.export import kept_checkpoint
from dejavu.runtime.job.progress import (
    Evaluation,
    last_losses,
    parse_evaluation,
    parse_progress,
    read_evaluations,
    read_losses,
)
from dejavu.runtime.single import train_single
from dejavu.runtime.state import best_checkpoint, checkpoint_step, complete_checkpoints, held_out_loss_of
from dejavu.runtime.training import WholeModel, build_layers
from dejavu.runtime.worker import tell
from dejavu.trials.spec import TrialSpec
from dejavu.workload import Workload
from dejavu.workload.data import check_data, dataset_of
from tests.conftest import TINY
from tests.launching import DRAW, job_of, once, ranks
from tests.own_models import with_dropout

TOLERANCE = 1e-5
CPU = torch.device("cpu")
EVALUATED = Workload.model_validate(
    TINY.model_dump() | {"held_out": 0.2, "evaluate_every": 3, "evaluation_examples": 20}
)


def single(workload: Workload) -> tuple[list[float], list[Evaluation]]:
    rows: list[Evaluation] = []
    losses = train_single(
        workload, DRAW, range(workload.num_steps), on_evaluation=lambda *row: rows.append(Evaluation(*row))
    )
    return losses, rows


@pytest.mark.integration
def test_a_launch_evaluates_and_trains_as_without(tmp_path: Path) -> None:
    """A rank is killed on the way: every evaluation is there once, and progress has a line of its own for each."""
    job = job_of(EVALUATED.model_copy(update={"num_steps": 20}), tmp_path / "run")
    losses, expected = single(job.workload)
    told: list[Evaluation] = []
    result = launch(
        job, on_step=once(lambda: ranks()[1].kill(), 10), on_evaluation=lambda *row: told.append(Evaluation(*row))
    )
    assert result.losses == pytest.approx(losses, abs=TOLERANCE)
    assert [row.step for row in result.evaluations] == [2, 5, 8, 11, 14, 17, 19]
    assert [row.loss for row in result.evaluations] == pytest.approx([row.loss for row in expected], abs=TOLERANCE)
    assert set(told) == set(result.evaluations)
    lines = [json.loads(line) for line in job.progress_path.read_text().splitlines()]
    assert all({"step", "loss", "seconds"} <= set(line) for line in lines), "for readers that know no other"
    assert read_evaluations(job.progress_path) == result.evaluations
    assert tuple(read_losses(job.progress_path)[k] for k in range(20)) == result.losses
    assert TrainingResult.from_dict(json.loads(job.result_path.read_text())) == result
    longer = launch(job_of(job.workload.model_copy(update={"evaluate_every": 0}), tmp_path / "without"))
    assert longer.losses == pytest.approx(result.losses, abs=TOLERANCE) and longer.evaluations == ()
    assert result.step_times is not None and longer.step_times is not None


@pytest.mark.integration
@pytest.mark.slow
def test_the_best_checkpoint_is_kept_beside_the_last_two(tmp_path: Path) -> None:
    """Few examples and a high rate: what is held out is worst at the end."""
    fields = {"model": "mlp", "model_options": {"num_blocks": 3, "width": 16}, "data": "digits", "held_out": 0.95}
    fields |= {"num_steps": 30, "checkpoint_every": 2, "optimizer": {"learning_rate": 0.1}}
    workload = Workload.model_validate(EVALUATED.model_dump() | fields)
    job = job_of(workload, tmp_path / "run")
    result = launch(job)
    evaluated = {row.step + 1: row.loss for row in result.evaluations if (row.step + 1) % 2 == 0}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert best < 28
    assert [checkpoint_step(path) for path in complete_checkpoints(job.checkpoints)] == [best, 28, 30]
    found = best_checkpoint(job.checkpoints)
    assert found is not None and held_out_loss_of(found) == evaluated[best]
    assert kept_checkpoint(tmp_path / "run", best=True) == found
    assert launch(replace(job, last_step=32)).resumed_from_step == 30


def test_lines_of_progress_are_told_apart() -> None:
    step, evaluated = b'{"step": 4, "loss": 2.5, "seconds": 0.1}', b'{"step": 4, "loss": 2.5, "held_out_loss": 3.0}'
    assert (parse_progress(step), parse_evaluation(step)) == ((4, 2.5), None)
    assert (parse_progress(evaluated), parse_evaluation(evaluated)) == (None, (4, 3.0))
    assert parse_progress(b'{"step": 4, "lo') is None and parse_evaluation(b'{"step": 4, "held_ou') is None


@pytest.mark.parametrize(
    ("batch_size", "wanted", "there", "expected"),
    [(8, 20, 400, 24), (8, 24, 400, 24), (8, 100, 50, 48), (32, 1, 400, 32), (64, 256, 18, 64), (8, 256, 8, 8)],
)
def test_evaluated_examples_are_whole_batches(batch_size: int, wanted: int, there: int, expected: int) -> None:
    """Distinct ones where there are enough; where not even a batch is held out, all of them come again."""
    workload = Workload(
        data="digits", model="mlp", batch_size=batch_size, held_out=there / 1797, evaluate_every=1,
        evaluation_examples=wanted,
    )  # fmt: skip
    inputs, targets = held_out_examples(workload)
    assert len(inputs) == len(targets) == expected
    assert len({x.numpy().tobytes() for x in inputs}) == min(expected, there)
    assert torch.equal(held_out_examples(workload)[0], inputs)
    tested, _ = dataset_of(workload).test_batch(10**6, seed=0)
    assert {x.numpy().tobytes() for x in inputs} <= {x.numpy().tobytes() for x in tested}


def test_an_evaluation_changes_nothing_and_has_no_dropout() -> None:
    workload = EVALUATED.model_copy(update={"model": f"{with_dropout.__module__}:with_dropout", "model_options": {}})
    workload = Workload.model_validate(workload.model_dump() | {"data": "digits"})
    layers = build_layers(workload, Draw(), CPU)
    model, held = WholeModel(layers, workload), HeldOut(workload, 8, CPU)
    frozen = next(layers.children())
    frozen.eval()
    before = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    first, again = held.loss(model), held.loss(model)
    assert first == again
    assert all(torch.equal(tensor, before[name]) for name, tensor in layers.state_dict().items())
    assert all(parameter.grad is None for parameter in layers.parameters())
    assert layers.training and not frozen.training, "what was frozen stays"
    with pytest.raises(RuntimeError), evaluating([layers]):
        assert not torch.is_grad_enabled() and not any(module.training for module in layers.modules())
        raise RuntimeError
    assert layers.training and torch.is_grad_enabled()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [("weights_here_and_there", {}), ("Images", {}), ("with_garbage", {"call": 99, "factor": "1"})]
)
def test_what_a_layer_keeps_is_kept_once_where_it_runs_again(name: str, options: dict[str, Any], twice: bool) -> None:
    """A batch norm's statistics, with two microbatches on their way; a backward pass in two parts runs it twice."""
    workload = Workload.model_validate(
        EVALUATED.model_dump() | {"model": f"tests.own_models:{name}", "model_options": options, "data": "digits"}
    )
    kept = []
    for recompute in (False, True):
        layers = build_layers(workload, Draw(), CPU, recompute=recompute)
        outputs = []
        for layers.microbatch in range(2):
            x, _ = dataset_of(workload).batch(layers.microbatch, 8, seed=0)
            outputs.append(layers(x))
        own = dict(layers.named_buffers())
        for output in outputs:
            for again in range(1 + twice):
                output.sum().backward(retain_graph=twice and not again)
        assert all(held is own[key] for key, held in layers.named_buffers())
        kept.append(layers.state_dict())
    assert all(torch.equal(tensor, kept[1][key]) for key, tensor in kept[0].items())
    fresh = build_layers(workload, Draw(), CPU).state_dict()
    assert not all(torch.equal(tensor, fresh[key]) for key, tensor in kept[0].items())


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_layer_that_runs_again_computes_what_it_did(num_microbatches: int) -> None:
    """Also where it read a buffer that later microbatches have changed: gradients are those without recomputation."""
    workload = Workload.model_validate(
        EVALUATED.model_dump() | {"model": "tests.own_models:Centring", "model_options": {}, "data": "digits"}
    )
    gradients = []
    for recompute in (False, True):
        layers = build_layers(workload, Draw(), CPU, recompute=recompute)
        for step in range(2):
            outputs = []
            for layers.microbatch in range(num_microbatches):
                x, _ = dataset_of(workload).batch(step * num_microbatches + layers.microbatch, 8, seed=0)
                outputs.append(layers(x))
            for output in outputs:
                output.square().sum().backward()
        gradients.append({name: weight.grad for name, weight in layers.named_parameters()})
        gradients[-1] |= dict(layers.named_buffers())
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("lost", [*itertools.combinations(range(2, 7), 1), *itertools.combinations(range(2, 7), 2), ()])
def test_losses_are_of_the_steps_that_they_are_said_to_be_of(lost: tuple[int, ...], tmp_path: Path) -> None:
    """Where lines are lost: of a training that goes on elsewhere, or after a power failure."""
    progress = tmp_path / "progress.jsonl"
    for step in range(2, 7):
        if step not in lost:
            tell(progress, step=step, loss=step / 2, seconds=0.1)
    first, losses = last_losses(progress, 2)
    assert losses == tuple(step / 2 for step in range(first, first + len(losses)))
    last = max(step for step in range(2, 7) if step not in lost)
    before = [step for step in lost if step < last]
    assert (first, first + len(losses)) == (max(before, default=1) + 1, last + 1)
    assert last_losses(tmp_path / "none", 2) == (2, ())


@pytest.mark.parametrize("data", ["text", "digits", "synthetic"])
def test_nothing_to_evaluate_is_said(data: str) -> None:
    shape = {"synthetic": {"num_classes": 9}} if data == "synthetic" else {}
    said = f"evaluate_every is 5, but held_out is 0 and data '{data}' has no test part of its own; wanted a share"
    with pytest.raises(ValidationError, match=said):
        Workload.model_validate({"data": data, "evaluate_every": 5, **shape})
    Workload.model_validate({"data": data, "evaluate_every": 5, "held_out": 0.1, **shape})


def test_a_part_too_small_to_hold_anything_out_is_said_before_ranks_start() -> None:
    small = {"data": "digits", "model": "mlp", "model_options": {}, "held_out": 1e-9, "evaluate_every": 5}
    workload = Workload.model_validate(TINY.model_dump() | small)
    with pytest.raises(InputError, match=r"held_out 1e-09 leaves 1,797 examples to train on and 0 to test on"):
        check_data(workload)


def test_trials_are_remembered_whatever_is_evaluated() -> None:
    keys = {TrialSpec(EVALUATED.model_copy(update={"evaluate_every": every}), DRAW, 3).key for every in (0, 3, 7)}
    assert len(keys) == 1


def test_the_summary_says_how_it_went() -> None:
    assert held_out([Evaluation(9, 2.0)]) == "loss 2.0000 after 10 steps"
    assert held_out([Evaluation(9, 2.0), Evaluation(19, 1.5)]) == "loss 2.0000 after 10 steps, 1.5000 after 20"
    rising = [Evaluation(9, 2.0), Evaluation(19, 1.0), Evaluation(29, 1.5)]
    assert held_out(rising).endswith("1.5000 after 30; the least was 1.0000 after 20")


JUNK = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"\0" * 64, b"[1]", b"3", b'"step"', b"{}", b'{"loss": 1}', b'{"step": 2, "lo', b"\xff\xfe", b"null"]
    ),
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 9), JUNK), max_size=12))
def test_what_a_killed_rank_or_a_power_failure_left_costs_no_other_line_of_progress(told: list[int | bytes]) -> None:
    """Each line that is told afterwards is read, whatever is between: steps and evaluations.

    A training that goes back to a step has not trained it, nor those after it.
    """
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress.jsonl"
        for one in told:
            if isinstance(one, bytes):
                with progress.open("ab") as file:
                    file.write(one)
                continue
            tell(progress, step=one, loss=one / 2, seconds=0.1)
            tell(progress, step=one, loss=one / 2, seconds=0.1, held_out_loss=one / 4)
        steps = list[int]()
        for one in told:
            if isinstance(one, int):
                steps = [*(step for step in steps if step < one), one]
        assert read_losses(progress) == {step: step / 2 for step in steps}
        assert [tuple(row) for row in read_evaluations(progress)] == [(step, step / 4) for step in steps]
