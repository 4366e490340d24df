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
    """Let layers run on the part `index` of `count` equal ones of every sequence (`chunk_numbers`)."""
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


def chunk_numbers(index: int, count: int, length: int) -> tuple[int, ...]:
    """Return which equal chunks of a sequence the part `index` of `count` is, in order.

    One from each end, so that of causal attention, where later positions see more, all parts compute as much (Dubey et
    al., 2024, section 3.3.2): of 2 · count chunks the numbers `index` and 2 · count − 1 − `index`. A run of positions,
    of `count` chunks the number `index`, where a part can't be halved.

    Args:
        length: positions of the part.
    """
    return (index,) if count == 1 or length % 2 else (index, 2 * count - 1 - index)


def num_at_hand(length: int) -> int:
    """Return how many positions are at hand of a sequence of this length."""
    found = _SLICE.get()
    return length // _PART.get()[1] if found is None else found[1]


def positions(length: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return the places (T,) in the sequence of the `length` positions that are at hand."""
    found, (index, count) = _SLICE.get(), _PART.get()
    if found is not None and found[0]:
        return torch.arange(found[0], found[0] + length, dtype=dtype, device=device)
    if found is not None or count == 1:
        return torch.arange(length, dtype=dtype, device=device)
    numbers = chunk_numbers(index, count, length)
    size = length // len(numbers)
    return torch.cat([torch.arange(k * size, (k + 1) * size, dtype=dtype, device=device) for k in numbers])
