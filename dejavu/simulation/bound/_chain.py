"""The least of a weighted sum of the stages' times over all plans with so many stages: a table over cuts.

Letters: S = stages, L = layers, G = classes of configurations whose messages cost the same, C = configurations, M =
parts of messages.
Devices have prices in place of counts (Lagrangian relaxation), and the two stages of a rank choose for themselves, each
charged its share of the rank's devices: both only let in more plans, so that the least is not above that of a plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, PER_STEP, Integers
from dejavu.simulation.bound._prefix_sums import BoundPrices

Mask = NDArray[np.bool_]


class Weights(NamedTuple):
    """What the times of a stage, by its place, count in the sum.

    Attributes:
        layer_S5: its layers' seconds of each pass.
        pass_S, per_step_S: what each pass takes besides, and what the stage does once a step besides.
        cut_SM: a message's parts, across the cut after the stage; see `BoundPrices`.
        price_C: added for a stage of the configuration.
    """

    layer_S5: Floats
    pass_S: Floats
    per_step_S: Floats
    cut_SM: Floats
    price_C: Floats


def weights(stage_S5: Floats, cut_S3: Floats, price_C: Floats, back_S: Mask | None = None) -> Weights:
    """Of a line, and prices for devices.

    Args:
        back_S: whether the message after each stage goes back to the rank before; None: all the same.
    """
    layer_S5 = stage_S5.copy()
    # The first stage leaves its whole backward pass to the second part: see `simulation.plans.stages_of`.
    layer_S5[0, BACKWARD] += layer_S5[0, BACKWARD_WEIGHT]
    layer_S5[0, BACKWARD_INPUT] = layer_S5[0, BACKWARD_WEIGHT] = 0.0
    cut_SM = cut_S3 if back_S is None else np.hstack([cut_S3 * ~back_S[:, None], cut_S3 * back_S[:, None]])
    return Weights(layer_S5, stage_S5[:, :PER_STEP].sum(axis=1), stage_S5[:, PER_STEP].copy(), cut_SM, price_C)


class Table(NamedTuple):
    """The cheapest ways to run what is left.

    Attributes:
        left_SL1G: [s, cut, g] stages s and after run the layers after the cut; the stage before is of class g.
        stop_SL1G, how_SL1G: [s, cut, g] where the stage that begins there ends, if it is of class g; its configuration.
        next_SL1G: [s, cut, g] the class of the stage that begins there, where the one before is of class g.
        first_G: the cheapest whole plans, by the first stage's class.
    """

    left_SL1G: Floats
    stop_SL1G: NDArray[np.int32]
    how_SL1G: NDArray[np.int32]
    next_SL1G: NDArray[np.int32]
    first_G: Floats

    @property
    def least(self) -> float:
        return float(self.first_G.min())

    def plan(self) -> tuple[Integers, Integers]:
        """Where each stage of the cheapest plan ends, and its configuration."""
        S = len(self.left_SL1G) - 1
        stop_S, how_S = np.zeros(S, np.int64), np.zeros(S, np.int64)
        start, g = 0, int(self.first_G.argmin())
        for s in range(S):
            if s:
                g = self.next_SL1G[s, start, g]
            stop_S[s], how_S[s] = self.stop_SL1G[s, start, g], self.how_SL1G[s, start, g]
            start = stop_S[s]
        return stop_S, how_S


class Spans(NamedTuple):
    """Between which stops the stages lie that are still considered; most are dropped soon, and need not be looked at.

    Attributes:
        any_SC: whether there is one.
        span_SCL2: [s, c, start] the first stop, and one more than the last.
    """

    any_SC: Mask
    span_SCL2: NDArray[np.int16]


def spans_of(alive_SCLL1: Mask) -> Spans:
    """What `drop` keeps up to date afterwards; wider spans than need be change no result."""
    return Spans(*_spans_of(alive_SCLL1))


@njit(cache=True, nogil=True)
def _spans_of(alive_SCLL1: Mask) -> tuple[Mask, NDArray[np.int16]]:
    S, C, L, L1 = alive_SCLL1.shape
    any_SC = np.zeros((S, C), np.bool_)
    span_SCL2 = np.zeros((S, C, L, 2), np.int16)
    for s in range(S):
        for c in range(C):
            for start in range(L):
                first, last = start + 1, L1 - 1
                while first < L1 and not alive_SCLL1[s, c, start, first]:
                    first += 1
                if first == L1:
                    continue
                while not alive_SCLL1[s, c, start, last]:
                    last -= 1
                any_SC[s, c] = True
                span_SCL2[s, c, start, 0], span_SCL2[s, c, start, 1] = first, last + 1
    return any_SC, span_SCL2


def table(prices: BoundPrices, weigh: Weights, alive_SCLL1: Mask, spans: Spans | None = None) -> Table:
    """The cheapest ways after each cut, among the stages that are still considered."""
    return Table(*_table(prices, weigh, alive_SCLL1, spans or spans_of(alive_SCLL1)))


@njit(cache=True, nogil=True)
def _table(
    prices: BoundPrices, weigh: Weights, alive_SCLL1: Mask, spans: Spans
) -> tuple[Floats, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], Floats]:
    S, _, L, _ = alive_SCLL1.shape
    G = prices.message_L1GGM.shape[1]
    left_SL1G = np.full((S + 1, L + 1, G), np.inf)
    stop_SL1G = np.full((S, L + 1, G), -1, np.int32)
    how_SL1G = np.full((S, L + 1, G), -1, np.int32)
    next_SL1G = np.full((S, L + 1, G), -1, np.int32)
    here_L1G = np.empty((L + 1, G))
    left_SL1G[S, L, :] = 0.0
    for s in range(S - 1, -1, -1):
        found = here_L1G, stop_SL1G[s], how_SL1G[s]
        _begin(prices, weigh, s, alive_SCLL1, spans, left_SL1G[s + 1], found)
        if s > 0:
            _cross(prices.message_L1GGM, weigh.cut_SM, s, here_L1G, left_SL1G[s], next_SL1G[s])
    return left_SL1G, stop_SL1G, how_SL1G, next_SL1G, here_L1G[0].copy()


@njit(cache=True, nogil=True)
def _begin(
    prices: BoundPrices,
    weigh: Weights,
    s: int,
    alive_SCLL1: Mask,
    spans: Spans,
    left_L1G: Floats,
    found: tuple[Floats, NDArray[np.int32], NDArray[np.int32]],
) -> None:
    """The cheapest ways from stage s on, without the messages to it, by where it begins and its class.

    Args:
        left_L1G: the cheapest ways after stage s.
        found: those from it on, where it stops, its configuration; all three are filled.
    """
    (here_L1G, stop_L1G, how_L1G), (any_SC, span_SCL2), class_C = found, spans, prices.class_C
    S, C, L, _ = alive_SCLL1.shape
    here_L1G[:] = np.inf
    sum_L1 = np.empty(L + 1)
    # Each stage before and after has a layer.
    begin, end = (s, L - (S - s) + 1) if s > 0 else (0, 1)
    for c in range(C):
        if not any_SC[s, c]:
            continue
        g = class_C[c]
        fixed = weighted(prices, weigh, s, c, sum_L1)
        for start in range(begin, end):
            least, where = here_L1G[start, g], -1
            base = fixed - sum_L1[start]
            first, last = span_SCL2[s, c, start, 0], span_SCL2[s, c, start, 1]
            for stop in range(max(first, start + 1 if s < S - 1 else L), min(last, L - (S - s - 1) + 1)):
                if not alive_SCLL1[s, c, start, stop]:
                    continue
                total = base + sum_L1[stop] + left_L1G[stop, g]
                if total < least:
                    least, where = total, stop
            if where >= 0:
                here_L1G[start, g], stop_L1G[start, g], how_L1G[start, g] = least, where, c


@njit(cache=True, nogil=True)
def _cross(
    message_L1GGM: Floats, cut_SM: Floats, s: int, here_L1G: Floats, left_L1G: Floats, next_L1G: NDArray[np.int32]
) -> None:
    """The cheapest ways after the cut before stage s, its messages included, by the class of the stage before it."""
    S, (L1, G) = len(cut_SM), here_L1G.shape
    for start in range(s, L1 - (S - s)):
        for h in range(G):
            if here_L1G[start, h] == np.inf:
                continue
            for g in range(G):
                total = here_L1G[start, h] + message(message_L1GGM, cut_SM, s - 1, start, g, h)
                if total < left_L1G[start, g]:
                    left_L1G[start, g], next_L1G[start, g] = total, h


@njit(cache=True, nogil=True)
def weighted(prices: BoundPrices, weigh: Weights, s: int, c: int, sum_L1: Floats) -> float:
    """Fills a configuration's weighted prefix sums at a place; returns what the stage takes whatever its layers."""
    sum_L1[:] = 0.0
    for k in range(5):
        weight = weigh.layer_S5[s, k]
        if weight != 0.0:
            for cut in range(len(sum_L1)):
                sum_L1[cut] += weight * prices.sum_5CL1[k, c, cut]
    fixed: float = weigh.pass_S[s] * prices.pass_C[c] + weigh.per_step_S[s] * prices.per_step_C[c] + weigh.price_C[c]
    return fixed


