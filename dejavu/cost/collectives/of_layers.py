"""What tensor-parallel devices say to each other while they run a layer: collectives of whole tensors."""

from __future__ import annotations

from dejavu.cost.kernels.sequence import OwnTokens
from dejavu.cost.kernels.sharding import degree_of, gathers_scores, split_loss
from dejavu.graphs.graph import Layer
from dejavu.plans import StageConfiguration

Moves = list[tuple[str, float]]


def layer_moves(
    layer: Layer, direction: str, configuration: StageConfiguration, *, has_loss: bool = False, again: bool = False
) -> Moves:
    """List a layer's collectives in one pass, of one microbatch; those of the loss with the layer that has it.

    Args:
        has_loss: where devices share examples, the layer's scores of all tokens are on each of them.
        again: of a forward pass that activation checkpointing repeats.
    """
    degree, tokens = configuration.tensor_parallel, OwnTokens(configuration.context_parallel, has_loss)
    if direction == "backward" and not layer.has_backward:
        return []
    if found := layer.found_split(degree):
        return list(found.moves[direction])
    split = layer.tensor_parallel
    if split is None or degree_of(layer, degree) == 1:
        return []
    whole = layer.output_bytes / configuration.context_parallel
    sums, other_way = split.forward_sums, split.backward_sums
    if direction == "backward":
        sums, other_way = other_way, sums
    if again and any(operator.flops for operator in layer.not_recomputed):
        sums = sums[:-1]  # that of the product which is not run again
    if configuration.sequence_parallel:
        # What is summed goes out in parts; what was summed the other way comes in parts, and is gathered.
        moves = [("reduce_scatter", share * whole) for share in sums]
        moves += [("all_gather", share * whole) for share in other_way]
    else:
        moves = [("all_reduce", share * whole) for share in sums]
    if direction == "forward" and gathers_scores(layer, degree):
        moves.append(("all_gather", whole))
    loss = split_loss(layer, direction, degree, tokens)
    return moves + list(loss.moves(direction) if loss else ())
