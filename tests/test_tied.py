"""Tied weights: an embedding and a head with one matrix, on whatever stages they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.pipeline.plans import by_hand, even_bounds, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_all
from dejavu.cluster import load_cluster
from dejavu.cost.memory import configuration_memory
from dejavu.graphs.capture import capture
from dejavu.init import SCHEMES, Draw
from dejavu.parallelism import Parallelism
from dejavu.planning.prices import price_workload
from dejavu.plans import StageConfiguration
from dejavu.plans.schedule import SCHEDULES
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.single import train_single
from dejavu.runtime.state import read_trial
from dejavu.runtime.training import WholeModel, build_layers
from dejavu.workload import OptimizerSettings, TrialSettings, Workload
from dejavu.workload.data import dataset_of

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
STEPS, MICROBATCHES, DRAW = 4, 4, Draw("depth_scaled", seed=5)
BLOCKS = 4
EMBEDDING, HEAD = "embedding.token.weight", "head.logits.weight"
SPREADS: dict[str, tuple[StageConfiguration, ...]] = {
    "replicas": (one_device(data_parallel=2), one_device(data_parallel=2)),
    "uneven_replicas": (one_device(data_parallel=3), one_device()),
    "shards": (one_device(tensor_parallel=2), one_device(tensor_parallel=2)),
    "shards_and_replicas": (one_device(tensor_parallel=2), one_device(data_parallel=2)),
    "zero_1": (one_device(data_parallel=2, zero_level=1), one_device()),
    "zero_3": (one_device(data_parallel=2, zero_level=3), one_device(data_parallel=2, zero_level=3)),
}


def workload(**fields: object) -> Workload:
    options = {"num_blocks": BLOCKS, "width": 16, "num_heads": 2, "tied": True}
    given = {"model_options": options, "sequence_length": 12, "batch_size": 24, "num_microbatches": MICROBATCHES}
    optimizer = OptimizerSettings(learning_rate=0.01, weight_decay=0.1, clip_norm=0.5)
    return Workload(**{**given, "optimizer": optimizer, "num_steps": STEPS, "trials": TrialSettings(count=0), **fields})


def really_tied(workload: Workload, draw: Draw) -> list[float]:
    """Losses of plain torch, where both layers have one and the same parameter."""
    module = build_layers(workload, draw, torch.device("cpu"))
    module.get_submodule("head.logits").weight = module.get_submodule("embedding.token").weight
    settings, dataset = workload.optimizer, dataset_of(workload)
    optimizer = torch.optim.AdamW(module.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    losses = []
    for step in range(workload.num_steps):
        inputs, targets = dataset.batch(step, workload.batch_size, seed=workload.seed)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if not scheme.calibrated])
def test_one_process_trains_as_if_there_were_one_matrix(scheme: str) -> None:
    draw = Draw(scheme, seed=3)
    assert train_single(workload(), draw, range(STEPS)) == pytest.approx(really_tied(workload(), draw), abs=TOLERANCE)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_ends_stay_equal_to_the_last_bit(scheme: str, tmp_path: Path) -> None:
    """Also where a scheme rescales layers one by one on a batch."""
    train_single(workload(), Draw(scheme, seed=3), range(STEPS), save_to=tmp_path / "state")
    state = read_trial(tmp_path / "state", {"embedding", "head"})
    assert torch.equal(state[f"model.{EMBEDDING}"], state[f"model.{HEAD}"])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("span", [(0, None), (BLOCKS, None)])
def test_every_draw_gives_both_ends_the_same_values(scheme: str, span: tuple[int, int | None]) -> None:
    """Also on a rank that has the head alone."""
    whole = build_layers(workload(), Draw(scheme, seed=1), torch.device("cpu"))
    part = build_layers(workload(), Draw(scheme, seed=1), torch.device("cpu"), *span)
    assert torch.equal(whole.get_parameter(EMBEDDING), part.get_parameter(HEAD))


@pytest.mark.parametrize("name", ["frozen", "looked up without gradients"])
def test_a_tied_weight_may_have_no_gradient_at_an_end(name: str) -> None:
    """At none, and it stays as it was; or where rows are looked up, and both ends follow the other's."""
    asked = workload()
    layers, twin = (build_layers(asked, DRAW, torch.device("cpu")) for _ in range(2))
    ends = EMBEDDING, HEAD
    if name == "frozen":
        for end in ends:
            layers.get_parameter(end).requires_grad_(False)
            twin.get_parameter(end).requires_grad_(False)
    for module in (layers, twin):
        module.get_submodule("embedding.token").register_forward_hook(lambda _, __, found: found.detach())
    twin.get_submodule("head.logits").weight = twin.get_submodule("embedding.token").weight
    before, model, plain = layers.get_parameter(HEAD).detach().clone(), WholeModel(layers, asked), asked.optimizer
    made = make_optimizer(plain, layers.parameters())
    own = torch.optim.AdamW(twin.parameters(), plain.learning_rate, weight_decay=plain.weight_decay)
    for step in range(2):
        inputs, targets = dataset_of(asked).batch(step, asked.batch_size, seed=asked.seed)
        made.zero_grad(set_to_none=False)
        model(step, inputs, targets)
        made.step()
        own.zero_grad()
        nn.functional.cross_entropy(twin(inputs).flatten(0, -2), targets.flatten()).backward()
        own.step()
    first, last = (layers.get_parameter(end) for end in ends)
    assert torch.equal(first, last)
    torch.testing.assert_close(last, twin.get_parameter(HEAD), atol=TOLERANCE, rtol=0)
    assert torch.equal(last, before) == (name == "frozen")


