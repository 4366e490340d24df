"""Compiled loop that moves the cuts of a plan, its configurations staying as they are.

Letters: S = stages, L1 = cut positions, C = configurations.
"""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.search.shared.stage_table import Costs, Ints, Links, stage_cost


@njit(cache=True, nogil=True, error_model="numpy")
def best_cuts(
    limit: float, repeats: float, reach: int, cuts_S1: Ints, need_S: Ints, how_S: Ints, costs: Costs, links: Links
) -> tuple[float, Ints]:
    """The cuts, each at most `reach` from where it was, with the least Σ and no bottleneck above the limit.

    Args:
        repeats: B − 1. need_S, how_S: microbatches in flight of each stage, and its configuration.
        costs, links: see `StageTable`.

    Returns:
        Σ, inf if there are none; and the cuts.
    """
    link_CC2, cut_bytes_L1 = links
    S = len(need_S)
    width = 2 * reach + 1
    rest = np.full((S + 1, width), np.inf)  # [s, w] from the cut before stage s on, the transfer across it included
    choice = np.zeros((S + 1, width), np.int64)
    last = cuts_S1[S]
    rest[S, reach] = 0.0
    for s in range(S - 1, -1, -1):
        for w in range(width):
            start = cuts_S1[s] - reach + w
            if start < 0 or start >= last or (s == 0 and start != 0):
                continue
            best = np.inf
            for v in range(width):
                stop = cuts_S1[s + 1] - reach + v
                if stop <= start or rest[s + 1, v] == np.inf:
                    continue
                seconds, once, fits = stage_cost(costs, start, stop, how_S[s])
                if repeats * seconds + once > limit:
                    break
                if fits < need_S[s]:
                    continue
                total = seconds + rest[s + 1, v]
                if total < best:
                    best = total
                    choice[s, w] = v
            if s > 0 and best < np.inf:
                before, here = how_S[s - 1], how_S[s]
                transfer = 2.0 * (link_CC2[before, here, 0] + link_CC2[before, here, 1] * cut_bytes_L1[start])
                best = best + transfer if repeats * transfer <= limit else np.inf
            rest[s, w] = best
    cuts = np.empty(S + 1, np.int64)
    w = reach
    for s in range(S):
        cuts[s] = cuts_S1[s] - reach + w
        w = choice[s, w]
    cuts[S] = last
    return rest[0, reach], cuts
