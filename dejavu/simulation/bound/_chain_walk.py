"""Every plan that no line rules out, stage by stage: what the table over cuts lets in too much is left out here.

Devices are counted, the stages of a rank have one configuration, and each plan that is reached has its own longest path
looked at. A partial plan is left as soon as one line says that it cannot be completed below the limit: the line's
seconds of its stages so far, and the least of the line over all ways to run the layers left.
Letters: N = lines; others as in `_chain`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import NOTHING, ActionTable, Integers
from dejavu.simulation.bound._chain import Mask, Weights, spans_of, table, weighted
from dejavu.simulation.bound._paths import longest
from dejavu.simulation.bound._prefix_sums import BoundPrices


class Lines(NamedTuple):
    """Several lines at once.

    Attributes:
        sum_NSCL1, fixed_NSC: a stage is a difference of two sums, and what it takes whatever its layers.
        cut_NSM: a message's parts, across the cut after the stage.
        left_NSL1G: the least for stages s and after; see `_chain.Table`.
        constant_N: added to every plan.
    """

    sum_NSCL1: Floats
    fixed_NSC: Floats
    cut_NSM: Floats
    left_NSL1G: Floats
    constant_N: Floats


class WalkLimits(NamedTuple):
    """How far a walk goes.

    Attributes:
        seconds: only plans whose longest path is below this are looked for.
        most_steps: after so many it is given up.
        lowers: each plan that is met lowers the limit to its own longest path; else all are kept.
        most_leaves: plans that are kept; the last ones where the limit is lowered, else more are a reason to give up.
    """

    seconds: float
    most_steps: int
    lowers: bool
    most_leaves: int


class Walked(NamedTuple):
    """What a walk found.

    Attributes:
        is_complete: every plan that is not among the leaves takes at least `limit`.
        limit: the limit in the end; that of the last leaf where leaves lowered it.
        stop_KS, configuration_KS: the leaves: plans whose longest path was below the limit.
    """

    is_complete: bool
    limit: float
    stop_KS: Integers
    configuration_KS: Integers


def lines_of(prices: BoundPrices, weighs: list[tuple[Weights, float]], alive_SCLL1: Mask) -> Lines:
    """The lines' sums, and their least for what is left."""
    spans = spans_of(alive_SCLL1)
    sum_NSCL1, fixed_NSC = line_sums(prices, weighs, alive_SCLL1)
    return Lines(
        sum_NSCL1,
        fixed_NSC,
        np.array([weigh.cut_SM for weigh, _ in weighs]),
        np.array([table(prices, weigh, alive_SCLL1, spans).left_SL1G for weigh, _ in weighs]),
        np.array([constant for _, constant in weighs]),
    )


def line_sums(prices: BoundPrices, weighs: list[tuple[Weights, float]], alive_SCLL1: Mask) -> tuple[Floats, Floats]:
    """What each line counts for a stage: a difference of two sums, and what it takes whatever its layers."""
    S, C, L, _ = alive_SCLL1.shape
    sum_NSCL1, fixed_NSC = np.zeros((len(weighs), S, C, L + 1)), np.zeros((len(weighs), S, C))
    for n, (weigh, _) in enumerate(weighs):
        for s in range(S):
            for c in range(C):
                fixed_NSC[n, s, c] = weighted(prices, weigh, s, c, sum_NSCL1[n, s, c])
    return sum_NSCL1, fixed_NSC


class Ranks(NamedTuple):
    """Which stages share a rank's devices.

    Attributes:
        partner_S: the rank's first stage, for its second; else NOTHING.
        share_SCLL1: the part of the memory that a stage takes of its rank's devices; together at most 1. Or empty.
    """

    partner_S: Integers
    share_SCLL1: NDArray[np.float32]


def walk(
    prices: BoundPrices,
    order: ActionTable,
    lines: Lines,
    alive_SCLL1: Mask,
    share_SCLL1: NDArray[np.float32],
    limits: WalkLimits,
) -> Walked:
    """All plans below the limit; given up after so many steps or leaves."""
    S = len(order.rank_S)
    first: dict[int, int] = {}
    partner_S = np.array([first.setdefault(rank, s) for s, rank in enumerate(order.rank_S)])
    partner_S[partner_S == np.arange(S)] = NOTHING
    leaves_2KS = np.zeros((2, limits.most_leaves, S), np.int64)
    is_complete, limit, leaves = _walk(
        prices, order, lines, alive_SCLL1, Ranks(partner_S, share_SCLL1), limits[:3], leaves_2KS
    )
    return walked_to(is_complete, limit, leaves, leaves_2KS)


def walked_to(is_complete: bool, limit: float, leaves: int, leaves_2KS: Integers) -> Walked:
    """What a compiled walk came to."""
    kept = min(leaves, leaves_2KS.shape[1])
    return Walked(is_complete, limit, leaves_2KS[0, :kept], leaves_2KS[1, :kept])


