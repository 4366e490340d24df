"""The loss of scores of which each device has those of its own classes, as Megatron-LM computes it.

Devices exchange a maximum, a sum and the target's score for each target (Shoeybi et al., 2019, section 3), which is
what torch's `loss_parallel` does. Its operators need the backward pass under that context too, and distributed tensors:
so both passes of the loss are one node of the graph here, between tensors that are a device's own. Schedules that split
the backward pass, and those that drop a stage's output, see nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.overrides import TorchFunctionMode

from dejavu.foundation.errors import InputError
from dejavu.runtime.training import Loss

_CLASSES = 1  # of what torch's cross entropy is given: (targets, classes)


def loss_of_own_classes(loss: Loss, mesh: DeviceMesh, num_classes: int) -> Loss:
    """Return the same loss, on every device, of outputs that have a device's own classes in their last dimension.

    Args:
        loss: cross entropy of class indices (`by_class`).
        mesh: the devices, in the order of their classes.
        num_classes: of all devices; they have equal parts, of which the last may be smaller.
    """

    def of_own(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with _AmongDevices(mesh, num_classes) as among:
            found = loss(output, target)
        if among.calls != 1:
            raise InputError(
                f"the loss called torch's cross_entropy {among.calls} times; wanted once, as `by_class` promises of it"
            )
        return found

    return of_own


class _AmongDevices(TorchFunctionMode):
    """Gives torch's cross entropy to all devices together."""

    def __init__(self, mesh: DeviceMesh, num_classes: int) -> None:
        super().__init__()
        self._mesh, self._num_classes, self.calls = mesh, num_classes, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.cross_entropy:
            self.calls += 1
            return self._cross_entropy(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _cross_entropy(self, scores: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        if scores.dim() != 2 or target.is_floating_point():
            raise InputError(
                f"the loss gives torch's cross_entropy scores {tuple(scores.shape)} and targets {tuple(target.shape)} "
                f"of {target.dtype}; wanted (targets, classes) and indices of classes, as `by_class` promises"
            )

        def of_whole(part: torch.Tensor) -> torch.Tensor:
            shape = torch.Size([len(part), self._num_classes])
            whole = DTensor.from_local(
                part, self._mesh, [Shard(_CLASSES)], run_check=False, shape=shape, stride=(self._num_classes, 1)
            )
            found: Any = torch.nn.functional.cross_entropy(whole, target, **options)
            mean: torch.Tensor = found.to_local()
            return mean

        mean: torch.Tensor = _OneNode.apply(scores, of_whole)  # type: ignore[no-untyped-call]  # torch's has no types
        return mean


class _OneNode(torch.autograd.Function):
    """A function of a tensor with both passes under torch's `loss_parallel`."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        wanted = ctx.needs_input_grad[0]
        own = given.detach().requires_grad_(wanted)
        with loss_parallel(), torch.enable_grad() if wanted else nullcontext():
            found = function(own)
        if wanted:
            ctx.own, ctx.found = own, found
        return found.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with loss_parallel():
            (of_given,) = torch.autograd.grad(ctx.found, ctx.own, gradients)
        ctx.own = ctx.found = None  # what the loss has kept is dropped with its gradient, as torch drops its own
        return of_given, None
