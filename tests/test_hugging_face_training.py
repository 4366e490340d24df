"""Every family of transformers' models as pipelines of real ranks: the losses of one process, wherever it is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_in_turn
from dejavu.init import Draw, draw_layer
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.single import train_single
from dejavu.workload import OptimizerSettings, TrialSettings, Workload
from dejavu.workload.models import layers_of
from tests.conftest import asked, some
from tests.test_hugging_face import CONFIGS, needs_transformers

TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
STEPS = 3
one = one_device()
SPLIT = ("llama", "mistral", "qwen2")  # by sequence among tensor-parallel devices
WHOLE = ("bert", "t5")  # each device has whole sequences
BY_SEQUENCE, SHARED = "split by sequence", "2 share a sequence"


def plans(count: int) -> dict[str, tuple[str, tuple[int, ...], list]]:
    """Ways to train a model of so many layers on at most three cores."""
    return {
        "uneven cuts": ("1f1b", (0, 1, count - 1, count), [one] * 3),
        "2 replicas and 1, clipped": ("zbv", (0, 1, 2, 3, count), [one_device(2), one]),
        "recomputed, ZeRO 2": ("1f1b", (0, 2, count), [one_device(2, recompute=True, zero_level=2), one]),
    }


EVERY = [(kind, name) for kind in CONFIGS for name in plans(6)]
IN_TURN = [EVERY[3 * k + k % 3] for k in range(len(CONFIGS))]  # each model in one way
SPLIT_CASES = [(kind, BY_SEQUENCE) for kind in SPLIT] + [(kind, SHARED) for kind in CONFIGS if kind not in WHOLE]


def workload_of(kind: str, folder: Path) -> Workload:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    return Workload(
        model=f"hf:{path}",
        sequence_length=24,
        batch_size=16,
        num_microbatches=4,
        num_steps=STEPS,
        optimizer=OptimizerSettings(learning_rate=1e-2, clip_norm=1.0),
        trials=TrialSettings(count=0),
    )


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[TrainingJob, Trained]]:
    folder, cases = tmp_path_factory.mktemp("configs"), asked(request.session, "case")
    jobs = {}
    for kind in CONFIGS:
        workload = workload_of(kind, folder)
        for name, (schedule, bounds, ranks) in plans(len(layers_of(workload))).items():
            jobs[kind, name] = job_of(workload, by_hand(schedule, bounds, ranks, 4), STEPS)
        if kind in SPLIT:
            bounds, shards = (0, 1, 2, 3, len(layers_of(workload))), one_device(1, 2, sequence_parallel=True)
            jobs[kind, BY_SEQUENCE] = job_of(workload, by_hand("zbv", bounds, [one, shards], 4), STEPS)
        if kind not in WHOLE:
            bounds, sharing = (0, 2, len(layers_of(workload))), one_device(2, context_parallel=2)
            jobs[kind, SHARED] = job_of(workload, by_hand("1f1b", bounds, [sharing, one], 4), STEPS)
    jobs = {case: job for case, job in jobs.items() if case in cases}
    return {case: (jobs[case], done) for case, done in zip(jobs, train_in_turn(list(jobs.values())), strict=True)}


_singles: dict[str, list[float]] = {}


def single(job: TrainingJob) -> list[float]:
    """What one process finds."""
    if job.workload.model not in _singles:
        _singles[job.workload.model] = train_single(job.workload, job.draw, range(STEPS))
    return _singles[job.workload.model]


@needs_transformers
@pytest.mark.integration
@pytest.mark.parametrize("case", some(EVERY, IN_TURN), ids=", ".join)
def test_losses_are_those_of_one_process(
    case: tuple[str, str], trained: dict[tuple[str, str], tuple[TrainingJob, Trained]]
) -> None:
    job, found = trained[case]
    expected = single(job)
    assert found.losses == pytest.approx(expected, abs=TOLERANCE)
    assert expected[-1] < expected[0]


@needs_transformers
@pytest.mark.integration
@pytest.mark.parametrize("case", some(SPLIT_CASES, SPLIT_CASES[::2]), ids=", ".join)
def test_losses_of_a_split_sequence_are_those_of_one_process(
    case: tuple[str, str], trained: dict[tuple[str, str], tuple[TrainingJob, Trained]]
) -> None:
    job, found = trained[case]
    assert found.losses == pytest.approx(single(job), abs=TOLERANCE)


@needs_transformers
@pytest.mark.parametrize("scheme", ["default", "xavier", "orthogonal"])
def test_each_expert_is_drawn_as_a_matrix_of_its_own(scheme: str, tmp_path: Path) -> None:
    """Its deviation follows from its own fans, not from those of the stack of all."""
    builder = layers_of(workload_of("mixtral", tmp_path))[1]
    block = draw_layer(builder, Draw(scheme, seed=1), position=1, depth=4)
    stack = block.get_parameter("block.mlp.experts.down_proj")  # (experts, width, inner)
    linear = torch.empty(stack.shape[1:])
    expected = 0.02
    if scheme == "xavier":
        expected = torch.nn.init.xavier_uniform_(linear).std().item()
    elif scheme == "orthogonal":
        expected = torch.nn.init.orthogonal_(linear).std().item()
    assert stack.std().item() == pytest.approx(expected, rel=0.1)
    assert not torch.equal(stack[0], stack[1])