def cases() -> dict[str, TrainingJob]:
    found = {}
    for name in SCHEDULES:
        per_rank = SCHEDULES[name].stages_per_rank
        bounds = even_bounds(BLOCKS + 2, 2 * per_rank)
        found[name] = job_of(workload(), by_hand(name, bounds, [one_device()] * 2, MICROBATCHES), STEPS, DRAW)
    for name, ranks in SPREADS.items():
        found[name] = job_of(workload(), by_hand("1f1b", (0, 2, BLOCKS + 2), ranks, MICROBATCHES), STEPS, DRAW)
    return found


CASES = cases()


SLOW = dict.fromkeys(("shards", "zero_1", "zero_3"), pytest.mark.slow)  # their weights are DTensors, as others' are


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, Trained]:
    """The cases that are asked for; those of shards in launches of their own, but for what has the most ranks."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in CASES if name in asked]
    return dict(zip(names, train_all([CASES[name] for name in names]), strict=True))


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return really_tied(workload(), DRAW)


@pytest.mark.integration
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in CASES])
def test_tied_ends_on_different_stages_train_as_one_matrix(
    name: str, trained: dict[str, Trained], alone: list[float]
) -> None:
    assert trained[name].losses == pytest.approx(alone, abs=TOLERANCE)


def test_both_ends_are_priced_what_they_tell_each_other() -> None:
    """Two messages of the gradient over the slowest link of the device's type, once a step; all else is as untied."""
    cluster = load_cluster(CLUSTERS / "4x8-v100.yaml")
    options = {"num_blocks": BLOCKS, "width": 64, "num_heads": 4}
    tied, untied = (
        price_workload(workload(model_options={**options, "tied": one}), cluster, Path("nowhere"), Parallelism())
        for one in (True, False)
    )
    graph = capture(workload(model_options={**options, "tied": True}))
    matrix_bytes = dataset_of(workload()).shape.num_classes * 64 * 4
    assert [layer.tied_bytes for layer in graph.layers] == [matrix_bytes, *[0] * BLOCKS, matrix_bytes]
    more = np.asarray(tied.problem.costs.per_step_seconds_CL) - np.asarray(untied.problem.costs.per_step_seconds_CL)
    (link,) = {link for pair, link in cluster.links_between.items()}
    message = 2 * (link.latency_seconds + matrix_bytes / link.bytes_per_second)
    expected = np.array([message, *[0.0] * BLOCKS, message])
    assert more == pytest.approx(np.broadcast_to(expected, more.shape))
    assert tied.problem.costs.seconds_CL == pytest.approx(untied.problem.costs.seconds_CL)


@pytest.mark.parametrize(
    "one", [one_device(), one_device(tensor_parallel=2), one_device(data_parallel=2, zero_level=3)], ids=str
)
def test_memory_has_room_for_the_sum_of_both_ends(one: StageConfiguration) -> None:
    """While gradients are summed each device has the other end's, and its own whole where it has a part of it."""
    asked = workload(model_options={"num_blocks": BLOCKS, "width": 64, "num_heads": 4, "tied": True})
    graph = capture(asked)
    device = load_cluster(CLUSTERS / "4x8-v100.yaml").device_types["V100-SXM2-16GB"]
    found = configuration_memory(replace(one, device_type=device.name), graph, asked, device, 0.0)
    whole = graph.layers[0].tied_bytes
    assert whole > 0
    assert found.step_bytes_L[[0, -1]].min() >= (1 if one.num_devices == 1 else 2) * whole
