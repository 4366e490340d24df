"""Models of one's own, by whose names ranks and workers import this file: it is light, since each of them does."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def with_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
    )


def wide_stack(width: int = 64, depth: int = 2) -> nn.Sequential:
    """Linear maps, norms and nothing that says how it may be split."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width)]
    for _ in range(depth):
        layers += [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def with_shared_weight() -> nn.Sequential:
    """Four layers: the first has no weights, the third is all between two modules of one matrix and two biases."""
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    b.weight = a.weight
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), a, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), b, nn.Linear(32, 10)
    )


class Times(nn.Module):
    """Multiply: gradients that fit into float16 as the loss's may not fit any more."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def with_large_gradients(factor: float = 1000.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), Times(factor), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )


class OfSums(nn.Module):
    """Its gradients are one tensor for two matrices, and one number for all of a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Parameter(torch.randn(width, width) / width) for _ in range(2))
        self.scale = nn.Parameter(torch.full((width,), 1 / width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ (self.inner + self.outer)) * self.scale.sum()


def of_sums() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), OfSums(16), nn.Tanh(), OfSums(16), nn.Linear(16, 10))


class EveryOtherStep(nn.Module):
    """One of its matrices is used in the passes of every other step alone."""

    def __init__(self, width: int, microbatches: int) -> None:
        super().__init__()
        self.always, self.at_times = nn.Linear(width, width), nn.Linear(width, width)
        self.microbatches, self.passes = microbatches, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_used = self.passes // self.microbatches % 2 == 0
        self.passes += self.training
        found: torch.Tensor = self.always(x)
        return found + self.at_times(x) if is_used else found


def used_at_times(microbatches: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), EveryOtherStep(32, microbatches), nn.Tanh(), nn.Linear(32, 10)
    )


class EveryThirdStep(nn.Module):
    """One of its matrices is used in every third step, which it counts in a buffer: a checkpoint has that."""

    def __init__(self, width: int, microbatches: int) -> None:
        super().__init__()
        self.always, self.at_times = nn.Linear(width, width), nn.Linear(width, width)
        self.microbatches = microbatches
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_used = isinstance(x, FakeTensor) or int(self.passes) // self.microbatches % 3 == 0
        self.passes += self.training
        found: torch.Tensor = self.always(x)
        return found + self.at_times(x) if is_used else found


def used_every_third_step(microbatches: int) -> nn.Sequential:
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    return nn.Sequential(first, *(EveryThirdStep(16, microbatches) for _ in range(2)), nn.Linear(16, 10))


def weights_here_and_there() -> nn.Sequential:
    """Weights, buffers of a norm, and layers with nothing of their own."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 16), nn.Linear(16, 10)
    )


def with_frozen(*, layers: list[int]) -> nn.Sequential:
    """Four layers, of which these have frozen weights; the second has none."""
    chain = nn.Sequential(nn.Embedding(256, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 256))
    for number in layers:
        chain[number].requires_grad_(False)
    return chain


class WithoutGradients(nn.Module):
    """Computes what a module does, without gradients, as a fixed backbone is used."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.module(x)


def on_fixed(*, layer: int | None) -> nn.Sequential:
    """Four layers, of which one computes without gradients."""
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)]
    return nn.Sequential(*(WithoutGradients(one) if k == layer else one for k, one in enumerate(layers)))


