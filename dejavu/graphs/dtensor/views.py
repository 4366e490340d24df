"""Views of distributed tensors whose parts lie in memory in another order than the whole is said to.

A collective delivers a tensor in the order of its dimensions. torch's distributed tensor goes on to name the strides
that it had before: attention's output, say, with its heads between batch and sequence. What follows asks for a view
that those strides allow and the real ones do not. Such a part is copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

VIEW = torch.ops.aten.view.default


def lie_alike(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether tensors of a shape with these strides lie in memory in the same order of their dimensions."""
    return _order(shape, one) == _order(shape, other)


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return sorted((k for k, length in enumerate(shape) if length != 1), key=lambda k: -strides[k])


def view_in_order(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View a distributed tensor; DTensor's own way where the parts lie as it thinks they do."""
    whole = args[0]
    local = whole._local_tensor
    if not lie_alike(local.shape, local.stride(), whole.stride()):
        whole = DTensor(local.contiguous(), whole._spec, requires_grad=False)
    return torch.ops.aten._unsafe_view.default(whole, *args[1:], **kwargs)
