"""Weights in the host's memory: the same gradients to the last bit, and on the device only while their layer runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dejavu.graphs import offload
from dejavu.init import Draw
from dejavu.plans import Offload, StageConfiguration
from dejavu.plans.stage_costs import PlanError
from dejavu.runtime.batches import Reader
from dejavu.runtime.training import Layers, WholeModel, build_layers
from tests.test_models import ZOO
from tests.test_offload import CPU, gradients

WEIGHTS, ALL = Offload(None, "host", "host"), Offload("host", "host", "host")


class Fetches:
    """The copies of weights: which are there, and how many bytes have come."""

    def __init__(self) -> None:
        self.known: list[tuple[StorageWeakRef, int]] = []
        self.moved_bytes = self.most_bytes = 0

    @property
    def there_bytes(self) -> int:
        return sum(size for copy, size in self.known if not copy.expired())

    def note(self, copy: torch.Tensor) -> None:
        self.known.append((StorageWeakRef(copy.untyped_storage()), copy.nbytes))
        self.moved_bytes += copy.nbytes
        self.most_bytes = max(self.most_bytes, self.there_bytes)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    found, plain = Fetches(), offload._fetched

    def told(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = plain(weight, device)
        found.note(copy)
        return copy

    monkeypatch.setattr(offload, "_fetched", told)
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_the_same_to_the_last_bit(name: str, recompute: bool) -> None:
    plain = gradients(name, recompute=recompute)
    for away in (WEIGHTS, ALL):
        again = gradients(name, recompute=recompute, offload=away)
        assert len(plain) == len(again) > 0
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def layers_and_batch(name: str, **options: Any) -> tuple[Layers, torch.Tensor, torch.Tensor]:
    layers = build_layers(ZOO[name], Draw(), CPU, **options)
    _, inputs, targets = next(iter(Reader(ZOO[name], range(1), None)))
    return layers, inputs, targets


def bytes_of(layer: nn.Module) -> int:
    return sum(weight.nbytes for weight in layer.parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_a_layer_s_weights_are_there_while_it_runs(name: str, recompute: bool, fetches: Fetches) -> None:
    """One layer's at a time, twice in each microbatch, and nothing stays; going backward only what operators saved."""
    layers, inputs, targets = layers_and_batch(name, recompute=recompute, offload=WEIGHTS)
    number, sizes = ZOO[name].num_microbatches, [bytes_of(layer) for layer in layers]
    with torch.no_grad():
        layers(inputs.chunk(number)[0])
    assert (fetches.moved_bytes, fetches.there_bytes) == (sum(sizes), 0)
    WholeModel(layers, ZOO[name])(0, inputs, targets)
    assert fetches.there_bytes == 0 and fetches.most_bytes == max(sizes)
    assert (1 + number) * sum(sizes) < fetches.moved_bytes <= (1 + 2 * number) * sum(sizes)


def weights_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    return ((name, id(weight)) for name, weight in module.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("name", ["gpt", "user_tied", "wide_resnet"])
def test_a_module_has_its_own_weights_again_also_when_it_failed(name: str) -> None:
    layers, inputs, _ = layers_and_batch(name, offload=WEIGHTS)
    before = list(weights_of(layers))
    layers(inputs[:2])
    assert list(weights_of(layers)) == before
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)):
        layers(torch.zeros(1, 1, 1, 1, 1))
    assert list(weights_of(layers)) == before


@pytest.mark.parametrize("shared", [{"tensor_parallel": 2}, {"data_parallel": 2, "zero_level": 1}])
def test_weights_that_devices_share_are_not_fetched(shared: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=r"wanted tensor_parallel 1, and zero_level 0 where there are replicas"):
        StageConfiguration("core", 1, 2, **{"data_parallel": 1, **shared}, offload=WEIGHTS)
    StageConfiguration("core", 1, 2, 2, offload=WEIGHTS)


def test_weights_take_the_optimizer_s_state_with_them() -> None:
    assert Offload.from_json({"parameters": "host"}) == WEIGHTS
    for optimizer in (None, "nvme"):
        with pytest.raises(PlanError, match="and with them the optimizer's state on the 'host'"):
            Offload(None, optimizer, "host")  # type: ignore[arg-type]
