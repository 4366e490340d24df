"""The optimizer of a workload, and the learning rate at any step, computed from the step's number alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dejavu.workload import OptimizerSettings

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def make_optimizer(settings: OptimizerSettings, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A fresh torch optimizer with the workload's settings; a stage without weights gets one that has nothing to do."""
    make = OPTIMIZERS[settings.name]
    return make([{"params": list(parameters)}], lr=settings.learning_rate, weight_decay=settings.weight_decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, settings: OptimizerSettings, step: int) -> None:
    """The rate of this step: a linear warm-up, then constant."""
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * warm
