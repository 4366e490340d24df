"""Compiled loops of the PipeDream search: stages along a line of devices, none busier than a limit.

The devices stand in a line, type after type. Letters: K = cuts that are considered, the ends included; C =
configurations; G = groups of the same type, devices and links; A = link classes; D = types in the line's order; M1 =
places in the line, the end included. `behind`: stages behind a stage, of which few are always as good as more.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.search.shared.stage_table import stage_cost

NEVER = 2**31 - 1  # stages, where there is no way


@njit(cache=True, nogil=True, error_model="numpy")
def list_stages(costs, cut_K, member_C, need_J, repeats):
    """(busy seconds in a step, how many stages may be behind or −1) of every stage of every usable configuration."""
    K = len(cut_K)
    busy_CKK, behind_CKK = np.full((len(member_C), K, K), np.inf), np.full((len(member_C), K, K), -1, np.int32)
    for i in range(len(member_C)):
        for first in range(K - 1):
            for last in range(first + 1, K):
                seconds, once, fits = stage_cost(costs, cut_K[first], cut_K[last], member_C[i])
                busy_CKK[i, first, last] = (repeats + 1) * seconds + once
                behind = 0
                while behind < len(need_J) and need_J[behind] <= fits:
                    behind += 1
                behind_CKK[i, first, last] = behind - 1
    return busy_CKK, behind_CKK


@njit(cache=True, nogil=True, error_model="numpy")
def fewest_stages(limit, busy_CKK, behind_CKK, group_C, type_G, devices_G, class_G, link_KAA, end_D, use_all, most):
    """rest[k, m, a]: the fewest stages from cut k on, the first of class a on the devices from place m; NEVER if none.

    next[k, m, b]: the same behind a stage of class b that ends at place m; where devices may stay idle the next stage
    may begin at a later type's first. allowed[g, k, l]: how many stages may be behind a stage from cut k to l.
    """
    G, K, A, D = len(type_G), busy_CKK.shape[1], link_KAA.shape[1], len(end_D)
    M = end_D[D - 1]
    allowed_GKK = np.full((G, K, K), -1, np.int32)
    for i in range(len(group_C)):
        for first in range(K - 1):
            for last in range(first + 1, K):
                if busy_CKK[i, first, last] <= limit:
                    g = group_C[i]
                    allowed_GKK[g, first, last] = max(allowed_GKK[g, first, last], behind_CKK[i, first, last])
    rest_KMA, next_KMA = np.full((K, M + 1, A), NEVER, np.int32), np.full((K, M + 1, A), NEVER, np.int32)
    for k in range(K - 2, -1, -1):
        for g in range(G):
            begin = end_D[type_G[g] - 1] if type_G[g] > 0 else 0
            for last in range(k + 1, K):
                allowed = allowed_GKK[g, k, last]
                if allowed < 0:
                    continue
                for m in range(begin, end_D[type_G[g]] - devices_G[g] + 1):
                    after = m + devices_G[g]
                    if last < K - 1:
                        behind = next_KMA[last, after, class_G[g]]
                    else:
                        behind = 0 if after == M or not use_all else NEVER
                    if behind <= allowed and behind + 1 <= most:
                        rest_KMA[k, m, class_G[g]] = min(rest_KMA[k, m, class_G[g]], behind + 1)
        for b in range(A):
            for a in range(A):
                if link_KAA[k, b, a] <= limit:
                    for m in range(M + 1):
                        next_KMA[k, m, b] = min(next_KMA[k, m, b], rest_KMA[k, m, a])
        if not use_all:
            for d in range(D - 2, -1, -1):
                for m in range(end_D[d - 1] if d > 0 else 0, end_D[d]):
                    for b in range(A):
                        next_KMA[k, m, b] = min(next_KMA[k, m, b], next_KMA[k, end_D[d], b])
    return rest_KMA, next_KMA, allowed_GKK
