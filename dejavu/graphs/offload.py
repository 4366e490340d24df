"""Activations that wait for the backward pass in the host's memory, and weights that live there.

What autograd saves of a layer is copied there when the layer's forward pass ends, and back when the backward pass first
asks for it.
Weights come before the layer's forward pass, are gone from the device after it, and come again when the backward pass
first asks for them; their gradients go to the host's memory and add up there. Of a backward pass in two parts each part
asks for weights by itself, and in between they are gone. The copies are in the stream that computes, so nothing hides
them: `dejavu.cost` prices them as time of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@contextmanager
def offloading(
    layer: nn.Module, x: torch.Tensor, *, activations: bool = True, weights: bool = False, in_parts: bool = False
) -> Iterator[Callable[[torch.Tensor], Any]]:
    """Keep what the layer's forward pass saves in the host's memory until the backward pass.

    A storage is copied once, however many operators save views of it: `graphs.liveness` counts it so, too. The model's
    own input stays: it is a part of the batch, which the training holds anyway.

    Args:
        x: the layer's input.
        activations: what is saved goes there; else only weights are fetched again.
        weights: the layer's are in the host's memory (`weights_to_host`).
        in_parts: the backward pass runs in two parts, and what comes back for the first goes again when it has passed
            the layer; the graph, which is kept for the second, would hold it.

    Yields:
        The layer's forward pass, which may run again before the backward pass (recomputation).
    """
    moves = _Moves(layer, x, activations=activations)
    with saved_tensors_hooks(moves.away, lambda moved: moved.back() if isinstance(moved, _Plain | _Wrapped) else moved):
        yield moves.with_fetched_weights if weights else layer
    if in_parts and x.requires_grad:
        x.register_hook(moves.go)
    moves.forget()


def weights_to_host(module: nn.Module, device: torch.device) -> None:
    """Keep the weights in the host's memory, page-locked where a GPU fetches them, and buffers on the device."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    if device.type == "cuda":
        for weight in module.parameters():
            weight.data = weight.data.pin_memory()


class _Fetched(torch.autograd.Function):
    """A weight's copy on the device, whose gradient goes to the host's memory."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
        return _fetched(weight, device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if not gradient.is_cuda:
            return gradient, None
        there = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        there.copy_(gradient, non_blocking=True)
        torch.cuda.current_stream(gradient.device).synchronize()  # the host adds it up next
        return there, None


def _fetched(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(weight, device=device).copy_(weight.detach(), non_blocking=True)


@contextmanager
def _having(layer: nn.Module, copies: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Put the copies in the weights' places.

    `torch.func.functional_call` does so, too, but leaves the copies in a module that a layer has twice.
    """
    weights = [dict(part._parameters) for part in layer.modules()]
    try:
        for part in layer.modules():
            for name, weight in part._parameters.items():
                if weight is not None:
                    part._parameters[name] = copies[weight]  # type: ignore[assignment]  # torch's own way, too
        yield
    finally:
        for part, own in zip(layer.modules(), weights, strict=True):
            part._parameters.update(own)


class _Away:
    """What a tensor's elements come from when the backward pass wants them."""

    @cached_property
    def again(self) -> torch.UntypedStorage:
        raise NotImplementedError

    def leave(self) -> None:
        """Leave the device when the layer's forward pass ends."""

    def go(self) -> None:
        """Leave the device, until somebody asks again."""
        self.__dict__.pop("again", None)


class _Weight(_Away):
    """A weight in the host's memory; on the device from its first use in the backward pass on.

    It is gone when the last operator that used it has gone backward.
    """

    def __init__(self, weight: torch.Tensor, device: torch.device) -> None:
        self._weight, self._device = weight.detach(), device

    @cached_property
    def again(self) -> torch.UntypedStorage:
        return _fetched(self._weight, self._device).untyped_storage()


