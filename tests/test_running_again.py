"""A layer that runs forward again once, however many backward calls want something of it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from dejavu.foundation.errors import DejavuError
from dejavu.graphs.in_parts.running_again import run_again_once
from dejavu.graphs.in_parts.split_backward import backward_input, backward_weight

WIDTH, EXAMPLES, MICROBATCHES = 8, 5, 3


class Block(nn.Module):
    """Products, a norm, a dropout and what autograd saves without any weight; counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop, self.runs = nn.Dropout(0.3), 0
        self.made = list[weakref.ref[torch.Tensor]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        inner = functional.gelu(self.up(self.norm(x)))
        self.made.append(weakref.ref(inner))
        y: torch.Tensor = self.down(self.drop(inner)) * x.sigmoid()
        return y


def whole(block: Block, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of an ordinary backward pass: of the weights, then of the inputs."""
    xs = [x.clone().requires_grad_() for x in inputs]
    for at, x in enumerate(xs):
        torch.manual_seed(at)
        block(x).square().sum().backward()
    return gradients(block, xs)


def gradients(block: Block, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = [one.grad for one in (*block.parameters(), *xs)]
    return [one for one in found if one is not None]


@pytest.fixture(params=["float32", "bfloat16 products"])
def autocast(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=request.param != "float32"):
        yield


@pytest.mark.usefixtures("autocast")
@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("stops_early", [True, False])
def test_it_runs_again_once_as_it_ran(in_parts: bool, stops_early: bool) -> None:
    """With the same dropout and in the same types, and it leaves the generators alone; so torch's checkpoint does."""
    torch.manual_seed(0)
    block = Block()
    inputs = [torch.randn(EXAMPLES, WIDTH) for _ in range(MICROBATCHES)]
    expected = whole(copy.deepcopy(block), inputs)
    xs, losses, waiting = [x.clone().requires_grad_() for x in inputs], [], []
    for at, x in enumerate(xs):
        torch.manual_seed(at)
        losses.append(run_again_once(block, x, stops_early=stops_early).square().sum())
    assert block.runs == MICROBATCHES
    state = torch.get_rng_state()
    with torch.autocast("cpu", enabled=False):  # as in the thread that goes backward
        for x, loss in zip(xs, losses, strict=True):
            if in_parts:
                (x.grad,), groups = backward_input([loss], None, [x], block.parameters())
                waiting.append(groups)
            else:
                loss.backward()
        for groups in waiting:
            backward_weight(block.parameters(), groups)
    assert torch.equal(torch.get_rng_state(), state)
    assert block.runs == 2 * MICROBATCHES
    found = gradients(block, xs)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_between_the_parts_only_what_weights_want_is_held_and_nothing_after() -> None:
    block, x = Block(), torch.randn(EXAMPLES, WIDTH, requires_grad=True)
    output = run_again_once(block, x)
    assert [one() for one in block.made] == [None]
    _, groups = backward_input([output], [torch.ones_like(output)], [x], block.parameters())
    backward_weight(block.parameters(), groups)
    del output, groups
    gc.collect()
    assert len(block.made) == 2 and not any(one() is not None for one in block.made)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda x: x.exp()[:2].exp(), r"of shape \(2, 8\) and torch.float32; wanted \(5, 8\)"),
        (lambda x: x.exp(), "saves 1 tensor; wanted 2, as the first time"),
    ],
)
def test_a_layer_that_does_something_else_the_second_time_is_named(
    second: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    ways = iter([lambda x: x.exp().exp(), second])
    x = torch.randn(EXAMPLES, WIDTH, requires_grad=True)
    output = run_again_once(lambda x: next(ways)(x), x)
    with pytest.raises(DejavuError, match=said):
        output.sum().backward()
