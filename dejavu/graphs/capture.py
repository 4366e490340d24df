"""Capture what every layer of a model computes, reads, writes and keeps, without weights and without running it.

Layers are traced one after another, each on the form of the output before it (`dejavu.graphs.layer_trace`). A layer
that was traced before on an equal input is not traced again, neither in this process nor, where it is kept, in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dejavu.cluster.records import Kind
from dejavu.foundation.errors import OWN_CODE
from dejavu.foundation.tracing import FakeMode, fake_tensors
from dejavu.foundation.units import plural
from dejavu.graphs.attention import AttendsOnGPU
from dejavu.graphs.graph import DTYPES, Graph, Layer
from dejavu.graphs.layer_trace import CaptureError, bytes_of, trace_layer
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import LayerBuilder, Model, layers_of, model_of
from dejavu.workload.models.ties import ties_of

__all__ = ["CaptureError", "End", "Form", "KeptLayers", "Traced", "capture", "plain_arguments"]


COMPILED = "layers are compiled: measured so where they were measured; predictions are of kernels that are not compiled"


def capture(workload: Workload, kind: Kind = "cpu", *, reuse: bool = True, kept: KeptLayers | None = None) -> Graph:
    """Capture the workload's model as layers, without weights.

    Args:
        kind: of the devices that will run it: attention has other kernels on GPUs, with other FLOPs and activations.
        reuse: trace layers with equal constructors and inputs only once; does not change the result.
        kept: a cache of traced layers across processes; does not change the result.

    Raises:
        CaptureError: a layer cannot be traced.
        InputError: the workload names a model or data that do not exist or do not fit.

    Example:
        >>> import dejavu
        >>> graph = dejavu.capture(dejavu.load_workload("mlp"))
        >>> all(layer.output_bytes > 0 for layer in graph.layers)
        True
    """
    shape, model = dataset_of(workload).shape, model_of(workload)
    dtype, size = DTYPES[workload.dtype], workload.microbatch_size
    inputs: Form | torch.Tensor = Form.contiguous(
        (size, *shape.input_shape), dtype if shape.input_dtype.is_floating_point else shape.input_dtype
    )
    end = End(model, Form.contiguous((size, *shape.target_shape), torch.int64))
    tracing = _Tracing(dtype, workload.autocast, kind, kept)
    builders = layers_of(workload)
    layers, passes = _traced_in_order(tracing, builders, inputs, end, reuse=reuse)
    fixed = max((k + 1 for k in range(len(layers) - 1) if not passes[k + 1]), default=0)
    if any(layer.has_backward or layer.trained_bytes for layer in layers[:fixed]):
        # To these no gradient comes back: they compute without one, in a training as here.
        untrained = [without_gradients(builder) for builder in builders[:fixed]]
        again = _traced_in_order(tracing, untrained, inputs, None, reuse=reuse)[0]
        if workload.optimizer.master_weights:  # which gives a gradient to every weight that asks for one
            again = [
                replace(one, frozen_bytes=was.frozen_bytes) for one, was in zip(again, layers[:fixed], strict=True)
            ]
        layers[:fixed] = again
    for position, shared in tied_bytes(builders, dtype).items():
        layers[position] = replace(layers[position], tied_bytes=shared)
    if layers[-1].output_shape[-1] < shape.num_classes:
        raise CaptureError(
            f"the last layer, {layers[-1].name!r}, gives {layers[-1].output_shape}: scores of "
            f"{plural(layers[-1].output_shape[-1], 'class')}, and data {workload.data} has {shape.num_classes}; wanted "
            f"as many or more in the last dimension"
        )
    if not workload.compile:
        return Graph(tuple(layers), size, workload.dtype, model.notes(shape), kind)
    made = tuple(layer.compiled() for layer in layers)
    return Graph(made, size, workload.dtype, (*model.notes(shape), COMPILED), kind)


def _traced_in_order(
    tracing: _Tracing, builders: Sequence[LayerBuilder], inputs: Form | torch.Tensor, end: End | None, *, reuse: bool
) -> tuple[list[Layer], list[bool]]:
    """Trace layers one after another; also return of each one's input, and of the output, whether gradients pass it.

    Args:
        end: goes with the last one; None: it is not the model's.
    """
    layers, passes, traced = list[Layer](), [inputs.requires_grad], dict[Any, tuple[Layer, Form | torch.Tensor]]()
    for position, builder in enumerate(builders):
        last = end is not None and position == len(builders) - 1
        key = work_of(builder, inputs) if reuse and not last else None
        if key is None or key not in traced:
            traced[key] = tracing.layer(builder, inputs, end if last else None)
        layer, inputs = traced[key]
        layers.append(replace(layer, name=builder.name, tensor_parallel=builder.tensor_parallel))
        passes.append(inputs.requires_grad)
    return layers, passes


def without_gradients(builder: LayerBuilder) -> LayerBuilder:
    """Return the layer with weights that are not trained."""
    work = builder.work or partial(plain_arguments, builder)
    return replace(builder, build=partial(_untrained, builder.build), work=work if work() is not None else None)


def _untrained(build: Callable[[], nn.Module]) -> nn.Module:
    return build().requires_grad_(False)


def tied_bytes(builders: Sequence[LayerBuilder], dtype: torch.dtype) -> dict[int, int]:
    """Return the bytes of each layer's tied weights, by its position; of layers that have none, nothing."""
    found: dict[int, int] = {}
    for tie in ties_of(builders):
        with fake_tensors():
            weight = builders[tie.copy.position].build().get_parameter(tie.copy.weight)
        for end in tie.ends:
            found[end.position] = found.get(end.position, 0) + weight.numel() * dtype.itemsize
    return found