@njit(cache=True, nogil=True)
def message(message_L1GGM: Floats, cut_SM: Floats, s: int, cut: int, g: int, h: int) -> float:
    """What the messages after stage s take in the sum."""
    total = 0.0
    for part in range(cut_SM.shape[1]):
        total += cut_SM[s, part] * message_L1GGM[cut, g, h, part]
    return total


@njit(cache=True, nogil=True)
def enter_table(prices: BoundPrices, weigh: Weights, alive_SCLL1: Mask, place: int) -> Floats:
    """The least for all stages before a place and the messages between them, by where it begins and its class."""
    L1, G = alive_SCLL1.shape[3], prices.message_L1GGM.shape[1]
    enter_L1G = np.full((L1, G), np.inf)
    enter_L1G[0, :] = 0.0
    for s in range(place):
        before_L1G = _end(prices, weigh, s, alive_SCLL1, enter_L1G)
        _enter(prices.message_L1GGM, weigh.cut_SM, s + 1, before_L1G, enter_L1G)
    return enter_L1G


@njit(cache=True, nogil=True)
def _end(prices: BoundPrices, weigh: Weights, s: int, alive_SCLL1: Mask, enter_L1G: Floats) -> Floats:
    """The cheapest ways up to the stop of stage s, by the stop and the stage's class; from those up to its start."""
    S, C, L, _ = alive_SCLL1.shape
    before_L1G = np.full(enter_L1G.shape, np.inf)
    sum_L1, class_C = np.empty(L + 1), prices.class_C
    begin, end = (s, L - (S - s) + 1) if s > 0 else (0, 1)
    for c in range(C):
        g = class_C[c]
        fixed = weighted(prices, weigh, s, c, sum_L1)
        for start in range(begin, end):
            base = enter_L1G[start, g] + fixed - sum_L1[start]
            for stop in range(start + 1, L - (S - s - 1) + 1):
                if alive_SCLL1[s, c, start, stop]:
                    before_L1G[stop, g] = min(before_L1G[stop, g], base + sum_L1[stop])
    return before_L1G


