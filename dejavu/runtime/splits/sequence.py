"""Context parallelism: a device has one part of the sequence through all layers; attention sees the keys of all.

As Llama 3 was trained (Dubey et al., 2024, section 3.3.2): keys and values are gathered, with grouped-query attention
much less than the queries, and going backward their gradients are summed and split again. Parts are runs of positions
in order, so of causal attention the last device computes the most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from dejavu.runtime.layout import Layout
from dejavu.workload.models.modules.positions import having_part

_SEQUENCE = 1  # the dimension of positions between layers
_KEYS = 2  # and of keys and values (batch, heads, positions, width)


class SequencePart:
    """The part of the sequence that this device has.

    Args:
        mesh: the devices that share its examples, in the order of their parts.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.index, self.count = mesh.get_local_rank(), mesh.size()

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Take this device's positions of what goes into the model (batch, positions, …)."""
        return whole.chunk(self.count, dim=_SEQUENCE)[self.index].contiguous()

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run a layer on the positions that it has. Recomputation comes here again, perhaps in another thread."""
        with having_part(self.index, self.count), _AttentionToAll(self):
            output: torch.Tensor = layer(x)
        return output

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Gather what comes out of the model: each device computes the loss of all positions, and goes on from its own.

        So the gradient that arrives is taken as it is, and not summed over the devices.
        """
        return self._gathered(part, _SEQUENCE).to_local()

    def keys(self, part: torch.Tensor) -> torch.Tensor:
        """Gather keys or values (batch, heads, positions, width); their gradient is summed over the devices."""
        return self._gathered(part, _KEYS).to_local(grad_placements=[Partial()])

    def _gathered(self, part: torch.Tensor, dim: int) -> DTensor:
        placed = DTensor.from_local(part.contiguous(), self._mesh, [Shard(dim)], run_check=False)
        return placed.redistribute(placements=[Replicate()])


class _AttentionToAll(TorchFunctionMode):
    """Gives torch's attention the keys and values of all positions."""

    def __init__(self, part: SequencePart) -> None:
        super().__init__()
        self._part = part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise NotImplementedError("attention with a mask of its own cannot be split along the sequence")
        keys, values = self._part.keys(key), self._part.keys(value)
        causal: Any = None
        if is_causal:  # of the keys only those until the own last position
            seen = (self._part.index + 1) * query.shape[_KEYS]
            keys, values = keys[:, :, :seen], values[:, :, :seen]
            causal = causal_lower_right(query.shape[_KEYS], seen) if self._part.index else None
        attended: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, causal, dropout_p, is_causal and causal is None, **options
        )
        return attended


def sequence_parts(layout: Layout, device: torch.device) -> tuple[DeviceMesh | None, ...]:
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
