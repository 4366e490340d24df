"""All replicas' gradients of one's own shard, in place of their sum: what a rule compares under ZeRO.

Torch's FSDP reduces a layer's gradients by a reduce-scatter. Here an all-to-all of as many bytes takes its place:
every rank receives its shard of each replica's gradient, as many numbers as one whole gradient has. What rules measure
adds up over parts, so it is summed over the ranks.

Shape suffixes: N = replicas, S = numbers of this rank's shard of a stage's gradient, padded as FSDP pads it,
P = numbers of a replica's gradient on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from dejavu.runtime.replicas import WithGradients, left_whole


def add_up(module: nn.Module) -> None:
    """Add what part of a backward pass leaves on FSDP's weights to their sums in float32, if it is to reduce these.

    FSDP does so itself after whole passes.
    """
    for _, group in _groups_of(module) if isinstance(module, FSDPModule) else ():
        for one in group.fsdp_params:
            one.accumulate_unsharded_grad_if_needed()
            one.to_accumulated_grad_if_needed()


def _groups_of(module: nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """Yield FSDP's groups of weights, each with its layer."""
    for layer in module.modules():
        if isinstance(layer, FSDPModule):
            for group in layer._get_fsdp_state()._fsdp_param_groups:
                yield layer, group


class ShardedWithGradients(WithGradients):
    """The same of weights that FSDP shards.

    Where it reduces a step's gradients at its end (ZeRO 1), zeros are given before. Where it does in every microbatch
    (ZeRO 2 and 3), it takes zeros for what is absent itself, which are forgotten after the step where nobody had one.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, device: torch.device, *, in_every_microbatch: bool
    ) -> None:
        groups = [found for _, found in _groups_of(module)]
        super().__init__((one for found in groups for one in found.fsdp_params), group, device)
        self._arrived = set[Any]()
        for found in groups if in_every_microbatch else ():
            found.reduce_scatter_unused_params = True
            found.post_backward = partial(self._note, found, found.post_backward)

    def _note(self, group: Any, go_on: Callable[..., None], *arguments: Any) -> None:
        self._arrived.update(one for one in group.fsdp_params if _has_gradient(one))
        go_on(*arguments)

    @staticmethod
    def is_trained(weight: Any) -> bool:
        return bool(weight.sharded_param.requires_grad)

    def has_gradient(self, weight: Any) -> bool:
        return weight in self._arrived or _has_gradient(weight)

    def give_zeros(self, weight: Any) -> None:
        if weight.sharded_param.grad is None:
            weight.unsharded_param.grad = torch.zeros_like(weight.unsharded_param)
            weight.to_accumulated_grad_if_needed()

    def forget_others(self) -> None:
        """Forget the zeros of weights that nobody had a gradient of, after the step: the optimizer would use them."""
        for one in self._unknown:
            one.sharded_param.grad = None
        self._arrived.clear()


def _has_gradient(weight: Any) -> bool:
    """Return whether FSDP has a gradient of a weight that it has not reduced."""
    return weight.unsharded_accumulated_grad is not None or weight._unsharded_param.grad is not None


class Place(NamedTuple):
    """Where a weight's gradient is among the columns of all.

    Attributes:
        numel: of the weight, before it is sharded over the replicas.
    """

    name: str
    weight: nn.Parameter
    columns: slice
    numel: int


class ShardedGradients:
    """Receives the replicas' gradients of this rank's shards, of one step.

    At ZeRO level 1 they come once a step, at 2 and 3 in every microbatch, and add up.

    Args:
        module: whose layers are sharded by FSDP over the group.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        self.num_replicas = dist.get_world_size(group)
        self._rows_NS: torch.Tensor | None = None
        self._own_S: torch.Tensor | None = None  # what is computed alone, while it is
        self._groups: list[tuple[int, list[Any]]] = []  # FSDP's of weights, with their first columns
        self.width = 0
        for layer, group_of_layer in _groups_of(module):
            weights = [one for one in group_of_layer.fsdp_params if one.sharded_param.requires_grad]
            self._groups.append((self.width, weights))
            layer.set_custom_reduce_scatter(_Receiver(self, self.width))
            self.width += sum(one.padded_sharded_param_size.numel() for one in weights)
        self._whole = [one for one in left_whole(module) if one.requires_grad]  # last, each in a column
        self._sharded_width, self.width = self.width, self.width + len(self._whole)

    def places(self) -> list[Place]:
        """Return the weights that have gradients, in the order of their columns, after FSDP has passed them on."""
        names = {weight: name for name, weight in self._module.named_parameters()}
        found = list[Place]()
        for first, weights in self._groups:
            start = first
            for one in weights:
                if one.sharded_param.grad is None:
                    continue
                stop = start + one.padded_sharded_param_size.numel()
                weight = one.sharded_param
                found.append(Place(names[weight], weight, slice(start, stop), math.prod(one._orig_size)))
                start = stop
        for column, weight in enumerate(self._whole, self._sharded_width):
            if weight.grad is not None:
                found.append(Place(names[weight], weight, slice(column, column + 1), 1))
        return found

    def receive(self, first: int, sent: torch.Tensor) -> None:
        """Send each replica its shard of a layer's gradient, and add what the replicas sent to this rank's rows.

        Args:
            first: of the layer's columns.
            sent: the shards one after another.
        """
        width = sent.numel() // self.num_replicas
        if self._own_S is not None:
            self._own_S[first : first + width] += sent.view(self.num_replicas, width)[dist.get_rank(self._group)]
            return
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self._group)
        if self._rows_NS is None:
            self._rows_NS = sent.new_zeros(self.num_replicas, self.width)
        self._rows_NS[:, first : first + width] += arrived.view(self.num_replicas, width)

    def take(self) -> torch.Tensor | None:
        """Return the step's rows, (N, S) in the group's order, and forget them; None: no weight has a gradient."""
        rows_NS, self._rows_NS = self._rows_NS, None
        if any(one.grad is not None for one in self._whole):
            own = self._of_whole()
            if rows_NS is None:
                rows_NS = own.new_zeros(self.num_replicas, self.width)
            every = own.new_empty(self.num_replicas, len(own))
            dist.all_gather_single(every.view(-1), own, group=self._group)
            rows_NS[:, self._sharded_width :] = every
        return rows_NS

    def _of_whole(self) -> torch.Tensor:
        """Return the gradients of the weights that are not sharded, zeros where there are none."""
        return torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in self._whole]).detach()

    def alone(self, loss: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the gradient of a loss, of which no other replica is told: (S,)."""
        self._own_S, kept = like.new_zeros(self.width), [one.grad for one in self._whole]
        for one in self._whole:
            one.grad = None
        try:
            loss.backward()
            if self._whole:
                self._own_S[self._sharded_width :] = self._of_whole()
            return self._own_S
        finally:
            self._own_S = None
            for one, gradient in zip(self._whole, kept, strict=True):
                one.grad = gradient

    def spoil(self, rows_NS: torch.Tensor, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each replica's gradient by what a drill makes of it. Every replica calls it together.

        Each gets its own gradient back, whole and in the order of the weights, and sends it anew.
        """
        own_NS = torch.empty_like(rows_NS)
        dist.all_to_all_single(own_NS, rows_NS, group=self._group)
        order = {name: number for number, (name, _) in enumerate(self._module.named_parameters())}
        places = sorted(self.places(), key=lambda place: order[place.name])
        whole_P = torch.cat([own_NS[:, one.columns].flatten()[: one.numel] for one in places])
        parts = spoil(whole_P).split([one.numel for one in places])
        for place, part in zip(places, parts, strict=True):
            columns = own_NS[:, place.columns]
            if place.columns.start >= self._sharded_width:  # every replica has it whole
                columns.copy_(part)
                continue
            padded = part.new_zeros(columns.numel())
            padded[: place.numel] = part
            columns.copy_(padded.view_as(columns))
        dist.all_to_all_single(rows_NS, own_NS, group=self._group)


class _Receiver(ReduceScatter):
    """What FSDP calls in place of a reduce-scatter of some weights' gradients."""

    def __init__(self, sharded: ShardedGradients, first: int) -> None:
        self._sharded, self._first = sharded, first

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        output_tensor.zero_()  # FSDP adds it to the gradient, which `ReplicaGradients` sets when all has come
        self._sharded.receive(self._first, input_tensor)
