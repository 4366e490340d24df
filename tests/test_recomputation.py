"""Layers that run again before their backward pass: the same gradients to the last bit, whatever they draw or write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from dejavu.runtime.training import Layers
from dejavu.workload import Workload

MICROBATCHES = 3


class Follows(nn.Module):
    """Subtracts a mean that it keeps, and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.map(x)
        self.mean.lerp_(found.detach().mean(0), 0.1)
        return torch.tanh(found - self.mean)


class Calls(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(x, training=True)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
    "alpha dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.5)),
    "randomized ReLU": nn.RReLU,
    "randomized ReLU in place": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU(inplace=True)),
    "randomized ReLU and a view": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Unflatten(1, (2, 4))),
    "randomized ReLU, traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), Calls())),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "GRU": lambda: nn.Sequential(OrderedDict(cell=nn.GRUCell(8, 8))),
    "mean of its own": Follows,
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_pass(kind: str) -> None:
    """All forward passes come before the backward passes, as in a pipeline."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(5)
        layers = Layers(OrderedDict(layer=KINDS[kind]()), Workload(), 0, recompute=recompute)
        inputs = [torch.randn(6, 8, requires_grad=True) for _ in range(MICROBATCHES)]
        outputs = []
        for layers.microbatch, x in enumerate(inputs):
            outputs.append(layers(x))
        torch.autograd.backward([output.square().sum() for output in outputs])
        found.append([*outputs, *(one.grad for one in (*inputs, *layers.parameters())), *layers.buffers()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
