"""The gradient of held-out examples, on each replica by itself: what Zeno++ scores gradients by."""

from __future__ import annotations

import torch

from dejavu.graphs.graph import DTYPES
from dejavu.runtime.batches.held_out import held_out_examples
from dejavu.runtime.gradients.sharded import ShardedGradients
from dejavu.runtime.process.failures import DivergedError
from dejavu.runtime.state import local_of
from dejavu.runtime.training import Layers
from dejavu.workload import Workload
from dejavu.workload.models import model_of


class HeldOutGradient:
    """The gradient of the loss of some held-out examples, a microbatch's number, others each time.

    Every replica that has the same weights computes the same. Without dropout, and with a batch norm's kept statistics.

    Args:
        module: the whole model.
        sharded: over the replicas, of which each gets its own shard of the gradient; None: whole on this device.
    """

    def __init__(
        self, workload: Workload, module: Layers, device: torch.device, sharded: ShardedGradients | None = None
    ) -> None:
        self._sharded = sharded
        self._workload, self._module, self._device = workload, module, device
        self._loss, self._every = model_of(workload).loss, workload.gradients.held_out_every
        self._examples: tuple[torch.Tensor, torch.Tensor] | None = None
        self._known: tuple[int, torch.Tensor] | None = None

    def __call__(self, step: int) -> torch.Tensor:
        """Return the gradient of a step, all weights' one after another, or this rank's shards of them: (P,).

        Raises:
            DivergedError: it is not finite, so that nothing can be judged by it.
        """
        turn = step // self._every
        if self._known is None or self._known[0] != turn:
            found_P = self._computed(turn)
            if not found_P.isfinite().all():
                raise DivergedError(
                    f"the gradient of held-out examples, by which gradients: zeno judges replicas in step {step + 1}, "
                    "is not finite; wanted held-out examples whose loss is a number, a lower learning rate, or another "
                    "rule"
                )
            self._known = turn, found_P
        return self._known[1]

    def _computed(self, turn: int) -> torch.Tensor:
        if self._examples is None:
            inputs, targets = held_out_examples(self._workload)
            dtype = DTYPES[self._workload.dtype] if inputs.is_floating_point() else inputs.dtype
            self._examples = inputs.to(self._device, dtype), targets.to(self._device)
        inputs, targets = self._examples
        size = self._workload.microbatch_size
        rows = (turn * size + torch.arange(size)) % len(inputs)
        trained = [part for part in self._module.modules() if part.training]
        weights = [weight for weight in self._module.parameters() if weight.grad is not None]
        try:
            for part in trained:
                part.training = False
            with torch.enable_grad():
                loss = self._loss(self._module(inputs[rows]), targets[rows])
                if self._sharded is not None:
                    return self._sharded.alone(loss.float(), local_of(weights[0]))
                # A master weight has a gradient from the beginning, and a layer may use a weight at times only.
                found = torch.autograd.grad(loss.float(), weights, materialize_grads=True)
        finally:
            for part in trained:
                part.training = True
        return torch.cat([one.flatten() for one in found]).to(weights[0].grad.dtype)  # type: ignore[union-attr]
