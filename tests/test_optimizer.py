"""The optimizer that a workload names is torch's with the settings that it names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dejavu.runtime.optimizer import make_optimizer
from dejavu.workload import OptimizerSettings

SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.3}


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