class Tempered(nn.Module):
    """A linear map whose matrix is not row by row, times a single number; a table of places, which is never trained.

    And positions before the others, of which there are none.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).t() / width**0.5)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.places = nn.Parameter(torch.arange(width).flip(0)[None], requires_grad=False)
        self.before = nn.Parameter(torch.zeros(0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[:, self.places[0]] @ self.weight + self.before.sum(0)) * self.temperature


def tempered() -> nn.Sequential:
    """Four layers; in the middle weights that FSDP does not take: of no dimension, without a number, transposed."""
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), Tempered(16), Tempered(16), nn.Linear(16, 10))


class Masked(nn.Module):
    """Weights of which some rows and columns are kept as they were drawn, by hooks, as in fine-tuning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        for one in (self.inner.weight, self.outer.weight, self.inner.bias):
            one.register_hook(lambda gradient: gradient * (torch.arange(gradient.shape[-1]) % 3 > 0))
        self.outer.weight.register_hook(lambda gradient: gradient * (torch.arange(len(gradient)) % 2)[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


def masked() -> nn.Sequential:
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    return nn.Sequential(first, Masked(16), nn.Tanh(), Masked(16), nn.Linear(16, 10))


class OnTables(nn.Module):
    """Frozen: a matrix that its constructor has loaded, a bias, a mask, places; in 16 bits: one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(16, 16).requires_grad_(False)
        self.mask = nn.Parameter(torch.ones(16, 16, dtype=torch.bool).tril(), requires_grad=False)
        self.places = nn.Parameter(torch.arange(16).flip(0)[None], requires_grad=False)
        self.trained = nn.Linear(16, 16, dtype=torch.bfloat16)
        with torch.no_grad():
            self.fixed.weight.copy_(torch.eye(16))
            self.fixed.bias.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.trained.weight.to(x.dtype) * self.mask
        return torch.tanh(self.fixed(x[:, self.places[0]]) @ weight)


def on_tables() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), OnTables(), nn.Linear(16, 10))


class OnInfinities(nn.Module):
    """Attends to what comes before; the mask is a buffer or a frozen weight. Beside it a buffer that was never set."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        if frozen:
            self.mask = nn.Parameter(mask, requires_grad=False)
        else:
            self.register_buffer("mask", mask)
        self.register_buffer("unset", torch.full((2,), torch.nan))
        self.query = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.softmax(self.query(x) @ x.transpose(1, 2) + self.mask, -1) @ x


def on_infinities() -> nn.Sequential:
    attention = (OnInfinities(frozen=frozen) for frozen in (False, True))
    return nn.Sequential(nn.Flatten(1, 2), *attention, nn.Flatten(), nn.Linear(64, 10))


class BeforeFixed(nn.Sequential):
    """Four layers; the second computes without gradients, so that none comes back to the first."""

    def __init__(self) -> None:
        first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        super().__init__(first, WithoutGradients(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 10))


class Odd(nn.Module):
    """A layer of 32 features whose operators torch splits in ways of its own, or not at all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(32, 32)
        self.words = nn.Embedding(64, 32) if kind == "looked up" else None
        self.inner = {
            "recurrent": lambda: nn.GRU(32, 32, batch_first=True),
            "group norm": lambda: nn.GroupNorm(4, 32),
            "instance norm": lambda: nn.InstanceNorm1d(4, affine=True),
            "looked up": lambda: nn.Linear(32, 32),
            "bilinear": lambda: nn.Bilinear(32, 32, 32),
            "convolution": lambda: nn.Conv1d(4, 4, 3, padding=1),
            "attention": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
            "prelu": lambda: nn.PReLU(32),
        }[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is not None:
            return self.inner(self.words((x.abs() * 9).long().clamp(0, 63)[:, :1]).squeeze(1)) + self.first(x)
        x = self.first(x)
        if self.kind == "recurrent":
            return self.inner(x[:, None].expand(-1, 3, -1))[0].mean(1)
        if self.kind in ("instance norm", "convolution"):
            return self.inner(x.view(-1, 4, 8)).flatten(1)
        if self.kind == "bilinear":
            return self.inner(x, x)
        if self.kind == "attention":
            return self.inner(x[:, None], x[:, None], x[:, None])[0][:, 0]
        return self.inner(x)


class Attends(nn.Module):
    """Attention of 4 heads, with what transformers' modules do around it.

    Args:
        kind: "biased" and "masked" add numbers to its scores, with and without a gradient; "cached" appends keys and
            values to those of earlier calls, of which there are none: a tensor of the shape (0,).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.zeros(4, 16, 16), requires_grad=kind == "biased")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).view(len(x), -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        if self.kind == "cached":
            key, value = (torch.cat([torch.tensor([]), one], dim=-2) for one in (key, value))
        mask = None if self.kind == "cached" else self.bias.expand(len(x), -1, -1, -1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


def attends(kinds: Sequence[str]) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(64, 32), *(Attends(kind) for kind in kinds), nn.Linear(32, 64))


ODD = ("recurrent", "group norm", "instance norm", "looked up", "bilinear", "convolution", "attention", "prelu")
NEVER_SPLIT = ("recurrent", "bilinear", "prelu")


def odd(*, kind: str) -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 32)), Odd(kind), nn.Linear(32, 10))


