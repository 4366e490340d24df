"""Backward passes in two parts: the gradients of a whole one, however a model uses its weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dejavu.graphs.capture import capture
from dejavu.graphs.in_parts.running_again import run_again_once
from dejavu.graphs.in_parts.split_backward import backward_input, backward_weight
from dejavu.plans.schedule import PARTS
from dejavu.profiling.layers import measure_layers
from dejavu.runtime.training import Layers
from dejavu.workload import Workload

MICROBATCHES = 3


class BiasFirst(nn.Module):
    """A linear layer that registers its bias before its weight, which it may be given."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class Recurrent(nn.Module):
    """One module whose forward pass uses its weights three times."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.between = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.between(torch.relu(self.step(x))))
        return x


class Product(nn.Module):
    """A weight made of two others, used in two places; and one weight that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        self.scale, self.unused = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.left @ self.right
        return torch.tanh(x @ weight) @ (weight * self.scale).T


class Sums(nn.Module):
    """Weights whose gradients are the one that arrives, as they are added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(5, 8))
        self.inner, self.outer = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.first) @ (self.inner + self.outer) + self.second


class Expanded(nn.Module):
    """A weight whose gradient is one number for all its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale.sum())


class Shifted(torch.autograd.Function):
    """A product whose summand gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight + summand

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> Any:
        (x, weight), (gradient,) = ctx.saved_tensors, arriving
        return gradient * weight, (gradient * x).sum(0), None


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.summand = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = Shifted.apply(x, self.weight, self.summand)  # type: ignore[no-untyped-call]
        return shifted


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class RunAgainOnce(nn.Module):
    """As `Recomputed`, but no more than once."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run_again_once(self.inner, x)


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def plain() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(), nn.LayerNorm(8), linear())


def shared_weight() -> nn.Sequential:
    """Two layers that share a matrix and not their biases, with another layer between them."""
    a, b = linear(), linear()
    b.weight = a.weight
    return nn.Sequential(a, nn.ReLU(), linear(), nn.Tanh(), b, linear())


def shared_layer() -> nn.Module:
    layer = linear()
    return nn.Sequential(layer, nn.ReLU(), linear(), layer, nn.Tanh(), layer)


def shared_side_by_side() -> nn.Module:
    layer = linear()
    return nn.Sequential(layer, layer)


def bias_first() -> nn.Module:
    """The order in which torch's own grouping counts the shared matrix twice."""
    weight = nn.Parameter(torch.randn(8, 8))
    return nn.Sequential(BiasFirst(weight), nn.Tanh(), linear(), BiasFirst(weight), BiasFirst(weight))


def crosswise() -> nn.Module:
    """Of three layers two share their matrices, and other two their biases."""
    a, b, c = linear(), linear(), linear()
    b.weight, c.bias = a.weight, a.bias
    return nn.Sequential(a, nn.ReLU(), c, nn.Tanh(), b)


def frozen() -> nn.Module:
    module = shared_weight()
    module[2].requires_grad_(False)
    return module


def shared_and_frozen() -> nn.Module:
    module = shared_weight()
    module[0].weight.requires_grad_(False)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    function.__name__: function
    for function in (
        plain, shared_weight, shared_layer, shared_side_by_side, bias_first, crosswise, frozen, shared_and_frozen,
        Recurrent, Product, Sums, Expanded, WithoutGradient,
    )
}  # fmt: skip
MODULES |= {
    f"{name}, {how}": lambda make=make, wrapper=wrapper: wrapper(make())  # type: ignore[misc]
    for how, wrapper in (("recomputed", Recomputed), ("run again once", RunAgainOnce))
    for name, make in MODULES.items()
}


@pytest.mark.parametrize("inputs_want", [True, False], ids=["input's gradient", "no input's gradient"])
@pytest.mark.parametrize("ends_in_loss", [True, False], ids=["loss", "output"])
@pytest.mark.parametrize("name", MODULES)
def test_parts_add_up_to_the_whole(name: str, ends_in_loss: bool, inputs_want: bool) -> None:
    """Several microbatches in flight, all first parts before the second ones, as zero-bubble schedules have them."""
    torch.manual_seed(7)
    module = MODULES[name]().double()
    inputs = [torch.randn(5, 8, dtype=torch.float64) for _ in range(MICROBATCHES)]
    arriving = [torch.randn(5, 8, dtype=torch.float64) for _ in range(MICROBATCHES)]

    def ends() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        fresh = [x.clone().requires_grad_(inputs_want) for x in inputs]
        outputs = [module(x) for x in fresh]
        return fresh, [o.square().mean() for o in outputs] if ends_in_loss else outputs

    xs, whole = ends()
    torch.autograd.backward(whole, None if ends_in_loss else arriving)
    expected = {key: parameter.grad for key, parameter in module.named_parameters()}
    of_inputs = [x.grad for x in xs]
    module.zero_grad()

    xs, outputs = ends()
    parts = [
        backward_input([output], None if ends_in_loss else [gradient], [x], module.parameters())
        for x, output, gradient in zip(xs, outputs, arriving, strict=True)
    ]
    for _, groups in parts:
        backward_weight(module.parameters(), groups)
    torch.testing.assert_close([gradients[0] for gradients, _ in parts], of_inputs)
    torch.testing.assert_close({key: parameter.grad for key, parameter in module.named_parameters()}, expected)


@pytest.mark.parametrize("first", [True, False], ids=["no weights", "weights"])
def test_a_stage_may_end_in_a_view(first: bool) -> None:
    """Such as `Flatten`'s, or what a distributed tensor's own part is."""
    linear = nn.Linear(2, 2)
    layers = Layers(
        OrderedDict({"flat": nn.Flatten()} if first else {"a": linear, "flat": nn.Flatten()}), Workload(), 0
    )
    x = torch.randn(3, 4, 2)
    output = layers(x)
    torch.testing.assert_close(output, x.flatten(1) if first else linear(x).flatten(1))
    _, groups = backward_input([output], [torch.ones_like(output)], [x], layers.parameters())
    backward_weight(layers.parameters(), groups)
    assert output.grad_fn is None
    if not first:
        torch.testing.assert_close(linear.bias.grad, torch.full((2,), 12.0))


def test_only_weights_that_cannot_wait_are_done_at_once() -> None:
    module = shared_weight()
    x = torch.randn(5, 8, requires_grad=True)
    output = module(x)
    backward_input([output], [torch.ones_like(output)], [x], module.parameters())
    done = {key for key, parameter in module.named_parameters() if parameter.grad is not None}
    assert done == {"0.weight", "0.bias", "4.bias"}


@pytest.mark.integration
def test_a_layer_of_shared_weights_is_measured_in_parts() -> None:
    workload = Workload(model="tests.own_models:with_shared_weight", data="digits", batch_size=8, num_microbatches=4)
    graph = capture(workload)
    (tied,) = (layer for layer in graph.layers if "-" in layer.name)
    rows = list(measure_layers(workload, graph, [tied.signature], "core"))
    assert {row.direction for row in rows} >= {"forward", "backward", *PARTS}
    for row in rows:
        row.check()
