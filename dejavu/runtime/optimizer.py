"""The optimizer of a workload, and the learning rate at any step, computed from the step's number alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from dejavu.workload import OptimizerSettings, Workload

MASTER = "master"  # the key of a weight's master copy in the optimizer's state and in checkpoints


class _WithMasters(torch.optim.Optimizer):
    """Mixin for a torch optimizer: step a float32 master of each weight, and copy it to the weight.

    The masters are part of the optimizer's state, so trials and checkpoints carry them. A missing master is made from
    the weight itself, cast to float32.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let torch step the masters in place of the weights, each with its weight's gradient and moments."""
        assert closure is None, "the training loop computes gradients itself"
        groups = [group["params"] for group in self.param_groups]
        master_of = {weight: self._master(weight) for weights in groups for weight in weights}
        for weight, master in master_of.items():
            master.grad = weight.grad
            if weight in self.state:
                self.state[master] = self.state.pop(weight)
        for group, weights in zip(self.param_groups, groups, strict=True):
            group["params"] = [master_of[weight] for weight in weights]
        super().step()
        for group, weights in zip(self.param_groups, groups, strict=True):
            group["params"] = weights
        for weight, master in master_of.items():
            self.state[weight] = {**self.state.pop(master, {}), MASTER: master.detach()}
            weight.copy_(master)

    def _master(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        # Kept out of the state while torch steps: torch creates its moments only where a state is empty.
        known = self.state[weight].pop(MASTER, None) if weight in self.state else None
        return torch.nn.Parameter(weight.detach().float() if known is None else known)


class _AdamWWithMasters(_WithMasters, torch.optim.AdamW):
    pass


class _SGDWithMasters(_WithMasters, torch.optim.SGD):
    pass


OPTIMIZERS: dict[tuple[str, bool], type[torch.optim.Optimizer]] = {
    ("adamw", False): torch.optim.AdamW,
    ("adamw", True): _AdamWWithMasters,
    ("sgd", False): torch.optim.SGD,
    ("sgd", True): _SGDWithMasters,
}


def make_optimizer(settings: OptimizerSettings, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make a fresh torch optimizer with the workload's settings; for a stage without weights it does nothing.

    With master weights the gradients accumulate in float32 from now on. They are allocated at once, because torch's
    split backward pass adds to an existing gradient but stores the first one as it is, in the weight's own type.
    """
    given = list(parameters)
    if settings.master_weights:
        for parameter in given:
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros_like(parameter.data, dtype=torch.float32)
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        options["momentum"] = settings.momentum
    else:
        options |= {"betas": settings.betas, "eps": settings.epsilon}
    if len({type(parameter.data) for parameter in given}) > 1:  # torch's grouped step mixes no split and whole weights
        options["foreach"] = False
    groups: list[dict[str, Any]] = [{"params": given}]
    if settings.decayed == "matrices" and settings.weight_decay:
        whole, left_out = ([one for one in given if (one.dim() > 1) is many] for many in (True, False))
        groups = [{"params": whole}, {"params": left_out, "weight_decay": 0.0}]
    return OPTIMIZERS[settings.name, settings.master_weights](groups, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, workload: Workload, step: int) -> None:
    """Set the rate of this step: a linear warm-up, then constant, or decaying to zero at the end of the training."""
    settings = workload.optimizer
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    left = max(0.0, 1.0 - (step + 1 - settings.warmup_steps) / max(1, workload.num_steps - settings.warmup_steps))
    falls = {"constant": 1.0, "linear": min(1.0, left), "cosine": (1.0 - math.cos(math.pi * min(1.0, left))) / 2}
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * warm * falls[settings.decay]