class Breaks(nn.Module):
    """Breaks in the way that it was made for; not where only the model's boundaries are looked for."""

    def __init__(self, how: Callable[[], object]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor):
            self.how()
        return x


def breaks(how: Callable[[], object]) -> nn.Module:
    return nn.Sequential(nn.Embedding(256, 256), Breaks(how))


def raises(error: Exception) -> nn.Module:
    def how() -> None:
        raise error

    return breaks(how)


def breaking() -> nn.Module:
    return raises(RuntimeError("this layer always breaks"))


def gpu_breaking() -> nn.Module:
    return raises(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))


def memory_breaking() -> nn.Module:
    return breaks(lambda: torch.empty(2**50))


def killing() -> nn.Module:
    return breaks(lambda: os.kill(os.getpid(), signal.SIGKILL))


def killing_once(folder: str, runs: int, steps: int) -> nn.Module:
    """Kills its process in the middle of one run of many: the one that is the `runs`-th to have begun step `steps`."""
    begun = itertools.count(1)

    def how() -> None:
        if next(begun) == steps and _next_number(Path(folder)) == runs:
            os.kill(os.getpid(), signal.SIGKILL)

    return breaks(how)


def _next_number(folder: Path) -> int:
    """1, 2, 3 …, each given to one process only."""
    for number in itertools.count(1):
        with suppress(FileExistsError):
            (folder / str(number)).touch(exist_ok=False)
            return number
    raise AssertionError


def slow() -> nn.Module:
    return breaks(lambda: time.sleep(0.3))


def dead() -> nn.Module:
    """No gradient reaches any of its weights."""
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.Threshold(1e9, 0.0), nn.Linear(8, 256, bias=False))


def trivial() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))


class _Times(torch.autograd.Function):
    """The same forward; its gradient times a factor."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * context.factor, None


class GarbageAt(nn.Linear):
    """Its gradients are multiplied by a factor in its `call`-th pass, whichever attempt that is; or in one only.

    How often it ran is part of its state. The loss of that step is as it would be.
    """

    def __init__(self, call: int, factor: float, once: str) -> None:
        super().__init__(16, 16)
        self.call, self.factor, self.once = call, factor, once
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            return super().forward(x)
        self.calls += 1
        struck = int(self.calls) == self.call and (not self.once or _next_number(Path(self.once)) == 1)
        return _Times.apply(super().forward(x), self.factor if struck else 1.0)


class NoNumberOn(nn.Linear):
    """Its output is not a number on one rank, from its `call`-th pass on: a device that computes garbage forward."""

    def __init__(self, rank: int, call: int) -> None:
        super().__init__(16, 16)
        self.rank, self.call, self.calls = rank, call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            return super().forward(x)
        self.calls += 1
        struck = self.calls >= self.call and dist.is_initialized() and dist.get_rank() == self.rank
        return super().forward(x) * (torch.nan if struck else 1.0)


def without_numbers(rank: int, call: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), NoNumberOn(rank, call), nn.ReLU(), nn.Linear(16, 10))


def with_garbage(call: int, factor: str, once: str = "") -> nn.Sequential:
    """Five layers; the factor is a word, because JSON has no NaN."""
    garbage = GarbageAt(call, float(factor), once)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), garbage, nn.ReLU(), nn.Linear(16, 10))


class Attention(nn.Module):
    """Attention that is given a mask and a table of rotations."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        p = self.drop.p if self.training else 0.0
        attended = nn.functional.scaled_dot_product_attention(q * turns, k * turns, v, attn_mask=mask, dropout_p=p)
        mixed: torch.Tensor = self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return mixed


class ResidualBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, dropout), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask, turns)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Blocks of a list in a loop, each with the same mask and rotations, and weights of its own."""

    def __init__(self, depth: int = 3, width: int = 16, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList(ResidualBlock(width, dropout) for _ in range(depth))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.register_buffer("speeds", torch.arange(1.0, width // 2 + 1) / width)
        self.unused = nn.Linear(2, 2)
        if tied:
            self.scores.weight = self.tokens.weight

    @torch.no_grad()
    def turns(self, length: int, device: torch.device) -> torch.Tensor:
        return torch.cos(torch.arange(length, device=device)[:, None] * self.speeds)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places[:length]
        mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
        turns = self.turns(length, tokens.device)
        for block in self.blocks:
            x = block(x, mask, turns)
        found: torch.Tensor = self.scores(self.norm(x))
        return found


class Encoder(nn.Module):
    """Torch's own encoder, which copies its layer and is given a mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens, self.scores = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        found: torch.Tensor = self.scores(self.encoder(self.tokens(tokens), mask=mask, is_causal=True))
        return found


class Skips(nn.Module):
    """Two tensors cross between its blocks, as in a U-Net; the last two are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.scores = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x.flatten(1))
        x = torch.relu(self.blocks[0](skip))
        x = torch.relu(self.blocks[1](x))
        x = self.blocks[2](x + skip)
        found: torch.Tensor = self.scores(torch.relu(x))
        return found


class Padded(Decoder):
    """Its mask depends on the tokens, so it crosses every cut."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        mask = (tokens != 0)[:, None, None, :]
        turns = self.turns(tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = block(x, mask, turns)
        found: torch.Tensor = self.scores(self.norm(x))
        return found


class Images(nn.Module):
    """Convolutions with batch norms, and a residual stream between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.dropout, self.scores = nn.Dropout(dropout), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.norm(self.first(x)))
        for block in self.blocks:
            x = x + block(x)
        found: torch.Tensor = self.scores(self.dropout(x.mean((2, 3))))
        return found


class Branching(Skips):
    """What it does depends on its numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x.flatten(1))
        if x.sum() > 0:
            x = self.blocks[0](x) + x
        found: torch.Tensor = self.scores(x)
        return found


class _Front(nn.Module):
    def __init__(self, down: nn.Module) -> None:
        super().__init__()
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = self.down(x.flatten(1))
        return torch.stack((both, both), 1)


