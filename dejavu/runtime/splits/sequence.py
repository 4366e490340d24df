"""Context parallelism: a device has one part of the sequence through all layers; attention sees the keys of all.

As Llama 3 was trained (Dubey et al., 2024, section 3.3.2): keys and values are gathered, with grouped-query attention
much less than the queries, and going backward their gradients are summed and split again. Each part is two chunks of
the sequence, one from each end, so that of causal attention all devices compute as much (`positions.chunk_numbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dejavu.foundation.errors import InputError
from dejavu.runtime.layout import Layout
from dejavu.runtime.splits.attention import KEYS, Attending, InPlaceOfAttention
from dejavu.runtime.training import Loss
from dejavu.workload.models import LayerBuilder
from dejavu.workload.models.modules.positions import chunk_numbers, having_part

_SEQUENCE = 1  # the dimension of positions between layers


class SequencePart:
    """The part of the sequence that this device has.

    Args:
        group: the devices that share its examples, in the order of their parts.
        loss_by_position: each device computes the loss of its own positions.
    """

    def __init__(self, group: dist.ProcessGroup, *, loss_by_position: bool) -> None:
        self._group, self.loss_by_position = group, loss_by_position
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Take this device's positions of what goes into the model, or of targets (batch, positions, …)."""
        return _own(whole, _SEQUENCE, self.index, self.count)

    def runs(
        self, layer: Callable[[torch.Tensor], torch.Tensor], microbatch: int, position: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what runs a layer on the positions that it has; recomputation too, perhaps in another thread."""
        return partial(self._run, layer)

    def _run(self, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with having_part(self.index, self.count), _AttentionToAll(self):
            output: torch.Tensor = layer(x)
        return output

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Gather what comes out of the model, if each device is to compute the loss of all positions.

        All get the same gradient, of which each goes on with its own part.
        """
        if self.loss_by_position:
            return part
        gathered: torch.Tensor = _Gathered.apply(part, _SEQUENCE, self._group, False)  # type: ignore[no-untyped-call]
        return gathered

    def loss_of_own(self, loss: Loss) -> Loss:
        """Return the loss of this device's positions, given all targets."""
        return lambda output, target: loss(output, self.own(target))

    def keys(self, part: torch.Tensor) -> torch.Tensor:
        """Gather keys or values (batch, heads, positions, width); their gradient is summed over the devices."""
        gathered: torch.Tensor = _Gathered.apply(part, KEYS, self._group, True)  # type: ignore[no-untyped-call]
        return gathered


def _own(whole: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    """Take a part of the positions along a dimension."""
    numbers = chunk_numbers(index, count, whole.shape[dim] // count)
    chunks = whole.chunk(len(numbers) * count, dim)
    return torch.cat([chunks[number] for number in numbers], dim)


def _in_order(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Put all parts together, all positions in order."""
    chunks = dict[int, torch.Tensor]()
    for index, part in enumerate(parts):
        numbers = chunk_numbers(index, len(parts), part.shape[dim])
        chunks |= dict(zip(numbers, part.chunk(len(numbers), dim), strict=True))
    return torch.cat([chunks[number] for number in sorted(chunks)], dim)


class _Gathered(torch.autograd.Function):
    """The parts of a tensor along a dimension, put together; of the gradient, perhaps summed, a device's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup, is_summed: bool) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.is_summed = dim, group, is_summed
        parts = part.new_empty((dist.get_world_size(group), *part.shape))
        dist.all_gather_single(parts.flatten(0, 1), part.contiguous(), group=group)
        return _in_order(parts.unbind(), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (whole,) = gradients
        index, count = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        if not ctx.is_summed:
            return _own(whole, ctx.dim, index, count), None, None, None
        parts = torch.stack([_own(whole, ctx.dim, one, count) for one in range(count)])
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_single(own, parts.flatten(0, 1), group=ctx.group)
        return own, None, None, None


class _AttentionToAll(InPlaceOfAttention):
    """Gives torch's attention the keys and values of all positions."""

    def __init__(self, part: SequencePart) -> None:
        super().__init__()
        self._part = part

    def attend(self, asked: Attending) -> torch.Tensor:
        if asked.mask is not None:
            raise InputError(
                f"a layer gives its attention a mask of its own, {tuple(asked.mask.shape)}, and has one of "
                f"{self._part.count} parts of the sequence; wanted context_parallel 1, or is_causal in place of a mask"
            )
        keys, values = self._part.keys(asked.key), self._part.keys(asked.value)
        if not asked.is_causal:
            return asked.to(keys, values, is_causal=False)
        numbers = chunk_numbers(self._part.index, self._part.count, asked.num_queries)
        size, found = asked.num_queries // len(numbers), []
        for place, number in enumerate(numbers):  # of the keys only those until the chunk's own last position
            seen = slice((number + 1) * size)
            own = asked.of(place * size, size).to(keys[:, :, seen], values[:, :, seen], is_causal=True)
            found.append(own.transpose(1, KEYS))
        return torch.cat(found, 1).transpose(1, KEYS)  # in memory heads are beside each other, as layers want them


def context_meshes(layout: Layout, device: torch.device) -> tuple[DeviceMesh | None, ...]:
    """Make each pipeline rank's mesh of the devices that share examples with this one; None: there are none.

    Every rank of the world calls it.
    """
    found = list[DeviceMesh | None]()
    for rank, grid in enumerate(layout.grids):
        configuration = layout.plan.rank_configuration(rank)
        if configuration.context_parallel == 1:
            found.append(None)
            continue
        groups = grid.reshape(-1, configuration.context_parallel, grid.shape[1])
        names = ("examples", "sequence", "shard")
        mesh = DeviceMesh(device.type, torch.from_numpy(groups), mesh_dim_names=names)
        found.append(mesh)
    return tuple(found)


def sequence_part(sharing: DeviceMesh | None, last: LayerBuilder) -> SequencePart | None:
    """Return the part of this device of a rank's mesh; None: it shares its examples with no other.

    Args:
        last: the model's last layer.
    """
    if sharing is None:
        return None
    assert last.tensor_parallel is not None, "rejected by preflight"
    group = sharing.get_group("sequence")
    return SequencePart(group, loss_by_position=last.tensor_parallel.loss_by_position)
