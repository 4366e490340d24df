"""A model's operators as arrays: captured, traced for what crosses between them, and priced kernel by kernel."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from dejavu.cluster import DeviceType
from dejavu.cost.sources.predicted import Predicted
from dejavu.foundation.errors import InputError
from dejavu.foundation.tracing import FakeMode, fake_tensors
from dejavu.foundation.tracing.dtypes import to_dtype_of_fake
from dejavu.graphs.attention import AttendsOnGPU
from dejavu.graphs.autocast import computing_in
from dejavu.graphs.capture import CaptureError, Form, capture, plain_arguments, without_gradients
from dejavu.graphs.graph import DTYPES, Graph, Layer, Operator
from dejavu.graphs.kernels import kernel_of
from dejavu.operator_cuts.dataflow import LayerFlow, Loss, trace_flow
from dejavu.operator_cuts.problem import OperatorArrays
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.kernel import Kernel
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import LayerBuilder, layers_of, model_of


class CapturedOperators(NamedTuple):
    """A model's forward operators in order, each with its backward operators.

    Attributes:
        layer_ends: the operator after each layer's last, rising.
        layer_names: of the layers.
        graph: of the captured layers, at a replica's part of a microbatch.
    """

    arrays: OperatorArrays
    layer_ends: tuple[int, ...]
    layer_names: tuple[str, ...]
    graph: Graph


def captured_operators(workload: Workload, device: DeviceType, database: Path, replicas: int = 1) -> CapturedOperators:
    """Capture the workload's model, and price its operators on a device.

    Args:
        replicas: kernels are priced at the part of a microbatch that one of so many replicas gets, times their number:
            a device with few examples works less efficiently.

    Raises:
        CaptureError: a layer cannot be traced.
        InputError: a microbatch does not divide into so many parts.
    """
    if replicas < 1 or workload.microbatch_size % replicas:
        raise InputError(
            f"replicas: found {replicas} for a microbatch of {workload.microbatch_size}; wanted a divisor of it"
        )
    part = workload.model_copy(update={"batch_size": workload.batch_size // replicas})
    graph = capture(part, device.kind)
    flows = _flows(part, graph)
    seconds = _prices(graph, Predicted(ProfileDatabase(database), workload.optimizer), device)
    compute: list[float] = []
    ends: list[int] = []
    for layer, flow in zip(graph.layers, flows, strict=True):
        compute += _operator_seconds(layer, flow, seconds)
        ends.append(len(compute))
    crossing, weights, held = (
        [size for flow in flows for size in getattr(flow, name)]
        for name in ("crossing_bytes", "weight_bytes", "held_bytes")
    )
    arrays = OperatorArrays(
        [replicas * value for value in compute],
        weights,
        [replicas * value for value in crossing],
        [replicas * value for value in held],
        tuple(f"{layer.name}: {kind}" for layer, f in zip(graph.layers, flows, strict=True) for kind in f.kinds),
    )
    return CapturedOperators(arrays, tuple(ends), tuple(layer.name for layer in graph.layers), graph)


def _operator_seconds(layer: Layer, flow: LayerFlow, seconds: dict[Kernel, float]) -> list[float]:
    """Return each forward operator's seconds, with those of the backward operators that are its gradient."""
    forward, backward = (
        [operator for operator in layer.operators if operator.direction == way] for way in ("forward", "backward")
    )
    if tuple(operator.kind for operator in forward) != flow.kinds or len(backward) != len(flow.backward_of):
        raise CaptureError(f"layer {layer.name!r} was traced twice with different operators")
    found = [_seconds(operator, seconds) for operator in forward]
    for operator, place in zip(backward, flow.backward_of, strict=True):
        found[place] += _seconds(operator, seconds)
    return found


def _seconds(operator: Operator, seconds: dict[Kernel, float]) -> float:
    kernel = kernel_of(operator)
    return 0.0 if kernel is None else seconds[kernel]


def _prices(graph: Graph, predicted: Predicted, device: DeviceType) -> dict[Kernel, float]:
    kernels = {kernel_of(operator): None for layer in graph.kinds[0] for operator in layer.operators}
    asked = [kernel for kernel in kernels if kernel is not None]
    return dict(zip(asked, predicted.prices(asked, device).seconds_K.tolist(), strict=True))


def _flows(workload: Workload, graph: Graph) -> list[LayerFlow]:
    """Trace the layers once more, each kind once, in the way of `capture`."""
    shape, model, size = dataset_of(workload).shape, model_of(workload), workload.microbatch_size
    dtype = DTYPES[workload.dtype]
    received: Form | torch.Tensor = Form.contiguous(
        (size, *shape.input_shape), dtype if shape.input_dtype.is_floating_point else shape.input_dtype
    )
    builders, mode = layers_of(workload), FakeMode(allow_non_fake_inputs=False)
    flows: list[LayerFlow] = []
    traced: dict[object, tuple[LayerFlow, Form | torch.Tensor]] = {}
    for own, layer in zip(builders, graph.layers, strict=True):
        is_last, builder = own is builders[-1], own if layer.has_backward else without_gradients(own)
        arguments = plain_arguments(builder)
        key = None if arguments is None or is_last or not isinstance(received, Form) else (*arguments, received)
        if key is None or key not in traced:
            with fake_tensors(mode):
                tensor = received.tensor() if isinstance(received, Form) else received
                target = torch.zeros((size, *shape.target_shape), dtype=torch.int64)
                loss: Loss | None = partial(_loss, model.loss, target) if is_last else None
                try:
                    flow, output = trace_flow(_module(builder, workload, graph, dtype), tensor, loss)
                except CaptureError as error:
                    raise CaptureError(f"layer {builder.name!r}: {error}") from error
                traced[key] = flow, Form.of(output) or output
        flow, received = traced[key]
        flows.append(flow)
    return flows


def _loss(loss: object, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return loss(output, target)  # type: ignore[no-any-return, operator]


def _module(builder: LayerBuilder, workload: Workload, graph: Graph, dtype: torch.dtype) -> torch.nn.Module:
    module = builder.build() if graph.kind == "cpu" else AttendsOnGPU(builder.build)
    to_dtype_of_fake(module, dtype)
    return computing_in(module, workload.autocast)
