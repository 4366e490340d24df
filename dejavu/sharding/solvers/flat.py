"""A choice problem as arrays for compiled loops, and what changing a part of a choice does to its price.

Shape suffixes: N = nodes, O = options of all nodes, E = edges, C = cells of all tables, M = nodes that change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.sharding.problem import ChoiceProblem, Floats

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
HUGE = 1e6  # in place of what is not possible, in units of the largest price: less is proved than could be


class Flat(NamedTuple):
    """The problem as arrays: of each node its first option, of each edge its ends, its table, its messages' places."""

    first_N: Integers
    seconds_O: Floats
    ends_E2: Integers
    table_E: Integers
    cells_C: Floats
    start_E2: Integers
    of_node_N: Integers
    edges_O: Integers


def scale_of(problem: ChoiceProblem) -> float:
    """Return the largest price that is possible, in seconds: the unit of the arrays."""
    finite = [own[np.isfinite(own)] for own in (*problem.seconds, *problem.edges.values())]
    return max((float(some.max(initial=0.0)) for some in finite), default=0.0) or 1.0


def flattened(problem: ChoiceProblem, scale: float) -> Flat:
    """Return the problem's prices in units of `scale`, in seconds."""
    sizes = [len(own) for own in problem.seconds]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    pairs = sorted(problem.edges)
    tables = [np.where(np.isfinite(problem.edges[p]), problem.edges[p] / scale, HUGE).ravel() for p in pairs]
    starts, at = [], 0
    for a, b in pairs:
        starts.append((at, at + sizes[a]))  # messages to a, and to b
        at += sizes[a] + sizes[b]
    around: list[list[int]] = [[] for _ in sizes]
    for e, (a, b) in enumerate(pairs):
        around[a].append(e)
        around[b].append(e)
    return Flat(
        first,
        np.concatenate([np.where(np.isfinite(own), own / scale, HUGE) for own in problem.seconds]),
        np.array(pairs, np.int64).reshape(-1, 2),
        np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64),
        np.concatenate([*tables, np.zeros(0)]),
        np.array(starts, np.int64).reshape(-1, 2),
        np.concatenate([[0], np.cumsum([len(some) for some in around])]).astype(np.int64),
        np.array([e for some in around for e in some], np.int64),
    )


@njit(cache=True)
def change(flat: Flat, chosen_N: Integers, nodes_M: Integers, options_M: Integers) -> float:
    """Return what the price grows by where these nodes take these options: below 0, it gets cheaper."""
    after_N, total = chosen_N.copy(), 0.0
    after_N[nodes_M] = options_M
    for n in nodes_M:
        first, before, after = flat.first_N[n], chosen_N[n], after_N[n]
        if before == after:
            continue
        total += flat.seconds_O[first + after] - flat.seconds_O[first + before]
        for e in flat.edges_O[flat.of_node_N[n] : flat.of_node_N[n + 1]]:
            a, b = flat.ends_E2[e]
            other = b if a == n else a
            if other < n and chosen_N[other] != after_N[other]:
                continue  # both of its ends change: counted at the first
            width = flat.first_N[b + 1] - flat.first_N[b]
            start = flat.table_E[e]
            total += flat.cells_C[start + after_N[a] * width + after_N[b]]
            total -= flat.cells_C[start + chosen_N[a] * width + chosen_N[b]]
    return total


@njit(cache=True)
def descend(flat: Flat, chosen_N: Integers, is_fixed_N: Booleans, least: float) -> float:
    """Give each node in turn the best option beside its neighbours', in place; return what that saves.

    Args:
        is_fixed_N: nodes that keep their option.
        least: what a change must save.
    """
    saved = 0.0
    for n in range(len(flat.first_N) - 1):
        if is_fixed_N[n]:
            continue
        first, stop = flat.first_N[n], flat.first_N[n + 1]
        own_K = flat.seconds_O[first:stop].copy()
        for e in flat.edges_O[flat.of_node_N[n] : flat.of_node_N[n + 1]]:
            a, b = flat.ends_E2[e]
            width, start = flat.first_N[b + 1] - flat.first_N[b], flat.table_E[e]
            for k in range(stop - first):
                cell = k * width + chosen_N[b] if a == n else chosen_N[a] * width + k
                own_K[k] += flat.cells_C[start + cell]
        best = own_K.argmin()
        gain = own_K[chosen_N[n]] - own_K[best]
        if gain > least:
            chosen_N[n] = best
            saved += gain
    return saved