class _Middle(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return torch.stack((torch.relu(self.block(both[:, 0])), both[:, 1]), 1)


class _Back(nn.Module):
    def __init__(self, block: nn.Module, scores: nn.Module) -> None:
        super().__init__()
        self.block, self.scores = block, scores

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.scores(torch.relu(self.block(both[:, 0] + both[:, 1])))
        return found


class Declared(Skips):
    """The same, and it says how one tensor can carry both."""

    def dejavu_layers(self) -> list[nn.Module]:
        return [_Front(self.down), _Middle(self.blocks[0]), _Middle(self.blocks[1]), _Back(self.blocks[2], self.scores)]


class DeclaredWrong(Skips):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def dejavu_layers(self) -> object:
        front, *middle = Declared.dejavu_layers(self)  # type: ignore[arg-type]
        return {
            "a number": 3,
            "none": [],
            "no module": {"front": front, "last": "scores"},
            "a weight is missing": [front, middle[0], middle[2]],
            "out of order": {"back": middle[2], "front": front, "a": middle[0], "b": middle[1]},
            "another output": [front, *middle[:2], middle[2].block, middle[2].scores],
        }[self.how]


class DeclaredTied(nn.Module):
    """It says its layers, and its head is its embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle = nn.Embedding(256, 16), nn.Linear(16, 16)
        self.scores = nn.Linear(16, 256, bias=False)
        self.scores.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.scores(self.middle(self.tokens(tokens)))
        return found

    def dejavu_layers(self) -> list[nn.Module]:
        return [self.tokens, self.middle, self.scores]


class ThirdName(Decoder):
    """Its head is its embedding's matrix, which it holds under a third name, as a T5 does."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.shared = self.tokens


class DeclaredThirdName(DeclaredTied):
    """The same, and it says its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleDict({"words": self.tokens})


class Shared(Decoder):
    """All of its blocks share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp[0].weight = self.blocks[0].mlp[0].weight


class WithRecord(nn.Linear):
    """Returns what there is beside its scores, too, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__(8, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return OrderedDict(loss=None, logits=super().forward(x).flatten(0, -2), hidden_states=(x,))


class Mismatched(nn.Module):
    """The second product takes what the first does not give; not a chain, so that torch has to trace the whole."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(inner, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x.flatten(1)))
        return y


class _Twice(nn.Sequential):
    """A Sequential whose forward pass is its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = 2 * super().forward(x.flatten(1))
        return found


class _DeclaredInPlace(nn.Sequential):
    def dejavu_layers(self) -> list[nn.Module]:
        return list(self)


class _States(nn.Module):
    """What a recurrent layer gives as its output at the last step."""

    def forward(self, both: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return both[0][:, -1]


def _hooked() -> nn.Module:
    made = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10))
    made.register_forward_hook(lambda module, inputs, output: 2 * output)
    return made


class _Switched(nn.Module):
    """Children in order, of which the first, or all, run with something of torch switched."""

    def __init__(self, switch: Callable[[], Any], *, all_of_them: bool = False) -> None:
        super().__init__()
        self.switch, self.all_of_them = switch, all_of_them
        self.fixed = nn.Sequential(nn.Flatten(), nn.Linear(64, 32))
        self.middle, self.scores = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.switch():
            x = self.fixed(x)
            if self.all_of_them:
                return self.scores(self.middle(x))  # type: ignore[no-any-return]
        return self.scores(self.middle(x.float() if x.dtype != torch.float32 else x))  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """One module, as frameworks and losses wrap them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


class Turned(nn.Module):
    """Features turned in pairs by complex numbers, as rotary positions are written; in a buffer or an attribute."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 16)
        turns = torch.polar(torch.ones(8), torch.arange(8) * 0.7)
        if buffer:
            self.register_buffer("turns", turns, persistent=False)
        else:
            self.turns = turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.scores(x).unflatten(-1, (8, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2)


class TurnedBlocks(nn.Module):
    """The same in a residual stream, which torch traces."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Turned(buffer=buffer) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def _one_act(act: nn.Module) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(64, 32), act, nn.Linear(32, 32), act, nn.Linear(32, 10)]


def _truncated(*sizes: int, std: float) -> nn.Linear:
    """Weights as vision models draw them: again where they are out of range, narrow or wide of it."""
    made = nn.Linear(*sizes)
    nn.init.trunc_normal_(made.weight, std=std)
    return made


def _rates(depth: int) -> list[float]:
    """Rates of blocks, as vision models compute them."""
    return [rate.item() for rate in torch.linspace(0.0, 0.1, depth)]


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "a forward pass of its own": lambda: _Twice(nn.Linear(64, 32), nn.Linear(32, 10)),
    "a hook": _hooked,
    "a tuple between two": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.LSTM(8, 16, batch_first=True), _States(), nn.Linear(16, 10)
    ),
    "one in-place module twice": lambda: nn.Sequential(*_one_act(nn.ReLU(inplace=True))),
    "a view written to": lambda: nn.Sequential(
        nn.Linear(8, 8), nn.Flatten(), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(64, 10)
    ),
    "declared, in place": lambda: _DeclaredInPlace(*_one_act(nn.Hardtanh(inplace=True))),
    "rates read from a tensor": lambda: nn.Sequential(
        nn.Flatten(), *(nn.Sequential(nn.Linear(64, 64), nn.Hardshrink(rate)) for rate in _rates(3)), nn.Linear(64, 10)
    ),
    "truncated weights": lambda: nn.Sequential(
        nn.Flatten(), _truncated(64, 32, std=0.02), nn.ReLU(), _truncated(32, 10, std=3.0)
    ),
    "no child that does something": lambda: nn.Sequential(nn.Identity()),
    "a child without gradients": lambda: _Switched(torch.no_grad),
    "a child under autocast": lambda: _Switched(partial(torch.autocast, "cpu", torch.bfloat16)),
    "all under autocast": lambda: _Switched(partial(torch.autocast, "cpu", torch.bfloat16), all_of_them=True),
    "a wrapped chain": lambda: Wrapped(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))),
    "wrapped twice, traced": lambda: Wrapped(Wrapped(Images())),
    "wrapped, declared": lambda: Wrapped(_DeclaredInPlace(*_one_act(nn.Hardtanh(inplace=True)))),
    "wrapped, without gradients": lambda: Wrapped(_Switched(torch.no_grad)),
    "turned by a complex buffer": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), Turned(buffer=True), nn.Linear(16, 10)
    ),
    "turned by a complex buffer, traced": lambda: TurnedBlocks(buffer=True),
    "turned by a complex attribute, traced": lambda: TurnedBlocks(buffer=False),
    "wrapped, all without gradients": lambda: nn.Sequential(
        WithoutGradients(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    ),
}


