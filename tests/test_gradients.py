"""Garbage among the gradients of one rank (fault 35): what is not finite ends an attempt, what is too large is said.

The loss of the step is as it would be without: only the gradients tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dejavu.launch.launcher import RankError, launch
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.process.gradients import LEAST_STEPS, SUDDEN, GradientWatch, gradient_norm
from dejavu.runtime.state import (
    checkpoint_step,
    complete_checkpoints,
    first_not_finite,
    given_not_finite,
    read_checkpoint,
)
from dejavu.workload import Workload
from dejavu.workload.models import layers_of
from tests import own_models
from tests.conftest import TINY
from tests.launching import TOLERANCE, job_of, largest_difference, runtime_processes

STEP = 20  # counted from 0


def parameter(*values: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(values)))
    made.grad = torch.tensor(values)
    return made


def test_the_norm_of_finite_gradients_is_finite() -> None:
    assert gradient_norm([]) == 0.0
    assert gradient_norm([parameter(3.0), nn.Parameter(torch.zeros(2)), parameter(0.0, 4.0)]) == pytest.approx(5.0)
    assert gradient_norm([parameter(3e30), parameter(4e30)]) == pytest.approx(5e30)
    for bad in (math.nan, math.inf):
        assert not math.isfinite(gradient_norm([parameter(1.0), parameter(bad)]))


def test_who_was_sent_garbage_lets_the_one_who_sent_it_fail_first(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    arrived: list[bool] = [True]
    watch = GradientWatch(1, "here", {3: module}, lambda stage: arrived[0], tmp_path / "warnings.txt")
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    watch.look(6)
    assert watch.garbage == "the gradient of stage 3 in step 7 is nan"
    other = GradientWatch(0, "here", {0: module}, lambda stage: False, tmp_path / "warnings.txt")
    other.look(6)
    assert not other.garbage
    other.look(7)
    assert other.garbage == "the gradient that stage 0 received in step 7 is nan"


def test_a_jump_is_said_once_something_is_usual(tmp_path: Path) -> None:
    module = nn.Linear(1, 1, bias=False)
    watch = GradientWatch(1, "beta", {2: module}, lambda stage: True, tmp_path / "warnings.txt")
    for step, norm in enumerate([SUDDEN * 2, *[1.0] * LEAST_STEPS, SUDDEN / 2, SUDDEN * 2, 1.0, 0.0]):
        module.weight.grad = torch.full((1, 1), norm)
        watch.look(step)
    (said,) = watch.warnings.read_text().splitlines()
    assert said.startswith(f"step {LEAST_STEPS + 3}: the gradient of stage 2 (rank 1 on beta) has the norm 2e+03, ")
    assert not watch.garbage


def test_what_is_made_infinite_and_never_trained_may_stay_so() -> None:
    """All else that is or becomes no finite number is named: a weight, and what a layer keeps of its inputs."""
    module = own_models.on_infinities().append(nn.BatchNorm1d(10))
    given = given_not_finite(module)
    assert given == {"model.1.mask", "model.1.unset", "model.2.mask", "model.2.unset"}

    def found() -> str | None:
        return first_not_finite({f"model.{name}": one for name, one in module.state_dict().items()}, given)

    assert found() is None
    for name, tensor in module.state_dict().items():
        if f"model.{name}" not in given and tensor.is_floating_point():
            kept = tensor.clone()
            for bad in (math.nan, math.inf):
                tensor.fill_(bad)
                assert found() == f"model.{name}"
            assert (f"model.{name}" in given_not_finite(module)) == ("running" in name)
            tensor.copy_(kept)


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    yield
    assert not runtime_processes()


def job(folder: Path, factor: float, once: str = "") -> TrainingJob:
    """Three stages, of which the second makes garbage in the last microbatch of a step."""
    call = (STEP + 1) * TINY.num_microbatches
    changes: dict[str, Any] = {
        "model": "tests.own_models:with_garbage",
        "model_options": {"call": call, "factor": str(factor), "once": once},
        "data": "digits",
        "num_steps": 30,
        "checkpoint_every": 7,
    }
    return job_of(Workload.model_validate({**TINY.model_dump(), **changes}), folder / "run", (2, 3))


@pytest.mark.integration
@pytest.mark.usefixtures("nothing_left_behind")
def test_masks_of_infinities_are_kept_with_the_weights(tmp_path: Path) -> None:
    """Such a training ended at its first checkpoint, as one that had diverged."""
    fields = {"model": "tests.own_models:on_infinities", "model_options": {}, "data": "digits", "checkpoint_every": 2}
    trained = job_of(TINY.model_copy(update=fields), tmp_path / "run", (2,))
    result = launch(trained)
    assert largest_difference(trained.workload, result.losses) < TOLERANCE and result.restarts == 0
    state = read_checkpoint(complete_checkpoints(trained.checkpoints)[-1], {"1", "2"})
    for name, tensor in own_models.on_infinities().state_dict().items():
        if "mask" in name or "unset" in name:
            assert torch.equal(state[f"model.{name}"].nan_to_num(), tensor.nan_to_num())


@pytest.mark.integration
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_gradient_that_is_no_number_ends_at_the_last_good_checkpoint(tmp_path: Path) -> None:
    trained = job(tmp_path, math.nan)
    wanted = r"rank 1 on localhost: DivergedError: the gradient of stage 1 in step 21 is nan, .*step-00000014"
    with pytest.raises(RankError, match=wanted) as said:
        launch(trained)
    assert "Traceback" not in str(said.value)
    kept = complete_checkpoints(trained.checkpoints)[-1]
    state = read_checkpoint(kept, {builder.name for builder in layers_of(trained.workload)})
    assert first_not_finite(state) is None and checkpoint_step(kept) == 14


@pytest.mark.integration
@pytest.mark.usefixtures("nothing_left_behind")
def test_garbage_that_does_not_come_again_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    result = launch(job(tmp_path, math.inf, str(tmp_path / "once")))
    assert (result.restarts, result.resumed_from_step) == (1, 14)
    assert any("rank 1 (stage 1 on localhost)" in failure for failure in result.failures)
    assert len(result.losses) == 30 and all(map(math.isfinite, result.losses))


@pytest.mark.integration
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_gradient_that_is_far_too_large_is_said_with_step_and_stage(tmp_path: Path) -> None:
    result = launch(job(tmp_path, 1e8))
    assert result.restarts == 0 and all(map(math.isfinite, result.losses))
    named = [said.partition(" has the norm ")[0] for said in result.warnings]
    garbage, after = (f"step 21: the gradient of stage {stage} (rank {stage} on localhost)" for stage in (1, 0))
    assert garbage in named and set(named) <= {garbage, after}, "the stage before it was sent what it made"
