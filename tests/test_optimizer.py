"""The optimizer that a workload names is torch's with the settings that it names."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cost._memory_rank import allocator_peak_bytes
from dejavu.cost.memory.layers import ONE_BY_ONE_TENSORS
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.replicas import clip_gradients
from dejavu.workload import OptimizerSettings

SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.3}
SCALARS = 256  # bytes of single numbers


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3, bias=False))


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        optimizer.zero_grad()
        module(torch.randn(5, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_frozen_weights_stay_as_they_are(name: str, on_host: bool, masters: bool) -> None:
    """Also where gradients are allocated at once, as those of master weights: they do not decay."""
    module = network().to(torch.bfloat16) if masters else network()
    module[0].requires_grad_(False)
    module[1].weight.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    given = {**SETTINGS, "name": name, "master_weights": masters}
    optimizer = make_optimizer(OptimizerSettings(**given), module.parameters(), on_host=on_host)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        module(torch.randn(5, 6).to(before[0].dtype)).square().sum().backward()
        optimizer.step()
    for parameter, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, old) != parameter.requires_grad
        assert parameter.requires_grad or parameter.grad is None


def test_the_betas_and_epsilon_are_torch_s() -> None:
    ours = network()
    made = make_optimizer(OptimizerSettings(**SETTINGS, betas=(0.8, 0.95), epsilon=1e-5), ours.parameters())
    theirs = network()
    own = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-5)
    assert all(map(torch.equal, stepped(ours, made), stepped(theirs, own)))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_norms_and_biases_do_not_decay_where_only_matrices_do(name: str) -> None:
    ours, theirs = network(), network()
    made = make_optimizer(OptimizerSettings(name=name, decayed="matrices", **SETTINGS), ours.parameters())  # type: ignore[arg-type]
    matrices = [theirs[0].weight, theirs[3].weight]
    others = [theirs[0].bias, theirs[1].weight, theirs[1].bias]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    own = kind([{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    found = stepped(ours, made)
    assert all(map(torch.equal, found, stepped(theirs, own)))
    everything = network()
    usual = stepped(everything, make_optimizer(OptimizerSettings(name=name, **SETTINGS), everything.parameters()))  # type: ignore[arg-type]
    assert not all(map(torch.equal, found, usual))


@pytest.mark.parametrize("most", [1e-8, 1e-6, 1e-3, 0.5, 1e3])
def test_a_rank_clips_as_torch_does(most: float) -> None:
    """Also to norms so small that what torch adds to them counts: the gradients are one process's."""
    ours, theirs = network(), network()
    for module in (ours, theirs):
        (module(torch.ones(5, 6)).square().sum() * 10 * most).backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = clip_gradients(ours.parameters(), ours.parameters(), 1, most, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert found == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), most)))
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(), (0, 5), (20_000,), (4_000, 1), (1, 4_000), (50, 70), (3, 5, 7, 11)], ids=str)
def test_clipping_takes_no_more_memory_than_plans_count(shape: tuple[int, ...]) -> None:
    """At most one weight's gradient at once, as SGD's steps do; the norm is float64's."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.empty(shape)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn(shape)
    expected = math.sqrt(sum(float(one.grad.double().square().sum()) for one in weights if one.grad is not None))
    found = list[float]()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        taken = allocator_peak_bytes(
            lambda: found.append(clip_gradients(weights, weights, 1, 0.5, torch.device("cpu")))
        )
    finally:
        dist.destroy_process_group()
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert taken <= 4 * ONE_BY_ONE_TENSORS["sgd"] * weights[0].numel() + SCALARS