class Form(NamedTuple):
    """Everything that a layer's trace depends on of its input, a tensor that owns and fills its memory.

    Attributes:
        stride: in elements.
        dtype: torch's name, such as `float32`.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Form:
        """Return the form of a new tensor."""
        steps = [prod(max(size, 1) for size in shape[k + 1 :]) for k in range(len(shape))]
        return cls(shape, tuple(steps), str(dtype).removeprefix("torch."), False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form | None:
        """Return the tensor's form; None where it is a view of part of its memory, whose size the form lacks."""
        form = cls(
            tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
        )
        fills = not tensor.storage_offset() and tensor.untyped_storage().nbytes() == bytes_of([tensor])
        return form if fills and type(tensor) is FakeTensor else None

    def tensor(self) -> torch.Tensor:
        """Make a tensor of this form.

        Raises:
            CaptureError: it has more elements than torch counts.
        """
        try:
            empty = torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype))
        except (RuntimeError, TypeError) as error:  # an overflow of 64 bits, in its product or in a number itself
            shown = " × ".join(f"{size:,}" for size in self.shape)
            raise CaptureError(f"a microbatch of {shown} elements is more than torch counts; wanted smaller") from error
        return empty.requires_grad_(self.requires_grad)


class End(NamedTuple):
    """What is traced with the last layer: the model's loss, and its targets."""

    model: Model
    target: Form


class KeptLayers(Protocol):
    """Layers that were traced before; `dejavu.graphs.kept_layers` keeps them on disk."""

    def load(self, builder: LayerBuilder, inputs: Form, dtype: str, kind: Kind, end: End | None) -> Traced | None:
        """Return the layer and its output's form, if it was traced before; None also for layers that are not kept."""

    def save(self, builder: LayerBuilder, inputs: Form, dtype: str, kind: Kind, end: End | None, found: Traced) -> None:
        """Keep the result of tracing."""


Traced = tuple[Layer, Form]


class _Tracing:
    """Traces the layers of one model, or reuses those that were traced before."""

    def __init__(self, dtype: torch.dtype, computes_in: str | None, kind: Kind, kept: KeptLayers | None) -> None:
        self._dtype, self._computes_in, self._kind, self._kept = dtype, computes_in, kind, kept

    @cached_property
    def _mode(self) -> FakeMode:
        """The mode for all layers. Made lazily: it imports torch's compiler, which takes nearly a second."""
        return FakeMode(allow_non_fake_inputs=False)

    def layer(
        self, builder: LayerBuilder, inputs: Form | torch.Tensor, end: End | None
    ) -> tuple[Layer, Form | torch.Tensor]:
        """Return one layer, and its output: as a form, where that is sufficient."""
        if self._kept is None or not isinstance(inputs, Form):
            return self._trace(builder, inputs, end)
        types = "+".join([str(self._dtype).removeprefix("torch."), *([self._computes_in] if self._computes_in else [])])
        asked = (builder, inputs, types, self._kind, end)
        known = self._kept.load(*asked)
        if known is not None:
            return known
        layer, output = self._trace(builder, inputs, end)
        if isinstance(output, Form):
            self._kept.save(*asked, (layer, output))
        return layer, output

    def _trace(
        self, builder: LayerBuilder, inputs: Form | torch.Tensor, end: End | None
    ) -> tuple[Layer, Form | torch.Tensor]:
        built = on_kind(builder, self._kind)
        with fake_tensors(self._mode):
            received = inputs.tensor() if isinstance(inputs, Form) else inputs
            loss = loss_of(end.model.loss, end.target.tensor()) if end else None
            layer, output = trace_layer(built, received, self._dtype, loss, self._computes_in, self._kind)
            return layer, Form.of(output) or output


def on_kind(builder: LayerBuilder, kind: Kind) -> LayerBuilder:
    """Return the layer with the kernels that run on devices of this kind."""
    return builder if kind == "cpu" else LayerBuilder(builder.name, partial(AttendsOnGPU, builder.build))


def work_of(builder: LayerBuilder, inputs: Form | torch.Tensor) -> Any:
    """Return a key that is equal for layers that compute the same: class, plain arguments, and form of the input.

    None where that is unknown.
    """
    if builder.work is not None and isinstance(inputs, Form):
        return builder.work(), inputs
    arguments = plain_arguments(builder)
    return None if arguments is None or not isinstance(inputs, Form) else (*arguments, inputs)


def plain_arguments(builder: LayerBuilder) -> tuple[type[nn.Module], tuple[Any, ...], tuple[Any, ...]] | None:
    """Return the layer's class and its constructor's arguments, where these are plain values; else None."""
    build = builder.build
    if not isinstance(build, partial) or not isinstance(build.func, type):
        return None
    arguments = (*build.args, *build.keywords.values())
    if not all(isinstance(argument, int | float | str | None) for argument in arguments):
        return None
    return build.func, build.args, tuple(sorted(build.keywords.items()))


def loss_of(loss: Callable[..., torch.Tensor], target: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the loss of an output, the targets being these; it raises CaptureError where that is no number."""

    def found(output: torch.Tensor) -> torch.Tensor:
        try:
            value = loss(output, target)
        except OWN_CODE as error:
            shapes = f"outputs of {tuple(output.shape)} and targets of {tuple(target.shape)}"
            raise CaptureError(f"the model's loss fails on {shapes}: {type(error).__name__}: {error}") from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, torch.Tensor)
            what = f"a tensor of {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise CaptureError(f"the model's loss returns {what}; wanted one number, as a tensor")
        if output.grad_fn is not None and value.grad_fn is None:
            raise CaptureError(
                "the model's loss returns a number without a gradient; wanted one computed differentiably"
            )
        return value

    return found