def chain(kind: str) -> nn.Module:
    return CHAINS[kind]()


FIRST: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 8),
    "without bias": lambda: nn.Linear(4, 8, bias=False),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 1), nn.Flatten()),
    "product": lambda: _Product(),
    "embedding": lambda: nn.Sequential(nn.Embedding(3, 2), nn.Flatten()),
}


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = x[None].expand(2, -1, -1)
        return torch.bmm(pairs, self.weight).transpose(0, 1).flatten(1)


def first_is(kind: str) -> nn.Sequential:
    """Two layers, of which the first takes four numbers and gives eight."""
    return nn.Sequential(FIRST[kind](), nn.Linear(8, 3))


class Called(nn.Module):
    """Three children in order, by any names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Linear(8, 8), nn.Linear(8, 10)])
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.inner:
            x = part(x)
        return x

    def dejavu_layers(self) -> dict[str, nn.Module]:
        return dict(zip(self.names, self.inner, strict=True))


class Centred(nn.Module):
    """Subtracts a mean of what it has seen, which it keeps in a buffer: in place, or a new one each time."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("never", torch.ones(16))
        self.linear, self.in_place = nn.Linear(16, 16), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.in_place:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        elif self.training:
            self.mean = torch.lerp(self.mean, x.detach().mean(0), 0.5)
        return self.linear(torch.tanh(x - self.mean.clone()) * self.never)


class Centring(nn.Sequential):
    """Four layers, whose forward passes read what earlier microbatches left; a norm of the weights does so, too."""

    def __init__(self) -> None:
        normed = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 10))
        super().__init__(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), Centred(in_place=True), Centred(in_place=False), normed
        )


class Scaled(nn.Module):
    """Multiplies by what it keeps in buffers, which its forward pass changes before: a mean, a count of passes.

    Later it counts, and changes the mean as well from its third pass on.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("same_mean", self.mean)
        if way == "views":
            self.register_buffer("first", self.mean[:8])
            self.register_buffer("last", self.mean[8:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.way == "in place":
            self.mean.lerp_(x.detach().mean(0), 0.5)
        elif self.training and self.way == "views":
            self.last.lerp_(x.detach().mean(0)[8:], 0.5)
            self.first.lerp_(x.detach().mean(0)[:8], 0.5)
        elif self.training and self.way == "data":
            self.mean.data.lerp_(x.detach().mean(0), 0.5)
        elif self.training:
            self.count += 1
            if self.way.startswith("later") and (isinstance(x, FakeTensor) or self.count > 2):
                (self.mean.data if self.way == "later, data" else self.mean).lerp_(x.detach().mean(0), 0.5)
        return self.linear(torch.tanh(x) * self.same_mean + torch.sin(x) * torch.exp(-0.1 * self.count))  # type: ignore[no-any-return]


class Scaling(nn.Sequential):
    """Layers that multiply by buffers which they change, one with a batch norm, and one that draws and only reads."""

    def __init__(self, way: str) -> None:
        normed = nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh())
        first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        super().__init__(first, Scaled(way), normed, Scaled(way), nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 10)))


class FromStart(nn.Module):
    """A chain whose children are called as what a stage keeps beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.sequence = nn.Flatten(), nn.Sequential(nn.Linear(64, 8), nn.Tanh())
        self.fixed = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(self.sequence(self.start(x)))  # type: ignore[no-any-return]


