"""The least of a weighted sum over plans whose ranks hold two stages as a V: rank by rank, from the ends to the middle.

Rank r runs stages r and S − 1 − r, so that ranks r and after hold the layers between two cuts. Both stages of a rank
have one configuration here, its devices count once, and pairs that together take too long or too much memory are out.
Letters as in `_chain`; P = ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import Integers
from dejavu.simulation.bound._chain import Mask, Weights, enter_table, message, weighted
from dejavu.simulation.bound._prefix_sums import BoundPrices


class Pairs(NamedTuple):
    """Which two stages a rank may have.

    Attributes:
        sum_SCL1, fixed_SC: what the rank's own line counts for each of its stages; see `_paths.busy_lines`.
        enter_PL1G: the least of that line before the rank's first stage, whose class is g.
        limit: a pair whose line comes to this is out: no plan with it takes less.
        share_SCLL1: the part of the memory that a stage takes of a rank's devices; together at most 1. Or empty.
    """

    sum_SCL1: Floats
    fixed_SC: Floats
    enter_PL1G: Floats
    limit: float
    share_SCLL1: NDArray[np.float32]


def pairs(
    prices: BoundPrices, busy: list[Weights], alive_SCLL1: Mask, limit: float, share_SCLL1: NDArray[np.float32]
) -> Pairs:
    """By each rank's own line."""
    S, C, L, _ = alive_SCLL1.shape
    P = S // 2
    sum_SCL1, fixed_SC = np.zeros((S, C, L + 1)), np.zeros((S, C))
    enter_PL1G = np.empty((P, L + 1, prices.message_L1GGM.shape[1]))
    for r, weigh in enumerate(busy):
        enter_PL1G[r] = enter_table(prices, weigh, alive_SCLL1, r)
        for s in (r, S - 1 - r):
            for c in range(C):
                fixed_SC[s, c] = weighted(prices, weigh, s, c, sum_SCL1[s, c])
    return Pairs(sum_SCL1, fixed_SC, enter_PL1G, limit, share_SCLL1)


class VeeTable(NamedTuple):
    """The cheapest ways to run the layers between two cuts.

    Attributes:
        left_PL1L1G: [r, a, b, g] ranks r and after run layers a to b; the rank before is of class g.
        first_L1L1G, last_L1L1G, how_L1L1G: [r, a, b, h] where rank r's first stage ends and its second begins, if it is
            of class h; its configuration.
        next_PL1L1G: the class of rank r where the rank before is of class g.
        whole_G: the cheapest whole plans, by the first rank's class.
    """

    left_PL1L1G: Floats
    first_PL1L1G: NDArray[np.int16]
    last_PL1L1G: NDArray[np.int16]
    how_PL1L1G: NDArray[np.int16]
    next_PL1L1G: NDArray[np.int16]
    whole_G: Floats

    @property
    def least(self) -> float:
        return float(self.whole_G.min())

    def plan(self) -> tuple[Integers, Integers]:
        """Where each stage of the cheapest plan ends, and its configuration."""
        P, L = len(self.first_PL1L1G), self.left_PL1L1G.shape[1] - 1
        stop_S, how_S = np.zeros(2 * P, np.int64), np.zeros(2 * P, np.int64)
        a, b, h = 0, L, int(self.whole_G.argmin())
        for r in range(P):
            if r:
                h = self.next_PL1L1G[r, a, b, h]
            at = (r, a, b, h)
            how_S[r] = how_S[2 * P - 1 - r] = self.how_PL1L1G[at]
            stop_S[2 * P - 1 - r] = b
            a, b = self.first_PL1L1G[at], self.last_PL1L1G[at]
            stop_S[r] = a
        return stop_S, how_S


def vee_table(prices: BoundPrices, weigh: Weights, alive_SCLL1: Mask, allowed: Pairs) -> VeeTable:
    """The cheapest ways, among the stages and pairs that are still considered."""
    return VeeTable(*_vee_table(prices, weigh, alive_SCLL1, allowed))


