"""A module as a graph of operators: who computes what from whose results, forward and, in training, backward.

Traced on fake tensors like layers are (`dejavu.graphs.layer_trace`), so branches stay branches: what one operator wrote
and another reads, by the memory that both see. A view is its whole memory; an operator that writes in place makes a new
value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dejavu.cluster.records import Kind
from dejavu.foundation.errors import OWN_CODE
from dejavu.foundation.tracing import fake_tensors
from dejavu.foundation.tracing.dtypes import to_dtype_of_fake
from dejavu.graphs.attention import _FusedKernels
from dejavu.graphs.graph import Operator
from dejavu.graphs.kernels import without_family
from dejavu.graphs.layer_trace import CaptureError, _Recorder, bytes_of, why


@dataclass(frozen=True)
class Value:
    """What an operator wrote.

    Attributes:
        producer, readers: numbers of operators.
        is_saved: an operator of the backward pass reads it, and its producer is of the forward pass.
    """

    producer: int
    readers: tuple[int, ...]
    size_bytes: int
    is_saved: bool


@dataclass(frozen=True)
class Weight:
    """A parameter, and the operators that read it or write its gradient: they are where it is.

    Attributes:
        is_trained: it has a gradient, and state of the optimizer.
    """

    name: str
    size_bytes: int
    operators: tuple[int, ...]
    is_trained: bool = True


@dataclass(frozen=True)
class Dataflow:
    """Operators in the order in which they were called, and what they pass on.

    Attributes:
        names: of each operator, the module that calls it and its kind; unique.
    """

    names: tuple[str, ...]
    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    weights: tuple[Weight, ...]
    dtype: str

    @property
    def unknown(self) -> tuple[str, ...]:
        """The kinds of operators that are priced by their bytes alone, because the predictor does not know them."""
        return without_family(self.operators)


def trace_dataflow(
    build: Callable[[], nn.Module],
    inputs: Sequence[torch.Tensor],
    *,
    trains: bool = True,
    dtype: torch.dtype = torch.float32,
    kind: Kind = "cpu",
) -> Dataflow:
    """Trace a module that takes these inputs.

    Args:
        build: makes the module; it is called under fake tensors, so its weights take no memory.
        inputs: of any device, also `meta`: only shapes and types count.
        trains: with the backward pass, from the sum of the floating-point outputs.
        dtype: of the weights.
        kind: of the devices: attention has other kernels on GPUs.

    Raises:
        CaptureError: it cannot be traced, or computes nothing.
    """
    with fake_tensors():
        try:
            module = build()
            to_dtype_of_fake(module, dtype)
            arguments = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
            recorder = _trace(module, arguments, trains, kind)
        except CaptureError:
            raise
        except OWN_CODE as error:
            raise CaptureError(
                f"the module cannot be traced on {[tuple(x.shape) for x in inputs]}: {why(error)}"
            ) from error
        if not recorder.operators:
            raise CaptureError("the module computes nothing; wanted one operator or more")
        return recorder.dataflow(str(dtype).removeprefix("torch."))


def _trace(module: nn.Module, arguments: Sequence[torch.Tensor], trains: bool, kind: Kind) -> _FlowRecorder:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    recorder = _FlowRecorder(module)
    with recorder, torch.set_grad_enabled(trains), nullcontext() if kind == "cpu" else _FusedKernels():
        outputs = module(*arguments)
    recorder.path = []
    if not trains:
        return recorder
    ends = [leaf for leaf in _leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not ends:
        raise CaptureError("no output of the module depends on a weight; wanted one that does, or no backward pass")
    recorder.direction = "backward"
    arriving = [torch.ones_like(end) for end in ends]
    with recorder:
        gradients = torch.autograd.grad(ends, weights, arriving, allow_unused=True)
    recorder.note_gradients(weights, gradients)
    return recorder


class _FlowRecorder(_Recorder):
    """Records beside each operator whose results it reads, and the modules that are at work."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(set())
        self.path: list[str] = []
        self._names: list[str] = []
        self._seen: list[torch.Tensor] = []  # kept, so that no storage's address is used again
        self._producer: dict[int, int] = {}  # of what is in a storage now: a number of a value
        self._values: list[tuple[int, int, list[int]]] = []  # producer, bytes, readers
        self._weights = {_storage(weight): (name, weight) for name, weight in module.named_parameters()}
        self._at: dict[int, list[int]] = {storage: [] for storage in self._weights}
        for name, part in module.named_modules():
            if name:
                part.register_forward_pre_hook(lambda _part, _inputs, name=name: self.path.append(name))
                part.register_forward_hook(lambda _part, _inputs, _outputs: self.path.pop() and None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        n = len(self.operators)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.operators) == n:
            return result
        self._names.append(f"{n} {self.path[-1] + ' ' if self.path else ''}{func.overloadpacket.__name__}")
        reads = {_storage(leaf) for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        for storage in sorted(reads & self._producer.keys()):
            self._values[self._producer[storage]][2].append(n)
        for storage in reads & self._weights.keys():
            self._at[storage].append(n)
        written: dict[int, int] = {}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._seen.append(leaf)
                written[_storage(leaf)] = max(bytes_of([leaf]), written.get(_storage(leaf), 0))
        for storage, size in written.items():
            self._producer[storage] = len(self._values)
            self._values.append((n, size, []))
        return result

    def note_gradients(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """What writes a weight's gradient is where the weight is."""
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None and _storage(gradient) in self._producer:
                self._at[_storage(weight)].append(self._values[self._producer[_storage(gradient)]][0])

    def dataflow(self, dtype: str) -> Dataflow:
        """Return what was recorded; results that nobody reads move nowhere and are left out."""
        forward = [operator.direction == "forward" for operator in self.operators]
        values = [
            Value(n, tuple(readers), size, forward[n] and any(not forward[reader] for reader in readers))
            for n, size, readers in self._values
            if readers
        ]
        weights = [
            Weight(name, bytes_of([weight]), tuple(sorted(set(self._at[storage]))), weight.requires_grad)
            for storage, (name, weight) in self._weights.items()
        ]
        return Dataflow(tuple(self._names), tuple(self.operators), tuple(values), tuple(weights), dtype)


def _leaves(outputs: Any) -> Iterator[Any]:
    """Yield what a module returns, out of lists, dictionaries and dataclasses; torch's trees know no dataclasses."""
    for leaf in tree_leaves(outputs):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, one.name) for one in fields(leaf)])
        else:
            yield leaf


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