class WithState(nn.Linear):
    """A part of its state is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class OnNeighbours(nn.Linear):
    """Mixes features by a table of neighbours, as layers of graphs do."""

    def __init__(self, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(16, 16)
        self.register_buffer("neighbours", made(torch.eye(16).roll(1, 0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.neighbours @ super().forward(x).t()).t()


MISFITS: dict[str, Callable[[], nn.Module]] = {
    "hooks of sums": lambda: _halving(nn.Linear(16, 16)),
    "sparse tables": lambda: OnNeighbours(torch.Tensor.to_sparse),
    "sparse tables by rows": lambda: OnNeighbours(torch.Tensor.to_sparse_csr),
    "a state of its own": lambda: WithState(16, 16),
    "such a state inside": lambda: nn.Sequential(nn.ReLU(), WithState(16, 16)),
    "statistics of all ranks": lambda: nn.SyncBatchNorm(16),
    "complex weights": lambda: nn.ParameterList([torch.zeros(16, dtype=torch.complex64)]),
    "sparse gradients": lambda: nn.Sequential(nn.Embedding(8, 16, sparse=True)),
    "sparse sums": lambda: nn.EmbeddingBag(8, 16, sparse=True),
    "rows with a norm": lambda: nn.Embedding(8, 16, max_norm=0.5),
    "sums of rows with a norm": lambda: nn.EmbeddingBag(8, 16, max_norm=2),
}


def _halving(linear: nn.Linear) -> nn.Linear:
    linear.bias.register_post_accumulate_grad_hook(lambda bias: None)
    return linear


def misfit(kind: str) -> nn.Sequential:
    """Three layers, of which the second cannot be trained in a plan."""
    second = MISFITS[kind]()
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16)),
        second if kind != "complex weights" else _Beside(second),
        nn.Linear(16, 10),
    )


class _Beside(nn.Module):
    def __init__(self, weights: nn.Module) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weights[0].abs()


def converting() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).half()


def orthogonal() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.orthogonal(nn.Linear(64, 64)))


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


class Fails(nn.Linear):
    """Does something else than it did when it was planned, from its second step of so many microbatches on."""

    def __init__(self, kind: str, calls: int) -> None:
        super().__init__(16, 16)
        self.kind, self.left = kind, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if isinstance(x, FakeTensor):
            return y
        self.left -= 1
        if self.left >= 0:
            return y
        if self.kind == "forward":
            raise OSError("a table is gone")
        if self.kind == "exit":
            raise SystemExit(0)
        changed: dict[str, Callable[[], torch.Tensor]] = {
            "backward": lambda: _FailsBackward.apply(y),
            "narrow": lambda: y[:, 1:],
            "short": lambda: y[1:],
            "wide": y.double,
            "whole": y.long,
        }
        return changed[self.kind]()


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise OSError("a table is gone")


def fails(kind: str, calls: int) -> nn.Sequential:
    """Layers whose second one does so."""
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16)),
        nn.Sequential(Fails(kind, calls), nn.ReLU()),
        nn.Linear(16, 16),
        nn.Linear(16, 10),
    )


class Sometimes(nn.Module):
    """Uses one of its maps, and a gain, where one of the examples is large enough, and else not at all."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.always, self.rare, self.gain = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.tensor(0.5))
        self.least = least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        large = x.detach()[:, :1] > self.least
        if isinstance(x, FakeTensor) or bool(large.any()):
            return y + self.gain * self.rare(x) * large
        return y


