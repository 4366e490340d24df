"""What kernels allocate and free inside, which fake tensors do not show: a rule for each kernel that takes much.

The rules follow torch's kernels (ATen's source, torch 2.13), and were read off the CPU allocator's events; a test holds
them against it at sizes that it draws. Of GPUs' kernels only those are counted that are put together of others, and
convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dejavu.cluster.records import Kind
from dejavu.foundation.tracing.recurrent import RecurrentLayer
from dejavu.graphs.inside import convolutions
from dejavu.graphs.inside.sizes import converted, copy_of, size_of

__all__ = ["inside_bytes", "size_of"]

_aten = torch.ops.aten
Rule = Callable[[Any, Any], int]  # (arguments, result) -> bytes beyond both
_VECTOR, _WIDE, _WIDEST, _HIGHEST, _PAIRS, _DEEPEST = 16, 64, 256, 256, 32, 1024  # blocks of products in 16 bits
_A_LITTLE = 1536
_NARROW_QUERIES, _QUERIES, _WIDE_QUERIES = 32, 64, 256  # in a block of flash attention (FlashAttentionKernel.cpp)
_A_NUMBER = 16
_KEYS, _LONG, _LONGER = 512, 192, 768
_ANTIALIASED_TABLE, _TABLE = 32, 48  # bytes of an interpolation's indices and weights for each place along an axis


def inside_bytes(kernel: Any, args: Any, result: Any, kind: Kind) -> int:
    """Return the most that a kernel holds beyond its arguments and results.

    Args:
        kernel: as `OpOverload.overloadpacket`.
        result: what it returned, or what takes its place in a trace.
        kind: of the devices.
    """
    if kernel is _aten.convolution:
        return convolutions.forward_bytes(args, result, kind)
    if kernel is _aten.convolution_backward:
        return convolutions.backward_bytes(args, result, kind)
    rule = _ANYWHERE.get(kernel) or (_ON_CPUS.get(kernel) if kind == "cpu" else None)
    return rule(args, result) if rule else 0


def _bilinear(args: Any, result: Any) -> int:
    """Count the two buffers of one slice of the unrolled dimension (`_trilinear`, ATen's Linear.cpp).

    Of three factors, each with dimensions of one in it where others have theirs, the first two are multiplied and
    summed over what the third does not have; then that is multiplied by the third.
    """
    factors, expanded, summed = args[:3], args[3:6], args[6]
    unrolled = args[7] if len(args) > 7 else 1
    shapes = []
    for factor, dimensions in zip(factors, expanded, strict=True):
        shape = list(factor.shape)
        for dimension in dimensions:
            shape.insert(dimension, 1)
        shapes.append(shape)
    first: int = result.element_size()
    second = first
    for dimension, sizes in enumerate(zip(*shapes, strict=True)):
        if dimension == unrolled:
            continue
        if not (dimension in summed and dimension in expanded[2]):
            first *= max(sizes[:2])
        if dimension not in summed:
            second *= max(sizes)
    return first + second


def _narrow_product(args: Any, result: Any) -> int:
    """Count a block of the sums in float32, and blocks of the factors as oneDNN lays out numbers of 16 bits.

    Its blocks are no larger than these; of a first factor that comes transposed it lays out more, and wider ones.
    """
    if result.dtype not in (torch.bfloat16, torch.float16):
        return 0
    left: torch.Tensor = args[-2]
    right: torch.Tensor = args[-1]
    rows, depth = left.shape[-2], min(-(-left.shape[-1] // _PAIRS) * _PAIRS, _DEEPEST)
    is_transposed = left.stride(-1) != 1
    width = min(-(-right.shape[-1] // _VECTOR) * _VECTOR, _WIDEST if is_transposed else _WIDE)
    blocks = min(rows, _HIGHEST) * width * 4 + depth * max(width, _WIDE) * left.element_size()
    return blocks + min(rows, 2 * _HIGHEST) * depth * left.element_size() * is_transposed + _A_LITTLE


def _attention_blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    length, num_keys = int(query.shape[-2]), int(key.shape[-2])
    block = _WIDE_QUERIES if length >= _LONGER else _QUERIES if length >= _LONG else _NARROW_QUERIES
    return min(block, length), min(_KEYS, num_keys)


def _attention(args: Any, result: Any) -> int:
    """Count one thread's scores, their maxima and sums, and its part of the output, in float32, and scores narrowed."""
    (queries, keys), width = _attention_blocks(args[0], args[1]), int(args[0].shape[-1])
    return (queries * keys + 2 * queries + queries * width) * 4 + _narrowed(args[0], queries * keys)


def _attention_backward(args: Any, result: Any) -> int:
    """Count one thread's scores and their gradients; and what arrives, if its heads do not come after its positions."""
    queries, keys = _attention_blocks(args[1], args[2])
    scores = 2 * queries * keys
    return copy_of(args[0].transpose(1, 2)) + (scores + queries) * 4 + _narrowed(args[1], scores)


def _narrowed(factor: torch.Tensor, scores: int) -> int:
    """Return the bytes of scores in the factors' type, where that is not float32."""
    return 0 if factor.dtype == torch.float32 else scores * factor.element_size()


def _interpolation(args: Any, result: Any) -> int:
    places: int = sum(result.shape[2:])
    return _TABLE * places + copy_of(args[0])


def _interpolation_by_channels(args: Any, result: Any) -> int:
    """Count copies of input and output in which channels come last."""
    return size_of(args[0]) + size_of(result) + _interpolation(args, result)


def _antialiased(args: Any, result: Any) -> int:
    """Count what is there after the first axis, and the tables of one axis."""
    image: torch.Tensor = args[0]
    between: int = size_of(image) // image.shape[-1] * result.shape[-1]
    tables: list[int] = [
        out * (_ANTIALIASED_TABLE + image.element_size() * (2 * math.ceil(2 * max(given / out, 1)) + 1))
        for given, out in zip(image.shape[2:], result.shape[2:], strict=True)
    ]
    return between + max(tables) + copy_of(image)


def _bag_backward(args: Any, result: Any) -> int:
    """Count sorted indices and their counts; where each feature has its own row, rows and values instead."""
    gradient, indices, offsets, most = args[0], args[1], args[2], args[5]
    return max(4 * size_of(indices) + 4 * size_of(offsets), size_of(most) + size_of(gradient) + 2 * size_of(offsets))


def _norm_backward(args: Any, result: Any) -> int:
    """Count sums for the weights' gradients, and copies of what arrives and came in."""
    sums = sum(size_of(one) for one in result[1:] if one is not None)
    return copy_of(args[0]) + copy_of(args[1]) + sums


def _group_norm_backward(args: Any, result: Any) -> int:
    arriving: torch.Tensor = args[0]
    sums = 2 * arriving.shape[0] * arriving.shape[1] * arriving.element_size()
    return copy_of(arriving) + copy_of(args[1]) + sums


def _promoting(args: Any, result: Any) -> int:
    """Count factors in the type in which they are computed, where theirs is another."""
    return sum(converted(one, result.dtype) for one in args[:2] if isinstance(one, torch.Tensor) and one.dim())


def _widening(args: Any, result: Any) -> int:
    return converted(args[0], result.dtype)


def _losses(args: Any, result: Any) -> int:
    """Count the losses of all elements, before they are summed."""
    return size_of(args[0]) + _A_NUMBER


def _more_losses(args: Any, result: Any) -> int:
    """Count what is made on the way to them as well; backward the loss's own gradient comes first."""
    return 2 * max(size_of(one) for one in args[:2]) + _A_NUMBER


def _kept_in_order(args: Any, result: Any) -> int:
    return copy_of(args[0])


def _kept_in_order_backward(args: Any, result: Any) -> int:
    return copy_of(args[0]) + copy_of(args[1])


_ANYWHERE: dict[Any, Rule] = {
    _aten._trilinear: _bilinear,
    _aten.mkldnn_rnn_layer: lambda args, _: RecurrentLayer.of(args[0], args[2]).forward_bytes(),
    _aten.mkldnn_rnn_layer_backward: lambda args, _: RecurrentLayer.of(args[0], args[2]).backward_bytes(),
}
_ON_CPUS: dict[Any, Rule] = {
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten.bmm), _narrow_product),
    _aten.native_batch_norm: lambda args, result: 3 * size_of(result[1]),
    _aten.native_batch_norm_backward: lambda args, _: size_of(args[1]),
    _aten.native_layer_norm: _kept_in_order,
    _aten.native_layer_norm_backward: _norm_backward,
    _aten.native_group_norm: _kept_in_order,
    _aten.native_group_norm_backward: _group_norm_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._safe_softmax: lambda args, result: result.numel() + 2 * result.numel() // max(result.shape[-1], 1) + 4,
    _aten._softmax: _kept_in_order,
    _aten._log_softmax: _kept_in_order,
    _aten._softmax_backward_data: _kept_in_order_backward,
    _aten._log_softmax_backward_data: _kept_in_order_backward,
    _aten.logsumexp: lambda args, result: size_of(args[0]) + 2 * size_of(result),
    **dict.fromkeys(
        (*(_aten.upsample_nearest2d, _aten._upsample_nearest_exact2d, _aten.upsample_bilinear2d),),
        _interpolation_by_channels,
    ),
    **dict.fromkeys((_aten._upsample_bilinear2d_aa, _aten._upsample_bicubic2d_aa), _antialiased),
    **dict.fromkeys(
        (
            *(_aten.upsample_bicubic2d, _aten.upsample_linear1d, _aten.upsample_trilinear3d),
            *(_aten.upsample_nearest1d, _aten.upsample_nearest3d),
        ),
        _interpolation,
    ),
    _aten.im2col: lambda args, _: size_of(args[0]),
    _aten._embedding_bag: lambda args, _: 2 * size_of(args[1]) + 4 * size_of(args[2]),
    _aten._embedding_bag_backward: _bag_backward,
    **dict.fromkeys((_aten.add, _aten.sub, _aten.mul, _aten.div), _promoting),
    **dict.fromkeys((_aten.sum, _aten.mean, _aten.cumsum, _aten.cumprod, _aten.linalg_vector_norm), _widening),
    **dict.fromkeys((_aten.mse_loss, _aten.smooth_l1_loss, _aten.huber_loss), _losses),
    **dict.fromkeys((_aten.binary_cross_entropy_with_logits, _aten.soft_margin_loss_backward), _more_losses),
    _aten.multi_margin_loss: _kept_in_order,
    _aten.multi_margin_loss_backward: lambda args, _: copy_of(args[1]),
    _aten.abs: lambda args, _: size_of(args[0]) * args[0].is_complex(),
    _aten.kthvalue: lambda args, result: size_of(args[0]) + args[0].numel() * result[1].element_size(),
}
