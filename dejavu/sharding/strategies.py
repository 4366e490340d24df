"""In which ways an operator can be split over the devices of one mesh dimension: by DTensor's own registries.

The registries are asked without processes: a mesh needs no process group to be reasoned about. Where torch has no rule,
`rules` has ours; what neither knows runs whole on every device, and is listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

from dejavu.graphs.dtensor import AVERAGED, REPLICATED, RULES, SUMMED
from dejavu.sharding.operator_graph import Node, OperatorGraph, TensorType


class Strategy(NamedTuple):
    """One way to run an operator on one mesh dimension: a placement for each input, and for each output."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Whether each device does a part of the work."""
        return any(one != REPLICATED for one in (*self.inputs, *self.outputs))


def placements_of(tensor: TensorType, size: int) -> tuple[int, ...]:
    """Return how a tensor may be placed on so many devices: whole, or split where a dimension divides."""
    return (REPLICATED, *(d for d, length in enumerate(tensor.shape) if length and length % size == 0))


def strategies_of(node: Node, inputs: Sequence[TensorType], size: int) -> tuple[Strategy, ...]:
    """Return the ways to run an operator on so many devices, whole on each of them first; never none."""
    whole = Strategy((REPLICATED,) * len(inputs), (REPLICATED,) * len(node.outputs))
    found = dict.fromkeys((whole,))
    for strategy in _all(node, inputs, size):
        if (len(strategy.inputs), len(strategy.outputs)) != (len(inputs), len(node.outputs)):
            continue
        fits = zip((*strategy.inputs, *strategy.outputs), (*inputs, *node.outputs), strict=True)
        if all(_fits(placement, tensor, size) for placement, tensor in fits):
            found[strategy] = None
    return tuple(found)


def without_rule(layers: Iterable[OperatorGraph]) -> tuple[str, ...]:
    """Return the kinds of operators that take a tensor and run whole, because nothing says how to split them."""
    nodes = (node for layer in layers for node in layer.nodes if node.inputs)
    return tuple(sorted({node.kind for node in nodes if not _is_known(node)}))


def _is_known(node: Node) -> bool:
    registries = DTensor._op_dispatcher.sharding_propagator
    return (
        node.kind in RULES
        or node.call in registries.op_strategy_funcs
        or node.call in registries.op_single_dim_strategy_funcs
    )


def _fits(placement: int, tensor: TensorType, size: int) -> bool:
    if placement in (SUMMED, AVERAGED):
        return tensor.dtype.is_floating_point  # parts of whole numbers are no numbers after a cast
    if placement >= len(tensor.shape):  # torch's `cat` also takes tensors of the shape (0,) beside others
        return False
    return placement < 0 or (tensor.shape[placement] > 0 and tensor.shape[placement] % size == 0)


def _all(node: Node, inputs: Sequence[TensorType], size: int) -> Iterator[Strategy]:
    if node.kind in RULES:
        arguments, options = node.arguments_with(inputs)
        for rule in RULES[node.kind](inputs, node.outputs, arguments, options):
            yield Strategy(*rule)
        return
    registries = DTensor._op_dispatcher.sharding_propagator
    mesh = mesh_of(size)
    if node.call in registries.op_strategy_funcs:
        yield from _by_strategies(node, inputs, mesh, registries.op_strategy_funcs[node.call])
    elif node.call in registries.op_single_dim_strategy_funcs:
        yield from _by_one_dimension(node, inputs, registries.op_single_dim_strategy_funcs[node.call])


def _by_strategies(node: Node, inputs: Sequence[TensorType], mesh: DeviceMesh, ask: Any) -> Iterator[Strategy]:
    """Ask a registered function again and again: most follow what they are given, and some reject what they cannot."""
    for placements in _asked(inputs):
        choices = [
            OpStrategy([OpSpec(DTensorSpec(mesh, (one,), meta_of(tensor))) for one in some])
            for some, tensor in zip(placements, inputs, strict=True)
        ]
        arguments, options = node.arguments_with(choices)
        arguments = tuple(_together(one) for one in arguments)
        in_lists = any(isinstance(one, TupleStrategy) for one in arguments)
        try:
            answer = ask(OpSchema(node.call, arguments, options, RuntimeSchemaInfo(needs_pytree=in_lists)))
        except (AssertionError, RuntimeError, ValueError, LookupError):
            continue  # not with these placements
        for spec in getattr(answer, "strategies", ()):
            arriving = [spec.output_spec] * len(inputs) if spec.input_specs is None else spec.input_specs
            if len(arriving) == len(inputs):
                yield from _strategy([one.placements[0] for one in arriving], _outputs(node, spec.output_specs))


def _asked(inputs: Sequence[TensorType]) -> Iterator[list[list[Placement]]]:
    """Return placements of all inputs to ask with: all at once, each of each input alone, and each of all of them."""
    ways = [_candidates(tensor) for tensor in inputs]
    yield ways
    for place, some in enumerate(ways):
        for one in some[1:]:
            yield [[one] if k == place else [Replicate()] for k in range(len(ways))]
    if len(ways) > 1:
        for one in dict.fromkeys(itertools.chain(*ways)):
            yield [[one] if one in some else [Replicate()] for some in ways]


def _together(argument: Any) -> Any:
    is_list = isinstance(argument, list | tuple) and any(isinstance(one, OpStrategy) for one in argument)
    return TupleStrategy(list(argument)) if is_list else argument


def _outputs(node: Node, specs: Any) -> list[Placement]:
    """Return the placements of the results that are tensors."""
    several = list(specs) if isinstance(specs, Sequence) and not isinstance(specs, DTensorSpec) else [specs]
    found = [one.placements[0] for one in several if one is not None]
    return found[:1] * len(node.outputs) if len(found) == 1 else found


def _by_one_dimension(node: Node, inputs: Sequence[TensorType], info: Any) -> Iterator[Strategy]:
    """Ask a registered function that speaks of one mesh dimension: it lists all ways but the whole one."""
    arguments, options = node.arguments_with([meta_of(tensor) for tensor in inputs])
    for rule in info.func(node.call, arguments, options):
        made, given = rule[: len(rule) - len(inputs)], rule[len(rule) - len(inputs) :]
        yield from _strategy(given, [one for one in made if one is not None])


def _strategy(inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[Strategy]:
    codes = [[code_of(one) for one in some] for some in (inputs, outputs)]
    if None not in itertools.chain(*codes):
        yield Strategy(*(tuple(one for one in some if one is not None) for some in codes))


def code_of(placement: Placement | _ShardingPlaceholder | None) -> int | None:
    """Return None for what this search leaves out: splits in strides, and other reductions than sums and means."""
    if placement is None or isinstance(placement, Replicate):
        return REPLICATED
    if type(placement) is Shard or isinstance(placement, _ShardingPlaceholder):
        return int(placement.dim)
    if isinstance(placement, Partial):
        return {"sum": SUMMED, "avg": AVERAGED}.get(placement.reduce_op)
    return None


@cache
def mesh_of(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(size), _init_backend=False, _rank=0)


def meta_of(tensor: TensorType) -> TensorMeta:
    strides, step = list[int](), 1
    for length in reversed(tensor.shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return TensorMeta(torch.Size(tensor.shape), tuple(strides), tensor.dtype)


def _candidates(tensor: TensorType) -> list[Placement]:
    ways: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(tensor.shape)))]
    return [*ways, Partial()] if tensor.dtype.is_floating_point else ways
