"""Capture what every layer of a model computes, reads, writes and keeps, without weights and without running it.

Each layer is traced with fake tensors through forward and backward, one microbatch, with the kernels that its kind of
device will run. Layers with the same operators share a signature: what is measured of one holds for all.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dejavu.cluster.records import Kind
from dejavu.foundation.errors import DejavuError
from dejavu.foundation.tracing import fake_tensors
from dejavu.foundation.units import plural
from dejavu.graphs.attention import AttendsOnGPU
from dejavu.graphs.liveness import Footprint, footprint
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import LayerBuilder, Model, TensorParallel, layers_of, model_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CaptureError(DejavuError):
    """A layer that cannot be traced; the message names it."""


@dataclass(frozen=True)
class Operator:
    """One operator on one microbatch.

    Attributes:
        kind: the ATen name, such as `aten.addmm`.
        direction: `forward` or `backward`.
        input_shapes, output_shapes: of its tensors, in order.
        flops: multiplications and additions, each counted; 0 where torch knows no formula (memory-bound operators).
        read_bytes, written_bytes: its tensors once, as if nothing were cached.
        parameter_bytes: of what it reads, the layer's weights.
    """

    kind: str
    direction: str
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flops: float
    read_bytes: int
    written_bytes: int
    parameter_bytes: int = 0


@dataclass(frozen=True)
class Layer:
    """A run of operators between two possible cuts, with its totals for one microbatch.

    Attributes:
        signature: the same for layers that do the same work on the same shapes.
        parameter_bytes: its weights.
        activation_bytes: kept from forward to backward.
        output_bytes: crosses a cut after this layer.
        footprint, recompute_footprint: its memory over time, without and with activation checkpointing.
        tensor_parallel: how the model says that it may be sharded over devices; None: not at all.
    """

    name: str
    signature: str
    operators: tuple[Operator, ...]
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int
    output_shape: tuple[int, ...]
    footprint: Footprint
    recompute_footprint: Footprint
    tensor_parallel: TensorParallel | None = None

    def flops(self, direction: str) -> float:
        return sum(operator.flops for operator in self.operators if operator.direction == direction)

    @cached_property
    def family(self) -> str:
        """A hash that is equal at all microbatch sizes: of its operators, and the shapes of single examples."""
        examples = [
            [shape[1:] for shape in operator.output_shapes if len(shape) > 2 and shape[0] == self.output_shape[0]]
            for operator in self.operators
            if operator.direction == "forward"
        ]
        kinds = [operator.kind for operator in self.operators]
        return _hash([kinds, examples, self.parameter_bytes, self.output_shape[1:]])


@dataclass(frozen=True)
class Graph:
    """A captured model: its layers in order, for one microbatch size and dtype.

    Attributes:
        notes: what a person should know of how the model was cut into layers.
        kind: of the devices whose kernels it has.
    """

    layers: tuple[Layer, ...]
    microbatch_size: int
    dtype: str
    notes: tuple[str, ...] = ()
    kind: Kind = "cpu"

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        return self.parameter_bytes // DTYPES[self.dtype].itemsize

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for models that do the same work, whatever their layers are called."""
        return _hash([layer.signature for layer in self.layers])


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
    tracing = _Tracing(dtype, kind, kept)
    builders = layers_of(workload)
    layers: list[Layer] = []
    traced: dict[Any, tuple[Layer, Form | torch.Tensor]] = {}
    for position, builder in enumerate(builders):
        last = position == len(builders) - 1
        key = _work_of(builder, inputs) if reuse and not last else None
        if key is None or key not in traced:
            traced[key] = tracing.layer(builder, inputs, end if last else None)
        layer, inputs = traced[key]
        layers.append(replace(layer, name=builder.name, tensor_parallel=builder.tensor_parallel))
    if layers[-1].output_shape[-1] < shape.num_classes:
        raise CaptureError(
            f"the last layer, {layers[-1].name!r}, gives {layers[-1].output_shape}: scores of "
            f"{plural(layers[-1].output_shape[-1], 'class')}, and data {workload.data} has {shape.num_classes}; wanted "
            f"as many or more in the last dimension"
        )
    return Graph(tuple(layers), size, workload.dtype, model.notes(shape), kind)


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
        fills = not tensor.storage_offset() and tensor.untyped_storage().nbytes() == _bytes_of([tensor])
        return form if fills and type(tensor) is FakeTensor else None

    def tensor(self) -> torch.Tensor:
        """Make a tensor of this form."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype))
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

    def __init__(self, dtype: torch.dtype, kind: Kind, kept: KeptLayers | None) -> None:
        self._dtype, self._kind, self._kept = dtype, kind, kept

    @cached_property
    def _mode(self) -> FakeTensorMode:
        """The mode for all layers. Made lazily: it imports torch's compiler, which takes nearly a second."""
        return FakeTensorMode(allow_non_fake_inputs=False)

    def layer(
        self, builder: LayerBuilder, inputs: Form | torch.Tensor, end: End | None
    ) -> tuple[Layer, Form | torch.Tensor]:
        """Return one layer, and its output: as a form, where that is sufficient."""
        if self._kept is None or not isinstance(inputs, Form):
            return self._trace(builder, inputs, end)
        asked = (builder, inputs, str(self._dtype).removeprefix("torch."), self._kind, end)
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
        built = builder
        if self._kind != "cpu":
            built = LayerBuilder(builder.name, partial(AttendsOnGPU, builder.build))
        with fake_tensors(self._mode):
            received = inputs.tensor() if isinstance(inputs, Form) else inputs
            loss = _loss_of(end.model.loss, end.target.tensor()) if end else None
            layer, output = _capture_layer(built, received, self._dtype, loss)
            return layer, Form.of(output) or output


