"""Liveness: one layer's memory through forward and backward, tracked storage by storage on fake tensors.

A layer is traced between two stand-ins for its neighbours, which own the tensors that cross the layer's two cuts as the
neighbours would: whether such a tensor is alive is recorded, and its bytes are left to the code that composes layers
(`dejavu.cost.memory`). Everything else that is allocated in the layer is its own. Gradients of the weights exist
already and are accumulated in place, as in every step but the first.

Fake tensors run no kernels, so what a kernel allocates and frees inside is not seen: formulas add it
(`dejavu.graphs.inside`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dejavu.cluster.records import Kind
from dejavu.graphs.in_parts.running_again import run_again_once
from dejavu.graphs.in_parts.split_backward import backward_input, backward_weight, own_tensor
from dejavu.graphs.inside import inside_bytes, size_of

INPUT, OUTPUT, ARRIVING = "input", "output", "arriving"  # arriving: the gradient of the output
_RANDOM_STATE_BYTES = 5056  # of the CPU's generator, torch 2.13
# Where two gradients of one tensor are summed, the engine adds to the first in place unless it is a view; an index's
# gradient is put into zeros in place. Under a dispatch mode both make a new tensor and drop the old one at once, so
# such a moment is not recorded.
_IN_PLACE_BACKWARD = (torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default)


@dataclass(frozen=True)
class Moment:
    """The most that a layer holds while exactly these boundary tensors are alive.

    Attributes:
        own_bytes: everything allocated in the layer except the boundary tensors.
        alive: of `INPUT`, `OUTPUT` and `ARRIVING`, those that are held by the layer itself.
    """

    own_bytes: int
    alive: frozenset[str]


class InParts(NamedTuple):
    """A layer's own bytes where its backward pass runs in two parts (`graphs.in_parts`), for one microbatch.

    Attributes:
        retained_bytes: when the first has passed the layer, but not yet all of its stage.
        waiting_bytes: between the two.
        most_bytes: the most while either passes the layer, with the gradient of its output.
    """

    retained_bytes: int
    waiting_bytes: int
    most_bytes: int


@dataclass(frozen=True)
class Footprint:
    """One layer's memory for one microbatch, its weights and their gradients left out.

    Attributes:
        input_bytes, output_bytes: the tensors that cross its two cuts; a gradient is as large as its tensor.
        held_bytes: its own, from forward to backward; also what an output that is a view, as the first of many
            positions, keeps of its memory besides.
        holds_input, holds_output: whether it needs them from forward to backward as well.
        passes_input: its output is a view of its input's memory.
        forward, backward: its moments, at most one for each set of boundary tensors.
        buffer_bytes: tensors of the module that are not weights.
        largest_parameter_bytes: its largest single weight.
        in_parts: where its backward pass runs in two parts.
    """

    input_bytes: int
    output_bytes: int
    held_bytes: int
    holds_input: bool
    holds_output: bool
    passes_input: bool
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    buffer_bytes: int
    largest_parameter_bytes: int
    in_parts: InParts


Loss = Callable[[torch.Tensor], torch.Tensor]


def footprint(
    module: nn.Module, inputs: torch.Tensor, loss: Loss | None, *, recompute: bool = False, kind: Kind = "cpu"
) -> Footprint:
    """Trace one layer under the fake tensor mode that is active.

    Args:
        inputs: their shape and dtype; no gradient of them is computed unless they require one.
        loss: the last layer's, which takes its output.
        recompute: under activation checkpointing: the layer keeps its input only, and runs again before its backward.
        kind: of the devices.
    """
    parameters = tuple(module.parameters())
    buffers = {buffer.untyped_storage()._cdata: size_of(buffer) for buffer in module.buffers()}
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    outside = (inputs, *parameters, *(p.grad for p in parameters if p.grad is not None), *module.buffers())
    watch, between = _Watch(outside, kind), _Watch(outside, kind)
    try:
        with between:
            in_parts = _in_parts(module, inputs, loss, between, recompute=recompute)
        with watch:
            held, forward, sizes = _forward(module, inputs, loss, watch, recompute=recompute)
            end = watch.end
            watch.end = None
            if end is not None and end.requires_grad:
                end.backward()
            watch.note()
    finally:
        for parameter in parameters:
            parameter.grad = None
    return Footprint(
        input_bytes=sizes[INPUT],
        output_bytes=sizes[OUTPUT],
        held_bytes=held.own_bytes,
        holds_input=INPUT in held.alive,
        holds_output=OUTPUT in held.alive,
        passes_input=sizes["passed"] > 0,
        forward=forward,
        backward=watch.moments(),
        buffer_bytes=sum(buffers.values()),
        largest_parameter_bytes=max((size_of(parameter) for parameter in parameters), default=0),
        in_parts=in_parts,
    )


def _forward(
    module: nn.Module, inputs: torch.Tensor, loss: Loss | None, watch: _Watch, *, recompute: bool
) -> tuple[Moment, tuple[Moment, ...], dict[str, int]]:
    """Run forward alone; what is alive when this returns is held by the layer. `watch` keeps the end of the graph."""
    x = _received(inputs, watch)
    watch.start_over()
    output = _checkpointed(module, x) if recompute else module(x)
    passed = output.untyped_storage()._cdata == x.untyped_storage()._cdata
    watch.call(INPUT if passed else OUTPUT, output)
    sizes = {INPUT: size_of(x), OUTPUT: size_of(output), "passed": int(passed)}
    besides = 0 if passed else _besides(output)
    watch.end = loss(output) if loss else _Behind.apply(output, watch)  # type: ignore[no-untyped-call]  # torch's has no types
    del x, output
    watch.note()
    forward = watch.moments()
    held = watch.now()
    if OUTPUT not in held.alive:  # who has the output keeps it
        held = replace(held, own_bytes=held.own_bytes + besides)
    watch.start_over()
    return held, forward, sizes


def _in_parts(module: nn.Module, inputs: torch.Tensor, loss: Loss | None, watch: _Watch, *, recompute: bool) -> InParts:
    """Run forward, and backward in two parts; between them the graph stays, as if a later layer of the stage waited."""
    x, retained = _received(inputs, watch), [0]

    def arrives(gradient: torch.Tensor) -> None:
        watch.call(INPUT, gradient)  # the upstream layer's
        retained.append(watch.now().own_bytes)

    state = torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)  # fake tensors cannot read the generator's
    again = partial(_with_state, module, state)
    output = run_again_once(again, x, keeps_generators=False) if recompute else module(x)
    del state, again
    if not output.requires_grad:
        return InParts(0, 0, 0)
    output = own_tensor(output)  # as a stage's
    end, arriving = (loss(output), None) if loss else (output, [torch.empty_like(output)])
    watch.call(OUTPUT, output)
    if arriving:
        watch.call(ARRIVING, arriving[0])
    gradient_bytes, besides = size_of(output), _besides(output)
    if x.requires_grad:
        x.register_hook(arrives)
    watch.start_over()
    graph = output.grad_fn
    groups = backward_input([end], arriving, [x], module.parameters(), retains=True)[1]
    del output, end, arriving, x
    waits = watch.now()
    if OUTPUT not in waits.alive:  # the next layer keeps it
        waits = replace(waits, own_bytes=waits.own_bytes + besides)
    backward_weight(module.parameters(), groups)
    del graph
    waiting_bytes = _with_arriving(waits, gradient_bytes)  # weights' gradients may want what arrives as it is
    return InParts(
        retained_bytes=max(*retained, waits.own_bytes) + waiting_bytes - waits.own_bytes,
        waiting_bytes=waiting_bytes,
        most_bytes=max(_with_arriving(moment, gradient_bytes) for moment in watch.moments()),
    )


def _with_state(module: nn.Module, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Run the layer, and keep the state as long as this may be run."""
    output: torch.Tensor = module(x)
    return output


