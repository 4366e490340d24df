"""The part of a layer's kernels where devices share examples and split the sequence, or where it comes in slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch

from dejavu.graphs.graph import Graph, Layer
from dejavu.graphs.kernels import family_of
from dejavu.profiles.kernel import Kernel


def resized(kernel: Kernel, sizes: Mapping[str, Any]) -> Kernel:
    """Return the kernel of other sizes, its work and traffic in proportion."""
    part = replace(kernel, **sizes)
    work, read, written = (of(part) / of(kernel) for of in (_products, _read_elements, _written_elements))
    return replace(
        part,
        flops=kernel.flops * work,
        read_bytes=kernel.read_bytes * read,
        written_bytes=kernel.written_bytes * written,
    )


def _products(kernel: Kernel) -> float:
    return float(kernel.batch) * kernel.m * kernel.n * kernel.k


def _read_elements(kernel: Kernel) -> float:
    if kernel.family != "matmul":
        return _products(kernel)
    return float(kernel.batch) * (kernel.m * kernel.k + kernel.k * kernel.n)


def _written_elements(kernel: Kernel) -> float:
    return float(kernel.batch) * kernel.m * kernel.n if kernel.family == "matmul" else _products(kernel)


class OwnTokens(NamedTuple):
    """Which tokens a device computes.

    Attributes:
        parts: into how many the sequence is split.
        has_loss: with the layer the loss is computed, of all tokens on every device.
    """

    parts: int = 1
    has_loss: bool = False

    def part(self, kernel: Kernel, *, holds_weights: bool) -> Kernel:
        """Return the device's part of a kernel: of attention its queries, with the keys of all.

        Of causal attention all devices compute as much, with a chunk of queries from each end of the sequence
        (`modules.positions.chunk_numbers`). Where a part can't be halved it is the last device's, which has the most to
        do and ends last: only in its own part do queries skip keys.
        """
        if self.parts == 1 or (self.has_loss and kernel.family not in ("matmul", "attention")):
            return kernel
        is_weights_gradient = kernel.family == "matmul" and kernel.batch == 1 and not holds_weights
        side = "k" if is_weights_gradient else "m"  # which of a product's sizes are tokens
        part = resized(kernel, {side: -(-getattr(kernel, side) // self.parts)})
        if not kernel.is_causal or kernel.m % (2 * self.parts) == 0:
            return part
        return replace(part, flops=part.flops * (2.0 - 1.0 / self.parts))


class SliceOfTokens(NamedTuple):
    """A slice of a sequence that goes through the stages by itself, from `start` to `stop` of `whole` positions.

    Everything but attention is of the slice's own positions; attention is of its queries and all keys until its end
    (TeraPipe, Li et al., ICML 2021).
    """

    start: int
    stop: int
    whole: int

    @property
    def parts(self) -> float:
        """How often it is in the sequence."""
        return self.whole / (self.stop - self.start)

    def part(self, kernel: Kernel, *, holds_weights: bool) -> Kernel:
        """Return the slice's part of a kernel."""
        if kernel.family == "attention":
            # Causal by `check_slices`, also where a kernel on a CPU is not told so: all slices' scores are the whole's.
            return attending(kernel, (self.stop - self.start) / self.whole, self.stop / self.whole, is_causal=True)
        is_weights_gradient = kernel.family == "matmul" and kernel.batch == 1 and not holds_weights
        side = "k" if is_weights_gradient else "m"
        return resized(kernel, {side: -(-getattr(kernel, side) * (self.stop - self.start) // self.whole)})

    def more(self, layer: Layer, direction: str, degree: int) -> list[Kernel]:
        """Return what a layer does for slices alone: copies of earlier keys, sums of what each slice's gradients are.

        Backward each slice adds to the weights' gradients, and hands the earlier ones their part of the keys'.

        Args:
            degree: of the devices that split the layer.
        """
        size = getattr(torch, layer.operators[0].dtype).itemsize if layer.operators else 4
        dtype = layer.operators[0].dtype if layer.operators else "float32"
        seen = [int(one * self.stop / self.whole / degree / size) for one in keys_and_values_bytes(layer)]
        name, family, read = ("cat", "copy", 1) if direction == "forward" else ("add", "elementwise", 2)
        sizes = [one for one in seen if one]
        if direction == "backward" and layer.parameter_bytes:
            sizes.append(max(1, int(layer.parameter_bytes / degree / size)))
        return [
            Kernel(
                family=family, name=f"aten.{name}", dtype=dtype, m=m,
                flops=0.0, read_bytes=float(read * m * size), written_bytes=float(m * size),
            )
            for m in sizes
        ]  # fmt: skip


def attending(kernel: Kernel, queries: float, keys: float, *, is_causal: bool) -> Kernel:
    """Return attention of a part of the sequence to all keys until its end: traffic by queries and by keys, once each.

    Args:
        queries, keys: as shares of the sequence.
        is_causal: the part's queries skip half of its own keys, as those of all skip half of all.
    """
    seen = 2 * keys - queries if is_causal else keys
    # forward reads q, k, v and writes the output; backward reads q, the output, its gradient, k, v, writes three
    is_backward = kernel.is_backward
    read, written = ((3 * queries + 2 * keys) / 5, (queries + 2 * keys) / 3) if is_backward else (0.0, queries)
    return replace(
        kernel,
        m=max(1, round(kernel.m * queries)),
        n=max(1, round(kernel.n * keys)),
        flops=kernel.flops * queries * seen,
        read_bytes=kernel.read_bytes * (read or (queries + 2 * keys) / 3),
        written_bytes=kernel.written_bytes * written,
    )


def context_length(graph: Graph) -> int:
    """Return the positions that all layers can be given a part of; 0 where one cannot, or they differ."""
    lengths = {
        layer.output_shape[1] if layer.tensor_parallel and layer.tensor_parallel.context else 0
        for layer in graph.layers
    }
    return lengths.pop() if len(lengths) == 1 else 0


def gathers_output(last: Layer) -> bool:
    """Return whether what the model's last layer puts out is gathered, to compute the loss of all positions."""
    return last.tensor_parallel is None or not last.tensor_parallel.loss_by_position


def attended_bytes(layer: Layer) -> float:
    """Return the bytes that come out of each causal attention, of all positions and heads, where it is one kernel.

    A device that has two chunks of the sequence keeps both for going backward, and what they are put together to.
    """
    return sum(
        float(prod(operator.output_shapes[0]) * getattr(torch, operator.dtype).itemsize)
        for operator in layer.operators
        if operator.direction == "forward" and operator.is_causal and family_of(operator.kind) == "attention"
    )


def keys_and_values_bytes(layer: Layer) -> list[float]:
    """Return the bytes of each attention's keys, and of its values, of all positions; those that a part gathers.

    Of attention that is written out they are the second factors of its two products, after heads that share keys were
    repeated: an upper bound.
    """
    found = list[float]()
    for operator in layer.operators:
        if operator.direction == "forward" and operator.parameter_bytes == 0:
            family = family_of(operator.kind)
            inputs = operator.input_shapes[1:3] if family == "attention" else ()
            if family == "matmul" and len(operator.input_shapes) == 2 and len(operator.input_shapes[1]) == 3:
                inputs = operator.input_shapes[1:]
            found += [float(prod(shape) * getattr(torch, operator.dtype).itemsize) for shape in inputs]
    return found