def _work_of(builder: LayerBuilder, inputs: Form | torch.Tensor) -> Any:
    """Return a key that is equal for layers that compute the same: class, plain arguments, and form of the input.

    None where that is unknown.
    """
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


def _loss_of(loss: Callable[..., torch.Tensor], target: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda output: loss(output, target)


def _capture_layer(
    builder: LayerBuilder,
    inputs: torch.Tensor,
    dtype: torch.dtype,
    loss: Callable[[torch.Tensor], torch.Tensor] | None,
) -> tuple[Layer, torch.Tensor]:
    """Trace one layer on fake inputs; the last layer together with the loss."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # module.to(dtype) fails under fake tensors
    try:
        module = builder.build()
    finally:
        torch.set_default_dtype(before)
    received = inputs
    inputs = inputs.detach().requires_grad_(inputs.dtype.is_floating_point)
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    recorder = _Recorder(parameters)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), recorder:
            output = module(inputs)
            if not isinstance(output, torch.Tensor):
                raise CaptureError(
                    f"layer {builder.name!r} returns a {type(output).__name__}; wanted one tensor for the next layer"
                )
            end = loss(output) if loss else output
        recorder.direction = "backward"
        wanted = [tensor for tensor in (inputs, *module.parameters()) if tensor.requires_grad]
        arriving = torch.ones_like(end)
        with recorder:
            if wanted:
                torch.autograd.grad(end, wanted, arriving, allow_unused=True)
        alive, alive_recomputed = (footprint(module, received, loss, recompute=again) for again in (False, True))
    except CaptureError:
        raise
    except Exception as error:
        where = f"layer {builder.name!r}{_failing_part(module, error)}"
        raise CaptureError(f"{where} cannot be traced on {tuple(inputs.shape)}: {error}") from error
    operators = tuple(recorder.operators)
    return (
        Layer(
            name=builder.name,
            signature=_signature(operators),
            operators=operators,
            parameter_bytes=_bytes_of(module.parameters()),
            activation_bytes=sum(kept.values()),
            output_bytes=_bytes_of([output]),
            output_shape=tuple(output.shape),
            footprint=alive,
            recompute_footprint=alive_recomputed,
        ),
        output,
    )


def _failing_part(module: torch.nn.Module, error: Exception) -> str:
    """Name the innermost module of the layer whose code raised the error."""
    names = {id(part): f", in its {name!r} ({type(part).__name__})," for name, part in module.named_modules() if name}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found


class _Recorder(TorchDispatchMode):
    """Records every operator that computes something; views are free."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.parameters = parameters  # their storages
        self.operators: list[Operator] = []
        self.direction = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        reads = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        writes = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if writes and not _is_view(func):
            self.operators.append(
                Operator(
                    kind=str(func.overloadpacket),
                    direction=self.direction,
                    input_shapes=tuple(tuple(tensor.shape) for tensor in reads),
                    output_shapes=tuple(tuple(tensor.shape) for tensor in writes),
                    dtype=str(writes[0].dtype).removeprefix("torch."),
                    flops=_flops(func, args, kwargs, result),
                    read_bytes=_bytes_of(reads),
                    written_bytes=_bytes_of(writes),
                    parameter_bytes=_bytes_of(t for t in reads if t.untyped_storage()._cdata in self.parameters),
                )
            )
        return result


def _is_view(func: Any) -> bool:
    """Return whether the operator's result only aliases its input's memory, without writing."""
    if func.overloadpacket is torch.ops.aten._unsafe_view:  # declared without alias, yet copies nothing
        return True
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Count FLOPs by torch's own formula, or two that it lacks: flash attention on the CPU, forward and backward."""
    packet = func.overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention_flops(args[0], args[1], args[2], products=2)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_flops(args[1], args[2], args[3], products=5)
    return 0.0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, products: int) -> float:
    """Count attention's matrix products: 2 forward, 5 backward, with recomputed scores; masks save nothing here."""
    batch, heads, length, width = query.shape
    return 2.0 * products * batch * heads * length * key.shape[2] * (width + value.shape[3]) / 2


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _signature(operators: Iterable[Operator]) -> str:
    """Hash kinds, shapes, dtypes, FLOPs and bytes; which of the inputs are weights does not matter."""
    return _hash([{k: v for k, v in asdict(operator).items() if k != "parameter_bytes"} for operator in operators])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
