"""What kernels keep and take inside, which fake tensors do not show: counted as the real allocator hands it out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.cost._memory_rank import allocated_bytes
from dejavu.foundation.tracing import fake_tensors
from dejavu.graphs.liveness import ARRIVING, OUTPUT, Footprint, footprint
from tests.conftest import some, spread

SMALL = 512  # bytes: numbers and tables
BLOCKS = 136 * 1024  # what oneDNN takes for blocks at most, whatever the sizes
Drawn = tuple[Callable[[], nn.Module], tuple[int, ...], int]  # the layer, its input's shape, words if it looks some up


class Applied(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.parts)


def recurrent(draw: random.Random, kind: type[nn.Module], **fields: Any) -> Drawn:
    """Two layers, both ways or not; of the output all or the last state alone is read."""
    inputs, states, shape = draw.randint(1, 140), draw.randint(2, 140), (draw.randint(1, 40), draw.randint(1, 20))
    options = {"num_layers": 2, "bidirectional": draw.random() < 0.5, "bias": draw.random() < 0.7, **fields}
    place = draw.choice([lambda found: found[0], lambda found: found[0][-1]])
    return lambda: Applied(lambda x, cells: place(cells(x)), kind(inputs, states, **options)), (*shape, inputs), 0


def bilinear(draw: random.Random) -> Drawn:
    left, right, out = draw.randint(1, 64), draw.randint(1, 64), draw.randint(1, 40)
    build = nn.Bilinear
    return (
        lambda: Applied(lambda x, one: one(x[:, :left], x[:, left:]), build(left, right, out)),
        (draw.randint(1, 100), left + right),
        0,
    )


def image(draw: random.Random, dimensions: int = 2, channels: int = 0) -> tuple[int, ...]:
    sizes = [draw.randint(6, {1: 80, 2: 24, 3: 9}[dimensions])] * dimensions
    return (draw.randint(2, 8), channels or draw.randint(2, 24), *sizes)


def normed(draw: random.Random, *kinds: type[nn.Module]) -> Drawn:
    dimensions = draw.randint(1, 3)
    shape = image(draw, dimensions)
    return lambda: kinds[dimensions - 1](shape[1]), shape, 0


def convolved(draw: random.Random, *kinds: type[nn.Module]) -> Drawn:
    dimensions, channels = draw.randint(1, 3), draw.choice([16, 32])
    stride, size = draw.randint(2, 3), draw.randint(2, 4)
    options = (channels, draw.choice([16, 32]), size, stride)
    return lambda: kinds[dimensions - 1](*options), image(draw, dimensions, channels), 0


def resized(draw: random.Random, mode: str, **options: Any) -> Drawn:
    size = draw.randint(3, 40)
    sizes = (size, size)
    return lambda: Applied(lambda x: functional.interpolate(x, sizes, mode=mode, **options)), image(draw), 0


def attended(draw: random.Random) -> Drawn:
    heads, width, length = draw.choice([1, 2, 4]), draw.choice([8, 16, 40]), draw.choice([5, 33, 200, 800])
    is_causal, is_last = draw.random() < 0.5, draw.random() < 0.5

    def attend(x: torch.Tensor) -> torch.Tensor:
        found = x.unflatten(2, (heads, 3 * width)).transpose(1, 2)
        found = functional.scaled_dot_product_attention(*found.chunk(3, -1), is_causal=is_causal)
        return found if is_last else found.transpose(1, 2).flatten(2)

    return lambda: Applied(attend), (draw.randint(1, 3), length, heads * 3 * width), 0


def bagged(draw: random.Random, mode: str) -> Drawn:
    words, width = draw.randint(4, 200), draw.randint(2, 64)
    return lambda: nn.EmbeddingBag(words, width, mode=mode), (draw.randint(1, 9), draw.randint(1, 30)), words


def narrowed(draw: random.Random) -> Drawn:
    sizes = [draw.choice([draw.randint(1, 300), 512]) for _ in range(3)]

    def products(x: torch.Tensor, *layers: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layers[1](layers[0](x).tanh())

    return (
        lambda: Applied(products, nn.Linear(*sizes[:2]), nn.Linear(*sizes[1:])),
        (draw.choice([draw.randint(1, 300), 4096]), sizes[0]),
        0,
    )


def applied(draw: random.Random, function: Callable[[torch.Tensor], torch.Tensor]) -> Drawn:
    return lambda: Applied(function), image(draw), 0


def lost(draw: random.Random, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Drawn:
    return applied(draw, lambda x: loss(x, torch.ones_like(x)))


LOSSES = {
    "squared": functional.mse_loss,
    "absolute": functional.l1_loss,
    "smooth": functional.smooth_l1_loss,
    "Huber": functional.huber_loss,
    "soft margin": functional.soft_margin_loss,
    "binary": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y),
    "binary, of logits": functional.binary_cross_entropy_with_logits,
}
LAYERS: dict[str, Callable[[random.Random], Drawn]] = {
    "LSTM": lambda draw: recurrent(draw, nn.LSTM),
    "LSTM, batch first": lambda draw: recurrent(draw, nn.LSTM, batch_first=True),
    "LSTM, projected": lambda draw: recurrent(draw, nn.LSTM, proj_size=1),
    "GRU": lambda draw: recurrent(draw, nn.GRU),
    "bilinear": bilinear,
    "batch norm": lambda draw: normed(draw, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "instance norm": lambda draw: normed(draw, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    "convolution": lambda draw: convolved(draw, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "transposed": lambda draw: convolved(draw, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "nearest": lambda draw: resized(draw, "nearest"),
    "linear": lambda draw: resized(draw, "bilinear"),
    "linear, smoothed": lambda draw: resized(draw, "bilinear", antialias=True),
    "cubic, smoothed": lambda draw: resized(draw, "bicubic", antialias=True),
    "attention": attended,
    **{f"bag: {mode}": lambda draw, mode=mode: bagged(draw, mode) for mode in ("sum", "mean", "max")},
    "products in bfloat16": narrowed,
    "unfolded": lambda draw: applied(draw, lambda x: functional.unfold(x, 3)),
    "norm of a view": lambda draw: applied(
        draw, lambda x: functional.layer_norm(x.transpose(1, 3), x.shape[1:2]).transpose(1, 2)
    ),
    "one of two types": lambda draw: applied(draw, lambda x: x * (x > 0)),
    "sum of logarithms": lambda draw: applied(draw, lambda x: x.logsumexp(1)),
    "folded": lambda draw: (lambda: nn.Fold(12, 3, padding=1), (draw.randint(1, 4), 9 * draw.randint(1, 9), 144), 0),
    **{f"loss: {name}": lambda draw, loss=loss: lost(draw, loss) for name, loss in LOSSES.items()},
}


class Arrives(torch.autograd.Function):
    """A gradient of ones that nobody else owns."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor) -> torch.Tensor:
        context.shape, context.dtype = output.shape, output.dtype
        return torch.zeros((), dtype=output.dtype)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.ones(context.shape, dtype=context.dtype)


