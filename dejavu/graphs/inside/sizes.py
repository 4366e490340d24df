"""Bytes of tensors, and of the copies that kernels make of them."""

from __future__ import annotations

from typing import Any

import torch


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of its elements, whatever memory it has."""
    return tensor.numel() * tensor.element_size()


def copy_of(tensor: Any) -> int:
    """Return the bytes of the copy that a kernel makes which wants its elements in order; 0: they are."""
    return 0 if tensor is None or tensor.is_contiguous() else size_of(tensor)


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of the copy that a kernel makes which computes in this type; 0: it is the tensor's."""
    return 0 if tensor.dtype == dtype else tensor.numel() * dtype.itemsize
