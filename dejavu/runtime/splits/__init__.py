"""Layers whose split was found: weights placed as the plan says, and everything else as torch propagates it.

`dejavu.sharding.propagation` has priced just that, by the same functions of torch. Beside it `sequence`: devices that
have a part of the sequence each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dejavu.graphs.dtensor import tell_torch


def carry_out(
    layer: nn.Module,
    weights: Mapping[str, int],
    mesh: DeviceMesh,
    *,
    whole_sums: bool = False,
    split_output: bool = False,
) -> None:
    """Split a layer's weights over the devices of a mesh in place; what it receives and returns is whole on each.

    Every device draws the same weights, so each takes its part of its own.

    Args:
        weights: by name, the dimension that each is split by; all others are whole.
        whole_sums: sums over the devices are made whole at once going forward, and a gradient when all products with
            split weights have added to it; else where torch needs them so.
        split_output: each device returns its part of the output's last dimension.
    """
    tell_torch()
    # Operators that make tensors inside, as attention does with its mask, give no distributed ones.
    DTensor._op_dispatcher._allow_implicit_replication = True
    split = {id(layer.get_parameter(name)): dim for name, dim in weights.items()}
    made: dict[int, nn.Parameter] = {}
    for module in layer.modules():
        for name, whole in module._parameters.items():
            if whole is not None:
                if id(whole) not in made:
                    made[id(whole)] = _placed(whole, split.get(id(whole)), mesh)
                module._parameters[name] = made[id(whole)]
    inner: Callable[..., Any] | None = layer.__dict__.get("forward")

    def forward(x: torch.Tensor) -> torch.Tensor:
        received = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        with _AllDistributed(mesh, whole_sums):
            output = type(layer).forward(layer, received) if inner is None else inner(received)
        whole: torch.Tensor = output
        if isinstance(output, DTensor):
            returned = Shard(output.dim() - 1) if split_output else Replicate()
            whole = output.redistribute(placements=[returned]).to_local()
        return whole

    layer.__dict__["forward"] = forward


def _placed(whole: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    place: list[Placement] = [Replicate() if dim is None else Shard(dim)]
    part = distribute_tensor(whole.detach(), mesh, place, src_data_rank=None)
    made = nn.Parameter(part, requires_grad=whole.requires_grad)
    if made.requires_grad:
        made.register_hook(partial(_as_its_weight, placements=place))
        for hook in (whole._backward_hooks or {}).values():
            made.register_hook(partial(as_a_whole, hook=hook))
    return made


def _as_its_weight(gradient: torch.Tensor, placements: list[Placement]) -> torch.Tensor:
    """Place a gradient as its weight is, before it is added to those of other microbatches."""
    if isinstance(gradient, DTensor) and list(gradient.placements) != placements:
        return gradient.redistribute(placements=placements)
    return gradient


def as_a_whole(gradient: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor | None:
    """Give a weight's own hook the whole gradient, and split again what it returns."""
    if not isinstance(gradient, DTensor):
        return hook(gradient)
    found = hook(gradient.full_tensor())
    mesh, placements = gradient.device_mesh, gradient.placements
    return None if found is None else distribute_tensor(found, mesh, placements, src_data_rank=None)


class _AllDistributed(TorchFunctionMode):
    """Makes a tensor that is whole on every device, such as a mask, a distributed one where it meets one.

    Makes sums whole where they arise, if that is wanted, and gradients of what split weights are multiplied with.
    """

    def __init__(self, mesh: DeviceMesh, whole_sums: bool) -> None:
        super().__init__()
        self._mesh, self._whole_sums = mesh, whole_sums
        self._of_split = dict[int, torch.Tensor]()  # made of split weights alone
        self._entered = dict[int, tuple[DTensor, DTensor]]()  # what they are multiplied with, before and as it is used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        tensors = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
        if any(isinstance(one, DTensor) for one in tensors) and any(not isinstance(one, DTensor) for one in tensors):
            given = tree_map_only(torch.Tensor, self._distributed, given)
        return self._with_whole_sums(func, given) if self._whole_sums else func(*given[0], **given[1])

    def _with_whole_sums(self, func: Any, given: Any) -> Any:
        tensors = [one for one in tree_leaves(given) if isinstance(one, DTensor)]
        of_split = [one for one in tensors if self._is_of_split(one)]
        if of_split and len(of_split) < len(tensors):
            given = tree_map_only(DTensor, self._entering, given)
        made = func(*given[0], **given[1])
        if of_split and len(of_split) == len(tensors):
            self._of_split.update({id(one): one for one in tree_leaves(made) if isinstance(one, DTensor)})
            return made
        if not of_split or any(map(_is_sum, tensors)):
            return made
        return tree_map_only(DTensor, _whole, made)

    def _is_of_split(self, tensor: DTensor) -> bool:
        """Return whether it is a split weight of products, or made of such alone; scales and biases are not."""
        is_split = isinstance(tensor, nn.Parameter) and any(one.is_shard() for one in tensor.placements)
        return (is_split and tensor.dim() > 1) or id(tensor) in self._of_split

    def _entering(self, tensor: DTensor) -> DTensor:
        """Return what split weights are multiplied with, once for all of them: its gradient adds up first."""
        if self._is_of_split(tensor) or not tensor.requires_grad or tensor.placements != (Replicate(),):
            return tensor
        if id(tensor) not in self._entered:
            entering: DTensor = _Entering.apply(tensor)  # type: ignore[no-untyped-call]  # torch's has no types
            self._entered[id(tensor)] = tensor, entering
            self._entered[id(entering)] = entering, entering
        return self._entered[id(tensor)][1]

    def _distributed(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)


def _is_sum(tensor: torch.Tensor) -> bool:
    """Return whether the devices' tensors have to be added up."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def _whole(tensor: DTensor) -> torch.Tensor:
    made: torch.Tensor = tensor
    if _is_sum(tensor):
        made = _Whole.apply(tensor)  # type: ignore[no-untyped-call]  # torch's has no types
    return made


class _Whole(torch.autograd.Function):
    """Adds up; a gradient, which is the whole tensor's however it is placed, passes as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        return tensor.redistribute(placements=[Replicate()])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _Entering(torch.autograd.Function):
    """Changes nothing going forward; adds a gradient up over the devices."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0]
        if isinstance(gradient, DTensor) and _is_sum(gradient):
            return gradient.redistribute(placements=[Replicate()])
        return gradient
