"""Search all bindings rank by rank with dominance: of partial bindings with the same free devices few are kept.

A partial binding (*label*) affects the following ranks only by how many devices are free on each node, by where its
last rank is (and its first, where a schedule sends from the last rank back to it), by its sum of seconds and by its
busiest rank or link. Nodes of a group are interchangeable, so which of them are full does not matter either. That
leaves few labels on clusters of equal nodes, however many devices there are; where every node has links of its own, as
many as there are subsets of nodes. Beyond a number of extensions only the most promising labels are extended.
Shape suffixes: R = pipeline ranks, P = pools, G = groups of nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import NamedTuple

import numpy as np

from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.link_prices import StageExchange
from dejavu.binding.site import Place

MOST_EXTENSIONS = 200_000  # of labels by a rank, over all ranks: about two seconds
FEW_EXTENSIONS = 5_000  # likewise, of plans that are only compared, of which there may be a hundred
MOST_PLACES = 1_000  # for one rank of one label, however its blocks can be shared out among nodes
CODE_BITS = 128  # long enough that two states of a cluster never share a code by chance
LEAST_GAIN = 1e-9  # bindings closer than this fraction count as equal: sums of floats differ by their order


@dataclass(frozen=True)
class BindingBounds:
    """Lower bounds on any binding, in seconds.

    Attributes:
        rest_seconds: of ranks r to R − 1 and their exchanges with earlier ranks; 0 at the end.
        busiest_seconds: the busiest rank or link.
        step_seconds: the whole step.
    """

    rest_seconds: tuple[float, ...]
    busiest_seconds: float
    step_seconds: float


class _Label(NamedTuple):
    """A partial binding: its sums, the devices it leaves free, and its parent label."""

    total_seconds: float
    busiest_seconds: float
    free: tuple[int, ...]
    place: Place
    first: Place
    code: int
    before: _Label | None

    def places(self) -> list[Place]:
        """Return the places of all ranks so far."""
        label, found = self, list[Place]()
        while label.before is not None:
            found.append(label.place)
            label = label.before
        return found[::-1]


def bounds(pricing: BindingPrices, computing_seconds: float, load_seconds: float) -> BindingBounds:
    """Compute the bounds from the least that all ranks and the busiest compute; see `placing.computing_bound`."""
    transfers = pricing.least_seconds_Q(np.isfinite(pricing.seconds_RK))
    needed = pricing.seconds_RK.min(axis=1)
    for exchange, seconds in zip(pricing.exchanges, transfers, strict=True):
        needed[max(exchange.a, exchange.b)] += seconds
    busiest = max(load_seconds, pricing.repeats * float(transfers.max(initial=0.0)))
    rest = (*(float(needed[rank:].sum()) for rank in range(len(needed))), 0.0)
    return BindingBounds(rest, busiest, computing_seconds + float(transfers.sum()) + busiest)


def best_places(
    pricing: BindingPrices, bound: BindingBounds, below_seconds: float, most_extensions: int = MOST_EXTENSIONS
) -> tuple[list[Place] | None, bool]:
    """Find the best binding that takes less than `below_seconds`, if there is one.

    Args:
        most_extensions: of labels by a rank.

    Returns:
        The place of each rank, or None; and whether all bindings were compared.
    """
    received: dict[int, list[tuple[int, StageExchange]]] = defaultdict(list)
    for q, exchange in enumerate(pricing.exchanges):
        received[max(exchange.a, exchange.b)].append((q, exchange))
    below_seconds *= 1.0 - LEAST_GAIN
    nodes, complete, budget = _Nodes(pricing), True, most_extensions

    def least_seconds(label: _Label) -> float:
        return label.total_seconds + max(label.busiest_seconds, bound.busiest_seconds)

    layer = [_Label(0.0, 0.0, tuple(pricing.site.size_P.tolist()), (), (), 0, None)]
    for rank, rest in enumerate(bound.rest_seconds[1:]):
        kept: dict[object, list[_Label]] = {}
        end = budget - budget // (pricing.num_ranks - rank)
        for label in sorted(layer, key=least_seconds):
            if budget <= end:
                complete = False
                break
            places, all_given = nodes.places(label, rank)
            complete &= all_given
            budget -= len(places)
            for place in places:
                total, busiest = _sums(pricing, label, rank, place, received[rank])
                if total + rest + max(busiest, bound.busiest_seconds) < below_seconds:
                    longer = nodes.extended(label, rank, place, total, busiest)
                    _keep(kept.setdefault((longer.code, *nodes.ends(longer)), []), longer)
        layer = [label for labels in kept.values() for label in labels]
    best = min(layer, key=least_seconds, default=None)
    return (None if best is None else best.places()), complete


def _sums(
    pricing: BindingPrices, label: _Label, rank: int, place: Place, received: Sequence[tuple[int, StageExchange]]
) -> tuple[float, float]:
    """Return total and busiest seconds of the label with one more rank."""
    kind = pricing.site.kind_P[place[0]]
    total = label.total_seconds + float(pricing.seconds_RK[rank, kind])
    busiest = max(label.busiest_seconds, float(pricing.load_seconds_RK[rank, kind]))
    for q, exchange in received:  # from the upstream rank, or from the last rank to the first
        other = label.place if min(exchange.a, exchange.b) == rank - 1 else label.first
        seconds = pricing.transfer_seconds(q, other, place)
        total += seconds
        busiest = max(busiest, pricing.repeats * seconds)
    return total, busiest


def _keep(labels: list[_Label], new: _Label) -> None:
    """Add the label unless another is at least as good, whatever the busiest of all will be; drop what it beats."""

    def beats(a: _Label, b: _Label) -> bool:
        totals = a.total_seconds <= b.total_seconds
        return totals and a.total_seconds + a.busiest_seconds <= b.total_seconds + b.busiest_seconds

    if not any(beats(label, new) for label in labels):
        labels[:] = [label for label in labels if not beats(new, label)]
        labels.append(new)


class _Nodes:
    """Which nodes are interchangeable for a label, and so which places and which labels are."""

    def __init__(self, pricing: BindingPrices) -> None:
        self._pricing, site = pricing, pricing.site
        self._group, self._node, self._kind = (values.tolist() for values in (site.group_P, site.node_P, site.kind_P))
        self._pools: dict[int, list[int]] = defaultdict(list)
        for pool, node in enumerate(self._node):
            self._pools[node].append(pool)
        self._loops = any(abs(exchange.a - exchange.b) > 1 for exchange in pricing.exchanges)
        self._possible = [np.flatnonzero(np.isfinite(row)).tolist() for row in pricing.seconds_RK]
        self._random = Random(0)
        self._codes: dict[object, int] = {}

    def _state(self, label: _Label, node: int) -> tuple[object, ...]:
        """Return a node's state: its group, what is free, and whether the last and the first rank are there."""
        pools = self._pools[node]
        last = any(pool in label.place for pool in pools)
        first = self._loops and any(pool in label.first for pool in pools)
        return (self._group[pools[0]], last, first, *[label.free[pool] for pool in pools])

    def _code(self, state: object) -> int:
        """Return a random number for each state: the sum over nodes is an order-independent hash of them all."""
        if state not in self._codes:
            self._codes[state] = self._random.getrandbits(CODE_BITS)
        return self._codes[state]

    def extended(self, label: _Label, rank: int, place: Place, total: float, busiest: float) -> _Label:
        """Return the label with one more rank; its code is updated incrementally."""
        free, width = list(label.free), self._pricing.configurations[rank].devices_per_node
        for pool in place:
            free[pool] -= width
        longer = _Label(total, busiest, tuple(free), place, label.first or place, label.code, label)
        touched = {self._node[pool] for pool in (*label.place, *place)}
        change = sum(self._code(self._state(longer, n)) - self._code(self._state(label, n)) for n in touched)
        return longer._replace(code=label.code + change)

    def ends(self, label: _Label) -> tuple[int, int]:
        """Return the kinds of the last rank and of the first, where that matters."""
        return self._kind[label.place[0]], self._kind[label.first[0]] if self._loops else 0

    def places(self, label: _Label, rank: int) -> tuple[list[Place], bool]:
        """Return places for the rank, one of each equivalence class; and whether these are all."""
        configuration = self._pricing.configurations[rank]
        found: list[Place] = []
        for kind in self._possible[rank]:
            alike: dict[object, list[int]] = defaultdict(list)
            for pool, free in enumerate(label.free):
                if self._kind[pool] == kind and free >= configuration.devices_per_node:
                    alike[self._state(label, self._node[pool])].append(pool)
            if configuration.num_nodes == 1:
                found += [(pools[0],) for pools in alike.values()]
                continue
            rooms = [(pools, label.free[pools[0]] // configuration.devices_per_node) for pools in alike.values()]
            found += islice(_takes(rooms, configuration.num_nodes), MOST_PLACES)
        return found, len(found) < MOST_PLACES


def _takes(rooms: Sequence[tuple[Sequence[int], int]], blocks: int) -> Iterator[Place]:
    """Yield ways to take so many blocks from classes of equal pools, each (pools, blocks that each has room for)."""
    if not blocks:
        yield ()
    elif rooms:
        (pools, most), *others = rooms
        for taken in _spread(pools, most, blocks):
            for more in _takes(others, blocks - len(taken)):
                yield tuple(sorted(taken + more))


def _spread(pools: Sequence[int], most: int, blocks: int) -> Iterator[Place]:
    """Yield ways to take at most so many blocks from equal pools, never more from a pool than from its predecessor."""
    yield ()
    counts, left = list[int](), blocks  # of the first pools; of these all ways to go on, a stage may have thousands
    ways = [iter(range(1, min(most, blocks) + 1))]
    while ways:
        if (count := next(ways[-1], 0)) and len(counts) < len(pools):
            counts.append(count)
            left -= count
            yield tuple(pool for pool, taken in zip(pools, counts, strict=False) for _ in range(taken))
            ways.append(iter(range(1, min(count, left) + 1)))
        else:
            ways.pop()
            left += counts.pop() if counts else 0
