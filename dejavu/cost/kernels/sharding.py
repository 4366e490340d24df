"""The part of a layer's kernels that one of t tensor-parallel devices computes.

Weights are sharded as in Megatron (Shoeybi et al., 2019): of a product with weights the larger side, of attention the
heads, of what lies between two sharded products its elements. Norms, additions and all else between a sum and the next
sharded product are whole on every device, or with sequence parallelism of its own tokens (Korthikanti et al., MLSys
2023, section 4.2). A part that does not divide is rounded up: the last device pads. Mixtures of experts have rules of
their own (`cost.kernels.experts`), the loss of split scores has kernels of its own (`graphs.split_loss`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, lcm, prod
from typing import NamedTuple

from dejavu.cost.kernels.experts import MixtureParts
from dejavu.cost.kernels.sequence import OwnTokens, SliceOfTokens, resized
from dejavu.graphs.graph import Graph, Layer, Operator
from dejavu.graphs.kernels import family_of, kernel_of
from dejavu.graphs.split_loss import BEGINS, CROSS_ENTROPY, SplitLoss
from dejavu.profiles.kernel import Kernel
from dejavu.workload.models import splits_loss

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


def trained_bytes(layer: Layer, tensor_parallel: int) -> float:
    """Return the bytes of those of its weights that are trained, on one of so many devices."""
    share = layer.trained_bytes / layer.parameter_bytes if layer.frozen_bytes else 1.0
    return share * weight_bytes(layer, tensor_parallel)


def gathers_scores(layer: Layer, tensor_parallel: int) -> bool:
    """Return whether the layer's outputs are sharded as it declares, and gathered for what follows: the loss."""
    split = layer.tensor_parallel
    if degree_of(layer, tensor_parallel) == 1 or split is None or layer.found_split(tensor_parallel):
        return False
    cuts = dict(split.weights or ()).values()
    return "gathered" in cuts or ("scores" in cuts and not has_split_loss(layer, tensor_parallel))


def has_split_loss(layer: Layer, tensor_parallel: int) -> bool:
    """Return whether each device computes the loss of its own classes' scores, which the layer puts out."""
    if found := layer.found_split(tensor_parallel):
        return found.split_loss
    return splits_loss(layer.tensor_parallel, layer.output_shape[-1], tensor_parallel)


def split_loss(
    layer: Layer, direction: str, tensor_parallel: int, tokens: OwnTokens | SliceOfTokens = ALL_TOKENS
) -> SplitLoss | None:
    """Return what each device does for the loss of its own classes' scores; None: the layer has no such loss.

    Args:
        tokens: those that the device has of each example.
    """
    if not has_split_loss(layer, tensor_parallel):
        return None
    begins = next((one for one in layer.operators if one.kind == BEGINS[direction]), None)
    parts = 1 if isinstance(tokens, OwnTokens) and tokens.has_loss else tokens.parts
    return None if begins is None else SplitLoss.of(begins, tensor_parallel, parts)


def sequence_length(graph: Graph) -> int:
    """Return the positions that all layers work on token by token; 0 where one does not, or they differ."""
    lengths = {
        layer.output_shape[1] if layer.tensor_parallel and layer.tensor_parallel.sequence else 0
        for layer in graph.layers
    }
    return lengths.pop() if len(lengths) == 1 else 0


class _Scores(NamedTuple):
    """Places in one pass of a head's operators: those of its scores, and of these those of the loss."""

    all: range
    loss: range


def layer_kernels(
    layer: Layer,
    direction: str,
    tensor_parallel: int = 1,
    *,
    expert_parallel: bool = False,
    sequence_parallel: bool = False,
    tokens: OwnTokens | SliceOfTokens = ALL_TOKENS,
) -> Iterator[Kernel]:
    """Yield the kernels of a layer's forward or backward on one of so many devices; with whole experts the fullest.

    Args:
        sequence_parallel: the devices split the sequence between the sharded products.
        tokens: those that the device computes of each example.
    """
    if direction == "backward" and not layer.has_backward:
        return
    if found := layer.found_split(tensor_parallel):
        yield from found.kernels[direction]
        return
    degree = degree_of(layer, tensor_parallel)
    operators = [operator for operator in layer.operators if operator.direction == direction]
    experts = layer.tensor_parallel.experts if layer.tensor_parallel and degree > 1 else None
    mixture = MixtureParts(layer, experts, operators, degree, is_whole=expert_parallel) if experts else None
    loss = split_loss(layer, direction, tensor_parallel, tokens)
    if loss is not None:
        yield from loss.kernels(direction)
    scores, all_scores = _at_scores(layer, operators, direction), gathers_scores(layer, tensor_parallel)
    for place, operator in enumerate(operators):
        kernel = kernel_of(operator)
        if kernel is None or (loss is not None and operator.kind in CROSS_ENTROPY):
            continue
        sizes, holds_weights = mixture.sizes(place, operator, kernel) if mixture else None, operator.parameter_bytes > 0
        if sizes is not None:
            own = resized(kernel, sizes)
        elif (all_scores and place in scores.loss) or (
            not sequence_parallel and _is_whole(place, operator, layer, scores)
        ):
            own = kernel
        else:
            own = shard(kernel, degree, holds_weights=holds_weights)
        yield tokens.part(own, holds_weights=holds_weights)
    if isinstance(tokens, SliceOfTokens):
        yield from tokens.more(layer, direction, degree)


def _is_whole(place: int, operator: Operator, layer: Layer, scores: _Scores) -> bool:
    """Return whether an operator lies between a sum and the next sharded product, by the shapes of its tensors.

    In a head it is all but the scores and the loss; in other layers what is as wide as what the layer hands on, and
    tables of distances between positions. What lies between sharded products has heads in dimensions of their own, or
    the inner width.
    """
    if scores.all:
        return place not in scores.all
    if family_of(operator.kind) in ("matmul", "attention", "convolution") or "embedding_dense" in operator.kind:
        return False
    largest = max((*operator.input_shapes, *operator.output_shapes), key=prod, default=())
    is_table = len(largest) == 2 and largest[0] == largest[1]
    return is_table or (len(largest) in (2, 3) and largest[-1] == layer.output_shape[-1])


def _at_scores(layer: Layer, operators: Sequence[Operator], direction: str) -> _Scores:
    """Find a head's scores among the operators of a pass: its last product forward, its first ones backward."""
    cuts = dict(layer.tensor_parallel.weights or ()).values() if layer.tensor_parallel else ()
    products = [place for place, one in enumerate(operators) if family_of(one.kind) == "matmul"]
    if not products or not {"scores", "gathered"} & set(cuts):
        return _Scores(range(0), range(0))
    if direction == "forward":
        return _Scores(range(products[-1], len(operators)), range(products[-1] + 1, len(operators)))
    last = products[:2][-1]  # the gradients of the product's input and of its weight, and perhaps of its bias
    after = operators[last + 1 : last + 2]
    has_bias = any(
        family_of(one.kind) == "reduction" and one.output_shapes[0][-1:] == layer.output_shape[-1:] for one in after
    )
    return _Scores(range(last + 1 + has_bias), range(products[0]))


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
