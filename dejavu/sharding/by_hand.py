"""Plans by hand, to compare with what is found: a rule splits the weights, the search decides the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dejavu.graphs.dtensor import REPLICATED
from dejavu.sharding.assembly import Sharded
from dejavu.sharding.operator_graph import OperatorGraph
from dejavu.sharding.problem import ChoiceProblem

# Modules of a transformer block by the last part of their name. torch's weights are (outputs, inputs).
COLUMNS = frozenset(("qkv", "query", "key", "value", "expand", "gate", "up", "logits"))  # a device has some outputs
ROWS = frozenset(("projection", "contract", "down"))  # a device has some inputs, and results are added up


def megatron(layers: Sequence[OperatorGraph], sharded: Sharded) -> ChoiceProblem:
    """Return the problem in which a transformer's weights are split as Megatron-LM splits them (Shoeybi et al., 2019).

    The first product of attention and of the feed-forward network by columns, with its bias; the second by rows, its
    bias whole; vocabularies by words; all else whole. What crosses the cuts between layers is whole on every device.
    A weight whose dimension does not divide stays whole. Of a model without such blocks nothing is split.
    """
    seconds = list(weights_by_hand(layers, sharded, place_in_megatron).seconds)
    for node in (node for cut in sharded.cuts for node in cut if node is not None):
        is_whole = [all(one == REPLICATED for one in option.outputs[0]) for option in sharded.options[node]]
        seconds[node] = np.where(is_whole, seconds[node], np.inf)
    problem = sharded.problem
    return ChoiceProblem(tuple(seconds), problem.edges, problem.bytes, problem.capacity_bytes)


def place_in_megatron(layer: OperatorGraph, name: str) -> int:
    """Return the dimension that Megatron-LM splits this weight by; -1: it is whole."""
    *modules, kind = name.split(".")
    module = modules[-1] if modules else ""
    if _reads_words(layer, layer.weights[name]):
        return 0 if module in ("", "token") else REPLICATED
    if module in COLUMNS:
        return 0
    return 1 if module in ROWS and kind == "weight" else REPLICATED


def weights_by_hand(
    layers: Sequence[OperatorGraph], sharded: Sharded, place: Callable[[OperatorGraph, str], int]
) -> ChoiceProblem:
    """Return the problem in which every weight is split over the mesh as told, whole where that is not possible.

    Args:
        place: (layer, name of a weight) -> the dimension that it is split by on every dimension of the mesh; -1: none.
    """
    seconds = list(sharded.problem.seconds)
    for number, layer in enumerate(layers):
        for name, k in layer.weights.items():
            node, wanted = sharded.of_node[number, k], place(layer, name)
            placed = [set(option.outputs[0]) for option in sharded.options[node]]
            fits = np.array([one == {wanted} for one in placed])
            fits = fits if fits.any() else np.array([one == {REPLICATED} for one in placed])
            seconds[node] = np.where(fits, seconds[node], np.inf)
    problem = sharded.problem
    return ChoiceProblem(tuple(seconds), problem.edges, problem.bytes, problem.capacity_bytes)


def _reads_words(layer: OperatorGraph, weight: int) -> bool:
    return any(value.node == weight and layer.nodes[user].kind == "aten.embedding" for value, user, _ in layer.uses())
