"""A workload's layers as operators with the tensors between them; equal layers are traced once."""

from __future__ import annotations

from typing import Any

import torch

from dejavu.cluster import Kind
from dejavu.foundation.tracing import FakeMode, fake_tensors
from dejavu.graphs.capture import Form, loss_of, on_kind, work_of
from dejavu.graphs.graph import DTYPES
from dejavu.graphs.layer_trace import CaptureError, built
from dejavu.sharding.operator_graph import OperatorGraph, trace_operators
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of, model_of


def capture_operators(workload: Workload, kind: Kind = "cuda") -> tuple[OperatorGraph, ...]:
    """Trace the model's layers at the workload's microbatch, the last one with the loss.

    Args:
        kind: of the devices that will run it: attention has other kernels on GPUs.

    Raises:
        CaptureError: a layer cannot be traced.
    """
    shape, model, dtype = dataset_of(workload).shape, model_of(workload), DTYPES[workload.dtype]
    size, given = workload.microbatch_size, shape.input_dtype
    inputs = Form.contiguous((size, *shape.input_shape), dtype if given.is_floating_point else given)
    target = Form.contiguous((size, *shape.target_shape), torch.int64)
    builders, mode = layers_of(workload), FakeMode(allow_non_fake_inputs=False)
    traced: dict[Any, OperatorGraph] = {}
    found = []
    for position, builder in enumerate(builders):
        is_last = position == len(builders) - 1
        key = None if is_last else work_of(builder, inputs)
        if key is None or key not in traced:
            with fake_tensors(mode):
                loss = loss_of(model.loss, target.tensor()) if is_last else None
                module = built(on_kind(builder, kind), dtype, workload.autocast)
                try:
                    traced[key] = trace_operators(module, inputs.tensor(), loss)
                except Exception as error:
                    raise CaptureError(f"layer {builder.name!r} cannot be traced: {error}") from error
        found.append(traced[key])
        output = found[-1].type_of(found[-1].output)
        inputs = Form.contiguous(output.shape, output.dtype)
    return tuple(found)
