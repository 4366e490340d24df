"""Compiled loops of the PipeDream search: stages along a line of devices, none busier than a limit.

The devices stand in a line, type after type. Letters: K = cuts that are considered, the ends included; C =
configurations; G = groups of the same type, devices and links; A = link classes; D = types in the line's order; M1 =
places in the line, the end included. `after`: stages after a stage, of which few are always as good as more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.shared.stage_table import Costs, Ints, stage_cost

NEVER = 2**31 - 1  # stages, where there is no way


class Stages(NamedTuple):
    """Every stage of every usable configuration; see `list_stages`.

    Attributes:
        busy_CKK, after_CKK: [c, k, l] of the layers between two cuts: seconds in a step; how many stages may be after.
        group_C: the configurations' groups.
    """

    busy_CKK: Floats
    after_CKK: NDArray[np.int32]
    group_C: Ints


class Line(NamedTuple):
    """The devices in a line, and what the groups take of it.

    Attributes:
        type_G, devices_G, class_G: a group's place in the order of the types, its devices and its link class.
        link_KAA: [cut, a, b] seconds in a step of a link between two classes.
        end_D: the place after the last device of each type.
        use_all, most_stages: whether no device may stay idle; how many stages a plan may have.
    """

    type_G: Ints
    devices_G: Ints
    class_G: Ints
    link_KAA: Floats
    end_D: Ints
    use_all: bool
    most_stages: int


@njit(cache=True, nogil=True, error_model="numpy")
def list_stages(
    costs: Costs, cut_K: Ints, member_C: Ints, need_J: Ints, repeats: int
) -> tuple[Floats, NDArray[np.int32]]:
    """(busy seconds in a step, how many stages may be after or −1) of every stage of every usable configuration."""
    K = len(cut_K)
    busy_CKK, after_CKK = np.full((len(member_C), K, K), np.inf), np.full((len(member_C), K, K), -1, np.int32)
    for i in range(len(member_C)):
        for first in range(K - 1):
            for last in range(first + 1, K):
                seconds, once, fits = stage_cost(costs, cut_K[first], cut_K[last], member_C[i])
                busy_CKK[i, first, last] = (repeats + 1) * seconds + once
                after = 0
                while after < len(need_J) and need_J[after] <= fits:
                    after += 1
                after_CKK[i, first, last] = after - 1
    return busy_CKK, after_CKK


@njit(cache=True, nogil=True, error_model="numpy")
def fewest_stages(
    limit: float, stages: Stages, line: Line
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """rest[k, a, m]: the fewest stages from cut k on, the first of class a on the devices from place m; NEVER if none.

    next[k, b, m]: the same after a stage of class b that ends at place m; where devices may stay idle the next stage
    may begin at a later type's first. allowed[g, k, l]: how many stages may be after a stage from cut k to l.
    """
    type_G, devices_G, class_G, link_KAA, end_D, use_all, most_stages = line
    allowed_GKK = _allowed(limit, stages, len(type_G))
    K, A, D = link_KAA.shape[0], link_KAA.shape[1], len(end_D)
    M = end_D[D - 1]
    rest_KAM, next_KAM = np.full((K, A, M + 1), NEVER, np.int32), np.full((K, A, M + 1), NEVER, np.int32)
    next_KAM[K - 1] = 0  # after the last layer no stage is needed
    if use_all:
        next_KAM[K - 1, :, :M] = NEVER
    for k in range(K - 2, -1, -1):
        for g in range(len(type_G)):
            a, begin = class_G[g], end_D[type_G[g] - 1] if type_G[g] > 0 else 0
            for last in range(k + 1, K):
                # The fewest stages after are enough to ask for: they hold the fewest microbatches, so that what fits
                # with more of them fits with these.
                most_after = min(allowed_GKK[g, k, last], most_stages - 1)
                if most_after < 0:
                    continue
                rest_M, next_M = rest_KAM[k, a, begin:], next_KAM[last, a, begin + devices_G[g] : end_D[type_G[g]] + 1]
                for m in range(len(next_M)):
                    rest_M[m] = min(rest_M[m], next_M[m] + 1 if next_M[m] <= most_after else NEVER)
        _look_past(k, limit, line, rest_KAM, next_KAM)
    next_KAM[K - 1] = NEVER
    return rest_KAM, next_KAM, allowed_GKK


@njit(cache=True, nogil=True, error_model="numpy")
def _allowed(limit: float, stages: Stages, num_groups: int) -> NDArray[np.int32]:
    """How many stages may be after a stage of each group that is no busier than the limit; −1: there is none."""
    busy_CKK, after_CKK, group_C = stages
    K = busy_CKK.shape[1]
    allowed_GKK = np.full((num_groups, K, K), -1, np.int32)
    for i in range(len(group_C)):
        g = group_C[i]
        for first in range(K - 1):
            for last in range(first + 1, K):
                if busy_CKK[i, first, last] <= limit:
                    allowed_GKK[g, first, last] = max(allowed_GKK[g, first, last], after_CKK[i, first, last])
    return allowed_GKK


@njit(cache=True, nogil=True, error_model="numpy")
def _look_past(k: int, limit: float, line: Line, rest_KAM: NDArray[np.int32], next_KAM: NDArray[np.int32]) -> None:
    """Fill `next` of a cut: across links that keep to the limit, and from a later type's first device on."""
    _, _, _, link_KAA, end_D, use_all, _ = line
    A, D = link_KAA.shape[1], len(end_D)
    for b in range(A):
        for a in range(A):
            if link_KAA[k, b, a] <= limit:
                rest_M, next_M = rest_KAM[k, a], next_KAM[k, b]
                for m in range(len(rest_M)):
                    next_M[m] = min(next_M[m], rest_M[m])
    if use_all:
        return
    for d in range(D - 2, -1, -1):
        for b in range(A):
            for m in range(end_D[d - 1] if d > 0 else 0, end_D[d]):
                next_KAM[k, b, m] = min(next_KAM[k, b, m], next_KAM[k, b, end_D[d]])
