"""Rules for operators that torch's registries lack: for the search for splits, and for torch, which runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo, StrategyType
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.utils._pytree import tree_leaves, tree_map_only

from dejavu.graphs.dtensor.views import VIEW, view_in_order


class TensorType(Protocol):
    """What the rules know of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Ways = Iterator[tuple[tuple[int, ...], tuple[int, ...]]]
Rule = Callable[[Sequence[TensorType], Sequence[TensorType], tuple[Any, ...], dict[str, Any]], Ways]

# A tensor is whole on every device, or parts whose sum or mean it is; any other number: the dimension it is split by.
REPLICATED, SUMMED, AVERAGED = -1, -2, -3


def _attention(inputs: Sequence[TensorType], outputs: Sequence[TensorType], *_: Any) -> Ways:
    """Split batch or heads, the first two dimensions of all; seeds, and a mask that is one for all, stay whole."""

    def placed(some: Sequence[TensorType], dim: int) -> tuple[int, ...]:
        return tuple(dim if len(one.shape) >= 3 and one.shape[dim] > 1 else REPLICATED for one in some)

    for dim in (0, 1):
        yield placed(inputs, dim), placed(outputs, dim)


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


def _whole(*_: Any) -> Ways:
    """Only whole: its sizes are numbers among its arguments, which torch does not divide."""
    yield from ()


_ATTENTIONS = ("_for_cpu", "_for_cpu_backward", "", "_backward")
RULES: dict[str, Rule] = {
    **{f"aten._scaled_dot_product_flash_attention{end}": _attention for end in _ATTENTIONS},
    **{f"aten._scaled_dot_product_efficient_attention{end}": _attention for end in _ATTENTIONS[2:]},
    "aten.floor_divide": _alike,
    "aten.index_copy": _into_places,
    "aten.index_add": _into_sums,
    "aten.native_group_norm_backward": _whole,
    "dejavu.grouped_mm": _of_groups,
    "dejavu.grouped_outer": _outer_of_groups,
    "dejavu.fused_rms_norm": _rms_norm,
    "dejavu.fused_rms_norm_backward": _rms_norm_backward,
}


@cache
def tell_torch() -> None:
    """Register these rules with DTensor where it has none, so that it runs these operators split; once a process."""
    DTensor._op_dispatcher._custom_op_handlers[VIEW] = view_in_order  # type: ignore[assignment]
    registries = DTensor._op_dispatcher.sharding_propagator
    for name, rule in RULES.items():
        room, _, operator = name.partition(".")
        packet = getattr(getattr(torch.ops, room), operator, None)
        for call in [] if packet is None else [getattr(packet, one) for one in packet.overloads()]:
            known = (registries.op_strategy_funcs, registries.op_single_dim_strategy_funcs, registries.op_to_rules)
            if not any(call in some for some in known):
                registries.register_op_strategy(call, _strategy_of(rule), RuntimeSchemaInfo(0, needs_pytree=True))


def _strategy_of(rule: Rule) -> Callable[[OpSchema], StrategyType]:
    """Return what torch asks: all ways to run an operator, for inputs that are placed already."""

    def strategy(schema: OpSchema) -> StrategyType:
        def empty(one: OpStrategy) -> torch.Tensor:
            meta = one.strategies[0].output_spec.tensor_meta
            assert meta is not None
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")

        arguments, options = tree_map_only(OpStrategy, empty, (schema.args_schema, schema.kwargs_schema))
        made = [one for one in tree_leaves(schema.op(*arguments, **options)) if isinstance(one, torch.Tensor)]
        named = [one for one in tree_leaves(options) if isinstance(one, torch.Tensor)]
        given = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
        ways: list[list[Placement | None]] = [[Replicate()] * (len(made) + len(given) + len(named))]
        for placed, outputs in rule([*given, *named], made, arguments, options):
            if all(one == REPLICATED for one in placed[len(given) :]):  # torch does not move what is given by name
                ways.append([_PLACEMENTS[one]() if one < 0 else Shard(one) for one in (*outputs, *placed)])
        return expand_to_full_mesh_op_strategy(
            schema.get_mesh_from_args(), schema, ways, input_index=len(made), inplace_op=schema.is_inplace_op()
        )

    return strategy


_PLACEMENTS: dict[int, Callable[[], Placement]] = {
    REPLICATED: Replicate,
    SUMMED: Partial,
    AVERAGED: lambda: Partial("avg"),
}