def _with_arriving(moment: Moment, gradient_bytes: int) -> int:
    return moment.own_bytes + gradient_bytes * (ARRIVING in moment.alive)


def _received(inputs: torch.Tensor, watch: _Watch) -> torch.Tensor:
    """Return what the layer is given, and as a layer before it would take its gradient."""
    if inputs.requires_grad:
        x: torch.Tensor = _Before.apply(inputs.detach(), torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]  # torch's has no types
    else:
        x = torch.empty_like(inputs)
    watch.call(INPUT, x)
    return x


def _checkpointed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run `checkpoint` with its defaults, and a stand-in for the generator's state, which fake tensors cannot read."""
    state = torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)
    output: torch.Tensor = checkpoint(
        lambda x, state: module(x), x, state, use_reentrant=False, preserve_rng_state=False
    )
    return output


class _Before(torch.autograd.Function):
    """Stand-in for the upstream layer: gives a tensor, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None


class _Behind(torch.autograd.Function):
    """Stand-in for the downstream layer: keeps nothing of its input, and gives a gradient that nobody else owns."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, watch: _Watch) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.watch = output.shape, output.dtype, watch
        return torch.zeros((), dtype=output.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        arriving = torch.empty(ctx.shape, dtype=ctx.dtype)
        ctx.watch.call(ARRIVING, arriving)
        return arriving, None


class _Watch(TorchDispatchMode):
    """Tracks every storage that is allocated while it is active, from allocation to release."""

    def __init__(self, outside: tuple[torch.Tensor, ...], kind: Kind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._kind = kind
        self.end: torch.Tensor | None = None
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self._alive: dict[int, int] = {}  # storage -> bytes
        self._names: dict[int, str] = {}  # storage -> which boundary tensor it is
        self._besides: dict[int, int] = {}  # storage of such a tensor -> its bytes besides those of the tensor
        self._own_bytes = 0
        self._most: dict[frozenset[str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note()
        result = func(*args, **(kwargs or {}))
        inside = inside_bytes(func.overloadpacket, args, result, self._kind)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._meet(leaf)
        if torch.is_grad_enabled() or func not in _IN_PLACE_BACKWARD or args[0]._is_view():
            self.note(inside)
        return result

    def call(self, name: str, tensor: torch.Tensor) -> None:
        """Name this tensor's storage as the boundary tensor `name` from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._alive:
            if key not in self._names:
                self._besides[key] = _besides(tensor)
                self._own_bytes -= self._alive[key] - self._besides[key]
            self._names[key] = name

    def note(self, inside_bytes: int = 0) -> None:
        """Record the current moment if it holds more than any with the same boundary tensors."""
        now = self.now()
        self._most[now.alive] = max(now.own_bytes + inside_bytes, self._most.get(now.alive, 0))

    def now(self) -> Moment:
        return Moment(self._own_bytes, frozenset(self._names.values()))

    def moments(self) -> tuple[Moment, ...]:
        """Return the largest moments so far, without those that another one dominates."""
        found = [Moment(size, alive) for alive, size in self._most.items()]
        return tuple(
            moment
            for moment in found
            if not any(m != moment and m.alive >= moment.alive and m.own_bytes >= moment.own_bytes for m in found)
        )

    def start_over(self) -> None:
        self._most.clear()

    def _meet(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._outside:
            return
        self._alive[key] = storage.nbytes()
        self._own_bytes += storage.nbytes()
        weakref.finalize(storage, self._bury, key).atexit = False

    def _bury(self, key: int) -> None:
        size = self._alive.pop(key)
        self._own_bytes -= size if self._names.pop(key, None) is None else self._besides.pop(key)


def _besides(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's memory that are not the tensor's: of a view, what it leaves out."""
    return max(0, tensor.untyped_storage().nbytes() - size_of(tensor))
