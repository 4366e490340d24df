"""Every plan of a V that no line rules out, rank by rank from the ends to the middle; as `_walk`, with pairs of stages.

Letters as in `_vee` and `_walk`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import ActionTable, Integers
from dejavu.simulation.bound._chain import Mask, Weights, weighted
from dejavu.simulation.bound._chain_walk import Walked, WalkLimits
from dejavu.simulation.bound._paths import longest
from dejavu.simulation.bound._prefix_sums import BoundPrices
from dejavu.simulation.bound._vee import Pairs, vee_table


class VeeLines(NamedTuple):
    """Several lines at once.

    Attributes:
        sum_NSCL1, fixed_NSC, cut_NS3, constant_N: as `_walk.Lines`.
        left_NPL1L1G: see `_vee.VeeTable`.
    """

    sum_NSCL1: Floats
    fixed_NSC: Floats
    cut_NS3: Floats
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
    S, C, L, _ = alive_SCLL1.shape
    sum_NSCL1, fixed_NSC = np.zeros((len(weighs), S, C, L + 1)), np.zeros((len(weighs), S, C))
    for n, (weigh, _) in enumerate(weighs):
        for s in range(S):
            for c in range(C):
                fixed_NSC[n, s, c] = weighted(prices, weigh, s, c, sum_NSCL1[n, s, c])
    lines = VeeLines(
        sum_NSCL1,
        fixed_NSC,
        np.array([weigh.cut_S3 for weigh, _ in weighs]),
        np.array([vee_table(prices, weigh, alive_SCLL1, allowed).left_PL1L1G for weigh, _ in weighs]),
        np.array([constant for _, constant in weighs]),
    )
    leaves_2KS = np.zeros((2, limits.most_leaves, S), np.int64)
    is_complete, limit, leaves = _vee_walk(
        prices, order, lines, alive_SCLL1, allowed.share_SCLL1, limits[:3], leaves_2KS
    )
    kept = min(leaves, limits.most_leaves)
    return Walked(is_complete, limit, leaves_2KS[0, :kept], leaves_2KS[1, :kept])


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
    """Fill the leaves; return whether the walk came to its end, its limit then, and how many leaves there were."""
    _, _, _, message_L1GG3, class_C, type_C, devices_C, count_T = prices
    sum_NSCL1, fixed_NSC, cut_NS3, left_NPL1L1G, constant_N = lines
    limit, most_steps, lowers = limits
    S, C, L, _ = alive_SCLL1.shape
    A = len(order.stage_A)
    P, N = S // 2, len(constant_N)
    # Rank r holds layers from_P[r] to near_P[r] and far_P[r] to until_P[r].
    from_P, until_P = np.zeros(P + 1, np.int64), np.zeros(P + 1, np.int64)
    near_P, far_P, how_P = np.zeros(P, np.int64), np.zeros(P, np.int64), np.full(P, -1)
    until_P[0] = L
    spent_P1N = np.zeros((P + 1, N))
    for n in range(N):
        spent_P1N[0, n] = constant_N[n]
    left_T = count_T.copy()
    stop_S, how_S = np.zeros(S, np.int64), np.zeros(S, np.int64)
    time_S5, time_S3 = np.zeros((S, 5)), np.zeros((S, 3))
    none_S5, none_S3 = np.zeros((0, 5)), np.zeros((0, 3))
    remembers = share_SCLL1.shape[0] > 0
    r, steps, leaves = 0, 0, 0
    while r >= 0:
        # The next option of rank r: where its second stage begins, then where its first ends, then its configuration.
        inner, z, c = 2 * (P - 1 - r), S - 1 - r, how_P[r]
        if c >= 0 and far_P[r] > near_P[r] + inner:
            far_P[r] -= 1
        elif c >= 0 and near_P[r] + 1 < until_P[r] - inner:
            near_P[r] += 1
            far_P[r] = until_P[r] - 1 if r < P - 1 else near_P[r]
        else:
            if c >= 0:
                left_T[type_C[c]] += devices_C[c]
            c += 1
            while c < C and devices_C[c] > left_T[type_C[c]]:
                c += 1
            if c == C:
                how_P[r] = -1
                r -= 1
                continue
            left_T[type_C[c]] -= devices_C[c]
            how_P[r], near_P[r] = c, from_P[r] + 1
            far_P[r] = until_P[r] - 1 if r < P - 1 else near_P[r]
        steps += 1
        if steps > most_steps:
            return False, limit, leaves
        a, b, near, far, g = from_P[r], until_P[r], near_P[r], far_P[r], class_C[c]
        if not alive_SCLL1[r, c, a, near] or not alive_SCLL1[z, c, far, b]:
            continue
        if remembers and share_SCLL1[r, c, a, near] + share_SCLL1[z, c, far, b] > 1.0:
            continue
        before = class_C[how_P[r - 1]] if r else 0
        is_ruled_out = False
        for n in range(N):
            spent = spent_P1N[r, n] + fixed_NSC[n, r, c] + fixed_NSC[n, z, c]
            spent += sum_NSCL1[n, r, c, near] - sum_NSCL1[n, r, c, a]
            spent += sum_NSCL1[n, z, c, b] - sum_NSCL1[n, z, c, far]
            if r:
                for part in range(3):
                    spent += cut_NS3[n, r - 1, part] * message_L1GG3[a, before, g, part]
                    spent += cut_NS3[n, z, part] * message_L1GG3[b, g, before, part]
            if spent + left_NPL1L1G[n, r + 1, near, far, g] >= limit:
                is_ruled_out = True
                break
            spent_P1N[r + 1, n] = spent
        if is_ruled_out:
            continue
        if r < P - 1:
            r += 1
            from_P[r], until_P[r] = near, far
            continue
        for q in range(P):
            stop_S[q], stop_S[S - 1 - q] = near_P[q], until_P[q]
            how_S[q] = how_S[S - 1 - q] = how_P[q]
        fill_times(prices, order, stop_S, how_S, time_S5, time_S3)
        steps += A
        seconds = longest(order, time_S5, time_S3, none_S5, none_S3)
        if seconds < limit:
            k = leaves % leaves_2KS.shape[1]
            for q in range(S):
                leaves_2KS[0, k, q], leaves_2KS[1, k, q] = stop_S[q], how_S[q]
            leaves += 1
            if lowers:
                limit = seconds
            elif leaves == leaves_2KS.shape[1]:
                return False, limit, leaves
    return True, limit, leaves


@njit(cache=True, nogil=True)
def fill_times(
    prices: BoundPrices, order: ActionTable, stop_S: Integers, how_S: Integers, time_S5: Floats, time_S3: Floats
) -> None:
    """What the stages of a plan take, and their messages; see `_dual.times_of`."""
    sum_5CL1, pass_C, per_step_C, message_L1GG3, class_C, _, _, _ = prices
    S, rank_S = len(stop_S), order.rank_S
    for s in range(S):
        c, start = how_S[s], stop_S[s - 1] if s else 0
        for k in range(5):
            time_S5[s, k] = sum_5CL1[k, c, stop_S[s]] - sum_5CL1[k, c, start]
        if s == 0:
            time_S5[0, 2], time_S5[0, 3] = 0.0, time_S5[0, 1]
        for k in range(4):
            time_S5[s, k] += pass_C[c]
        time_S5[s, 4] += per_step_C[c]
        if s and rank_S[s] != rank_S[s - 1]:
            for part in range(3):
                time_S3[s - 1, part] = message_L1GG3[start, class_C[how_S[s - 1]], class_C[c], part]
