"""Models of one's own, by whose names ranks and workers import this file: it is light, since each of them does."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def with_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
    )


def with_shared_weight() -> nn.Sequential:
    """Four layers: the first has no weights, the third is all between two modules of one matrix and two biases."""
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    b.weight = a.weight
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), a, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), b, nn.Linear(32, 10)
    )


def weights_here_and_there() -> nn.Sequential:
    """Weights, buffers of a norm, and layers with nothing of their own."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 16), nn.Linear(16, 10)
    )


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


def with_garbage(call: int, factor: str, once: str = "") -> nn.Sequential:
    """Five layers; the factor is a word, because JSON has no NaN."""
    garbage = GarbageAt(call, float(factor), once)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), garbage, nn.ReLU(), nn.Linear(16, 10))
