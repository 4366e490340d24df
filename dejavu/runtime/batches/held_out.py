"""The loss on examples that no step trains on, while a training runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from dejavu.graphs.graph import DTYPES
from dejavu.workload import Workload
from dejavu.workload.data import Batch, dataset_of


class Evaluates(Protocol):
    """Runs a batch forward only, without dropout, and leaves weights, gradients and statistics as they are."""

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Return the batch's mean loss, or None on a rank that does not have it. All ranks call it together."""


class HeldOut:
    """The held-out examples of a training: the same at every evaluation, on every rank and under every plan.

    They are whole batches: so many as `evaluation_examples` begins, but no more than are held out; where not even one
    batch is held out, examples come again until it is full.

    Args:
        last_step: where the training ends, which is evaluated too.
    """

    def __init__(self, workload: Workload, last_step: int, device: torch.device) -> None:
        self._workload, self._last_step, self._device = workload, last_step, device
        self._kept: list[Batch] = []

    def is_due(self, step: int) -> bool:
        """Whether the loss is wanted after this step."""
        every = self._workload.evaluate_every
        return bool(every) and ((step + 1) % every == 0 or step + 1 == self._last_step)

    def loss(self, model: Evaluates, on_batch: Callable[[], None] = lambda: None) -> float | None:
        """Return the mean loss, or None on a rank that does not have it.

        Args:
            on_batch: called after each batch.
        """
        losses: list[float | None] = []
        for inputs, targets in self._batches():
            losses.append(model.evaluate(inputs, targets))
            on_batch()
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if known else None

    def _batches(self) -> Sequence[Batch]:
        if not self._kept:
            inputs, targets = held_out_examples(self._workload)
            size, dtype = self._workload.batch_size, DTYPES[self._workload.dtype]
            inputs = inputs.to(self._device, dtype) if inputs.is_floating_point() else inputs.to(self._device)
            self._kept = list(zip(inputs.split(size), targets.to(self._device).split(size), strict=True))
        return self._kept


def held_out_examples(workload: Workload) -> Batch:
    """Return the examples that are evaluated: a multiple of the batch size.

    Raises:
        InputError: nothing is held out.
    """
    size = workload.batch_size
    wanted = -(-workload.evaluation_examples // size) * size
    inputs, targets = dataset_of(workload).test_batch(wanted, seed=workload.seed)
    there = len(inputs)
    rows = torch.arange(max(1, there // size) * size) % there
    return inputs[rows], targets[rows]


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation: no dropout, a batch norm's kept statistics, no graph. Put them back at the end."""
    trained = [part for module in modules for part in module.modules() if part.training]
    try:
        for part in trained:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        for part in trained:
            part.training = True
