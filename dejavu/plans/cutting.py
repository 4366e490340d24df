"""Layers in as many stages as there are devices, in order, the slowest stage as fast as can be."""

from __future__ import annotations

import numpy as np

from dejavu.foundation.compiled import njit
from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural


def fastest_cuts(seconds_SL: np.ndarray) -> list[int]:
    """Return where S stages begin, and the last one ends, so that the slowest is fastest, by dynamic programming.

    Args:
        seconds_SL: what a layer takes in a stage; inf where it cannot run there.

    Raises:
        InputError: in every cut a stage has a layer that it cannot run, or none.
    """
    S, L = seconds_SL.shape
    runs_SL = np.isfinite(seconds_SL)
    # Layers that cannot run are told apart, and not summed: a difference of infinite sums is none.
    sums_SL1 = np.pad(np.cumsum(np.where(runs_SL, seconds_SL, 0.0), axis=1), ((0, 0), (1, 0)))
    slowest, start_SL1 = _starts(sums_SL1, runs_SL)
    if not np.isfinite(slowest):
        raise InputError(f"no cut into {plural(S, 'stage')} gives each layers that its devices can run")
    bounds = [L]
    for s in reversed(range(S)):
        bounds.append(int(start_SL1[s, bounds[-1]]))
    return bounds[::-1]


def load_compiled_loops() -> None:
    """Load the loop, or compile it."""
    fastest_cuts(np.ones((1, 1)))


@njit(cache=True, nogil=True)
def _starts(sums_SL1: np.ndarray, runs_SL: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the slowest of S stages of all layers, and where stage s begins if it ends before a layer; the first."""
    S, L = runs_SL.shape
    best_L1, after_L1 = np.full(L + 1, np.inf), np.full(L + 1, np.inf)
    best_L1[0] = 0.0
    start_SL1 = np.zeros((S, L + 1), np.int64)
    for s in range(S):
        for stop in range(L + 1):
            least = np.inf
            for start in range(stop - 1, -1, -1):
                stage = sums_SL1[s, stop] - sums_SL1[s, start]
                if not runs_SL[s, start] or stage > least:
                    break  # an earlier start takes no less
                slowest = max(best_L1[start], stage)
                if slowest <= least:
                    least, start_SL1[s, stop] = slowest, start
            after_L1[stop] = least
        best_L1, after_L1 = after_L1, best_L1
    return float(best_L1[L]), start_SL1