def sometimes() -> nn.Sequential:
    """Layers of which the second is used by some examples in a step, the third by hardly any, the fourth by none."""
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16)),
        *(nn.Sequential(Sometimes(least), nn.LayerNorm(16)) for least in (1.6, 2.3, 9.0)),
        nn.Linear(16, 10),
    )


class Typed(nn.Module):
    """A table or a weight that says its own type, and a map that takes what comes in the type of its weights."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.scores, table = nn.Linear(16, 16), torch.arange(16, dtype=dtype) / 16
        if kind == "weight":
            self.table = nn.Parameter(table)
        elif kind == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x.to(self.scores.weight.dtype)) * self.table  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A recurrent layer, which holds its weights in a list, too; it reads one of them under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4, batch_first=True)
        self.gain = self.cells.bias_hh_l0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.cells(x.unflatten(1, (4, 4)))[0] * self.gain[:4]).flatten(1)  # type: ignore[no-any-return]


OWN_TYPES: dict[str, Callable[[], nn.Module]] = {
    "a float32 weight": lambda: Typed("weight", torch.float32),
    "a float32 buffer": lambda: Typed("buffer", torch.float32),
    "a float64 buffer": lambda: Typed("buffer", torch.float64),
    "a float16 buffer": lambda: Typed("buffer", torch.float16),
    "an attribute": lambda: Typed("attribute", torch.float32),
    "a recurrent layer": Recurrent,
}


def of_own_types(kind: str) -> nn.Sequential:
    """Four layers, of which the middle ones are of a kind."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    return nn.Sequential(first, OWN_TYPES[kind](), Typed("buffer", torch.float32), Typed("weight", torch.float32))


class Conjugated(nn.Module):
    """Takes pairs of numbers as complex ones, and gives them conjugated, or takes these and gives real ones."""

    def __init__(self, *, back: bool = False) -> None:
        super().__init__()
        self.map, self.back = nn.Linear(16, 16), back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.back:
            return self.map(torch.view_as_real(x.conj().resolve_conj()).flatten(1))  # type: ignore[no-any-return]
        return torch.view_as_complex(self.map(x).unflatten(1, (8, 2))).conj()


def conjugated() -> nn.Sequential:
    """Layers between which complex numbers go, conjugated, and whose gradients come back so."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    return nn.Sequential(first, Conjugated(), Conjugated(back=True), nn.Linear(16, 10))


class Heavy(nn.Module):
    """Weights of 4 MiB each that constructors make in many ways; a table and a hook's mask are nobody's buffers."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.drawn, self.frozen = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.words = nn.Embedding(width, width, padding_idx=1)
        self.cut = nn.Parameter(torch.empty(width, width), requires_grad=False)
        nn.init.trunc_normal_(self.cut, std=0.5, a=-0.25, b=0.25)
        self.columns = nn.Parameter(torch.empty(width, width), requires_grad=False)
        with torch.no_grad():
            for number, column in enumerate(self.columns[:, :2].unbind(1)):
                column.fill_(number + 1.0)
            self.columns[:, 2:].zero_()
        self.copied = copy.deepcopy(self.frozen)
        self.turned = nn.utils.parametrizations.weight_norm(nn.Linear(width, width, bias=False))
        self.attribute, mask = torch.empty(width, width).uniform_(), torch.empty(width, width).bernoulli_(0.5)
        self.drawn.weight.register_hook(lambda gradient: gradient * mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drawn(x) @ self.frozen.weight + x @ (self.cut + self.columns + self.attribute)
        x = self.turned(self.copied(x)) + self.words.weight.sum(0)
        return nn.functional.layer_norm(x, x.shape[-1:])


def heavy(depth: int = 1) -> nn.Sequential:
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 1024))
    return nn.Sequential(first, *(Heavy() for _ in range(depth)), nn.Linear(1024, 10))