@njit(cache=True, nogil=True)
def _enter(message_L1GGM: Floats, cut_SM: Floats, s: int, before_L1G: Floats, enter_L1G: Floats) -> None:
    """The cheapest ways before stage s, the messages to it included, by where it begins and its class."""
    S, (L1, G) = len(cut_SM), before_L1G.shape
    enter_L1G[:] = np.inf
    for start in range(s, L1 - (S - s)):
        for g in range(G):
            if before_L1G[start, g] == np.inf:
                continue
            for h in range(G):
                total = before_L1G[start, g] + message(message_L1GGM, cut_SM, s - 1, start, g, h)
                enter_L1G[start, h] = min(enter_L1G[start, h], total)


@njit(cache=True, nogil=True)
def drop(prices: BoundPrices, weigh: Weights, left_SL1G: Floats, alive_SCLL1: Mask, spans: Spans, limit: float) -> int:
    """Drop each stage without which no plan is below the limit: the cheapest plan with it is not. Returns what is left.

    The cheapest plan with a stage is the cheapest way before it, the stage, and the cheapest way after it; and the
    weighted sum is not above what a plan takes.
    """
    S, L1, G = len(alive_SCLL1), alive_SCLL1.shape[3], prices.message_L1GGM.shape[1]
    before_L1G, enter_L1G = np.empty((L1, G)), np.full((L1, G), np.inf)
    enter_L1G[0, :] = 0.0
    count = 0
    for s in range(S):
        if s > 0:
            _enter(prices.message_L1GGM, weigh.cut_SM, s, before_L1G, enter_L1G)
        ways = enter_L1G, left_SL1G[s + 1], before_L1G
        count += _drop_stages(prices, weigh, s, alive_SCLL1, spans, ways, limit)
    return count


@njit(cache=True, nogil=True)
def _drop_stages(
    prices: BoundPrices,
    weigh: Weights,
    s: int,
    alive_SCLL1: Mask,
    spans: Spans,
    ways: tuple[Floats, Floats, Floats],
    limit: float,
) -> int:
    """Drop those that stage s may be; how many are left.

    Args:
        ways: the cheapest ways up to the stage's start, from its stop on, and up to its stop; the last is filled.
    """
    (enter_L1G, left_L1G, before_L1G), (any_SC, span_SCL2), class_C = ways, spans, prices.class_C
    S, C, L, _ = alive_SCLL1.shape
    before_L1G[:] = np.inf
    sum_L1, count = np.empty(L + 1), 0
    begin, end = (s, L - (S - s) + 1) if s > 0 else (0, 1)
    for c in range(C):
        if not any_SC[s, c]:
            continue
        g, before = class_C[c], count
        fixed = weighted(prices, weigh, s, c, sum_L1)
        for start in range(begin, end):
            base = enter_L1G[start, g] + fixed - sum_L1[start]
            first, last = span_SCL2[s, c, start, 0], span_SCL2[s, c, start, 1]
            span_SCL2[s, c, start, 0] = span_SCL2[s, c, start, 1] = 0
            for stop in range(max(first, start + 1 if s < S - 1 else L), min(last, L - (S - s - 1) + 1)):
                if not alive_SCLL1[s, c, start, stop]:
                    continue
                total = base + sum_L1[stop]
                if total + left_L1G[stop, g] >= limit:
                    alive_SCLL1[s, c, start, stop] = False
                    continue
                if span_SCL2[s, c, start, 1] == 0:
                    span_SCL2[s, c, start, 0] = stop
                span_SCL2[s, c, start, 1] = stop + 1
                before_L1G[stop, g] = min(before_L1G[stop, g], total)
                count += 1
        any_SC[s, c] = count > before
    return count
