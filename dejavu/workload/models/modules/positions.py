"""Which positions of a sequence are at hand, where several devices have a part each (context parallelism)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_PART: ContextVar[tuple[int, int]] = ContextVar("part of the sequence", default=(0, 1))


@contextmanager
def having_part(index: int, count: int) -> Iterator[None]:
    """Let layers run on the part `index` of `count` equal ones of every sequence."""
    before = _PART.set((index, count))
    try:
        yield
    finally:
        _PART.reset(before)


def num_parts() -> int:
    """Return into how many parts the sequence is cut; 1: all of it is here."""
    return _PART.get()[1]


def positions(length: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return the places (T,) in the sequence of the `length` positions that are at hand."""
    first = _PART.get()[0] * length
    if first:
        return torch.arange(first, first + length, dtype=dtype, device=device)
    return torch.arange(length, dtype=dtype, device=device)