def predicted(found: Footprint) -> tuple[int, int]:
    """What the layer holds between its passes, with its output, and the most it ever holds."""
    moments = [
        *((one, one.alive & {OUTPUT}) for one in found.forward),
        *((one, one.alive & {OUTPUT, ARRIVING}) for one in found.backward),
    ]
    most = max(one.own_bytes + found.output_bytes * len(alive) for one, alive in moments)
    return found.held_bytes + found.output_bytes * (not found.passes_input), most


@pytest.mark.parametrize("seed", some(range(8), [0]))
@pytest.mark.parametrize("name", spread(LAYERS, 8))
def test_no_kernel_takes_more_than_is_counted(name: str, seed: int) -> None:
    """At sizes that no rule has seen; and what is counted is not wildly more."""
    build, shape, words = LAYERS[name](random.Random(f"{name} {seed}"))
    with fake_tensors():
        fake = torch.empty(shape, dtype=torch.int64) if words else torch.empty(shape, requires_grad=True)
        held, most = predicted(footprint(build(), fake, None))
    torch.manual_seed(seed)
    module = build()
    inputs = torch.randint(words, shape) if words else torch.randn(shape, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # some kernels take memory for each thread

    def forward() -> torch.Tensor:
        return module(inputs)

    def step() -> None:
        Arrives.apply(forward()).backward()

    kept = []
    try:
        step()  # gradients of weights are there, as in every step but the first
        inputs.grad = None
        really_held = allocated_bytes(lambda: kept.append(forward()))[-1]
        kept.clear()
        really_most = max(allocated_bytes(step))
    finally:
        torch.set_num_threads(threads)
    assert held == pytest.approx(really_held, abs=SMALL)
    assert really_most - SMALL <= most <= 1.5 * really_most + BLOCKS
