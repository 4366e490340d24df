"""What no placement is faster than.

Each operation has a *head*, seconds before it that every placement takes, and a *tail*, those after it. Both come from
paths at the fastest devices, from work (what has to be over before, on all devices at once), and from messages: an
ancestor is either on the operation's device, where ancestors run one after another, or a message is on the way
(Papadimitriou and Yannakakis, SIAM J. Comput. 1990, here with sizes, speeds and groups); and where branches leave one
operation and meet in another, each device that helps costs a message at both ends. The bound is the longest
head + operation + tail, or all work between a head and a tail, or the linear program that spreads work and memory.

Suffixes as in `dejavu.placement.problem`; E = edges, from each operation to each that reads of it; P = prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from dejavu.foundation.compiled import njit
from dejavu.placement.problem import Floats, Ints, PlacementProblem
from dejavu.placement.shared.joins import joins


@dataclass(frozen=True)
class LowerBound:
    """Seconds that no placement is below, and why: paths, work, memory, search."""

    seconds: float
    because: str


class Ends(NamedTuple):
    """Least seconds before each operation starts and after it has ended, in any placement."""

    head_N: Floats
    tail_N: Floats


class Edges(NamedTuple):
    """Who reads of whom.

    Attributes:
        first_N1, node_E: of each operation, those that it reads of, or those that read of it.
        message_E: the least seconds of the largest message; infinite where both are always on one device.
    """

    first_N1: Ints
    node_E: Ints
    message_E: Floats


def lower_bound(problem: PlacementProblem) -> LowerBound:
    """Return the best bound that takes no search."""
    return _best_of(problem, ends(problem), work_prices(problem))


def work_prices(problem: PlacementProblem) -> Floats:
    """Return y_D, from 0 on with sum 1, for which Σ over operations of the least y · seconds is largest.

    A device that is open for so many seconds does no more work than that, so neither do all of them at these prices.
    """
    prices_D, _, _ = _spread(problem, with_memory=False)
    return prices_D


def ends(problem: PlacementProblem) -> Ends:
    """Return the least heads and tails."""
    before, after = edges(problem)
    order_N = np.array(problem.topological_N, dtype=np.int64)
    seconds_ND = problem.arrays.seconds_ND
    columns_ND = np.ascontiguousarray(np.unique(seconds_ND, axis=1))  # equal devices bound alike
    work_N = _least(_priced(work_prices(problem), seconds_ND))
    rate_D = _rates(seconds_ND)
    least_N = columns_ND.min(axis=1)
    met = joins(problem.topological_N, _longest(problem), least_N, rate_D)
    met_N = np.array([one.fork for one in met], dtype=np.int64), np.array([one.seconds for one in met])
    # Turned round, what a fork sends would be what parts send, but that is one tensor for all: no such bound.
    none_N = np.full(len(least_N), -1, dtype=np.int64), np.zeros(len(least_N))
    head_N = _heads(order_N, before, after, columns_ND, work_N, problem.group_N, rate_D, met_N)
    back_N = np.ascontiguousarray(order_N[::-1])
    return Ends(head_N, _heads(back_N, after, before, columns_ND, work_N, problem.group_N, rate_D, none_N))


def _rates(seconds_ND: Floats) -> Floats:
    """Return how much of the fastest devices' work a device does in a second, at most, from the fastest on."""
    least_N1 = seconds_ND.min(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        rate_ND = np.where(seconds_ND > 0, least_N1 / seconds_ND, 0.0)
    rate_D = np.ascontiguousarray(np.sort(rate_ND.max(axis=0))[::-1])
    rate_D[0] = 1.0
    return rate_D


def edges(problem: PlacementProblem) -> tuple[Edges, Edges]:
    """Return the edges by reader, and by writer."""
    longest, N = _longest(problem), len(problem.operations)
    return _edges(longest, N, 1), _edges(longest, N, 0)


def _longest(problem: PlacementProblem) -> dict[tuple[int, int], float]:
    """Return the least seconds of the largest message of each edge; infinite where both are always on one device."""
    arrays, D = problem.arrays, problem.num_devices
    apart = ~np.eye(D, dtype=bool)
    least_T = arrays.message_seconds_TDD[:, apart].min(axis=1) if D > 1 else np.full(len(problem.tensors), np.inf)
    longest: dict[tuple[int, int], float] = {}
    for t, source in enumerate(arrays.producer_T):
        for reader in arrays.reader_R[arrays.first_reader_T1[t] : arrays.first_reader_T1[t + 1]]:
            together = arrays.group_N[source] == arrays.group_N[reader]
            pair = (int(source), int(reader))
            longest[pair] = max(longest.get(pair, 0.0), np.inf if together else float(least_T[t]))
    return longest


def _edges(longest: dict[tuple[int, int], float], N: int, at: int) -> Edges:
    pairs = sorted(longest, key=lambda pair: pair[at])
    counts = np.bincount([pair[at] for pair in pairs], minlength=N) if pairs else np.zeros(N, dtype=np.int64)
    return Edges(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array([pair[1 - at] for pair in pairs], dtype=np.int64),
        np.array([longest[pair] for pair in pairs], dtype=np.float64),
    )


def _priced(prices_D: Floats, seconds_ND: Floats) -> Floats:
    """Price seconds; NaN where nothing is paid for a device that cannot run it, which `_least` knows."""
    with np.errstate(invalid="ignore"):
        return prices_D[None] * seconds_ND


def _least(priced_ND: Floats) -> Floats:
    """Return each row's least; a price of 0 on a device that cannot run it is no offer."""
    least_N: Floats = np.where(np.isfinite(priced_ND), priced_ND, np.inf).min(axis=1)
    return least_N


@njit(cache=True, nogil=True)
def _heads(
    order_N: Ints,
    before: Edges,
    after: Edges,
    columns_NP: Floats,
    work_N: Floats,
    group_N: Ints,
    rate_D: Floats,
    met_N: tuple[Ints, Floats],
) -> Floats:
    """Least seconds before each operation; with edges and order turned round, after it.

    Args:
        met_N: an operation before it (-1: none), and the least seconds from that one's end.
    """
    N = len(order_N)
    head_N, least_N = np.zeros(N), np.zeros(N)
    for n in range(N):
        least_N[n] = columns_NP[n].min()
    path_N, away_N, far_N = np.empty(N), np.empty(N), np.empty(N)
    fork_N, at_N = np.full(N, -1, dtype=np.int64), np.empty(N, dtype=np.int64)
    at_N[order_N] = np.arange(N)
    for position in range(N):
        v = order_N[position]
        fork_N[v] = _fork(before.node_E[before.first_N1[v] : before.first_N1[v + 1]], fork_N, at_N)
        # path: from an ancestor's start to v's; away: when v starts at the earliest if that is on another device; far:
        # from its end to v's start if it is
        path_N[:], away_N[:], far_N[:] = -np.inf, -np.inf, -np.inf
        path_N[v] = 0.0
        num, found = 0, np.empty(position, dtype=np.int64)
        for back in range(position - 1, -1, -1):
            u = order_N[back]
            done = head_N[u] + least_N[u]
            for e in range(after.first_N1[u], after.first_N1[u + 1]):
                w, message = after.node_E[e], after.message_E[e]
                if path_N[w] == -np.inf:
                    continue
                path_N[u] = max(path_N[u], least_N[u] + path_N[w])
                arrives = done + message + path_N[w]
                away_N[u] = max(away_N[u], arrives if w == v else min(away_N[w], arrives))
                sent = message + path_N[w]
                far_N[u] = max(far_N[u], sent if w == v else min(least_N[w] + far_N[w], sent))
            if path_N[u] > -np.inf:
                if group_N[u] == group_N[v]:
                    away_N[u] = far_N[u] = np.inf
                head_N[v] = max(head_N[v], head_N[u] + path_N[u])
                found[num] = u
                num += 1
        head_N[v] = max(head_N[v], _work_before(found[:num], head_N, work_N))
        nearest = np.inf
        for p in range(columns_NP.shape[1]):
            if columns_NP[v, p] < np.inf:
                nearest = min(nearest, _joined(found[:num], head_N, away_N, columns_NP[:, p]))
        head_N[v] = max(head_N[v], nearest)
        a = fork_N[v]
        if a >= 0 and before.first_N1[v + 1] - before.first_N1[v] > 1:
            between = _between(a, found[:num], before, far_N, least_N, group_N, rate_D)
            head_N[v] = max(head_N[v], head_N[a] + least_N[a] + between)
        a = met_N[0][v]
        if a >= 0:
            head_N[v] = max(head_N[v], head_N[a] + least_N[a] + met_N[1][v])
    return head_N


@njit(cache=True, nogil=True)
def _fork(before: Ints, fork_N: Ints, at_N: Ints) -> int:
    """Return the last operation that is on every path to one with these predecessors; −1: none is (its dominator)."""
    if len(before) == 0:
        return -1
    found = before[0]
    for p in before[1:]:
        other = p
        while found != other:
            if found < 0 or other < 0:
                return -1
            if at_N[found] > at_N[other]:
                found = fork_N[found]
            else:
                other = fork_N[other]
    return int(found)


@njit(cache=True, nogil=True)
def _between(
    a: int, found: Ints, before: Edges, far_N: Floats, least_N: Floats, group_N: Ints, rate_D: Floats
) -> float:
    """Least seconds from the end of a fork to the start of the operation that joins what is between.

    On how many devices is that done? On one, it takes all the work. Each further device costs a message at its
    beginning, if the fork is on another, and one at its end, if the join is: together they work that much less long.
    """
    path_N, late_N = np.full(len(far_N), -np.inf), np.full(len(far_N), -np.inf)
    path_N[a] = -least_N[a]  # so that what follows the fork starts 0 after its end
    num, work = 0, 0.0
    out, back = np.empty(len(found)), np.empty(len(found))
    for k in range(len(found) - 1, -1, -1):  # found is from last to first
        v = found[k]
        if v == a:
            continue
        for e in range(before.first_N1[v], before.first_N1[v + 1]):
            p, message = before.node_E[e], before.message_E[e]
            if path_N[p] == -np.inf:
                continue
            start = path_N[p] + least_N[p]
            path_N[v] = max(path_N[v], start)
            # late: its start if it is not on the fork's device
            late_N[v] = max(late_N[v], start + message if p == a else min(late_N[p] + least_N[p], start + message))
        if path_N[v] > -np.inf:
            if group_N[v] == group_N[a]:
                late_N[v] = np.inf
            out[num], back[num] = late_N[v], far_N[v]
            work += least_N[v]
            num += 1
    # The operations that are first on their devices differ, and so do those that are last. Work is at most the sum of
    # rate times what is left of the time, largest where the fastest device loses nothing, the next one least.
    out, back = np.sort(out[:num]), np.sort(back[:num])
    rate, lost = rate_D[0], 0.0
    best: float = work / rate
    for further in range(1, min(len(rate_D), num)):
        rate += rate_D[further]
        lost += rate_D[further] * (out[further - 1] + back[further - 1])
        best = min(best, (work + lost) / rate)
    return best


@njit(cache=True, nogil=True)
def _work_before(found: Ints, head_N: Floats, work_N: Floats) -> float:
    """When all devices together can have done these: those that start late, after the earliest head among them."""
    latest, work = 0.0, 0.0
    for u in found[np.argsort(-head_N[found])]:
        work += work_N[u]
        latest = max(latest, head_N[u] + work)
    return latest


@njit(cache=True, nogil=True)
def _joined(found: Ints, head_N: Floats, away_N: Floats, seconds_N: Floats) -> float:
    """When an operation on a device of these seconds can start: some ancestors run there, the rest send messages.

    In any placement the ancestors with the longest ways are on the device up to one that is not, so the earliest over
    how many are is a bound: more of them only takes longer on the device, and waits for shorter ways.
    """
    if len(found) == 0:
        return 0.0
    by_way = found[np.argsort(-away_N[found])]
    released = found[np.argsort(head_N[found])]
    here_N = np.zeros(len(head_N), dtype=np.bool_)
    busy, best = 0.0, np.inf
    for u in by_way:
        if busy >= best:
            break
        best = min(best, max(busy, away_N[u]))
        if busy >= away_N[u]:
            break
        here_N[u] = True
        busy = 0.0  # one after another, each not before its head: by heads is fastest
        for w in released:
            if here_N[w]:
                busy = max(busy, head_N[w]) + seconds_N[w]
    return min(best, busy) if here_N[by_way[-1]] else best


def _best_of(problem: PlacementProblem, found: Ends, prices_D: Floats) -> LowerBound:
    seconds_ND = problem.arrays.seconds_ND
    path = float((found.head_N + seconds_ND.min(axis=1) + found.tail_N).max())
    work_N = _least(_priced(prices_D, seconds_ND))
    work = _windows(found.head_N, found.tail_N, work_N)
    prices_D, memory_prices_D, rooms_D = _spread(problem, with_memory=True)
    memory_G = problem.arrays.memory_G
    priced_GD = _priced(prices_D, problem.seconds_GD) + memory_prices_D[None] * memory_G[:, None]
    spread = float(_least(priced_GD).sum() - (memory_prices_D * rooms_D).sum())
    return max(
        (LowerBound(path, "paths"), LowerBound(work, "work"), LowerBound(spread, "memory")), key=lambda b: b.seconds
    )


def _windows(head_N: Floats, tail_N: Floats, work_N: Floats) -> float:
    """Return the longest head + all work after it and before a tail + that tail."""
    by_tail = np.argsort(-tail_N)
    head_N, tail_N, work_N = head_N[by_tail], tail_N[by_tail], work_N[by_tail]
    longest = 0.0
    for start in np.unique(head_N):
        late = head_N >= start
        longest = max(longest, float((start + np.cumsum(work_N[late]) + tail_N[late]).max()))
    return longest


def _spread(problem: PlacementProblem, *, with_memory: bool) -> tuple[Floats, Floats, Floats]:
    """Return prices on devices' seconds and bytes that prove the longest time when groups may be split over devices.

    Whatever the linear program's tolerances are, the bound at these prices is one.
    """
    seconds_GD, memory_G, D = problem.seconds_GD, problem.arrays.memory_G, problem.num_devices
    rooms_D = np.minimum(problem.arrays.memory_D, memory_G.sum())
    nothing_D, equal_D = np.zeros(D), np.full(D, 1.0 / D)
    alike = (seconds_GD == seconds_GD[:, :1]).all() and (not with_memory or (rooms_D == rooms_D[0]).all())
    if alike:
        return equal_D, nothing_D, rooms_D
    G = len(seconds_GD)
    runs_GD = np.isfinite(seconds_GD)
    rate = seconds_GD[runs_GD].max() or 1.0
    bytes_rate = memory_G.max() or 1.0
    spans_D = np.zeros((D, G * D + 1))
    holds_D = np.zeros((D, G * D + 1))
    for d in range(D):
        spans_D[d, d : G * D : D] = np.where(runs_GD[:, d], seconds_GD[:, d], 0.0) / rate
        holds_D[d, d : G * D : D] = memory_G / bytes_rate
    spans_D[:, -1] = -1.0
    whole_G = np.zeros((G, G * D + 1))
    for g in range(G):
        whole_G[g, g * D : (g + 1) * D] = 1.0
    rows = np.vstack([spans_D, holds_D]) if with_memory else spans_D
    limits = np.concatenate([nothing_D, rooms_D / bytes_rate]) if with_memory else nothing_D
    bounds = [(0.0, 1.0 if runs else 0.0) for runs in runs_GD.ravel()] + [(0.0, None)]
    goal = np.zeros(G * D + 1)
    goal[-1] = 1.0
    answer = linprog(goal, rows, limits, whole_G, np.ones(G), bounds=bounds, method="highs")
    if answer.status != 0:  # no room even for parts: then any prices prove something
        return equal_D, nothing_D, rooms_D
    dual = np.maximum(-answer.ineqlin.marginals, 0.0)
    prices_D = dual[:D] / dual[:D].sum() if dual[:D].sum() > 0 else equal_D
    return prices_D, dual[D:] * rate / bytes_rate if with_memory else nothing_D, rooms_D
