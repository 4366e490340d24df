"""Bounds on every option by messages between neighbours: sequential tree-reweighted message passing.

Each pass raises a lower bound on the least price, of the whole problem and of each option taken for granted
(Kolmogorov, IEEE PAMI 28, 2006). An option whose bound exceeds a known price is in no best choice.

Shape suffixes: N = nodes, O = options of all nodes, E = edges, C = cells of all tables, M = cells of all messages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.sharding.problem import ChoiceProblem, Floats
from dejavu.sharding.solvers.flat import Flat, Integers, flattened, scale_of


class Bounds(NamedTuple):
    """What messages prove.

    Attributes:
        least_seconds: no choice takes less.
        options: of each node, what no choice with that option takes less than.
        chosen: a choice that follows the messages, often a good one.
        problem: the same problem with the messages moved from edges to nodes: every choice has the same price.
    """

    least_seconds: float
    options: tuple[Floats, ...]
    chosen: tuple[int, ...]
    problem: ChoiceProblem


def bounds(problem: ChoiceProblem, passes: int) -> Bounds:
    """Pass messages forth and back so many times."""
    scale = scale_of(problem)
    flat = flattened(problem, scale)
    messages = np.zeros(int(flat.start_E2.max(initial=0)) + max((len(own) for own in problem.seconds), default=0))
    least, option_O, chosen = -np.inf, np.full(len(flat.seconds_O), -np.inf), np.zeros(len(problem.seconds), np.int64)
    best, kept = np.inf, tuple[int, ...]()
    for _ in range(passes):
        found, bound_O, taken = _pass(flat, messages)
        chosen = taken
        price = problem.price(chosen.tolist())
        if price < best:
            best, kept = price, tuple(chosen.tolist())
        if found > least:
            least = found
        option_O = np.maximum(option_O, bound_O)
    parts = [option_O[flat.first_N[n] : flat.first_N[n] + len(own)] * scale for n, own in enumerate(problem.seconds)]
    return Bounds(least * scale, tuple(parts), kept or tuple(chosen.tolist()), _moved(problem, flat, messages * scale))


def _moved(problem: ChoiceProblem, flat: Flat, messages_M: Floats) -> ChoiceProblem:
    """Return the problem with every message added to its node and taken from its edge."""
    seconds, edges = [own.copy() for own in problem.seconds], {}
    for (a, b), (to_a, to_b) in zip(sorted(problem.edges), flat.start_E2, strict=True):
        for_a = messages_M[to_a : to_a + len(seconds[a])]
        for_b = messages_M[to_b : to_b + len(seconds[b])]
        seconds[a] += for_a
        seconds[b] += for_b
        edges[a, b] = problem.edges[a, b] - for_a[:, None] - for_b[None, :]
    return ChoiceProblem(tuple(seconds), edges)


@njit(cache=True)
def _pass(flat: Flat, messages_M: Floats) -> tuple[float, Floats, Integers]:
    """Pass messages forth and back; return the bound, each option's, and a choice made on the way back."""
    N = len(flat.first_N) - 1
    bound_O, chosen_N = np.empty(len(flat.seconds_O)), np.zeros(N, np.int64)
    least = before_back = 0.0
    for way in range(2):
        before_back, least = least, 0.0
        for step in range(N):
            n = step if way == 0 else N - 1 - step
            first, stop = flat.first_N[n], flat.first_N[n + 1]
            own_K = _with_messages(flat, messages_M, n)
            lowest = own_K.min()
            own_K -= lowest
            least += lowest
            bound_O[first:stop] = own_K
            if way == 1:  # neighbours that were passed have chosen
                chosen_N[n] = _choice(flat, messages_M, own_K, chosen_N, n)
            least += _send(flat, messages_M, own_K, n, way)
    return least, bound_O + before_back, chosen_N  # of a node: what was proved when it was visited last, or less


@njit(cache=True)
def _with_messages(flat: Flat, messages_M: Floats, n: int) -> Floats:
    """Return a node's own seconds and all messages to it."""
    own_K = flat.seconds_O[flat.first_N[n] : flat.first_N[n + 1]].copy()
    for e in flat.edges_O[flat.of_node_N[n] : flat.of_node_N[n + 1]]:
        at = flat.start_E2[e, 0 if flat.ends_E2[e, 0] == n else 1]
        own_K += messages_M[at : at + len(own_K)]
    return own_K


@njit(cache=True)
def _table(flat: Flat, e: int) -> Floats:
    """Return an edge's table over (options of its first end, of its second)."""
    a, b = flat.ends_E2[e]
    shape = (flat.first_N[a + 1] - flat.first_N[a], flat.first_N[b + 1] - flat.first_N[b])
    return flat.cells_C[flat.table_E[e] : flat.table_E[e + 1]].reshape(shape)


@njit(cache=True)
def _choice(flat: Flat, messages_M: Floats, own_K: Floats, chosen_N: Integers, n: int) -> int:
    """Return the best option, given those of the neighbours behind, where others ahead are seen by their messages."""
    value_K = own_K.copy()
    for e in flat.edges_O[flat.of_node_N[n] : flat.of_node_N[n + 1]]:
        side = 0 if flat.ends_E2[e, 0] == n else 1
        other = flat.ends_E2[e, 1 - side]
        if other > n:
            at, table = flat.start_E2[e, side], _table(flat, e)
            value_K += table[:, chosen_N[other]] if side == 0 else table[chosen_N[other]]
            value_K -= messages_M[at : at + len(own_K)]
    return int(value_K.argmin())


@njit(cache=True)
def _send(flat: Flat, messages_M: Floats, own_K: Floats, n: int, way: int) -> float:
    """Send the node's share to each neighbour ahead; return what the messages' least add to the bound."""
    own = flat.edges_O[flat.of_node_N[n] : flat.of_node_N[n + 1]]
    ahead = 0
    for e in own:
        other = flat.ends_E2[e, 1] if flat.ends_E2[e, 0] == n else flat.ends_E2[e, 0]
        ahead += (other > n) == (way == 0)
    share, least = 1.0 / max(ahead, len(own) - ahead, 1), 0.0
    for e in own:
        side = 0 if flat.ends_E2[e, 0] == n else 1
        other = flat.ends_E2[e, 1 - side]
        if (other > n) != (way == 0):
            continue
        mine, theirs, table = flat.start_E2[e, side], flat.start_E2[e, 1 - side], _table(flat, e)
        told_K = share * own_K - messages_M[mine : mine + len(own_K)]
        size = flat.first_N[other + 1] - flat.first_N[other]
        for t in range(size):
            messages_M[theirs + t] = (told_K + (table[:, t] if side == 0 else table[t])).min()
        smallest = messages_M[theirs : theirs + size].min()
        messages_M[theirs : theirs + size] -= smallest
        least += smallest
    return least
