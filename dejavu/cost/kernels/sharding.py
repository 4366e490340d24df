"""The part of a layer's kernels that one of t tensor-parallel devices computes.

Weights are sharded as in Megatron (Shoeybi et al., 2019): of a product with weights the larger side, of attention the
heads, of everything else the tokens, as with sequence parallelism (Korthikanti et al., MLSys 2023, section 4.2), which
is what the memory formulas assume. A part that does not divide is rounded up: the last device pads. Mixtures of experts
have rules of their own (`cost.kernels.experts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from dejavu.cost.kernels.experts import MixtureParts
from dejavu.cost.kernels.resized import resized
from dejavu.cost.kernels.sequence import OwnTokens
from dejavu.graphs.graph import Graph, Layer
from dejavu.graphs.kernels import kernel_of
from dejavu.profiles.kernel import Kernel

ALL_TOKENS = OwnTokens()


def most_tensor_parallel(graph: Graph) -> int:
    """Return the highest tensor-parallel degree over all layers that can be sharded; every allowed one divides it."""
    declared = gcd(*(layer.tensor_parallel.most for layer in graph.layers if layer.tensor_parallel))
    return declared or lcm(*(split.degree for layer in graph.layers for split in layer.found))


def degree_of(layer: Layer, tensor_parallel: int) -> int:
    """Return over how many of the stage's devices this layer is sharded as it declares; 1: it is not."""
    return tensor_parallel if layer.tensor_parallel and layer.tensor_parallel.most % tensor_parallel == 0 else 1


def weight_bytes(layer: Layer, tensor_parallel: int) -> float:
    """Return the bytes of a layer's weights on one of so many devices."""
    found = layer.found_split(tensor_parallel)
    return found.parameter_bytes if found else layer.parameter_bytes / degree_of(layer, tensor_parallel)


def sequence_length(graph: Graph) -> int:
    """Return the positions that all layers work on token by token; 0 where one does not, or they differ."""
    lengths = {
        layer.output_shape[1] if layer.tensor_parallel and layer.tensor_parallel.sequence else 0
        for layer in graph.layers
    }
    return lengths.pop() if len(lengths) == 1 else 0


def layer_kernels(
    layer: Layer,
    direction: str,
    tensor_parallel: int = 1,
    *,
    expert_parallel: bool = False,
    tokens: OwnTokens = ALL_TOKENS,
) -> Iterator[Kernel]:
    """Yield the kernels of a layer's forward or backward on one of so many devices; with whole experts the fullest.

    Args:
        tokens: those that the device computes of each example.
    """
    if found := layer.found_split(tensor_parallel):
        yield from found.kernels[direction]
        return
    degree = degree_of(layer, tensor_parallel)
    operators = [operator for operator in layer.operators if operator.direction == direction]
    experts = layer.tensor_parallel.experts if layer.tensor_parallel and degree > 1 else None
    mixture = MixtureParts(layer, experts, operators, degree, is_whole=expert_parallel) if experts else None
    for place, operator in enumerate(operators):
        kernel = kernel_of(operator)
        if kernel is None:
            continue
        sizes, holds_weights = mixture.sizes(place, operator, kernel) if mixture else None, operator.parameter_bytes > 0
        own = shard(kernel, degree, holds_weights=holds_weights) if sizes is None else resized(kernel, sizes)
        yield tokens.part(own, holds_weights=holds_weights)


def shard(kernel: Kernel, degree: int, *, holds_weights: bool) -> Kernel:
    """Return one device's part of a kernel; `holds_weights`: one of a product's factors is a weight."""
    if degree == 1:
        return kernel
    side = _side(kernel, holds_weights=holds_weights)
    return resized(kernel, {side: -(-getattr(kernel, side) // degree)})


def _side(kernel: Kernel, *, holds_weights: bool) -> str:
    """Return which of a kernel's sizes is divided."""
    if kernel.family == "attention":
        return "batch"
    if kernel.family == "convolution":
        return "n"
    if kernel.family != "matmul":
        return "m"
    if holds_weights:  # m are tokens, which every device sees
        return "n" if kernel.n >= kernel.k else "k"
    if kernel.batch > 1:  # attention written out: the heads
        return "batch"
    return "m" if kernel.m >= kernel.n else "n"  # a weight's gradient: k are tokens
