"""Rules for operators that torch's registries lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dejavu.sharding.operator_graph import TensorType

Ways = Iterator[tuple[tuple[int, ...], tuple[int, ...]]]
Rule = Callable[[Sequence[TensorType], Sequence[TensorType], tuple[Any, ...], dict[str, Any]], Ways]

# A tensor is whole on every device, or parts whose sum or mean it is; any other number: the dimension it is split by.
REPLICATED, SUMMED, AVERAGED = -1, -2, -3


def _attention(inputs: Sequence[TensorType], outputs: Sequence[TensorType], *_: Any) -> Ways:
    """Split batch or heads, the first two dimensions of all; what has fewer (seeds, offsets) stays whole."""
    for dim in (0, 1):
        yield tuple(tuple(dim if len(one.shape) >= 3 else REPLICATED for one in some) for some in (inputs, outputs))  # type: ignore[misc]


def _rms_norm(inputs: Sequence[TensorType], outputs: Sequence[TensorType], *_: Any) -> Ways:
    """Forward of (x, weight): every dimension but the last one."""
    for dim in range(len(inputs[0].shape) - 1):
        yield (dim, REPLICATED), (dim, dim)


def _rms_norm_backward(inputs: Sequence[TensorType], outputs: Sequence[TensorType], *_: Any) -> Ways:
    """Backward of (gradient, x, scale, weight): the weight's gradient is a sum over what is split."""
    for dim in range(len(inputs[0].shape) - 1):
        yield (dim, dim, dim, REPLICATED), (dim, SUMMED)


def _alike(inputs: Sequence[TensorType], outputs: Sequence[TensorType], *_: Any) -> Ways:
    """Element by element, of tensors of one shape or numbers."""
    for dim in range(len(outputs[0].shape)):
        yield tuple(dim if one.shape == outputs[0].shape else REPLICATED for one in inputs), (dim,)


def _into_places(inputs: Sequence[TensorType], outputs: Sequence[TensorType], arguments: Any, *_: Any) -> Ways:
    """Put or add rows of a source to places along one dimension: every other dimension."""
    for dim in range(len(outputs[0].shape)):
        if dim != arguments[1] % len(outputs[0].shape):
            yield (dim, REPLICATED, dim), (dim,)


def _into_sums(inputs: Sequence[TensorType], outputs: Sequence[TensorType], *rest: Any) -> Ways:
    yield from _into_places(inputs, outputs, *rest)
    yield (SUMMED, REPLICATED, SUMMED), (SUMMED,)


def _of_groups(*_: Any) -> Ways:
    """Multiply sorted rows with their own expert's factor, given the ends of the experts' rows: columns or sums."""
    yield (REPLICATED, 2, REPLICATED), (1,)
    yield (1, 1, REPLICATED), (SUMMED,)


def _outer_of_groups(*_: Any) -> Ways:
    """Gradients of the experts' factors: either side's columns."""
    yield (1, REPLICATED, REPLICATED), (1,)
    yield (REPLICATED, 1, REPLICATED), (2,)


def _group_norm_backward(inputs: Sequence[TensorType], outputs: Sequence[TensorType], *_: Any) -> Ways:
    """Of (gradient, x, means, deviations, weight): examples; the weight's and the bias's gradients are sums."""
    of_weight = (REPLICATED,) * (len(inputs) - 4)
    yield (0, 0, 0, 0, *of_weight), (0, *((SUMMED,) * (len(outputs) - 1)))


_ATTENTIONS = ("_for_cpu", "_for_cpu_backward", "", "_backward")
RULES: dict[str, Rule] = {
    **{f"aten._scaled_dot_product_flash_attention{end}": _attention for end in _ATTENTIONS},
    **{f"aten._scaled_dot_product_efficient_attention{end}": _attention for end in _ATTENTIONS[2:]},
    "aten.floor_divide": _alike,
    "aten.index_copy": _into_places,
    "aten.index_add": _into_sums,
    "aten.native_group_norm_backward": _group_norm_backward,
    "dejavu.grouped_mm": _of_groups,
    "dejavu.grouped_outer": _outer_of_groups,
    "dejavu.fused_rms_norm": _rms_norm,
    "dejavu.fused_rms_norm_backward": _rms_norm_backward,
}
