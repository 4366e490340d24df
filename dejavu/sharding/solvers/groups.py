"""Linkage groups: what one decision implies for other nodes, as Auto-MAP propagates the split of a dimension.

Where two nodes' options *agree* the tensor between them is split, and needs no move: so a node that is told of the
split takes the option that agrees, if it is the only one. Where they *conflict* the tensor has to be gathered or
exchanged. All else is *silent*: everyone can use a whole tensor, and parts of a sum are added where that is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.sharding.problem import ChoiceProblem, Pair
from dejavu.sharding.solvers.flat import Integers

AGREE, SILENT, CONFLICT = 1, 0, -1
Links = Mapping[Pair, NDArray[np.int8]]  # of each edge, a table over (options of a, options of b) of the three


class Along(NamedTuple):
    """What is said along one dimension of a mesh, whatever is split along the others.

    Attributes:
        does_N: of each node, what each of its options does along it, numbered from 0 (whole).
        links: over what two nodes do.
    """

    does_N: tuple[Integers, ...]
    links: Links


class Group(NamedTuple):
    """A decision, and what it implies.

    Attributes:
        node, option: the decision.
        nodes, options: all that is decided with it, itself first.
        conflicts: how many edges have to move their tensor if all of it is carried out.
    """

    node: int
    option: int
    nodes: Integers
    options: Integers
    conflicts: int


class _Told(NamedTuple):
    """What a neighbour hears of an option: what agrees with it, what conflicts."""

    node: int
    agree: frozenset[int]
    conflict: frozenset[int]
    is_refused: bool  # all of its options conflict


def links_by_price(problem: ChoiceProblem) -> Links:
    """Return links of a problem of which only prices are known: what both ends pay least for agrees.

    Edges all of whose pairs cost alike say nothing.
    """
    found = {}
    for pair, table in problem.edges.items():
        least_a, least_b = table <= table.min(axis=1, keepdims=True), table <= table.min(axis=0, keepdims=True)
        says = np.where(least_a & least_b, AGREE, np.where(least_a | least_b, SILENT, CONFLICT))
        found[pair] = np.where((table == table.min()).all(), SILENT, says).astype(np.int8)
    return found


def linkage_groups(along: Along, seeds: Iterable[int]) -> list[Group]:
    """Return the groups of all that these nodes may do but the first (whole), the largest first.

    Of groups that decide the same, the first is returned.
    """
    listen = _Listeners(len(along.does_N), along.links)
    found: dict[tuple[bytes, bytes], Group] = {}
    for node in seeds:
        for option in range(1, int(along.does_N[node].max(initial=0)) + 1):
            group = _group(node, option, listen)
            order = np.argsort(group.nodes)
            found.setdefault((group.nodes[order].tobytes(), group.options[order].tobytes()), group)
    return sorted(found.values(), key=lambda one: -len(one.nodes))


def group_of(problem: ChoiceProblem, links: Links, decisions: Iterable[tuple[int, int]]) -> Iterator[Group]:
    """Return the group of each (node, option)."""
    listen = _Listeners(len(problem.seconds), links)
    for node, option in decisions:
        yield _group(node, option, listen)


class _Listeners:
    """Who hears of an option, found when it is asked for."""

    def __init__(self, count: int, links: Links) -> None:
        self._around: list[list[tuple[int, NDArray[np.int8]]]] = [[] for _ in range(count)]
        for (a, b), says in links.items():
            self._around[a].append((b, says))
            self._around[b].append((a, says.T))
        self.of = cache(self._of)

    def _of(self, node: int, option: int) -> list[_Told]:
        found = []
        for other, says in self._around[node]:
            row = says[option]
            agree, conflict = (frozenset(np.flatnonzero(row == one).tolist()) for one in (AGREE, CONFLICT))
            if agree or conflict:
                found.append(_Told(other, agree, conflict, len(conflict) == len(row)))
        return found


def _group(node: int, option: int, listen: _Listeners) -> Group:
    """Follow a decision along the graph, breadth first."""
    decided, left, against = {node: option}, dict[int, frozenset[int]](), set[Pair]()
    waiting = [node]
    for now in waiting:
        for other, agree, conflict, is_refused in listen.of(now, decided[now]):
            pair = (min(now, other), max(now, other))
            if other in decided:
                if decided[other] in conflict:
                    against.add(pair)
            elif agree:
                both = left.get(other, agree) & agree
                if not both:
                    against.add(pair)  # two neighbours want two things of it
                    continue
                left[other] = both
                if len(both) == 1:
                    (decided[other],) = both
                    waiting.append(other)
            elif is_refused:
                against.add(pair)
    nodes = np.array(waiting, np.int64)
    return Group(node, option, nodes, np.array([decided[one] for one in waiting], np.int64), len(against))
