"""Least seconds between an operation from which parts branch off and the one in which they meet again.

The parts share nothing but both ends. A part that is not wholly on the device of the join sends it a message, over
one of that device's incoming links, each of which carries one at a time: many parts fill them up. So either work stays
on the join's device or a link is taken, and all ways to choose are tried. What is left out can only take longer:
what parts do to each other on other devices, and messages between those.

Suffixes: C = parts, O = ways to send a part's message, L = links to the join's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.placement.problem import Floats, Ints

_MOST_PARTS = 10
_SLOWEST = 1e-300  # a device that runs none of the work: what it is given lasts for ever, and nothing lasts nothing
_MOST_STEPS = 50_000  # of trying choices; then nothing is proved


class Join(NamedTuple):
    """The operation from which the parts branch off, and the least seconds from its end to the join's start."""

    fork: int
    seconds: float


class _Parts(NamedTuple):
    """What the parts may send to the join's device.

    Attributes:
        first_C1, home_O, message_O: of each part its ways: what is left to do on the join's device, and the message.
        before_O, last_O: the least work of what has to be over before: the sender, and those before it.
        inner_O: the least message between those.
        out_C: the least message from the fork to the part.
        work_C: of the whole part.
    """

    first_C1: Ints
    home_O: Floats
    message_O: Floats
    before_O: Floats
    last_O: Floats
    inner_O: Floats
    out_C: Floats
    work_C: Floats


def joins(order: Sequence[int], pairs: dict[tuple[int, int], float], least_N: Floats, rate_D: Floats) -> list[Join]:
    """Return for each operation what it waits for; a fork of −1: no bound.

    Args:
        order: of the operations, each after those that it reads from.
        pairs: of each operation and a reader of it, the least seconds of the largest message.
        rate_D: how much of the fastest device's work each does in a second, from the fastest on.
    """
    N, rate_D = len(order), np.maximum(rate_D, _SLOWEST)
    before: list[list[int]] = [[] for _ in range(N)]
    for source, reader in pairs:
        before[reader].append(source)
    at, dominator, depth = {n: k for k, n in enumerate(order)}, [-1] * N, [0] * N
    found = [Join(-1, 0.0)] * N
    for v in order:
        dominator[v] = _common(before[v], dominator, depth)
        depth[v] = depth[dominator[v]] + 1 if dominator[v] >= 0 else 0
        fork, sources = dominator[v], before[v]
        while fork in sources and len(sources) > 2:  # read past what branches: then they branch off later
            sources = [one for one in sources if one != fork]
            fork = _common(sources, dominator, depth)
        if fork < 0 or len(sources) < 2 or len(rate_D) < 2:
            continue
        parts = _between(fork, sources, before, at)
        if 2 <= len(parts) <= _MOST_PARTS:
            found[v] = Join(fork, _least_seconds(_ways(fork, v, parts, before, pairs, least_N), rate_D))
    return found


def _common(sources: Sequence[int], dominator: Sequence[int], depth: Sequence[int]) -> int:
    """Return the last operation that is on every path to all of these; −1: none is."""
    if not sources:
        return -1
    found = sources[0]
    for one in sources[1:]:
        other = one
        while found != other:
            if found < 0 or other < 0:
                return -1
            if depth[found] >= depth[other]:
                found = dominator[found]
            else:
                other = dominator[other]
    return found


def _between(fork: int, sources: Sequence[int], before: Sequence[Sequence[int]], at: dict[int, int]) -> list[list[int]]:
    """Return the parts between: operations that are connected without the ends, each in order."""
    part_of: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    waiting = [one for one in sources if one != fork]
    inside = set(waiting)
    for one in waiting:
        for source in before[one]:
            if source != fork and source not in inside:
                inside.add(source)
                waiting.append(source)
    for number, n in enumerate(sorted(inside, key=at.__getitem__)):
        own = {part_of[source] for source in before[n] if source in part_of} or {number}
        kept = min(own)
        merged = [one for part in sorted(own) for one in parts.pop(part, [])]
        parts[kept] = [*merged, n]
        for one in parts[kept]:
            part_of[one] = kept
    return [sorted(part, key=at.__getitem__) for part in parts.values()]


