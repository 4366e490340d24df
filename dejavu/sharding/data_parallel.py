"""Data parallelism as a case of sharding: every weight is whole, the input is split, and the search decides how.

The dimension that it splits an input by is the batch's, whatever the model calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dejavu.sharding.assembly import Sharded
from dejavu.sharding.operator_graph import OperatorGraph
from dejavu.sharding.problem import ChoiceProblem


def data_parallel(layers: Sequence[OperatorGraph], sharded: Sharded) -> ChoiceProblem:
    """Return the problem in which no weight is split, and the input is."""
    seconds, given = list(sharded.problem.seconds), sharded.cuts[0][0]

    def is_split(node: int) -> np.ndarray:
        return np.array([any(one >= 0 for one in option.outputs[0]) for option in sharded.options[node]])

    for number, layer in enumerate(layers):
        for k in layer.weights.values():
            node = sharded.of_node[number, k]
            seconds[node] = np.where(is_split(node), np.inf, seconds[node])
    seconds[given] = np.where(is_split(given), seconds[given], np.inf)
    problem = sharded.problem
    return ChoiceProblem(tuple(seconds), problem.edges, problem.bytes, problem.capacity_bytes)
