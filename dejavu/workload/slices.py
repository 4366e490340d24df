"""The slices in which a workload's sequences go through the stages (TeraPipe, Li et al., ICML 2021)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dejavu.foundation.errors import InputError
from dejavu.workload.data import dataset_of
from dejavu.workload.settings import Workload


def slice_lengths(workload: Workload) -> tuple[int, ...]:
    """Return the positions of each slice of a sequence, in order; empty: sequences are whole.

    Raises:
        InputError: the workload's slices are not those of its sequences.
    """
    asked = workload.slices
    if asked == 1 or isinstance(asked, str):
        return ()
    shape = dataset_of(workload).shape.input_shape
    if len(shape) != 1:
        raise InputError(
            f"slices: {said(asked)} cuts sequences, and examples of data {workload.data!r} have the shape {shape}; "
            "wanted text or tokens, or no slices",
            ("slices",),
        )
    (length,) = shape
    if isinstance(asked, int):
        if asked > length:
            raise InputError(
                f"slices: {asked} of a sequence of {length} positions; wanted at most one for each position",
                ("slices",),
            )
        return tuple((k + 1) * length // asked - k * length // asked for k in range(asked))
    if sum(asked) != length:
        raise InputError(
            f"slices: {said(asked)} are {sum(asked)} positions; wanted the {length} of a sequence", ("slices",)
        )
    return asked if len(asked) > 1 else ()


def slice_spans(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (start, stop, positions of the whole sequence) of slices of these lengths."""
    stops = list(itertools.accumulate(lengths))
    return [(stop - length, stop, stops[-1]) for length, stop in zip(lengths, stops, strict=True)]


def said(asked: str | int | Sequence[int]) -> str:
    """Write slices as a workload has them."""
    return str(asked) if isinstance(asked, str | int) else str(list(asked))
