"""A layer is taken from a whole module, of whose other layers no weight is drawn, nor its memory touched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.init import Draw, draw_layer
from dejavu.runtime.single import train_single
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of
from dejavu.workload.models.user import UserModel
from dejavu.workload.models.user.waiting import LEAST_BYTES, values_when_read
from tests.own_models import Heavy, heavy
from tests.test_user_models import STEPS, TOLERANCE, workload_of

WORKLOAD = workload_of("heavy")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def test_memory_of_other_layers_is_not_touched() -> None:
    """Of twenty layers of 16 MiB one is wanted."""
    grown = list[int]()

    def make() -> nn.Sequential:
        before = psutil.Process().memory_info().rss
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), *(nn.Linear(2048, 2048) for _ in range(20)))
        grown.append(psutil.Process().memory_info().rss - before)
        return made

    builder = UserModel(make).layers(dataset_of(WORKLOAD).shape)[5]
    grown.clear()
    layer = builder.build()
    assert len(grown) == 1 and grown[0] < 64 * 2**20
    assert float(layer.get_parameter("weight").detach().std()) == pytest.approx(1 / (3 * 2048) ** 0.5, rel=0.01)


def test_values_are_those_that_constructors_give() -> None:
    with values_when_read():
        found = Heavy()
    assert found.drawn.weight.numel() * 4 >= LEAST_BYTES
    bound = 1 / 32
    for drawn in (found.drawn.weight, found.frozen.weight):
        assert 0.99 * bound < float(drawn.detach().abs().max()) <= bound
        assert float(drawn.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.01)
    assert not torch.equal(found.drawn.weight, found.frozen.weight)
    assert torch.equal(found.copied.weight, found.frozen.weight)
    assert not found.words.weight[1].any() and float(found.words.weight.detach().std()) == pytest.approx(1, rel=0.01)
    assert 0.24 < float(found.cut.abs().max()) <= 0.25
    expected = torch.zeros(1024, 1024)
    expected[:, 0], expected[:, 1] = 1, 2
    assert torch.equal(found.columns, expected)
    norms = found.turned.parametrizations["weight"]
    torch.testing.assert_close(norms.original0[:, 0], norms.original1.norm(dim=1))
    assert 0.49 < float(found.attribute.mean()) < 0.51 and 0.99 < float(found.attribute.max()) <= 1
    found(torch.randn(2, 1024))[:, 0].sum().backward()
    assert found.drawn.weight.grad is not None
    assert 0.49 < float((found.drawn.weight.grad != 0).float().mean()) < 0.51, "its hook's mask"


def test_small_weights_are_drawn_as_ever_and_large_ones_whatever_is_read() -> None:
    def made(reads: bool) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        with values_when_read():
            small, one = nn.Linear(16, 16), nn.Linear(1024, 1024)
            first = one.weight.sum().item() if reads else None
            two = nn.Linear(1024, 1024)
            assert first != two.weight.sum().item()
            if not reads:
                del one
        return small.weight, two.weight, two.bias

    torch.manual_seed(0)
    assert torch.equal(made(True)[0], (torch.manual_seed(0), nn.Linear(16, 16))[1].weight)
    for read, unread in zip(made(True), made(False), strict=True):
        assert torch.equal(read, unread)


def test_a_cycle_and_a_generator_of_one_s_own_change_no_value() -> None:
    def drawn(collects: bool) -> Any:
        torch.manual_seed(0)
        with values_when_read():
            cycle: Any = nn.Linear(1024, 1024)
            cycle.itself = [cycle]
            del cycle
            if collects:
                gc.collect()
            own = torch.empty(1024, 1024).normal_(generator=torch.Generator().manual_seed(5))
            kept = nn.Linear(1024, 1024)
        return own, kept.weight

    own, weight = drawn(True)
    assert torch.equal(own, torch.empty(1024, 1024).normal_(generator=torch.Generator().manual_seed(5)))
    assert torch.equal(drawn(False)[1], weight)


def test_every_process_draws_the_same_layer() -> None:
    builders = layers_of(WORKLOAD)
    layers = [draw_layer(builders[1], Draw(), position=1, depth=len(builders)) for _ in range(2)]
    for one, two in zip(layers[0].state_dict().values(), layers[1].state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(layers[0].attribute, layers[1].attribute)
    assert set(layers[0].state_dict()) == set(heavy()[1].state_dict())


@pytest.mark.integration
def test_losses_are_one_process_s() -> None:
    plan = by_hand("1f1b", (0, 1, 3), [one_device(), one_device(2)], 4)
    (trained,) = train_in_turn([job_of(WORKLOAD, plan, STEPS)])
    assert trained.losses == pytest.approx(train_single(WORKLOAD, Draw(), range(STEPS)), abs=TOLERANCE)