def _ways(
    fork: int,
    join: int,
    parts: Sequence[Sequence[int]],
    before: Sequence[Sequence[int]],
    pairs: dict[tuple[int, int], float],
    least_N: Floats,
) -> _Parts:
    first, ways = [0], list[Floats]()
    out, work = list[float](), list[float]()
    for part in sorted(parts, key=lambda one: -sum(least_N[n] for n in one)):
        inside = set(part)
        edges = [(a, b) for b in (*part, join) for a in before[b] if a in inside]
        total = sum(float(least_N[n]) for n in part)
        is_chain = edges == list(zip(part, (*part[1:], join), strict=True))
        start = dict.fromkeys(part, 0.0)  # the longest path from the fork to here
        for a, b in edges:
            if b != join:
                start[b] = max(start[b], start[a] + float(least_N[a]))
        inner, own = min((pairs[edge] for edge in edges if edge[1] != join), default=np.inf), list[Sequence[float]]()
        passed = np.inf  # the least message of a chain before here
        for a, b in edges:
            # What is after the sender in a chain is all on the join's device; elsewhere any of it may be.
            left = total - start[a] - float(least_N[a]) if is_chain else 0.0
            own.append((max(left, 0.0), pairs[a, b], start[a], float(least_N[a]), passed if is_chain else inner))
            passed = min(passed, pairs[a, b])
        ways.append(_undominated(np.array([one for one in own if one[1] < np.inf]).reshape(-1, 5)))
        first.append(first[-1] + len(ways[-1]))
        out.append(min((pairs[fork, n] for n in part if (fork, n) in pairs), default=np.inf))
        work.append(total)
    columns = np.concatenate(ways).T
    home, message, start_O, last, inner_O = (np.ascontiguousarray(one) for one in columns)
    return _Parts(np.array(first), home, message, start_O, last, inner_O, np.array(out), np.array(work))


def _undominated(ways: Floats) -> Floats:
    """Leave out ways beside which another, or the same one earlier, is in nothing more."""
    kept: list[Floats] = []
    for way in ways[np.lexsort(ways.T[::-1])]:
        if not any((one <= way).all() for one in kept):
            kept.append(way)
    return np.array(kept).reshape(-1, 5)


def _least_seconds(parts: _Parts, rate_D: Floats) -> float:
    """Return the least over which devices the fork and the join are on; equal devices are tried once."""
    best, tried = np.inf, set[tuple[float, ...]]()
    for join in range(len(rate_D)):
        others = [d for d in range(len(rate_D)) if d != join]
        for fork in range(len(rate_D)):
            # links from the fork's device come first
            links = [fork, *(d for d in others if d != fork)] if fork != join else others
            key = (rate_D[join], float(fork != join), *(rate_D[d] for d in links))
            if key not in tried:
                tried.add(key)
                best = min(best, float(_tried(parts, float(rate_D[join]), rate_D[links], fork != join)))
    return best


@njit(cache=True, nogil=True)
def _tried(parts: _Parts, rate: float, rate_L: Floats, is_apart: bool) -> float:
    """Try all ways, depth first; 0 where they are too many.

    Args:
        is_apart: the fork is not on the join's device, and the first link is from the one that it is on.
    """
    C, L = len(parts.work_C), len(rate_L)
    begins = 0.0
    if is_apart:  # before a message came, the fork's or a part's, the join's device has nothing to do
        begins = parts.out_C.min()
        for o in range(len(parts.message_O)):
            begins = min(begins, parts.before_O[o] + parts.last_O[o] + parts.message_O[o])
    best, steps = begins + parts.work_C.sum() / rate, 0
    if is_apart:
        best = max(best, parts.out_C.min())
    home_C1 = np.zeros(C + 1)
    released_C1L, sent_C1L, over_C1L = np.full((C + 1, L), np.inf), np.zeros((C + 1, L)), np.zeros((C + 1, L))
    choice_C = np.full(C, -1, dtype=np.int64)
    c = 0
    while c >= 0:
        if c == C:
            best = min(best, max(begins + home_C1[C] / rate, over_C1L[C].max()))
            c -= 1
            continue
        choice_C[c] += 1
        steps += 1
        if steps > _MOST_STEPS:
            return 0.0
        count = parts.first_C1[c + 1] - parts.first_C1[c]
        if choice_C[c] > count * L:
            choice_C[c] = -1
            c -= 1
            continue
        released_C1L[c + 1], sent_C1L[c + 1], over_C1L[c + 1] = released_C1L[c], sent_C1L[c], over_C1L[c]
        if choice_C[c] == count * L:  # last, as it leaves least room: all of it on the join's device
            home_C1[c + 1] = home_C1[c] + parts.work_C[c]
        else:
            o, link = parts.first_C1[c] + choice_C[c] // L, choice_C[c] % L
            out = 0.0 if is_apart and link == 0 else parts.out_C[c]
            # All that is before the message on the link's device, or some of it elsewhere with a message between.
            last = parts.last_O[o] / rate_L[link]
            ready = min(parts.before_O[o] + last + out, parts.before_O[o] + last + parts.inner_O[o])
            home_C1[c + 1] = home_C1[c] + parts.home_O[o]
            released_C1L[c + 1, link] = min(released_C1L[c, link], ready)
            sent_C1L[c + 1, link] += parts.message_O[o]
            over_C1L[c + 1, link] = max(
                over_C1L[c, link], ready + parts.message_O[o], released_C1L[c + 1, link] + sent_C1L[c + 1, link]
            )
            if over_C1L[c + 1, link] >= best:
                continue
        if begins + home_C1[c + 1] / rate < best:
            c += 1
    return float(best)
