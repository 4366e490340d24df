"""The part of a layer's kernels, and what it gathers, where devices share examples and split the sequence."""

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

        Of causal attention it is the last device's, which has the most to do and ends last: only in its own part do
        queries skip keys.
        """
        if self.parts == 1 or (self.has_loss and kernel.family not in ("matmul", "attention")):
            return kernel
        is_weights_gradient = kernel.family == "matmul" and kernel.batch == 1 and not holds_weights
        side = "k" if is_weights_gradient else "m"  # which of a product's sizes are tokens
        part = resized(kernel, {side: -(-getattr(kernel, side) // self.parts)})
        return replace(part, flops=part.flops * (2.0 - 1.0 / self.parts)) if kernel.is_causal else part


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
