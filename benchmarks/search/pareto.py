"""The optimum of a problem in Alpa's form by another way than the searches: every step of the trade-off, in numpy.

f(b), the least sum of stage times of a plan with no stage slower than b, is a step function. From b = ∞ on, each plan
found has some slowest stage; the next program allows only stages faster than that one. So every pair (sum, slowest
stage) that is worth anything is met, and the best of sum + (B − 1) · slowest stage is the optimum. No bounds and no
pruning but that: thousands of programs where `exact` needs tens, and too simple to be wrong in the same way.
"""

from __future__ import annotations

import numpy as np

from benchmarks.search.alpa_loop import AlpaArrays


def optimum(arrays: AlpaArrays, num_microbatches: int) -> float:
    """The least step; infinite if nothing fits."""
    least_bottleneck = _least_bottleneck(arrays)
    best, limit, strict = np.inf, np.inf, False
    while True:
        total, slowest = _least_sum(arrays, limit, strict)
        if not np.isfinite(total):
            return float(best)
        best = min(best, total + (num_microbatches - 1) * slowest)
        if total + (num_microbatches - 1) * least_bottleneck >= best:  # sums only grow from here on
            return float(best)
        limit, strict = slowest, True


def _least_sum(arrays: AlpaArrays, limit: float, strict: bool) -> tuple[float, float]:
    """The least sum of a plan whose stages are all below the limit (or at it, if not strict), and its slowest stage."""
    seconds = arrays.seconds_LLMC
    allowed = (seconds < limit) if strict else (seconds <= limit)
    L, D = arrays.num_layers, arrays.num_devices
    if (arrays.max_successors_LLMC >= min(L, D) - 1).all():  # memory binds nowhere: one level of them will do
        cheapest_JLLM = np.where(allowed, seconds, np.inf).min(axis=-1)[None]
    else:
        fits = [allowed & (arrays.max_successors_LLMC >= j) for j in range(min(L, D))]
        cheapest_JLLM = np.stack([np.where(here, seconds, np.inf).min(axis=-1) for here in fits])
    J = len(cheapest_JLLM)
    # rest[j, k, d]: layers k to the last on exactly d devices, in j stages (in any number, where J is 1).
    rest = np.full((J + 1, L + 1, D + 1), np.inf)
    slowest = np.zeros_like(rest)
    rest[0, L, 0] = 0.0
    if J == 1:
        rest[1] = rest[0]
    for start in range(L - 1, -1, -1):
        for m, taken in enumerate(arrays.devices_M):
            if taken > D:
                continue
            t_JL = cheapest_JLLM[:, start, start:, m]
            successors = slice(0, J) if J > 1 else slice(1, 2)
            options = t_JL[:, :, None] + rest[successors, start + 1 :, : D + 1 - taken]
            chosen = options.argmin(axis=1)[:, None]
            total = np.take_along_axis(options, chosen, axis=1)[:, 0]
            worst = np.maximum(t_JL[:, :, None], slowest[successors, start + 1 :, : D + 1 - taken])
            worst = np.take_along_axis(worst, chosen, axis=1)[:, 0]
            better = total < rest[1:, start, taken:]
            rest[1:, start, taken:] = np.where(better, total, rest[1:, start, taken:])
            slowest[1:, start, taken:] = np.where(better, worst, slowest[1:, start, taken:])
    j = int(rest[:, 0, D].argmin())
    return float(rest[j, 0, D]), float(slowest[j, 0, D])


def _least_bottleneck(arrays: AlpaArrays) -> float:
    """No plan's slowest stage is faster: devices and memory are not asked."""
    cheapest_LL = arrays.seconds_LLMC.min(axis=(2, 3))
    least = np.full(arrays.num_layers + 1, np.inf)
    least[0] = 0.0
    for stop in range(1, arrays.num_layers + 1):
        least[stop] = np.maximum(least[:stop], cheapest_LL[:stop, stop - 1]).min()
    return float(least[-1])
