"""A peer of data parallelism: torch's DistributedDataParallel, a model on every rank, in the product's own loop."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dejavu.runtime.job import TrainingJob
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.training import build_layers, train
from dejavu.workload import Workload
from dejavu.workload.models import model_of

WARMUP_STEPS = 2  # as of the ranks beside it


class Replicated:
    """An executor of `train`: each rank an equal part of every microbatch, gradients summed in the last one's pass."""

    frees_gradients = False

    def __init__(self, model: DistributedDataParallel, workload: Workload) -> None:
        self._model, self._loss, self._runs = model, model_of(workload).loss, workload.microbatches_in_a_step
        self.loss_scale = 1.0
        rank, count = dist.get_rank(), dist.get_world_size()
        each = np.arange(workload.batch_size).reshape(self._runs, count, -1)
        self.rows = each[:, rank].ravel()

    def __call__(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        total = torch.zeros(())
        self._model.module.step = step
        pairs = list(zip(inputs.chunk(self._runs), targets.chunk(self._runs), strict=True))
        for k, (x, y) in enumerate(pairs):
            with nullcontext() if k == len(pairs) - 1 else self._model.no_sync():
                loss = self._loss(self._model(x), y) / self._runs
                loss.backward()
                total += loss.detach()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def clip_gradients(self, most: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), most)

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        raise NotImplementedError("nothing is held out in these trainings")


def replicated_row(job: TrainingJob) -> dict[str, Any]:
    """Train a job's steps as one group of replicas; return what the ranks beside it write."""
    workload, device = job.workload, torch.device("cpu")
    model = DistributedDataParallel(build_layers(workload, job.draw, device))
    optimizer = make_optimizer(workload.optimizer, model.parameters())
    losses, seconds = list[float](), list[float]()

    def on_step(step: int, loss: float | None, step_seconds: float, once_seconds: float) -> None:
        seconds.append(step_seconds)
        losses.append(float(loss or 0.0))

    executor = Replicated(model, workload)
    train(executor, optimizer, workload, range(job.first_step, job.last_step), device=device, on_step=on_step)
    everyone: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(everyone, seconds)
    slowest = [max(step) for step in zip(*everyone, strict=True)][WARMUP_STEPS:]
    counted = {"step_seconds": slowest, "all_step_seconds": slowest, "num_undisturbed": 0}
    return {**counted, "stages": [], "losses": losses, "evaluations": [], "passes": [], "once": []}
