"""The cases of a question: every given sequence length with every given batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from dejavu.foundation.errors import InputError
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of


def varied(workload: Workload, lengths: Sequence[int], batches: Sequence[int]) -> list[tuple[str, Workload]]:
    """Return the workload with each combination, by name; just itself, without a name, where none is given.

    Where a batch does not divide into the workload's own number of microbatches, their greatest common divisor is
    taken, and the planner tries others.

    Raises:
        InputError: the workload cannot have such a length or batch, or its examples have no length.
    """
    found = []
    for length in lengths or (None,):
        for batch in batches or (None,):
            name = [f"sequence {length}"] if length is not None else []
            name += [f"batch {batch}"] if batch is not None else []
            found.append((", ".join(name), _with(workload, length, batch)))
    return found


def _with(workload: Workload, length: int | None, batch: int | None) -> Workload:
    changes: dict[str, Any] = {}
    if length is not None:
        changes["sequence_length"] = length
    if batch is not None:
        changes |= {
            "batch_size": batch,
            "num_microbatches": math.gcd(batch // workload.accumulate, workload.num_microbatches),
        }
    if not changes:
        return workload
    given = {name: getattr(workload, name) for name in workload.model_fields_set} | changes
    try:
        told = Workload.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        said = first["msg"].removeprefix("Value error, ")  # pydantic's word for a check of ours
        raise InputError(f"{', '.join(map(str, first['loc']))}: {said}") from None
    if length is not None and (shape := dataset_of(told).shape.input_shape) != (length,):
        each = " × ".join(map(str, shape)) or "one number"
        raise InputError(
            f"sequence_length {length}: an example of data {told.data} is {each}, whatever the length; wanted tokens"
        )
    return told
