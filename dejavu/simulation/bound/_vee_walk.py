"""Every plan of a V that no line rules out, rank by rank from the ends to the middle.

As `_chain_walk`, with pairs of stages. Letters as in `_vee` and `_chain_walk`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import ActionTable, Integers
from dejavu.simulation.bound._chain import Mask, Weights
from dejavu.simulation.bound._chain_walk import Walked, WalkLimits, line_sums, look_at, walked_to
from dejavu.simulation.bound._prefix_sums import BoundPrices
from dejavu.simulation.bound._vee import Pairs, vee_table


class VeeLines(NamedTuple):
    """Several lines at once.

    Attributes:
        sum_NSCL1, fixed_NSC, cut_NSM, constant_N: as `_chain_walk.Lines`.
        left_NPL1L1G: see `_vee.VeeTable`.
    """

    sum_NSCL1: Floats
    fixed_NSC: Floats
    cut_NSM: Floats
    left_NPL1L1G: Floats
    constant_N: Floats


def vee_walk(
    prices: BoundPrices,
    order: ActionTable,
    weighs: list[tuple[Weights, float]],
    alive_SCLL1: Mask,
    allowed: Pairs,
    limits: WalkLimits,
) -> Walked:
    """All plans below the limit; given up after so many steps or leaves."""
    sum_NSCL1, fixed_NSC = line_sums(prices, weighs, alive_SCLL1)
    lines = VeeLines(
        sum_NSCL1,
        fixed_NSC,
        np.array([weigh.cut_SM for weigh, _ in weighs]),
        np.array([vee_table(prices, weigh, alive_SCLL1, allowed).left_PL1L1G for weigh, _ in weighs]),
        np.array([constant for _, constant in weighs]),
    )
    leaves_2KS = np.zeros((2, limits.most_leaves, len(alive_SCLL1)), np.int64)
    is_complete, limit, leaves = _vee_walk(
        prices, order, lines, alive_SCLL1, allowed.share_SCLL1, limits[:3], leaves_2KS
    )
    return walked_to(is_complete, limit, leaves, leaves_2KS)


@njit(cache=True, nogil=True)
def _vee_walk(
    prices: BoundPrices,
    order: ActionTable,
    lines: VeeLines,
    alive_SCLL1: Mask,
    share_SCLL1: NDArray[np.float32],
    limits: tuple[float, int, bool],
    leaves_2KS: Integers,
) -> tuple[bool, float, int]:
    """As `_chain_walk._walk`, depth first over ranks, which have two stages each."""
    message_L1GGM, class_C = prices.message_L1GGM, prices.class_C
    use_CT, left_T = prices.use_CT, prices.count_T.copy()
    sum_NSCL1, fixed_NSC, cut_NSM, left_NPL1L1G, constant_N = lines
    limit, most_steps, lowers = limits
    S, C, L, _ = alive_SCLL1.shape
    P, N, A = S // 2, len(constant_N), len(order.stage_A)
    # Rank r holds layers from_P1[r] to near_P[r] and far_P[r] to until_P1[r].
    from_P1, until_P1 = np.zeros(P + 1, np.int64), np.zeros(P + 1, np.int64)
    near_P, far_P, configuration_P = np.zeros(P, np.int64), np.zeros(P, np.int64), np.full(P, -1)
    until_P1[0] = L
    spent_P1N = np.zeros((P + 1, N))  # of the ranks before, with their messages
    spent_P1N[0] = constant_N
    stop_S, configuration_S, times = np.zeros(S, np.int64), np.zeros(S, np.int64), (np.zeros((S, 5)), np.zeros((S, 3)))
    remembers = share_SCLL1.shape[0] > 0
    r, steps, leaves = 0, 0, 0
    while r >= 0:
        # The next option of rank r: where its second stage begins, then where its first ends, then its configuration.
        # The ranks after need a layer for each of their stages between the two; the last leaves none between.
        inner, z, c = 2 * (P - 1 - r), S - 1 - r, configuration_P[r]
        if c >= 0 and far_P[r] > near_P[r] + inner:
            far_P[r] -= 1
        elif c >= 0 and near_P[r] + 1 < until_P1[r] - inner:
            near_P[r] += 1
            far_P[r] = until_P1[r] - 1 if r < P - 1 else near_P[r]
        else:
            if c >= 0:
                left_T += use_CT[c]
            c += 1
            while c < C and (use_CT[c] > left_T).any():
                c += 1
            if c == C:
                configuration_P[r] = -1
                r -= 1
                continue
            left_T -= use_CT[c]
            configuration_P[r], near_P[r] = c, from_P1[r] + 1
            far_P[r] = until_P1[r] - 1 if r < P - 1 else near_P[r]
        steps += 1
        if steps > most_steps:
            return False, limit, leaves
        a, b, near, far, g = from_P1[r], until_P1[r], near_P[r], far_P[r], class_C[c]
        # Dropped before: no plan below the limit has one of these stages.
        if not alive_SCLL1[r, c, a, near] or not alive_SCLL1[z, c, far, b]:
            continue
        # The rank's two stages do not fit its memory together.
        if remembers and share_SCLL1[r, c, a, near] + share_SCLL1[z, c, far, b] > 1.0:
            continue
        # A line that says that no plan which begins and ends so is below the limit; as in `_chain_walk`.
        before = class_C[configuration_P[r - 1]] if r else 0
        is_ruled_out = False
        for n in range(N):
            spent = spent_P1N[r, n] + fixed_NSC[n, r, c] + fixed_NSC[n, z, c]
            spent += sum_NSCL1[n, r, c, near] - sum_NSCL1[n, r, c, a]
            spent += sum_NSCL1[n, z, c, b] - sum_NSCL1[n, z, c, far]
            if r:
                for part in range(cut_NSM.shape[2]):
                    spent += cut_NSM[n, r - 1, part] * message_L1GGM[a, before, g, part]
                    spent += cut_NSM[n, z, part] * message_L1GGM[b, g, before, part]
            if spent + left_NPL1L1G[n, r + 1, near, far, g] >= limit:
                is_ruled_out = True
                break
            spent_P1N[r + 1, n] = spent
        if is_ruled_out:
            continue
        if r < P - 1:
            r += 1
            from_P1[r], until_P1[r] = near, far
            continue
        _unfold(near_P, until_P1, configuration_P, stop_S, configuration_S)
        steps += A
        limit, leaves = look_at(prices, order, (stop_S, configuration_S), times, (limit, lowers), leaves_2KS, leaves)
        if not lowers and leaves == leaves_2KS.shape[1]:
            return False, limit, leaves
    return True, limit, leaves


@njit(cache=True, nogil=True)
def _unfold(
    near_P: Integers, until_P1: Integers, configuration_P: Integers, stop_S: Integers, configuration_S: Integers
) -> None:
    """The stages of the ranks, in the model's order."""
    for r in range(len(near_P)):
        z = len(stop_S) - 1 - r
        stop_S[r], stop_S[z] = near_P[r], until_P1[r]
        configuration_S[r] = configuration_S[z] = configuration_P[r]
