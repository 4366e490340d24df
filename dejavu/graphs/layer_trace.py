"""Trace one layer with fake tensors through forward and backward, with the kernels that its kind of device will run.

Layers with the same operators share a signature: what is measured of one holds for all.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from dejavu.cluster.records import Kind
from dejavu.foundation.errors import OWN_CODE, DejavuError
from dejavu.foundation.tracing.dtypes import to_dtype_of_fake
from dejavu.foundation.tracing.recurrent import RecurrentLayer
from dejavu.graphs.autocast import computing_in
from dejavu.graphs.graph import Layer, Operator, content_hash
from dejavu.graphs.kernels import GROUPED
from dejavu.graphs.liveness import footprint
from dejavu.workload.models import LayerBuilder


class CaptureError(DejavuError):
    """A layer that cannot be traced; the message names it."""


def trace_layer(
    builder: LayerBuilder,
    inputs: torch.Tensor,
    dtype: torch.dtype,
    loss: Callable[[torch.Tensor], torch.Tensor] | None,
    computes_in: str | None = None,
    kind: Kind = "cpu",
) -> tuple[Layer, torch.Tensor]:
    """Trace one layer on fake inputs; the last layer together with the loss. Return it and its output.

    Args:
        dtype: of its weights.
        computes_in: the type that autocast gives what it holds safe; None: that of the weights.
        kind: of the devices.

    Raises:
        CaptureError: it cannot be traced, or does not return one tensor.
    """
    module = built(builder, dtype, computes_in)
    received, inputs = inputs, received_by(module, inputs)
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, int] = {}
    recorder, num_recomputed = _Recorder(parameters), 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Autograd keeps what an operator reads before it runs, and what it writes after.
        nonlocal num_recomputed
        num_recomputed = len(recorder.operators)
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), recorder:
            output = module(inputs)
            if not isinstance(output, torch.Tensor):
                raise CaptureError(f"layer {builder.name!r} returns {_not_a_tensor(output, loss)}")
            in_layer = num_recomputed  # the loss is no part of what is checkpointed
            end = loss(output) if loss else output
        recorder.direction = "backward"
        wanted = [tensor for tensor in (inputs, *module.parameters()) if tensor.requires_grad]
        if loss and wanted and end.grad_fn is None:
            raise CaptureError(
                f"layer {builder.name!r} gives scores without a gradient; wanted some that are computed differentiably "
                "of its input or its weights"
            )
        arriving = torch.ones_like(end)
        with recorder:
            has_backward = bool(wanted) and end.grad_fn is not None
            if has_backward:  # what is computed without gradients has none
                torch.autograd.grad(end, wanted, arriving, allow_unused=True)
        alive, alive_recomputed = (
            footprint(module, received, loss, recompute=again, kind=kind) for again in (False, True)
        )
    except CaptureError:
        raise
    except OWN_CODE as error:
        where = f"layer {builder.name!r}{failing_part(module, error)}"
        raise CaptureError(f"{where} cannot be traced on {tuple(inputs.shape)}: {why(error)}") from error
    operators = tuple(recorder.operators)
    return (
        Layer(
            name=builder.name,
            signature=_signature(operators),
            operators=operators,
            parameter_bytes=bytes_of(module.parameters()),
            activation_bytes=sum(kept.values()),
            output_bytes=bytes_of([output]),
            output_shape=tuple(output.shape),
            footprint=alive,
            recompute_footprint=alive_recomputed,
            num_recomputed=in_layer,
            frozen_bytes=bytes_of(one for one in module.parameters() if not one.requires_grad),
            has_backward=has_backward,
        ),
        output,
    )


def received_by(module: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return a layer's input, of which a gradient is made where anything is trained in the layer or before it."""
    is_trained = inputs.requires_grad or any(one.requires_grad for one in module.parameters())
    return inputs.detach().requires_grad_(inputs.dtype.is_floating_point and is_trained)


def built(builder: LayerBuilder, dtype: torch.dtype, computes_in: str | None = None) -> torch.nn.Module:
    """Build a layer with weights of this dtype.

    Raises:
        CaptureError: it makes some in float64 or complex, whatever the dtype, or has a sparse tensor, or a state that
            is no tensor's, or norms that talk to all ranks, or embeddings with sparse gradients or a max_norm, or hooks
            of gradients that were added up.
    """
    module = builder.build()
    for name, one in module.named_parameters():
        if one._post_accumulate_grad_hooks:
            raise CaptureError(
                f"layer {builder.name!r}: {name!r} has a hook by register_post_accumulate_grad_hook, which sees other "
                "gradients, or none, where replicas, shards or the parts of a backward pass make them; wanted "
                "register_hook"
            )
        if one.dtype is torch.float64 or one.is_complex():
            raise CaptureError(
                f"layer {builder.name!r}: {name!r} is in {str(one.dtype).removeprefix('torch.')}; wanted weights "
                "without a type of their own, or in float32: they are trained in the workload's dtype, "
                f"{str(dtype).removeprefix('torch.')}"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"layer {builder.name!r}: {name!r} is a sparse tensor, which checkpoints and messages do not take; "
                "wanted a dense one, or its indices and values, of which forward makes it"
            )
    for name, part in module.named_modules():
        if misfit := _misfit(part):
            where = f" its {name!r} ({type(part).__name__})" if name else f" {type(part).__name__}"
            raise CaptureError(f"layer {builder.name!r}:{where} {misfit}")
    to_dtype_of_fake(module, dtype)
    return computing_in(module, computes_in)


