"""Sums of gradients beside the last backward pass: each gradient once, in one order, as soon as it is whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dejavu.runtime.gradients.overlapped import BUCKETS, LEAST_BYTES, OverlappedSum

REPLICAS = 3  # that have the same gradient: a sum is so many times as much
CPU = torch.device("cpu")


class Sums:
    """What was summed: how many weights' gradients were whole by then, and the numbers in it."""

    def __init__(self) -> None:
        self.whole: list[int] = []
        self.sizes: list[int] = []
        self.arrived = 0

    def all_reduce(self, flat: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.MAX:  # which weights have gradients: those of all replicas do
            return None
        flat *= REPLICAS
        self.whole.append(self.arrived)
        self.sizes.append(flat.numel())

        class Done:
            def wait(self) -> None: ...

        return Done() if async_op else None


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sums]:
    found = Sums()
    monkeypatch.setattr(dist, "all_reduce", found.all_reduce)
    yield found


def layers(rng: torch.Generator, count: int, width: int) -> nn.Sequential:
    """Layers of unequal sizes, some frozen, one used twice."""
    made: list[nn.Module] = []
    for _ in range(count):
        layer = nn.Linear(width, width, bias=bool(torch.randint(2, (), generator=rng)))
        layer.requires_grad_(bool(torch.randint(4, (), generator=rng)))
        made.append(layer)
    made.insert(0, nn.Linear(width, width))
    return nn.Sequential(*made, made[0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [8, 300])
def test_each_gradient_is_summed_once_in_one_order(seed: int, width: int, sums: Sums) -> None:
    rng = torch.Generator().manual_seed(seed)
    module, count = layers(rng, 2 + seed, width), 1 + seed % 3
    weights = [one for one in module.parameters() if one.requires_grad]
    handles = [
        one.register_post_accumulate_grad_hook(lambda one: setattr(sums, "arrived", sums.arrived + 1))
        for one in weights
    ]
    overlapped = OverlappedSum(module, object(), CPU)  # type: ignore[arg-type]
    orders = list[list[int]]()
    for _ in range(3):
        batches = [torch.randn(4, width, generator=rng) for _ in range(count)]
        module.zero_grad()
        for k, x in enumerate(batches):
            sums.arrived = 0
            before = len(sums.sizes)
            if k == count - 1:
                overlapped.begin()
            module(x).square().sum().backward()
            assert k == count - 1 or len(sums.sizes) == before, "nothing is summed before the last pass"
        overlapped.send_rest()
        overlapped.wait()
        found = [one.grad.clone() for one in weights if one.grad is not None]
        orders.append(sums.sizes[:])
        sums.sizes.clear()
        module.zero_grad()
        for x in batches:
            module(x).square().sum().backward()
        for own, one in zip(found, weights, strict=True):
            assert one.grad is not None
            torch.testing.assert_close(own, REPLICAS * one.grad)
    assert orders[0] == orders[1] == orders[2] and sum(orders[0]) == sum(one.numel() for one in weights)
    for handle in handles:
        handle.remove()


def test_sums_begin_before_the_pass_has_ended(sums: Sums) -> None:
    """From the second step on: the first finds out which weights have gradients."""
    width, count = 600, 2 * BUCKETS
    assert 4 * width * width > LEAST_BYTES
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    for one in module.parameters():
        one.register_post_accumulate_grad_hook(lambda one: setattr(sums, "arrived", sums.arrived + 1))
    overlapped = OverlappedSum(module, object(), CPU)  # type: ignore[arg-type]
    for step in range(2):
        module.zero_grad()
        sums.arrived, sums.whole = 0, []
        overlapped.begin()
        module(torch.randn(2, width)).sum().backward()
        began = sums.whole[:]
        overlapped.send_rest()
        overlapped.wait()
        assert len(sums.whole) == BUCKETS
        assert began == ([] if step == 0 else [2 * (k + 1) for k in range(BUCKETS)])


def test_what_arrives_by_parts_is_told(sums: Sums) -> None:
    """A backward pass in two parts leaves gradients without autograd's word; and a weight may have none at times."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    overlapped = OverlappedSum(module, object(), CPU)  # type: ignore[arg-type]
    for step in range(3):
        used = [one for k, one in enumerate(module.parameters()) if step < 2 or k]
        module.zero_grad()
        overlapped.begin()
        for one in reversed(used):
            one.grad = torch.ones_like(one)
            overlapped.arrived(one)
        overlapped.send_rest()
        overlapped.wait()
        assert all(one.grad is not None and (one.grad == REPLICAS).all() for one in used)


class Replicas:
    """Threads that are each other's replicas: what one of them reduces waits for all, which have to reduce as much."""

    def __init__(self) -> None:
        self.barrier, self.own = threading.Barrier(REPLICAS, timeout=20), threading.local()
        self.sent: list[torch.Tensor] = [torch.empty(0)] * REPLICAS

    def all_reduce(self, flat: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        self.sent[self.own.number] = flat.clone()
        self.barrier.wait()
        sent = self.sent[:]
        self.barrier.wait()
        assert len({(one.numel(), one.dtype) for one in sent}) == 1, [one.shape for one in sent]
        every = torch.stack(sent)
        flat.copy_(every.amax(0) if op == dist.ReduceOp.MAX else every.sum(0))

        class Done:
            def wait(self) -> None: ...

        return Done() if async_op else None


@pytest.mark.parametrize("seed", range(8))
def test_replicas_need_not_have_gradients_of_the_same_weights(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer may use a weight for some examples alone. Gradients are those of one process: none before the first."""
    replicas, count, steps, width = Replicas(), 5, 4, 8
    monkeypatch.setattr(dist, "all_reduce", replicas.all_reduce)
    rng = torch.Generator().manual_seed(seed)
    uses = torch.rand(steps, REPLICAS, count, generator=rng) < 0.1 + 0.1 * seed
    x = torch.randn(REPLICAS, 3, width, generator=rng)

    def backward(module: nn.Sequential, step: int, number: int) -> None:
        used = [layer for k, layer in enumerate(module) if uses[step, number, k]]
        sum((layer(x[number]).square().sum() for layer in used), torch.zeros((), requires_grad=True)).backward()

    def train(number: int) -> list[list[torch.Tensor | None]]:
        replicas.own.number, found = number, list[list[torch.Tensor | None]]()
        module = made()
        overlapped = OverlappedSum(module, object(), CPU)  # type: ignore[arg-type]
        for step in range(steps):
            module.zero_grad(set_to_none=False)
            overlapped.begin()
            backward(module, step, number)
            overlapped.send_rest()
            overlapped.wait()
            found.append([None if one.grad is None else one.grad.clone() for one in module.parameters()])
        return found

    def made() -> nn.Sequential:
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        for k, one in enumerate(module.parameters()):
            one.data = torch.linspace(-1, 1, width * width).view(width, width) * (k + 1)
        return module

    with ThreadPoolExecutor(REPLICAS) as pool:
        found = list(pool.map(train, range(REPLICAS)))
    whole = made()
    for step in range(steps):
        whole.zero_grad(set_to_none=False)
        for number in range(REPLICAS):
            backward(whole, step, number)
        for own in (one[step] for one in found):
            for gradient, one in zip(own, whole.parameters(), strict=True):
                assert (gradient is None) == (one.grad is None)
                if gradient is not None:
                    torch.testing.assert_close(gradient, one.grad)