@njit(cache=True, nogil=True)
def _walk(
    prices: BoundPrices,
    order: ActionTable,
    lines: Lines,
    alive_SCLL1: Mask,
    ranks: Ranks,
    limits: tuple[float, int, bool],
    leaves_2KS: Integers,
) -> tuple[bool, float, int]:
    """Fill the leaves; return whether the walk came to its end, its limit then, and how many leaves there were.

    Depth first: stage s stands at one of its options (a configuration, a stop), the stages before it at theirs.
    """
    message_L1GGM, class_C = prices.message_L1GGM, prices.class_C
    use_CT, left_T = prices.use_CT, prices.count_T.copy()
    sum_NSCL1, fixed_NSC, cut_NSM, left_NSL1G, constant_N = lines
    (limit, most_steps, lowers), (partner_S, share_SCLL1) = limits, ranks
    remembers = share_SCLL1.shape[0] > 0
    S, C, L, _ = alive_SCLL1.shape
    N, A = len(constant_N), len(order.stage_A)
    start_S, stop_S, configuration_S = np.zeros(S + 1, np.int64), np.zeros(S, np.int64), np.full(S, -1)
    spent_S1N = np.zeros((S + 1, N))  # of the stages before, with their messages
    spent_S1N[0] = constant_N
    times = np.zeros((S, 5)), np.zeros((S, 3))
    s, steps, leaves = 0, 0, 0
    while s >= 0:
        # The next option of stage s: its stop, then its configuration. In the loop: as a function it takes longer.
        partner, c = partner_S[s], configuration_S[s]
        if c >= 0 and stop_S[s] < L - (S - s - 1):
            stop_S[s] += 1
        else:  # a rank's second stage has the configuration of its first
            if c >= 0 and partner == NOTHING:
                left_T += use_CT[c]
            if partner == NOTHING:
                c += 1
                while c < C and (use_CT[c] > left_T).any():
                    c += 1
            else:
                c = configuration_S[partner] if c < 0 else C
            if c == C:
                configuration_S[s] = -1
                s -= 1
                continue
            if partner == NOTHING:
                left_T -= use_CT[c]
            configuration_S[s] = c
            stop_S[s] = start_S[s] + 1 if s < S - 1 else L
        steps += 1
        if steps > most_steps:
            return False, limit, leaves
        start, stop = start_S[s], stop_S[s]
        # Dropped before: no plan below the limit has this stage.
        if not alive_SCLL1[s, c, start, stop]:
            continue
        # The two stages of a rank do not fit its memory together.
        if remembers and partner != NOTHING:
            other = share_SCLL1[partner, c, start_S[partner], stop_S[partner]]
            if other + share_SCLL1[s, c, start, stop] > 1.0:
                continue
        # Each line counts at most the step of any plan: where its seconds of the stages so far and the least for those
        # after come to the limit, every plan that begins so takes at least that.
        g, is_ruled_out = class_C[c], False
        for n in range(N):
            spent = spent_S1N[s, n]
            if s:
                before = class_C[configuration_S[s - 1]]
                for part in range(cut_NSM.shape[2]):
                    spent += cut_NSM[n, s - 1, part] * message_L1GGM[start, before, g, part]
            spent += fixed_NSC[n, s, c] + sum_NSCL1[n, s, c, stop] - sum_NSCL1[n, s, c, start]
            if spent + left_NSL1G[n, s + 1, stop, g] >= limit:
                is_ruled_out = True
                break
            spent_S1N[s + 1, n] = spent
        if is_ruled_out:
            continue
        if s < S - 1:
            s += 1
            start_S[s] = stop
            continue
        steps += A
        limit, leaves = look_at(prices, order, (stop_S, configuration_S), times, (limit, lowers), leaves_2KS, leaves)
        if not lowers and leaves == leaves_2KS.shape[1]:
            return False, limit, leaves
    return True, limit, leaves


@njit(cache=True, nogil=True)
def look_at(
    prices: BoundPrices,
    order: ActionTable,
    plan: tuple[Integers, Integers],
    times: tuple[Floats, Floats],
    limit: tuple[float, bool],
    leaves_2KS: Integers,
    leaves: int,
) -> tuple[float, int]:
    """Write a plan down if its longest path is below the limit; the limit and the number of leaves from then on.

    Args:
        plan: where its stages stop, and their configurations.
        times: scratch, S × 5 and S × 3; zeros in the beginning.
        limit: in seconds, and whether a plan below it lowers it to its own longest path.
        leaves_2KS: plans beyond as many as there is room for are written over the earliest.
    """
    (stop_S, configuration_S), (time_S5, time_S3), (limit_seconds, lowers) = plan, times, limit
    _fill_times(prices, order, stop_S, configuration_S, time_S5, time_S3)
    seconds = longest(order, time_S5, time_S3, np.zeros((0, 5)), np.zeros((0, 3)))
    if seconds >= limit_seconds:
        return limit_seconds, leaves
    k = leaves % leaves_2KS.shape[1]
    for s in range(len(stop_S)):
        leaves_2KS[0, k, s], leaves_2KS[1, k, s] = stop_S[s], configuration_S[s]
    return seconds if lowers else limit_seconds, leaves + 1


@njit(cache=True, nogil=True)
def _fill_times(
    prices: BoundPrices,
    order: ActionTable,
    stop_S: Integers,
    configuration_S: Integers,
    time_S5: Floats,
    time_S3: Floats,
) -> None:
    """What the stages of a plan take, and their messages; see `_dual.times_of`."""
    sum_5CL1, pass_C, per_step_C, message_L1GGM, class_C, _, _ = prices
    S, rank_S = len(stop_S), order.rank_S
    for s in range(S):
        c, start = configuration_S[s], stop_S[s - 1] if s else 0
        for k in range(5):
            time_S5[s, k] = sum_5CL1[k, c, stop_S[s]] - sum_5CL1[k, c, start]
        if s == 0:
            time_S5[0, 2], time_S5[0, 3] = 0.0, time_S5[0, 1]
        for k in range(4):
            time_S5[s, k] += pass_C[c]
        time_S5[s, 4] += per_step_C[c]
        if s and rank_S[s] != rank_S[s - 1]:
            before = class_C[configuration_S[s - 1]]
            skipped = 3 if message_L1GGM.shape[3] > 3 and rank_S[s] == rank_S[s - 1] - 1 else 0
            for part in range(3):
                time_S3[s - 1, part] = message_L1GGM[start, before, class_C[c], skipped + part]
