"""The one training loop, which trials, the reference and every rank of a pipeline use."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dejavu.data import dataset_of
from dejavu.graph import DTYPES
from dejavu.init import Draw, draw_layer
from dejavu.models import layers_of, model_of
from dejavu.runtime.optimizer import set_learning_rate
from dejavu.workload import Workload

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Executor(Protocol):
    """Runs a batch forward and backward and leaves the mean gradient in `.grad`."""

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """The batch's mean loss, or None on a rank that does not have it."""


def build_layers(
    workload: Workload, draw: Draw, device: torch.device, start: int = 0, stop: int | None = None
) -> nn.Sequential:
    """Layers `start` to `stop` (not included) with drawn weights, named as in the whole model."""
    builders = layers_of(workload)
    chosen = builders[start:stop]
    modules = ((builder.name, draw_layer(builder, draw, depth=len(builders))) for builder in chosen)
    return nn.Sequential(OrderedDict(modules)).to(device, DTYPES[workload.dtype])


class Recomputed(nn.Sequential):
    """The same layers under activation checkpointing: each keeps its input only, and runs again before its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class WholeModel:
    """The executor of a single process: microbatches in turn, gradients accumulated."""

    def __init__(self, module: nn.Module, workload: Workload) -> None:
        self.module, self.loss, self.num_microbatches = module, model_of(workload).loss, workload.num_microbatches

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        losses = []
        pairs = zip(inputs.chunk(self.num_microbatches), targets.chunk(self.num_microbatches), strict=True)
        for x, y in pairs:
            loss = self.loss(self.module(x), y)
            (loss / self.num_microbatches).backward()
            losses.append(loss.item())
        return sum(losses) / len(losses)


def train(
    executor: Executor,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    steps: Sequence[int],
    *,
    device: torch.device,
    on_step: Callable[[int, float | None, float, float], None],
) -> None:
    """Train these steps; data and learning rate depend on a step's number alone.

    Args:
        on_step: (step, loss or None, step seconds, optimizer seconds), after each step; may raise to stop.
    """
    dataset, dtype = dataset_of(workload), DTYPES[workload.dtype]
    for step in steps:
        inputs, targets = dataset.batch(step, workload.batch_size, seed=workload.seed)
        inputs = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        loss = executor(inputs, targets.to(device))
        computed = time.perf_counter()
        set_learning_rate(optimizer, workload.optimizer, step)
        optimizer.step()
        ended = time.perf_counter()
        on_step(step, loss, ended - started, ended - computed)
