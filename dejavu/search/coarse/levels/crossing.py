"""Transfers at cuts between classes of links: the least of what is known of each class, with a message to each other.

Messages between replicas of one type take as long as the side with fewer links makes them. So classes lie in chains: of
two chains a transfer costs what it costs to the first class of the one, or from the first class of the other, whichever
is dearer. From a chain to a chain all transfers at once take a step for each class, in place of one for each pair of
classes. Where nothing is like that each class is a chain by itself.

Letters as in `coarse.levels.counted`; B = classes of links that are known in a transfer, S = chains.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.levels.lesser import lesser
from dejavu.search.coarse.levels.minima import NO_NAN, lower
from dejavu.search.coarse.windows import Links

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_TOGETHER = 256  # cuts


class Crossing(NamedTuple):
    """Transfers at cuts between a class of links that is known, b, and each other class, a.

    Attributes:
        repeats, bytes_L1: as of `Links`.
        order_P: all classes, chain by chain, in each from the cheapest on; P = places in this order, also Q.
        begin_S: the first place of each chain; last, how many there are.
        latency_PQ, per_byte_PQ: seconds of a message from p to q, and for each byte.
        alike_SQ: so many of a chain's first classes cost to q what its first one costs; the others cost there what they
            cost to the first class of the chain of q.
    """

    repeats: float
    bytes_L1: Floats
    order_P: Ints
    begin_S: Ints
    latency_PQ: Floats
    per_byte_PQ: Floats
    alike_SQ: Ints


def crossing(links: Links, is_after: bool) -> Crossing:
    """`is_after`: the known class is the one after a cut."""
    tables = (table_AA.T if is_after else table_AA for table_AA in (links.latency_AA, links.per_byte_AA))
    message_BA2 = np.stack(list(tables), axis=2)
    chains, first_A = list[list[int]](), np.full(len(message_BA2), -1)
    for b in np.argsort(message_BA2[:, :, 1].sum(axis=1), kind="stable").tolist():
        chain = next((chain for chain in chains if _goes_on(message_BA2, chain, b, first_A)), None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(b)
        first_A[b] = chain[0]
    order_P = np.concatenate(chains)
    message_PQ2 = message_BA2[np.ix_(order_P, order_P)]
    begin_S = np.cumsum([0, *(len(chain) for chain in chains)])
    alike = [(message_PQ2[p:q] == message_PQ2[p]).all(axis=2).sum(axis=0) for p, q in pairwise(begin_S)]
    return Crossing(
        repeats=links.repeats,
        bytes_L1=links.bytes_L1,
        order_P=order_P,
        begin_S=begin_S,
        latency_PQ=message_PQ2[:, :, 0].copy(),
        per_byte_PQ=message_PQ2[:, :, 1].copy(),
        alike_SQ=np.array(alike),
    )


def _goes_on(message_BA2: Floats, chain: list[int], b: int, first_A: Ints) -> bool:
    """Whether a class may be the next one of a chain.

    Args:
        first_A: of the chain of each class that is in one; −1: it is in none.
    """
    last, head = chain[-1], chain[0]
    if not (message_BA2[b] >= message_BA2[last]).all() or not (message_BA2[:, b] >= message_BA2[:, last]).all():
        return False
    among = np.append(np.flatnonzero(first_A >= 0), b)
    first = np.append(first_A[among[:-1]], head)

    def same(one_B2: Floats, other_B2: Floats) -> Flags:
        return np.asarray((one_B2 == other_B2).all(axis=1))

    from_it, to_it = message_BA2[b, among], message_BA2[among, b]
    as_from = same(from_it, message_BA2[head, among]) | same(from_it, message_BA2[b, first])
    as_to = same(to_it, message_BA2[first, b]) | same(to_it, message_BA2[among, head])
    return bool((as_from & as_to).all())


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def transferred(limit: float, crossing: Crossing, cut: int, here_A: Floats, least_P: Floats, to_A: Floats) -> None:
    """to[a]: the least of here[b] with the transfer at a cut.

    `least_P`: of each chain up to each class; written to.
    """
    repeats, bytes_L1, order_P, begin_S, latency_PQ, per_byte_PQ, alike_SQ = crossing
    size, S = bytes_L1[cut], len(begin_S) - 1
    to_A[:] = np.inf
    for s in range(S):
        head, end, least = begin_S[s], begin_S[s + 1], np.inf
        for p in range(head, end):
            least = lesser(least, here_A[order_P[p]])
            least_P[p] = least
        for t in range(S if least < np.inf else 0):
            first, rest, p = begin_S[t], np.inf, end - 1
            for q in range(begin_S[t + 1] - 1, first - 1, -1):
                last = head + alike_SQ[s, q] - 1
                while p > last:
                    seconds = 2.0 * (latency_PQ[p, first] + per_byte_PQ[p, first] * size)
                    rest = lesser(rest, here_A[order_P[p]] + seconds if repeats * seconds <= limit else np.inf)
                    p -= 1
                seconds = 2.0 * (latency_PQ[head, q] + per_byte_PQ[head, q] * size)
                total = least_P[last] + seconds if repeats * seconds <= limit else np.inf
                to_A[order_P[q]] = lesser(to_A[order_P[q]], lesser(rest, total))


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def transfers(
    limit: float, crossing: Crossing, alive_L1: Flags, low: int, high: int, here_AB: Floats, to_AL1: Floats
) -> None:
    """The same at all cuts from `low` to `high` that are alive, to which `here` belongs; inf at the others."""
    _, bytes_L1, order_P, begin_S, _, _, _ = crossing
    A, S = len(here_AB), len(begin_S) - 1
    here_PW, least_PW, to_QW = np.empty((A, _TOGETHER)), np.empty((A, _TOGETHER)), np.empty((A, _TOGETHER))
    rest_W = np.empty(_TOGETHER)
    for begin in range(low, high + 1, _TOGETHER):
        width = min(_TOGETHER, high + 1 - begin)
        alive_W, size_W = alive_L1[begin : begin + width], bytes_L1[begin : begin + width]
        for p in range(A):
            here_PW[p, :width] = here_AB[order_P[p], begin - low : begin - low + width]
        least_PW[:] = here_PW
        to_QW[:] = np.inf
        for s in range(S):
            for p in range(begin_S[s] + 1, begin_S[s + 1]):
                lower(least_PW[p, :width], least_PW[p - 1, :width])
            for t in range(S):
                _to_chain(limit, crossing, s, t, size_W, (here_PW, least_PW, rest_W), to_QW)
        for q in range(A):
            _where_alive(alive_W, to_QW[q, :width], to_AL1[order_P[q], begin : begin + width])


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def _to_chain(
    limit: float,
    crossing: Crossing,
    s: int,
    t: int,
    size_W: Floats,
    from_: tuple[Floats, Floats, Floats],
    to_QW: Floats,
) -> None:
    """Lower what is there to what there is of one chain, with a message to another; `from_`: each, least, and room."""
    repeats, _, _, begin_S, latency_PQ, per_byte_PQ, alike_SQ = crossing
    here_PW, least_PW, rest_W = from_
    head, end, first, width = begin_S[s], begin_S[s + 1], begin_S[t], len(size_W)
    p = end - 1
    rest_W[:width] = np.inf
    for q in range(begin_S[t + 1] - 1, first - 1, -1):
        last = head + alike_SQ[s, q] - 1
        while p > last:
            message = (limit, repeats, latency_PQ[p, first], per_byte_PQ[p, first])
            _with_message(message, size_W, here_PW[p], rest_W)
            p -= 1
        message = (limit, repeats, latency_PQ[head, q], per_byte_PQ[head, q])
        _with_message(message, size_W, least_PW[last], to_QW[q])
        if p < end - 1:
            lower(to_QW[q, :width], rest_W)


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def _with_message(message: tuple[float, float, float, float], size_W: Floats, here_W: Floats, to_W: Floats) -> None:
    """Lower what is there to what is here with a message, where that takes no longer than the limit."""
    limit, repeats, latency, per_byte = message
    for w in range(len(size_W)):
        seconds = 2.0 * (latency + per_byte * size_W[w])
        total = here_W[w] + seconds if repeats * seconds <= limit else np.inf
        to_W[w] = lesser(to_W[w], total)


@njit(cache=True, nogil=True, fastmath=NO_NAN)
def _where_alive(alive_W: Flags, to_W: Floats, found_W: Floats) -> None:
    for w in range(len(found_W)):
        found_W[w] = to_W[w] if alive_W[w] else np.inf
