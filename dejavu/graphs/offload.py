"""Activations that wait for the backward pass in the host's memory.

What autograd saves of a layer is copied there as it is saved, and back when the backward pass first asks for it. The
copies are in the stream that computes, so nothing hides them: `dejavu.cost` prices them as time of the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@contextmanager
def offloading(layer: nn.Module, x: torch.Tensor) -> Iterator[None]:
    """Keep what the layer's forward pass saves, its weights left out, in the host's memory until the backward pass.

    A storage is copied once, however many operators save views of it: `graphs.liveness` counts it so, too. The model's
    own input stays: it is a part of the batch, which the training holds anyway.

    Args:
        x: the layer's input.
    """
    moves = _Moves(layer, x)
    with saved_tensors_hooks(moves.away, lambda moved: moved.back() if isinstance(moved, _Plain | _Wrapped) else moved):
        yield
    moves.forget()


class _Storage:
    """A storage in the host's memory; on its device again from its first use on.

    It is gone when the last operator that saved a view of it has gone backward.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._device = storage.device
        self._kept = torch.empty(there.shape, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        self._kept.copy_(there, non_blocking=True)

    @cached_property
    def again(self) -> torch.UntypedStorage:
        back = torch.empty_like(self._kept, device=self._device)
        return back.copy_(self._kept, non_blocking=True).untyped_storage()


class _Plain:
    """A tensor whose storage was moved."""

    def __init__(self, tensor: torch.Tensor, storage: _Storage) -> None:
        self._storage, self._dtype = storage, tensor.dtype
        self._place = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def back(self) -> torch.Tensor:
        again = self._storage.again
        return torch.empty(0, dtype=self._dtype, device=again.device).set_(again, *self._place)


class _Wrapped:
    """A tensor of tensors, such as a shard's part of a distributed one."""

    def __init__(self, tensor: Any, moves: _Moves) -> None:
        self._kind, self._size, self._stride = type(tensor), tensor.size(), tensor.stride()
        names, self._context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}  # tensors, and what describes them (a mesh)
        self._inner = {name: moves.away(one) if isinstance(one, torch.Tensor) else one for name, one in parts.items()}

    def back(self) -> torch.Tensor:
        inner = {name: one.back() if isinstance(one, _Plain | _Wrapped) else one for name, one in self._inner.items()}
        whole: torch.Tensor = self._kind.__tensor_unflatten__(inner, self._context, self._size, self._stride)
        return whole


class _Moves:
    """What one forward pass of a layer has moved.

    It holds these storages until the layer's forward pass ends, so that none of them is taken for a later one.
    """

    def __init__(self, layer: nn.Module, x: torch.Tensor) -> None:
        self._layer, self._x = layer, x
        self._moved: dict[int, tuple[torch.UntypedStorage, _Storage]] = {}

    @cached_property
    def _staying(self) -> set[int]:
        """The storages of what stays, as it is when the first tensor is saved: ZeRO gathers weights just before."""
        stays = [*self._layer.parameters(), *self._layer.buffers(), *([] if self._x.requires_grad else [self._x])]
        return {storage._cdata for one in stays for storage in _storages(one)}

    def away(self, tensor: torch.Tensor) -> Any:
        if is_traceable_wrapper_subclass(tensor):
            return _Wrapped(tensor, self)
        storage = tensor.untyped_storage()
        if storage._cdata in self._staying:
            return tensor
        if storage._cdata not in self._moved:  # what autograd saves must not change afterwards: one copy does for all
            self._moved[storage._cdata] = (storage, _Storage(storage))
        return _Plain(tensor, self._moved[storage._cdata][1])

    def forget(self) -> None:
        self._moved.clear()


def _storages(part: Any) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(part):
        for name in part.__tensor_flatten__()[0]:
            yield from _storages(getattr(part, name))
    elif isinstance(part, torch.Tensor):
        yield part.untyped_storage()