@njit(cache=True, nogil=True)
def _vee_table(
    prices: BoundPrices, weigh: Weights, alive_SCLL1: Mask, allowed: Pairs
) -> tuple[Floats, NDArray[np.int16], NDArray[np.int16], NDArray[np.int16], NDArray[np.int16], Floats]:
    S, C, L, _ = alive_SCLL1.shape
    P, G = S // 2, prices.message_L1GGM.shape[1]
    left = np.full((P + 1, L + 1, L + 1, G), np.inf)
    first = np.full((P, L + 1, L + 1, G), -1, np.int16)
    last, configuration, following = first.copy(), first.copy(), first.copy()
    here = np.full((L + 1, L + 1, G), np.inf)
    for cut in range(L + 1):
        left[P, cut, cut, :] = 0.0
    for r in range(P - 1, -1, -1):
        here[:] = np.inf
        found = here, first[r], last[r], configuration[r]
        for c in range(C):
            _begin(prices, weigh, (r, c), alive_SCLL1, allowed, left[r + 1], found)
        for a in range(r, L - r + 1 if r > 0 else 0):
            _cross(prices.message_L1GGM, weigh.cut_SM, (r, a), here[a], left[r, a], following[r, a])
    return left, first, last, configuration, following, here[0, L].copy()


@njit(cache=True, nogil=True)
def _begin(
    prices: BoundPrices,
    weigh: Weights,
    place: tuple[int, int],
    alive_SCLL1: Mask,
    allowed: Pairs,
    left_L1L1G: Floats,
    found: tuple[Floats, NDArray[np.int16], NDArray[np.int16], NDArray[np.int16]],
) -> None:
    """The cheapest ways from a rank on, without the messages to it, if it has this configuration; between any cuts.

    Args:
        place: the rank and the configuration.
        left_L1L1G: the cheapest ways of the ranks after.
        found: those of the cheapest configuration so far, where their first stage ends and their second begins, and
            which one that is; written over where this one is cheaper.
    """
    (r, c), (here, first, last, configuration) = place, found
    busy_SCL1, busy_SC, enter_PL1G, limit, share_SCLL1 = allowed
    S, _, L, _ = alive_SCLL1.shape
    z, inner = S - 1 - r, max(S - 2 - 2 * r, 0)  # its second stage; the layers that the ranks after need at least
    is_last, remembers = inner == 0, share_SCLL1.shape[0] > 0
    g, near_L1, far_L1 = prices.class_C[c], np.empty(L + 1), np.empty(L + 1)
    fixed = weighted(prices, weigh, r, c, near_L1) + weighted(prices, weigh, z, c, far_L1)
    busy_near, busy_far = busy_SCL1[r, c], busy_SCL1[z, c]
    begin, end = (r, L - r - inner - 1) if r > 0 else (0, 1)
    for a in range(begin, end):
        # More layers only take longer: what is beyond the first that is too long is too long as well.
        spent_a = enter_PL1G[r, a, g] + busy_SC[r, c] + busy_SC[z, c] - busy_near[a]
        if spent_a >= limit:
            continue
        for b in range(a + inner + 2 if r > 0 else L, L - r + 1):
            best = here[a, b, g]
            for stop in range(a + 1, b - inner):
                spent = spent_a + busy_near[stop] + busy_far[b]
                if spent - busy_far[b - 1] >= limit:
                    break
                if not alive_SCLL1[r, c, a, stop]:
                    continue
                base = fixed + near_L1[stop] - near_L1[a] + far_L1[b]
                until = stop if is_last else stop + inner
                for start in range(stop if is_last else b - 1, until - 1, -1):
                    if spent - busy_far[start] >= limit:
                        break
                    total = base - far_L1[start] + left_L1L1G[stop, start, g]
                    if total >= best or not alive_SCLL1[z, c, start, b]:
                        continue
                    if remembers and share_SCLL1[r, c, a, stop] + share_SCLL1[z, c, start, b] > 1.0:
                        continue
                    best = here[a, b, g] = total
                    first[a, b, g], last[a, b, g], configuration[a, b, g] = stop, start, c


@njit(cache=True, nogil=True)
def _cross(
    message_L1GGM: Floats,
    cut_SM: Floats,
    place: tuple[int, int],
    here_L1G: Floats,
    left_L1G: Floats,
    following_L1G: NDArray[np.int16],
) -> None:
    """The cheapest ways from a rank on, the messages to it included, by the class of the rank before it.

    Args:
        place: the rank, and the cut at which its first stage begins.
    """
    (r, a), S, (L1, G) = place, len(cut_SM), here_L1G.shape
    z = S - 1 - r
    for b in range(a + S - 2 * r, L1 - r):
        for h in range(G):
            if here_L1G[b, h] == np.inf:
                continue
            for g in range(G):
                total = here_L1G[b, h] + message(message_L1GGM, cut_SM, r - 1, a, g, h)
                total += message(message_L1GGM, cut_SM, z, b, h, g)
                if total < left_L1G[b, g]:
                    left_L1G[b, g], following_L1G[b, g] = total, h
