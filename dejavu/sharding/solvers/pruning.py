"""Before a search: options that some other option of the same node can always replace are left out.

Goldstein's criterion of dead-end elimination (Biophysical Journal 66, 1994): option s goes if another one, s', costs no
more whatever the neighbours choose: c(s) - c(s') + sum over the neighbours of min over t of (e(s, t) - e(s', t)) >= 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dejavu.sharding.problem import ChoiceProblem, Floats

Integers = NDArray[np.int64]


def pruned(problem: ChoiceProblem, kept: Sequence[int] = ()) -> tuple[ChoiceProblem, tuple[Integers, ...]]:
    """Return a problem with the same least price, and which option each of its options is.

    Args:
        kept: nodes all of whose options stay.
    """
    around: list[list[tuple[int, Floats]]] = [[] for _ in problem.seconds]
    for (a, b), table in problem.edges.items():
        around[a].append((b, table))
        around[b].append((a, table.T))
    left: list[Integers] = [np.arange(len(own)) for own in problem.seconds]
    queued = [node not in kept for node in range(len(left))]
    waiting = deque(node for node in range(len(left)) if queued[node])
    while waiting:
        node = waiting.popleft()
        queued[node] = False
        keeps = _kept(
            problem.seconds[node][left[node]], [table[np.ix_(left[node], left[b])] for b, table in around[node]]
        )
        if keeps.all():
            continue
        left[node] = left[node][keeps]
        for b, _ in around[node]:
            if not queued[b] and b not in kept:
                queued[b] = True
                waiting.append(b)
    return _restricted(problem, left), tuple(left)


def without(problem: ChoiceProblem, worse: Sequence[NDArray[np.bool_]]) -> tuple[ChoiceProblem, tuple[Integers, ...]]:
    """Return the problem without these options, and which option each of its options is."""
    left = [np.flatnonzero(~some) for some in worse]
    return _restricted(problem, left), tuple(left)


def _restricted(problem: ChoiceProblem, left: Sequence[Integers]) -> ChoiceProblem:
    """Return the problem with these options; an edge that depends on one of its ends alone becomes that node's."""
    seconds = [own[some] for own, some in zip(problem.seconds, left, strict=True)]
    edges = {}
    for (a, b), whole in problem.edges.items():
        table = whole[np.ix_(left[a], left[b])]
        if (table == table[:, :1]).all():
            seconds[a] = seconds[a] + table[:, 0]
        elif (table == table[:1]).all():
            seconds[b] = seconds[b] + table[0]
        else:
            edges[a, b] = table
    held = tuple(own[some] for own, some in zip(problem.bytes, left, strict=True)) if problem.bytes else ()
    return ChoiceProblem(tuple(seconds), edges, held, problem.capacity_bytes)


def _kept(own: Floats, tables: list[Floats]) -> NDArray[np.bool_]:
    """Return which of a node's options stay."""
    count = len(own)
    if count == 1:
        return np.ones(1, np.bool_)
    with np.errstate(invalid="ignore"):
        saved = own[:, None] - own[None, :]  # by taking the second instead of the first, at least
        for table in tables:
            difference = table[:, None, :] - table[None, :, :]
            difference[np.isnan(difference)] = np.inf  # neither is possible with that neighbour
            saved = saved + difference.min(axis=-1)
        saved = np.nan_to_num(saved, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    keeps = np.ones(count, np.bool_)
    for first in np.argsort(-own, kind="stable"):
        others = keeps.copy()
        others[first] = False
        if (saved[first][others] >= 0.0).any():
            keeps[first] = False
    return keeps
