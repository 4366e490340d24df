"""Shapes and types at every cut of a model, found with fake tensors, to set up stages before a first batch runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from dejavu.foundation.errors import InputError
from dejavu.foundation.tracing import fake_tensors
from dejavu.foundation.tracing.dtypes import to_dtype_of_fake
from dejavu.graphs.capture import Form, work_of
from dejavu.graphs.graph import DTYPES
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of


def boundaries(workload: Workload) -> tuple[torch.Tensor, ...]:
    """Return the input of every layer, and the last one's output, for one microbatch; on `meta`, without memory.

    Whether a tensor requires a gradient is as in the whole model: none before a layer that computes without gradients.

    Raises:
        InputError: a layer's output does not begin with the examples of the microbatch.
    """
    return _boundaries(
        workload.model_copy(update={"schedule": "auto", "slices": 1, "both_ways": False}).model_dump_json()
    )


@lru_cache(maxsize=8)  # a process makes several pipelines of a workload: for a comparison, or a benchmark
def _boundaries(text: str) -> tuple[torch.Tensor, ...]:
    workload = Workload.model_validate_json(text)
    shape, dtype, size = dataset_of(workload).shape, DTYPES[workload.dtype], workload.microbatch_size
    found = []
    with fake_tensors(allow_non_fake_inputs=True):
        x = torch.empty(size, *shape.input_shape, dtype=dtype if shape.input_dtype.is_floating_point else torch.int64)
        found.append(_meta(x))
        known: dict[Any, Form] = {}  # of layers that compute the same, one is run
        for builder in layers_of(workload):
            form = Form.of(x)
            key = None if form is None else work_of(builder, form)
            if key is not None and key in known:
                x = known[key].tensor()
                found.append(_meta(x))
                continue
            module = builder.build()
            to_dtype_of_fake(module, dtype)
            x = module(x)
            if x.dim() == 0 or x.shape[0] != size:
                raise InputError(
                    f"layer {builder.name!r} returns {tuple(x.shape)} for a microbatch of {size} examples; "
                    "wanted the examples as its first dimension"
                )
            found.append(_meta(x))
            output = Form.of(x)
            if key is not None and output is not None:
                known[key] = output
    passes_none = (k for k in range(len(found) - 1) if found[k].requires_grad and not found[k + 1].requires_grad)
    for boundary in found[: max(passes_none, default=-1) + 1]:
        boundary.requires_grad_(False)
    return tuple(found)


def part_of(boundary: torch.Tensor, num_examples: int, num_parts: int = 1) -> torch.Tensor:
    """Return the same boundary for another number of examples, and one of so many parts of the sequence."""
    rest = boundary.shape[1:]
    shape = (num_examples, *((rest[0] // num_parts, *rest[1:]) if num_parts > 1 else rest))
    return torch.empty(shape, dtype=boundary.dtype, device="meta", requires_grad=boundary.requires_grad)


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
