"""The optimizer of a workload, and the learning rate at any step, computed from the step's number alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from dejavu.workload import OptimizerSettings, Workload

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def make_optimizer(settings: OptimizerSettings, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A fresh torch optimizer with the workload's settings; a stage without weights gets one that has nothing to do."""
    given = list(parameters)
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        options["momentum"] = settings.momentum
    if len({type(parameter.data) for parameter in given}) > 1:  # torch's grouped step mixes no split and whole weights
        options["foreach"] = False
    return OPTIMIZERS[settings.name]([{"params": given}], **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, workload: Workload, step: int) -> None:
    """The rate of this step: a linear warm-up, then constant, or falling to zero at the end of the training."""
    settings = workload.optimizer
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    left = max(0.0, 1.0 - (step + 1 - settings.warmup_steps) / max(1, workload.num_steps - settings.warmup_steps))
    falls = {"constant": 1.0, "linear": min(1.0, left), "cosine": (1.0 - math.cos(math.pi * min(1.0, left))) / 2}
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * warm * falls[settings.decay]
