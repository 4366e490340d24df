"""What torch does with a layer whose weights are placed so: DTensor's own propagation, asked without processes.

A training places the weights and leaves the rest to torch, which decides operator by operator, forward and backward,
what moves. The same functions are asked here in the same order, so what is priced is what runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard
from torch.utils._pytree import tree_leaves

from dejavu.graphs.dtensor import REPLICATED, VIEW, lie_alike, tell_torch
from dejavu.graphs.split_loss import BEGINS, CROSS_ENTROPY, SplitLoss
from dejavu.profiles.kernel import Kernel
from dejavu.sharding.assembly import Option, collective_of, kept_values, kernel_on, local_type
from dejavu.sharding.operator_graph import CONSTANT, WEIGHT, Node, OperatorGraph, Value
from dejavu.sharding.problem import ShardingError
from dejavu.sharding.strategies import code_of, mesh_of, meta_of


class Move(NamedTuple):
    """A collective among the devices, of a tensor that is so large when it is whole."""

    name: str
    size_bytes: float


@dataclass(frozen=True)
class Carried:
    """What each device does when a layer is carried out.

    Attributes:
        kernels, moves: by direction, `forward` and `backward`.
        held_bytes: of what is made, from forward to backward.
        peak_bytes: the most that is made and not dropped yet.
        split_loss: the layer ends with its own classes' scores on each device, of which the loss is computed.
    """

    kernels: Mapping[str, tuple[Kernel, ...]]
    moves: Mapping[str, tuple[Move, ...]]
    held_bytes: float
    peak_bytes: float
    split_loss: bool = False


def carried_out(
    layer: OperatorGraph,
    weights: Mapping[str, int],
    size: int,
    *,
    whole_sums: bool = False,
    loss_by_class: bool = False,
) -> Carried:
    """Follow a layer whose weights are split over so many devices, and whose input and output are whole on each.

    Args:
        weights: by name, the dimension that each is split by; all others are whole on each device.
        whole_sums: sums over the devices that products with split weights give are made whole as Megatron-LM does, at
            once going forward, and a gradient when all of them have added to it; else where torch first needs them
            whole or in parts, which may be one part on each device, to be gathered later.
        loss_by_class: the loss can be computed of parts of the classes, and is where the scores come out so.

    Raises:
        ShardingError: torch has no way to run it so, or devices would draw other numbers than one alone.
    """
    tell_torch()
    return _Propagation(layer, weights, size, whole_sums, loss_by_class).run()


class _Propagation:
    def __init__(
        self, layer: OperatorGraph, weights: Mapping[str, int], size: int, whole_sums: bool, loss_by_class: bool
    ) -> None:
        self._layer, self._weights, self._mesh, self._size = layer, weights, mesh_of(size), size
        self._whole_sums, self._loss_by_class = whole_sums, loss_by_class
        self._split_loss = False
        self._of_split = {  # split weights of products, and what is made of nothing else
            Value(k)
            for k, node in enumerate(layer.nodes)
            if node.kind == WEIGHT and node.name in weights and len(node.outputs[0].shape) > 1
        }
        self._pending: set[Value] = set()  # sums of gradients to be made whole, whose specs say that they are
        self._specs: dict[Value, DTensorSpec] = {}
        self._plain: set[Value] = set()  # not distributed: made from nothing, or buffers
        self._kernels: dict[str, list[Kernel]] = {"forward": [], "backward": []}
        self._moves: dict[str, list[Move]] = {"forward": [], "backward": []}
        self._copies: dict[int, float] = {}  # bytes of what a node gathers to use it
        self._order: dict[Value, torch.Tensor] = {}  # on meta: as they lie, where torch believes otherwise
        self._copied: set[Value] = set()  # views that are copies
        self._end = REPLICATED  # the placement of the output before it is made whole

    def run(self) -> Carried:
        for number, node in enumerate(self._layer.nodes):
            if node.is_source:
                self._hold(number, node)
            elif self._split_loss and self._is_of_loss(number):
                self._call_on_classes(number, node)
            else:
                self._call(number, node)
            if number == self._layer.leaves.node:
                self._end_forward()
            returns = self._layer.returns
            if returns is not None and number == returns.node:
                self._begin_backward(returns)
        if self._layer.leaving is not None:
            self._finish(self._layer.leaving)
            self._move("backward", self._layer.leaving, Replicate())
        for name, value in self._layer.gradients.items():
            self._finish(value)
            self._move("backward", value, _placement_of(self._weights.get(name, REPLICATED)))
        held, peak = self._memory()
        return Carried(
            {way: tuple(some) for way, some in self._kernels.items()},
            {way: tuple(some) for way, some in self._moves.items()},
            held,
            peak,
            self._split_loss,
        )

    def _hold(self, number: int, node: Node) -> None:
        dim = self._weights.get(node.name, REPLICATED) if node.kind == WEIGHT else REPLICATED
        self._set(Value(number), dim)
        if node.kind == CONSTANT:
            self._plain.add(Value(number))

    def _end_forward(self) -> None:
        """Make the layer's output whole: what follows, such as the loss, is computed by each device.

        Scores of a device's own classes stay so where the loss can be computed of them.
        """
        leaves = self._layer.leaves
        self._end = self._code(leaves)
        classes = len(self._layer.type_of(leaves).shape) - 1
        is_plain = not isinstance(self._specs[leaves].placements[0], _StridedShard)
        if self._loss_by_class and self._end == classes and is_plain:
            self._split_loss = True
            return
        self._move("forward", leaves, Replicate())
        self._set(leaves, REPLICATED)

    def _begin_backward(self, returns: Value) -> None:
        """Take the own part of the output's gradient; that of what was a sum is whole."""
        self._set(returns, self._end if self._end >= 0 else REPLICATED)

    def _set(self, value: Value, placement: int) -> None:
        known, tensor = self._specs.get(value), self._layer.type_of(value)
        meta = known.tensor_meta if known is not None else meta_of(tensor)
        self._specs[value] = DTensorSpec(self._mesh, (_placement_of(placement),), meta)
        self._check_parts(self._specs[value])

    def _code(self, value: Value) -> int:
        return _placement(self._specs[value])

    def _call(self, number: int, node: Node) -> None:
        made = [Value(number, k) for k in range(len(node.outputs))]
        adds_up = self._adds_up(node)
        plain = [value in self._plain for value in node.inputs]
        if all(plain):  # also where there are none: nothing is distributed
            for value in made:
                self._set(value, REPLICATED)
            self._plain.update(made)
            wanted = [self._specs[value] for value in node.inputs]
        else:
            wanted = self._distributed(number, node, made, plain)
        given = [self._layer.type_of(value) for value in node.inputs]
        option = Option(tuple((_placement(spec),) for spec in wanted), tuple((self._code(value),) for value in made))
        if _draws(node) and any(one != (REPLICATED,) for one in option.inputs):
            raise ShardingError(f"{node.kind} would draw other numbers on each device than on one")
        kernel = kernel_on(node, given, option, (self._size,))
        if kernel is not None:
            self._kernels[node.direction].append(kernel)
        if node.inputs and self._of_split.issuperset(node.inputs):
            self._of_split.update(made)
        elif adds_up:
            self._pending.update(made)
        elif self._whole_sums and self._of_split.intersection(node.inputs):
            self._make_sums_whole(node, made)

    def _is_of_loss(self, number: int) -> bool:
        returns = self._layer.returns
        return self._layer.leaves.node < number <= (returns.node if returns is not None else number)

    def _call_on_classes(self, number: int, node: Node) -> None:
        """Run an operator of the loss on each device's own scores, as plain tensors; see `workload.models.by_class`.

        Tensors whose last dimension are the classes are in parts, and all others are whole on each device.
        """
        classes = self._layer.type_of(self._layer.leaves).shape[-1]
        for k, tensor in enumerate(node.outputs):
            has_classes = len(tensor.shape) > 1 and tensor.shape[-1] == classes and tensor.dtype.is_floating_point
            self._set(Value(number, k), len(tensor.shape) - 1 if has_classes else REPLICATED)
        if node.kind in CROSS_ENTROPY:
            if node.kind == BEGINS[node.direction]:
                self._begin_cross_entropy(number, node)
            return
        places = tuple((self._code(value),) for value in node.inputs)
        made = tuple((self._code(Value(number, k)),) for k in range(len(node.outputs)))
        types = [self._layer.type_of(value) for value in node.inputs]
        if (kernel := kernel_on(node, types, Option(places, made), (self._size,))) is not None:
            self._kernels[node.direction].append(kernel)

    def _begin_cross_entropy(self, number: int, node: Node) -> None:
        scores = node.outputs[0]
        targets, classes = scores.shape
        loss = SplitLoss(targets, classes // self._size, str(scores.dtype).removeprefix("torch."))
        self._kernels[node.direction] += loss.kernels(node.direction)
        self._moves[node.direction] += [Move(*move) for move in loss.moves(node.direction)]
        self._copies[number] = loss.more_bytes(node.direction)

    def _adds_up(self, node: Node) -> bool:
        """Return whether the operator passes gradients on that are to be made whole later; if not, they are now."""
        pending = self._pending.intersection(node.inputs)
        if not pending:
            return False
        passes = node.is_view or node.kind in ("aten.add", "aten._to_copy")
        if passes and all(self._code(value) == REPLICATED for value in node.inputs):
            return True
        for value in pending:
            self._finish(value)
        return False

    def _finish(self, value: Value) -> None:
        if value in self._pending:
            self._pending.remove(value)
            self._moves["backward"].append(Move("all_reduce", float(self._layer.type_of(value).size_bytes)))

    def _make_sums_whole(self, node: Node, made: list[Value]) -> None:
        if any(self._code(value) < REPLICATED for value in node.inputs):
            return
        for value in made:
            if self._code(value) < REPLICATED:
                if node.direction == "forward":
                    self._move("forward", value, Replicate())
                else:
                    self._pending.add(value)
                self._set(value, REPLICATED)

    def _distributed(self, number: int, node: Node, made: list[Value], plain: list[bool]) -> list[DTensorSpec]:
        """Ask torch for the placements of an operator's inputs, which are moved there, and of its results."""
        given = [self._specs[value] for value in node.inputs]
        is_split = any(_placement(one) != REPLICATED for one in given)
        if is_split and node.call is not VIEW and node.call in DTensor._op_dispatcher._custom_op_handlers:
            raise ShardingError(f"{node.kind} moves its tensors by rules of its own, which are not priced")
        if node.is_view and any(isinstance(one.placements[0], _MaskPartial) for one in given):
            raise ShardingError(f"{node.kind} of rows that each device looked up has another shape than their mask")
        answer = self._asked(node, given)
        wanted = given
        if answer.needs_redistribute and answer.redistribute_schema is not None:
            leaves = tree_leaves((answer.redistribute_schema.args_schema, answer.redistribute_schema.kwargs_schema))
            wanted = [one for one in leaves if isinstance(one, DTensorSpec)]
        if len(wanted) != len(given):
            raise ShardingError(f"{node.kind} has {len(given)} tensors, and torch speaks of {len(wanted)}")
        in_place = node.call._schema.name.endswith("_") and not node.call._schema.name.endswith("__")
        if in_place and (plain[0] or node.inputs[0] in self._copied or wanted[0].placements != given[0].placements):
            raise ShardingError(f"{node.kind} writes to a tensor that would have to be moved")
        for value, spec in zip(node.inputs, wanted, strict=True):
            self._check_parts(spec)
            self._move(node.direction, value, spec.placements[0])
            if _placement(spec) == REPLICATED and self._code(value) >= 0:
                self._copies[number] = self._copies.get(number, 0.0) + self._layer.type_of(value).size_bytes
        left = [one for one in tree_leaves(answer.output_spec) if isinstance(one, DTensorSpec)]
        for value in made:
            if left and tuple(left[0].shape) == self._layer.type_of(value).shape:
                self._check_parts(left[0])
                self._specs[value] = left.pop(0)
            else:  # a number, such as a seed
                self._set(value, REPLICATED)
                self._plain.add(value)
        self._lay_out(number, node, wanted)
        if left:
            raise ShardingError(f"{node.kind} gives {len(made)} tensors, and torch speaks of more")
        return wanted

    def _asked(self, node: Node, given: list[DTensorSpec]) -> OutputSharding:
        propagator = DTensor._op_dispatcher.sharding_propagator
        known = propagator.op_to_schema_info.get(node.call)
        if known is None:
            known = propagator.op_to_schema_info_for_single_dim_strategy.get(node.call)
        arguments, options = node.arguments_with(given)
        ask: Any = propagator.propagate_op_sharding
        if any(str(one.type) == "List[bool]" for one in node.call._schema.arguments):
            # Which gradients are wanted is not in the key under which torch keeps its answers.
            ask = propagator.propagate_op_sharding_non_cached
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = ask(OpSchema(node.call, tuple(arguments), options, schema_info=known))
        except Exception as error:  # torch's functions raise what they like
            why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise ShardingError(f"{node.kind} cannot be run on distributed tensors: {why}") from error
        assert isinstance(answer, OutputSharding)
        return answer

    def _move(self, direction: str, value: Value, placement: Placement) -> None:
        if self._specs[value].placements[0] == placement or _number(placement) < REPLICATED:
            return  # what is whole becomes one device's part of a sum by itself
        now, wanted = self._specs[value].placements[0], placement
        gathers = isinstance(now, _StridedShard) or (isinstance(wanted, _StridedShard) and _number(now) >= 0)
        name = collective_of(_number(now), REPLICATED if gathers else _number(wanted))
        if name is not None:
            tensor = self._layer.type_of(value)
            self._moves[direction].append(Move(name, float(tensor.size_bytes)))

    def _check_parts(self, spec: DTensorSpec) -> None:
        placement = _placement(spec)
        if placement >= 0 and (spec.shape[placement] == 0 or spec.shape[placement] % self._size):
            raise ShardingError(f"{tuple(spec.shape)} does not divide into {self._size} along {placement}")

    def _lay_out(self, number: int, node: Node, wanted: list[DTensorSpec]) -> None:
        """Follow in which order parts lie in memory where that is not what torch believes (`graphs.dtensor.views`).

        A collective leaves a tensor in the order of its dimensions; a view that this does not allow is made of a copy.
        """
        lying = list[torch.Tensor | None]()
        for value, spec in zip(node.inputs, wanted, strict=True):
            if spec.placements != self._specs[value].placements:
                as_known = _on_meta(self._specs[value])
                lying.append(_unless_alike(torch.empty(as_known.shape, dtype=as_known.dtype, device="meta"), as_known))
            else:
                lying.append(self._order.get(value))
        if node.is_view and self._copied.intersection(node.inputs):
            self._copied.update(Value(number, k) for k in range(len(node.outputs)))
        if all(one is None for one in lying):
            return
        given = [_on_meta(spec) if one is None else one for one, spec in zip(lying, wanted, strict=True)]
        if node.call is VIEW:
            given[0] = given[0].contiguous()
            self._copies_to_view(number, node, wanted[0])
        arguments, options = node.arguments_with(given)
        try:
            made = [one for one in tree_leaves(node.call(*arguments, **options)) if isinstance(one, torch.Tensor)]
        except Exception as error:  # torch's functions raise what they like
            raise ShardingError(f"{node.kind} cannot be run on what a collective has put in order: {error}") from error
        for k, one in enumerate(made):
            spec = self._specs[Value(number, k)]
            if tuple(one.shape) == tuple(spec.shape) and (differs := _unless_alike(one, _on_meta(spec))) is not None:
                self._order[Value(number, k)] = differs

    def _copies_to_view(self, number: int, node: Node, spec: DTensorSpec) -> None:
        self._copied.add(Value(number))
        tensor = self._layer.type_of(node.inputs[0])
        placed = Option(((_placement(spec),),), ((_placement(spec),),))
        copying = replace(node, kind="aten.clone", outputs=(tensor,), flops=0.0, is_view=False)
        kernel = kernel_on(copying, [tensor], placed, (self._size,))
        if kernel is not None:
            self._kernels[node.direction].append(kernel)

    def _local_bytes(self, value: Value) -> float:
        return float(local_type(self._layer.type_of(value), (self._code(value),), (self._size,)).size_bytes)

    def _memory(self) -> tuple[float, float]:
        """Return what is held between the passes, and the most at any moment, weights and views left out."""
        last: dict[Value, int] = {}
        for value, user, _ in self._layer.uses():
            last[value] = max(user, last.get(value, user))
        dropped: dict[int, list[Value]] = {}
        for value, user in last.items():
            dropped.setdefault(user, []).append(value)
        kept = kept_values(self._layer)
        held = sum(self._local_bytes(value) for value in kept if not self._layer.nodes[value.node].is_view)
        now = peak = 0.0
        for number, node in enumerate(self._layer.nodes):
            counts = not node.is_source and not node.is_view
            now += sum(self._local_bytes(Value(number, k)) for k in range(len(node.outputs))) if counts else 0.0
            peak = max(peak, now + self._copies.get(number, 0.0))
            for value in dropped.get(number, ()):
                owner = self._layer.nodes[value.node]
                now -= 0.0 if owner.is_source or owner.is_view else self._local_bytes(value)
        return held, peak


def _on_meta(spec: DTensorSpec) -> torch.Tensor:
    meta = spec.tensor_meta
    assert meta is not None
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _unless_alike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    return None if lie_alike(one.shape, one.stride(), other.stride()) else one


def _draws(node: Node) -> bool:
    """Return whether the operator draws at random; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in node.call.tags:
        return False
    arguments, options = node.arguments_with(node.inputs)
    for number, argument in enumerate(node.call._schema.arguments):
        if argument.name == "dropout_p":
            given = arguments[number] if number < len(arguments) else options.get("dropout_p", argument.default_value)
            return bool(given)
    return True


def _placement(spec: DTensorSpec) -> int:
    """Return the number of a tensor's placement."""
    return _number(spec.placements[0])


def _number(placement: Placement) -> int:
    """Return a placement's number; parts in strides, as of heads merged with examples, have their dimension's.

    Raises:
        ShardingError: there is none.
    """
    found = placement.dim if isinstance(placement, _StridedShard) else code_of(placement)
    if found is None:
        raise ShardingError(f"a tensor would be placed as {placement}, which is not priced")
    return found


def _placement_of(number: int) -> Placement:
    return Replicate() if number < 0 else Shard(number)
