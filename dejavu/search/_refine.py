"""Compiled loop that moves the cuts of a plan, its configurations staying as they are.

Letters: S = stages, L1 = cut positions; tables of a stage are rows of its configuration.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def best_cuts(
    limit, repeats, reach, cuts_S1, need_S,
    seconds_SL1, once_SL1, latency_S, fixed_SL1, active_SL1, step_SL1, scratch_SL, message_SL1, capacity_S,
    link_latency_S, link_per_byte_S, cut_bytes_L1,
):  # fmt: skip
    """The cuts, each at most `reach` from where it was, with the least Σ and no bottleneck above the limit.

    Args:
        repeats: B − 1. need_S: microbatches in flight of each stage. link_latency_S, link_per_byte_S: to the next one.

    Returns:
        Σ, inf if there are none; and the cuts.
    """
    S = len(need_S)
    width = 2 * reach + 1
    behind = np.full((S + 1, width), np.inf)  # [s, w] from the cut before stage s on, the transfer across it included
    choice = np.zeros((S + 1, width), np.int64)
    last = cuts_S1[S]
    behind[S, reach] = 0.0
    for s in range(S - 1, -1, -1):
        for w in range(width):
            start = cuts_S1[s] - reach + w
            if start < 0 or start >= last or (s == 0 and start != 0):
                continue
            scratch, scanned, best = 0.0, start, np.inf
            for v in range(width):
                stop = cuts_S1[s + 1] - reach + v
                if stop <= start or behind[s + 1, v] == np.inf:
                    continue
                while scanned < stop:
                    scratch = max(scratch, scratch_SL[s, scanned])
                    scanned += 1
                seconds = seconds_SL1[s, stop] - seconds_SL1[s, start]
                if repeats * seconds + (once_SL1[s, stop] - once_SL1[s, start] + latency_S[s]) > limit:
                    break
                messages = message_SL1[s, start] + message_SL1[s, stop]
                free = capacity_S[s] - (fixed_SL1[s, stop] - fixed_SL1[s, start] + messages)
                working = scratch + need_S[s] * (active_SL1[s, stop] - active_SL1[s, start])
                if working > free or step_SL1[s, stop] - step_SL1[s, start] > free:
                    continue
                total = seconds + behind[s + 1, v]
                if total < best:
                    best = total
                    choice[s, w] = v
            if s > 0 and best < np.inf:
                transfer = 2.0 * (link_latency_S[s - 1] + link_per_byte_S[s - 1] * cut_bytes_L1[start])
                best = best + transfer if repeats * transfer <= limit else np.inf
            behind[s, w] = best
    cuts = np.empty(S + 1, np.int64)
    w = reach
    for s in range(S):
        cuts[s] = cuts_S1[s] - reach + w
        w = choice[s, w]
    cuts[S] = last
    return behind[0, reach], cuts
