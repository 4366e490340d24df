"""Elimination with tables of a limited size: exact where the limit is never met, else a bound and a good choice.

A node is eliminated by the least over its options given its neighbours'. The time is that of the largest table, the
product of a node's options and its neighbours' when it goes (the width of a tree decomposition: Bertelè and Brioschi,
1972; Dechter, 1999). Where that is too large, the node's tables are summed in several buckets and each takes its own
least option, which can only be less: a lower bound (mini-buckets: Dechter and Rish, JACM 50, 2003).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from dejavu.sharding.problem import ChoiceProblem, Floats

Scope = tuple[int, ...]


class Eliminated(NamedTuple):
    """What elimination gives.

    Attributes:
        is_exact: no node's tables had to be kept apart, so the choice is the best and takes the bound.
    """

    bound_seconds: float
    chosen: tuple[int, ...]
    is_exact: bool


class Rest(NamedTuple):
    """What elimination leaves of a problem.

    Attributes:
        table: the least seconds (or a bound of them) for every choice of the nodes that were kept, in their order.
        steps: each node that went, with the tables that it went with.
        is_exact: see `Eliminated`.
    """

    kept: Scope
    table: Floats
    steps: list[tuple[int, list[tuple[Scope, Floats]]]]
    is_exact: bool

    def chosen(self, of_kept: Sequence[int], count: int) -> list[int]:
        """Return the options of all nodes, given those of the kept ones."""
        found = [0] * count
        for node, option in zip(self.kept, of_kept, strict=True):
            found[node] = option
        for node, own in reversed(self.steps):
            tables = [table[tuple(slice(None) if one == node else found[one] for one in scope)] for scope, table in own]
            found[node] = int(sum(tables[1:], tables[0]).argmin())
        return found


def eliminate(problem: ChoiceProblem, most_cells: int) -> Eliminated:
    """Eliminate all nodes; no table that is made has more cells than this."""
    rest = eliminate_all_but((), problem, most_cells)
    return Eliminated(float(rest.table), tuple(rest.chosen((), len(problem.seconds))), rest.is_exact)


def eliminate_all_but(kept: Scope, problem: ChoiceProblem, most_cells: int) -> Rest:
    """Eliminate the other nodes; no table that is made has more cells than this, but the last one."""
    sizes = [len(own) for own in problem.seconds]
    left, steps, bound, is_exact = _Tables(problem), list[tuple[int, list[tuple[Scope, Floats]]]](), 0.0, True
    for node in elimination_order(problem, kept):
        own = sorted(left.take(node), key=lambda one: -one[1].size)
        steps.append((node, own))
        buckets: list[tuple[set[int], list[tuple[Scope, Floats]]]] = []
        for scope, table in own:
            for nodes, tables in buckets:
                if prod(sizes[one] for one in nodes.union(scope)) <= most_cells:
                    nodes.update(scope)
                    tables.append((scope, table))
                    break
            else:
                buckets.append((set(scope), [(scope, table)]))
        is_exact &= len(buckets) <= 1
        for nodes, tables in buckets:
            axes = (*sorted(nodes - {node}), node)
            least = _sum(tables, axes, sizes).min(axis=-1)
            if len(axes) > 1:
                left.put(axes[:-1], least)
            else:
                bound += float(least)
    last = [one for node in kept for one in left.take(node)]
    table = _sum(last, kept, sizes) + bound if kept else np.array(bound)
    return Rest(kept, table, steps, is_exact)


def elimination_order(problem: ChoiceProblem, kept: Scope = ()) -> list[int]:
    """Return the nodes that are not kept, next always the one whose table is the smallest then."""
    sizes = [len(own) for own in problem.seconds]
    around = [set(some) for some in problem.neighbours]

    def cells(node: int) -> int:
        return sizes[node] * prod(sizes[one] for one in around[node])

    done, found = [node in kept for node in range(len(sizes))], list[int]()
    heap = [(cells(node), node) for node in range(len(sizes)) if not done[node]]
    heapq.heapify(heap)
    while heap:
        size, node = heapq.heappop(heap)
        if done[node] or size != cells(node):
            continue
        done[node] = True
        found.append(node)
        for one in around[node]:
            around[one] |= around[node]
            around[one] -= {one, node}
        for one in around[node]:
            if not done[one]:
                heapq.heappush(heap, (cells(one), one))
    return found


def cells(problem: ChoiceProblem, kept: Scope = ()) -> tuple[int, int]:
    """Return the cells of the largest table that an exact elimination would make, and of all."""
    sizes = [len(own) for own in problem.seconds]
    around, widest, total = [set(some) for some in problem.neighbours], 0, 0
    for node in elimination_order(problem, kept):
        own = sizes[node] * prod(sizes[one] for one in around[node])
        widest, total = max(widest, own), total + own
        for one in around[node]:
            around[one] |= around[node]
            around[one] -= {one, node}
    return widest, total


class _Tables:
    """What is left of the problem: tables over some nodes each, found by each of their nodes."""

    def __init__(self, problem: ChoiceProblem) -> None:
        self._of: list[dict[Scope, Floats]] = [{} for _ in problem.seconds]
        for node, own in enumerate(problem.seconds):
            self.put((node,), own)
        for pair, table in problem.edges.items():
            self.put(pair, table)

    def put(self, scope: Scope, table: Floats) -> None:
        """Add a table over some nodes, in the order of their numbers."""
        known = self._of[scope[0]].get(scope)
        for node in scope:
            self._of[node][scope] = table if known is None else known + table

    def take(self, node: int) -> list[tuple[Scope, Floats]]:
        """Remove a node; return its tables."""
        own = self._of[node]
        for scope in own:
            for one in scope:
                if one != node:
                    del self._of[one][scope]
        self._of[node] = {}
        return list(own.items())


def _sum(tables: Sequence[tuple[Scope, Floats]], axes: Scope, sizes: Sequence[int]) -> Floats:
    place = {one: k for k, one in enumerate(axes)}
    total: Floats = np.zeros((1,) * len(axes))
    for scope, table in tables:
        order = sorted(range(len(scope)), key=lambda k: place[scope[k]])
        shape = [1] * len(axes)
        for k in order:
            shape[place[scope[k]]] = table.shape[k]
        total = total + table.transpose(order).reshape(shape)
    return np.broadcast_to(total, [sizes[one] for one in axes])
