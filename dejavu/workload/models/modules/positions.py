"""Which positions of a sequence are at hand: of several devices each may have a part, or slices come one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_PART: ContextVar[tuple[int, int]] = ContextVar("part of the sequence", default=(0, 1))
_SLICE: ContextVar[tuple[int, int] | None] = ContextVar("slice of the sequence", default=None)


@contextmanager
def having_part(index: int, count: int) -> Iterator[None]:
    """Let layers run on the part `index` of `count` equal ones of every sequence."""
    before = _PART.set((index, count))
    try:
        yield
    finally:
        _PART.reset(before)


@contextmanager
def having_slice(start: int, length: int) -> Iterator[None]:
    """Let layers run on so many positions of every sequence, from `start` on."""
    before = _SLICE.set((start, length))
    try:
        yield
    finally:
        _SLICE.reset(before)


def num_at_hand(length: int) -> int:
    """Return how many positions are at hand of a sequence of this length."""
    found = _SLICE.get()
    return length // _PART.get()[1] if found is None else found[1]


def positions(length: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return the places (T,) in the sequence of the `length` positions that are at hand."""
    found = _SLICE.get()
    first = _PART.get()[0] * length if found is None else found[0]
    if first:
        return torch.arange(first, first + length, dtype=dtype, device=device)
    return torch.arange(length, dtype=dtype, device=device)