class _Storage(_Away):
    """A storage in the host's memory when it has left the device; there again from its first use on.

    It is gone when the last operator that saved a view of it has gone backward.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._here: torch.UntypedStorage | None = storage

    def leave(self) -> None:
        """Copy it, as it is now, to the host's memory."""
        assert self._here is not None
        there = torch.empty(0, dtype=torch.uint8, device=self._here.device).set_(self._here)
        self._device, self._here = self._here.device, None
        self._kept = torch.empty(there.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._kept.copy_(there, non_blocking=True)
        self.go()

    @cached_property
    def again(self) -> torch.UntypedStorage:
        if self._here is not None:  # the forward pass takes a gradient itself
            return self._here
        back = torch.empty_like(self._kept, device=self._device)
        return back.copy_(self._kept, non_blocking=True).untyped_storage()


class _Plain:
    """A tensor whose storage was moved; perhaps a view that negates what is there, such as a conjugate."""

    def __init__(self, tensor: torch.Tensor, storage: _Away) -> None:
        self._storage, self._dtype = storage, tensor.dtype
        self._place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()

    def back(self) -> torch.Tensor:
        again = self._storage.again
        found = torch.empty(0, dtype=self._dtype, device=again.device).set_(again, *self._place)
        found = found.conj() if self._is_conj else found
        return torch._neg_view(found) if self._is_neg else found


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

    def __init__(self, layer: nn.Module, x: torch.Tensor, *, activations: bool) -> None:
        self._layer, self._x, self._activations = layer, x, activations
        self._moved: dict[int, tuple[torch.UntypedStorage, _Away]] = {}
        self._is_over = False
        # Weak: what is moved lives as long as the graph that saved it.
        self._known = WeakSet[_Away]()

    @property
    def go(self) -> Callable[[torch.Tensor], None]:
        """A hook of the layer's input, whose gradient is there: nothing that came back is wanted now.

        It does not hold this, which has the input.
        """
        known = self._known

        def go(_: torch.Tensor) -> None:
            for one in known:
                one.go()

        return go

    def with_fetched_weights(self, x: torch.Tensor) -> Any:
        """Run the layer's forward pass with copies of its weights."""
        copies = dict[nn.Parameter, torch.Tensor]()
        for weight in self._layer.parameters():
            copies[weight] = copy = _Fetched.apply(weight, x.device)  # type: ignore[no-untyped-call]
            if not self._is_over:  # a recomputation's copies stay for the backward pass that follows at once
                storage = copy.untyped_storage()
                self._move(storage, _Weight(weight, x.device))
        with _having(self._layer, copies):
            return self._layer(x)

    @cached_property
    def _staying(self) -> set[int]:
        """The storages of what stays, as it is when the first tensor is saved: ZeRO gathers weights just before."""
        stays = [*self._layer.parameters(), *self._layer.buffers(), *([] if self._x.requires_grad else [self._x])]
        return {storage._cdata for one in stays for storage in _storages(one)}

    def away(self, tensor: torch.Tensor) -> Any:
        if tensor._is_zerotensor():  # as a weight's tangent under `torch.func.jvp`: it has no memory
            return tensor
        if is_traceable_wrapper_subclass(tensor):
            return _Wrapped(tensor, self)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._moved:
            if not self._activations or storage._cdata in self._staying:
                return tensor
            self._move(storage, _Storage(storage))
        return _Plain(tensor, self._moved[storage._cdata][1])

    def _move(self, storage: torch.UntypedStorage, away: _Away) -> None:
        self._moved[storage._cdata] = (storage, away)
        self._known.add(away)

    def forget(self) -> None:
        """Let what was saved leave the device: all views of a storage have what it has in the end, as on the device.

        Recurrent layers of torch's write to a part of a storage when another part of it is saved already.
        """
        self._is_over = True
        for _, away in self._moved.values():
            away.leave()
        self._moved.clear()


def _storages(part: Any) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(part):
        for name in part.__tensor_flatten__()[0]:
            yield from _storages(getattr(part, name))
    elif isinstance(part, torch.Tensor):
        yield part.untyped_storage()
