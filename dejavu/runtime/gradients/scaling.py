"""Loss scaling, for layers that compute in float16: small gradients would vanish in it.

The loss is multiplied before the backward pass, and the gradients are divided again, in float32. Where one of them has
overflowed, on whatever rank, no rank makes the step, and the scale is halved; after many good steps it is doubled
(Micikevicius et al., ICLR 2018, section 3.2).

torch's `ShardedGradScaler` does the same for FSDP alone: where a stage has both split and whole weights, as every
tensor-parallel one, it fails at mixed DTensors and tensors.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from dejavu.foundation.errors import DejavuError
from dejavu.runtime.state import OF_ALL, local_of, states_of

FIRST_SCALE = 2.0**16
LEAST_SCALE = 2.0**-14  # no gradient of this scale overflows that is a number
GOOD_STEPS = 2000  # before the scale is doubled
MOST_HALVED = round(math.log2(FIRST_SCALE / LEAST_SCALE))  # times in a row, from the first step of a training


class ScaleError(DejavuError):
    """The gradients are not finite at any scale."""


class LossScale:
    """The scale of a training's loss; part of the optimizer's state, so checkpoints and trials carry it.

    Every rank has one, and all of them the same.

    Args:
        device: of the rank, wherever its gradients are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        if OF_ALL not in states_of(optimizer):
            self._set(FIRST_SCALE, 0)

    @property
    def scale(self) -> float:
        """What the loss of the next step is multiplied by: a power of two, so that nothing is rounded."""
        return float(states_of(self._optimizer)[OF_ALL]["scale"])

    def unscale(self, step: int) -> bool:
        """Divide the gradients of a step by its scale, and choose the next one; every rank of the world calls it.

        Returns:
            Whether all gradients are finite, on all ranks, so that the step may be made.

        Raises:
            ScaleError: they are not, at the smallest scale.
        """
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        gradients = [local_of(weight.grad) for weight in weights if weight.grad is not None]
        scale, good_steps = self.scale, int(states_of(self._optimizer)[OF_ALL]["good_steps"])
        finite = torch.tensor(float(all(bool(one.isfinite().all()) for one in gradients)), device=self._device)
        if dist.is_initialized():
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            if scale <= LEAST_SCALE:
                raise ScaleError(_not_finite(step, scale))
            self._set(scale / 2, 0)
            return False
        for gradient in gradients:
            gradient.div_(scale)
        self._set(*((scale * 2, 0) if good_steps + 1 == GOOD_STEPS else (scale, good_steps + 1)))
        return True

    def _set(self, scale: float, good_steps: int) -> None:
        """Keep new tensors: a snapshot may still be copying the old ones."""
        states_of(self._optimizer)[OF_ALL] = {"scale": torch.tensor(scale), "good_steps": torch.tensor(good_steps)}


def _not_finite(step: int, scale: float) -> str:
    found = f"gradients of step {step + 1} are not finite, at a loss scale of {scale:g}"
    if step <= MOST_HALVED:  # each step before it halved the first scale
        return (
            f"{found}, and at larger ones those of all steps before it were not, so that no weight was changed; wanted "
            "finite ones: set mixed_precision: bfloat16, or leave it out, in a new training: one that is resumed keeps "
            "it. Where they are not finite without it either, the model's backward pass makes them so"
        )
    return (
        f"{found}; wanted finite ones: lower the learning rate, or set mixed_precision: bfloat16, in a new training: "
        "one that is resumed keeps both"
    )
