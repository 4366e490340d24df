"""The cheapest placement of one layer's weights, between cuts where everything is whole: so layers can be composed.

The solver chooses placements of everything; of its answers a training takes the weights', and torch decides the rest
(`propagation`). So each answer is priced as torch carries it out, and its weights are changed one by one while that
gets cheaper. No placement can be cheaper than the solver's own price: where that is nearly met, nothing is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dejavu.graphs.dtensor import REPLICATED
from dejavu.sharding.assembly import Sharded, ShardingPrices, assemble
from dejavu.sharding.operator_graph import OperatorGraph
from dejavu.sharding.problem import ChoiceProblem, ShardingError
from dejavu.sharding.propagation import Carried, carried_out
from dejavu.sharding.solvers.repeated import Repeated
from dejavu.sharding.strategies import placements_of

CLOSE = 0.02  # to the solver's own price: no further placement is tried
MOST_TRIED = 40  # placements of a layer that are followed through torch
_MEMORY_ALONE = 1e3  # times the price of a byte: where holding less is all that counts

Weights = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Found:
    """A placement of a layer's weights, and what torch makes of it.

    Attributes:
        weights: by name, the dimension that each is split by; all others are whole. Empty: the layer is whole.
        whole_sums: see `carried_out`.
        cost_seconds: a pass's, forward and backward, with what its bytes cost.
        tried: how many placements were followed through torch.
    """

    weights: Weights
    whole_sums: bool
    carried: Carried
    cost_seconds: float
    tried: int


def find(
    layer: OperatorGraph,
    prices: ShardingPrices,
    seconds_per_byte: float,
    fixed: Iterable[str] = (),
    *,
    loss_by_class: bool = False,
) -> Found:
    """Return the cheapest placement of a layer's weights over the devices of a mesh with one dimension.

    Args:
        seconds_per_byte: what it costs to hold a byte on each device.
        fixed: names of weights that stay whole.
        loss_by_class: of the last layer: see `carried_out`.

    Raises:
        ShardingError: not even the whole layer can be run by torch's distributed tensors.
    """
    return _Search(layer, prices, seconds_per_byte, frozenset(fixed), loss_by_class).found()


class _Search:
    def __init__(
        self,
        layer: OperatorGraph,
        prices: ShardingPrices,
        seconds_per_byte: float,
        fixed: frozenset[str],
        loss_by_class: bool,
    ) -> None:
        (self._size,) = prices.mesh
        self._layer, self._prices, self._byte, self._loss_by_class = layer, prices, seconds_per_byte, loss_by_class
        self._weights = {name: layer.nodes[k].outputs[0] for name, k in layer.weights.items()}
        self._ways = {
            name: (REPLICATED,) if name in fixed else placements_of(tensor, self._size)
            for name, tensor in self._weights.items()
        }
        self._known: dict[tuple[Weights, bool], Found | None] = {}

    def found(self) -> Found:
        best = self._tried({})
        if best is None:
            raise ShardingError("the layer cannot be run on distributed tensors")
        least = np.inf
        for byte in (0.0, self._byte, self._byte * _MEMORY_ALONE):
            weights, bound = self._solved(byte)
            least = bound if byte == self._byte else least
            for whole_sums in (False, True):
                best = _cheaper(best, self._tried(weights, whole_sums))
        if self._loss_by_class:
            # The solver knows no loss of parts of the classes: its price is no bound, and what a head declares, its
            # scores' weight alone, may be far from its answer.
            least = -np.inf
            alone = [{name: 0} for name, ways in self._ways.items() if 0 in ways]
            for weights, whole_sums in itertools.product(alone, (False, True)):
                best = _cheaper(best, self._tried(weights, whole_sums))
        improves = True
        while improves and best.cost_seconds > least * (1 + CLOSE):
            before = best
            for changed in self._neighbours(dict(best.weights)):
                if len(self._known) >= MOST_TRIED:
                    break
                for whole_sums in (False, True) if self._loss_by_class else (before.whole_sums,):
                    best = _cheaper(best, self._tried(changed, whole_sums))
            improves = best is not before
        return replace(best, tried=len(self._known))

    def _neighbours(self, weights: Mapping[str, int]) -> Iterator[dict[str, int]]:
        for name, ways in self._ways.items():
            for way in ways:
                if way != weights.get(name, REPLICATED):
                    yield {**weights, name: way}

    def _tried(self, weights: Mapping[str, int], whole_sums: bool = False) -> Found | None:
        split = tuple(sorted((name, dim) for name, dim in weights.items() if dim != REPLICATED))
        if (split, whole_sums) not in self._known:
            try:
                carried = carried_out(
                    self._layer, dict(split), self._size, whole_sums=whole_sums, loss_by_class=self._loss_by_class
                )
                found = Found(split, whole_sums, carried, self._cost(dict(split), carried), 0)
                self._known[split, whole_sums] = found
            except ShardingError:
                self._known[split, whole_sums] = None
        return self._known[split, whole_sums]

    def _cost(self, weights: Mapping[str, int], carried: Carried) -> float:
        kernels = [one for some in carried.kernels.values() for one in some]
        seconds = float(self._prices.kernels(kernels).sum()) if kernels else 0.0
        seconds += sum(self._prices.moves(name, 0, size) for some in carried.moves.values() for name, size in some)
        held = sum(tensor.size_bytes / (self._size if name in weights else 1) for name, tensor in self._weights.items())
        return seconds + self._byte * (self._prices.bytes_for_each * held + carried.held_bytes)

    def _solved(self, seconds_per_byte: float) -> tuple[dict[str, int], float]:
        """Return the solver's placements of the weights, and its price; nothing below is possible."""
        sharded = self._sharded
        problem = sharded.problem.with_multiplier(seconds_per_byte)
        answer = Repeated(sharded.blocks).run(problem)
        at = {name: sharded.of_node[0, k] for name, k in self._layer.weights.items()}
        placed = {name: sharded.options[node][answer.chosen[node]].outputs[0][0] for name, node in at.items()}
        return placed, answer.lower_bound_seconds

    @property
    def _sharded(self) -> Sharded:
        """The choice problem, with all that crosses the layer's cuts whole, and what is fixed."""
        if not hasattr(self, "_posed"):
            sharded = assemble([self._layer], self._prices)
            seconds = list(sharded.problem.seconds)
            fixed = {name for name, ways in self._ways.items() if ways == (REPLICATED,)}
            whole = [node for cut in sharded.cuts for node in cut if node is not None]
            whole += [sharded.of_node[0, k] for name, k in self._layer.weights.items() if name in fixed]
            for node in whole:
                is_whole = np.array([one.outputs[0] == (REPLICATED,) for one in sharded.options[node]])
                seconds[node] = np.where(is_whole, seconds[node], np.inf)
            problem = sharded.problem
            self._posed = replace(
                sharded, problem=ChoiceProblem(tuple(seconds), problem.edges, problem.bytes, problem.capacity_bytes)
            )
        return self._posed


def _cheaper(best: Found, other: Found | None) -> Found:
    return best if other is None or other.cost_seconds >= best.cost_seconds else other