def _misfit(part: torch.nn.Module) -> str:
    """Say why a module cannot be trained as a part of a plan; empty: it can."""
    if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
        return "keeps a state by get_extra_state, which checkpoints do not have; wanted it in buffers"
    if isinstance(part, torch.nn.SyncBatchNorm):
        return (
            "takes its statistics over all ranks, also those of other stages, which wait for each other; wanted "
            "nn.BatchNorm1d, 2d or 3d, whose statistics are those of a replica's examples"
        )
    if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
        return "makes sparse gradients, which replicas, clipping and Adam do not take; wanted sparse=False"
    if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.max_norm is not None:
        return (
            f"writes its weights going forward (max_norm {part.max_norm:g}), only the rows that its examples read, so "
            "replicas would come to have different weights; wanted max_norm=None, and the norm limited in forward"
        )
    return ""


def _not_a_tensor(output: object, loss: object) -> str:
    """Say what is wanted in place of an output, and which tensor of a record could be returned alone.

    Models of transformers return such records.
    """
    form = "one tensor, the scores" if loss else "one tensor for the next layer"
    names = [name for name, one in output.items() if isinstance(one, torch.Tensor)] if isinstance(output, dict) else []
    alone = f": its {names[0]!r}, by a module whose forward pass returns that alone" if names else ""
    return f"a {type(output).__name__}; wanted {form}{alone}"


def failing_part(module: torch.nn.Module, error: BaseException) -> str:
    """Name the innermost module of the layer whose code raised the error."""
    names = {id(part): f", in its {name!r} ({type(part).__name__})," for name, part in module.named_modules() if name}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found


def why(error: BaseException) -> str:
    """Say why tensors without memory do not do."""
    if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return str(error)
    return (
        f"it depends on the numbers in its tensors ({error.func}), as by `.item()`, `if x.sum() > 0` or `x[x > 0]`, "
        "and plans are made without any; wanted operators and shapes that do not, as torch.where or a mask"
    )


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
        if writes and not is_view(func):
            self.operators.append(
                Operator(
                    kind=str(func.overloadpacket),
                    direction=self.direction,
                    input_shapes=tuple(tuple(tensor.shape) for tensor in reads),
                    output_shapes=tuple(tuple(tensor.shape) for tensor in writes),
                    dtype=str(writes[0].dtype).removeprefix("torch."),
                    flops=flops_of(func, args, kwargs, result),
                    read_bytes=bytes_of(reads),
                    written_bytes=bytes_of(writes),
                    parameter_bytes=bytes_of(t for t in reads if t.untyped_storage()._cdata in self.parameters),
                    is_causal=is_causal(func, args, kwargs),
                )
            )
        return result


def is_view(func: Any) -> bool:
    """Return whether the operator's result only aliases its input's memory, without writing."""
    if func.overloadpacket is torch.ops.aten._unsafe_view:  # declared without alias, yet copies nothing
        return True
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the operator was told that each query sees the keys up to its own position alone."""
    place = next((k for k, one in enumerate(func._schema.arguments) if one.name == "is_causal"), None)
    if place is None:
        return False
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Count FLOPs by torch's own formula, or where it lacks one or counts too many.

    It has none of flash attention on the CPU, of an LSTM, and of products of sorted rows. It counts the gradient of
    grouped weights as if there were one group.
    """
    packet = func.overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        return _convolution_backward_flops(*args)
    if packet is torch.ops.aten.mkldnn_rnn_layer:
        return RecurrentLayer.of(args[0], args[2]).forward_flops()
    if packet is torch.ops.aten.mkldnn_rnn_layer_backward:  # gradients of what came in, and of weights
        return 2.0 * RecurrentLayer.of(args[0], args[2]).forward_flops()
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention_flops(args[0], args[1], args[2], products=2)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_flops(args[1], args[2], args[3], products=5)
    if GROUPED in func.name():
        rows, factors = args[:2]
        products = 2 if "backward" in func.name() else 1
        return 2.0 * products * float(rows.shape[0] * factors.shape[1] * factors.shape[2])
    return 0.0


def _convolution_backward_flops(
    gradient: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> float:
    """Count a product as large as forward's for the gradient of the images, and for that of the weight, if wanted."""
    is_transposed, wanted = rest[4], rest[7]
    one_product = conv_flop_count(list(images.shape), list(weight.shape), list(gradient.shape), is_transposed)
    return float(one_product * sum(wanted[:2]))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, products: int) -> float:
    """Count attention's matrix products: 2 forward, 5 backward, with recomputed scores; masks save nothing here."""
    batch, heads, length, width = query.shape
    return 2.0 * products * batch * heads * length * key.shape[2] * (width + value.shape[3]) / 2


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Add up the tensors' elements, whatever memory they share."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _signature(operators: Iterable[Operator]) -> str:
    """Hash kinds, shapes, dtypes, FLOPs and bytes, and that it is causal; which inputs are weights does not matter."""
    return content_hash(
        [
            {k: v for k, v in asdict(operator).items() if k != "parameter_bytes" and (k != "is_causal" or v)}
            for operator in operators
        ]
    )
