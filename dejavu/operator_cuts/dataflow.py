"""What each operator of a layer makes, reads again later, keeps for the backward pass, and does in it.

Shape suffixes: I = a layer's forward operators that compute something, in the captured order.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dejavu.graphs.layer_trace import CaptureError, is_view, received_by

Loss = Callable[[torch.Tensor], torch.Tensor]
_View = tuple[int, tuple[int, ...], tuple[int, ...], int]  # offset, shape and stride in elements; its bytes


@dataclass(frozen=True)
class LayerFlow:
    """One layer's operators as a chain: what crosses if it is cut after each.

    Attributes:
        kinds: ATen names, as the captured operators have them.
        crossing_bytes: received or made before, and read by later operators or the next layer.
        weight_bytes: of the weights that each is the first to read.
        held_bytes: made by each, and kept for the backward pass.
        backward_of: of each backward operator, the forward operator whose gradient it computes.
    """

    kinds: tuple[str, ...]
    crossing_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    backward_of: tuple[int, ...]


def trace_flow(module: torch.nn.Module, inputs: torch.Tensor, loss: Loss | None) -> tuple[LayerFlow, torch.Tensor]:
    """Trace a layer on fake inputs, the last one with its loss; return its flow and its output.

    What depends on no input and no weight (masks, positions) is made anew on whichever side of a cut needs it, so it
    crosses none.

    Raises:
        CaptureError: the layer has weights, and only views of them.
    """
    given = received_by(module, inputs)
    watch = _Flow(module.parameters(), given)
    with torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda tensor: tensor), watch:
        output = module(given)
        watch.leave(output)
        end = loss(output) if loss else output
    wanted = [tensor for tensor in (given, *module.parameters()) if tensor.requires_grad]
    arriving = torch.ones_like(end)
    watch.is_backward = True
    with watch:
        if wanted and end.grad_fn is not None:
            torch.autograd.grad(end, wanted, arriving, allow_unused=True)
    return watch.flow(crosses_end=loss is None), output


@dataclass
class _Tensor:
    """A storage that depends on the layer's input or weights: where it was made, and who reads which views of it."""

    made: int
    size_bytes: int
    reads: list[tuple[int, _View]] = field(default_factory=list)


class _Flow(TorchDispatchMode):
    """Follows storages through forward, and autograd's numbers of operations through backward."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.is_backward = False
        self.kinds: list[str] = []
        self.sequences: list[int] = []  # autograd's number after each forward operator
        self.backward: list[int] = []  # autograd's number of the operation behind each backward operator
        self._weights = {parameter.untyped_storage()._cdata: _size(parameter) for parameter in parameters}
        self._first_read: dict[int, int] = {}
        self._tensors = {given.untyped_storage()._cdata: _Tensor(-1, _size(given))}
        self._made: dict[int, int] = {}  # every storage, also of what depends on no input
        self._held: dict[int, tuple[int, int]] = {}
        self._alive: list[torch.Tensor] = []  # a storage that is freed would give its number to another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        writes = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if writes and not is_view(func):
            reads = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self._backward() if self.is_backward else self._forward(str(func.overloadpacket), reads, writes)
        return result

    def _forward(self, kind: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        place, depends = len(self.kinds), False
        for tensor in reads:
            key = tensor.untyped_storage()._cdata
            if key in self._weights:
                depends = True
                self._first_read.setdefault(key, place)
            if key in self._tensors:
                depends = True
                self._tensors[key].reads.append((place, _view(tensor)))
        for tensor in writes:
            key = tensor.untyped_storage()._cdata
            self._made.setdefault(key, place)
            if depends:
                self._tensors.setdefault(key, _Tensor(place, _size(tensor)))
        self._alive += writes
        self.kinds.append(kind)
        self.sequences.append(torch._C._autograd._get_sequence_nr())

    def _backward(self) -> None:
        node = torch._C._current_autograd_node()
        self.backward.append(node._sequence_nr() if node is not None else -1)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note what autograd keeps: at the operator that made it, once."""
        key = tensor.untyped_storage()._cdata
        if key not in self._weights:
            self._alive.append(tensor)
            self._held[key] = (max(self._made.get(key, 0), 0), _size(tensor))
        return tensor

    def leave(self, output: torch.Tensor) -> None:
        """Note that the next layer reads the layer's output."""
        made = self._tensors.get(output.untyped_storage()._cdata)
        if made is not None:
            made.reads.append((len(self.kinds), _view(output)))

    def flow(self, *, crosses_end: bool) -> LayerFlow:
        count = len(self.kinds)
        if self._weights and not count:
            raise CaptureError("its weights are read by no operator that computes something; wanted one or more")
        end = count if crosses_end else count - 1
        crossing = [sum(_needed(tensor, place) for tensor in self._tensors.values()) for place in range(end)]
        weights, held = [0] * count, [0] * count
        for key, size in self._weights.items():
            weights[self._first_read.get(key, 0)] += size
        for place, size in self._held.values():
            held[place] += size
        # An operation gets its number before its kernels run: of operators after which autograd stood at the same
        # number all belong to it; of a number in between, which a view has, the operator before it is meant.
        first = [bisect.bisect_left(self.sequences, number + 1) for number in self.backward]
        backward_of = tuple(min(place, count - 1) for place in first)
        crossing += [0] * (count - end)
        return LayerFlow(tuple(self.kinds), tuple(crossing), tuple(weights), tuple(held), backward_of)


def _needed(tensor: _Tensor, place: int) -> int:
    """Return the bytes of a tensor that are read after this operator; 0 where it is not made yet."""
    if tensor.made > place:
        return 0
    later = {view for read, view in tensor.reads if read > place}
    return min(tensor.size_bytes, sum(view[-1] for view in later))


def _view(tensor: torch.Tensor) -> _View:
    return (
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.numel() * tensor.element_size(),
    )


def _size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
