"""Which trials are promoted: successive halving on the running training loss. Pure decisions, no Dask.

Synchronous halving decides ([Jamieson & Talwalkar, AISTATS 2016](https://arxiv.org/abs/1502.07943)); the asynchronous
rule only fills workers that would idle ([Li et al., MLSys 2020](https://arxiv.org/abs/1810.05934)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dejavu.workload import LEAST_RUNG_STEPS

LEAST_AVERAGED = 3  # losses in a running loss: that of one batch is noise
AVERAGED_PART = 4  # of a rung's losses, the last quarter is its running loss: the beginning of a curve says less
FLAT_FALL = 0.01  # of the running loss, over the second half of a rung: no more than batches differ from each other
# A weight of size 1 is rounded by the float32 epsilon, 2^-23; where the gradient is larger than its inverse, rounding
# alone moves the loss by more than 1, and no step has a meaning.
EXPLODING_GRADIENT_NORM = 2.0**23


def rungs(count: int, last_steps: int, reduction: int) -> tuple[int, ...]:
    """Return the numbers of steps after which `count` trials are compared, each `reduction` times the one before.

    The first rung is the shortest that is informative, and such that trials are left for the last.
    """
    steps = [last_steps]
    while reduction ** len(steps) <= count:
        shorter = round(last_steps / reduction ** len(steps))
        if shorter < LEAST_RUNG_STEPS:
            break
        steps.append(shorter)
    return tuple(reversed(steps))


def running_loss(losses: Sequence[float]) -> float:
    """Return a trial's score: the mean of its last losses; infinite where there are none."""
    return _mean_of_last(losses, _window(losses))


def unsafe(loss: float, gradient_norm: float) -> str:
    """Return why training cannot start from this first batch; empty where it can. Trials are never ranked by these."""
    if not math.isfinite(loss):
        return f"the loss was {loss} at step 0"
    if not math.isfinite(gradient_norm):
        return f"the gradient norm was {gradient_norm} at step 0"
    if gradient_norm == 0.0:
        return "the gradient norm was 0 at step 0: nothing can be learned"
    if gradient_norm > EXPLODING_GRADIENT_NORM:
        return f"the gradient norm was {gradient_norm:.1e} at step 0; wanted at most {EXPLODING_GRADIENT_NORM:.1e}"
    return ""


def survivors(curves: Sequence[Sequence[float]], reduction: int) -> list[int]:
    """Return which of a rung's trials are promoted, best first: one in `reduction`, and those still falling steeply.

    A trial that is not among the best is promoted too if, extrapolated by its own fall, it would beat the worst of them
    at the next rung. There are at most as many of these as of the best, and none whose curve is flat.

    Args:
        curves: each trial's losses up to this rung, all equally long; empty where it failed.
    """
    order = ranked([running_loss(curve) for curve in curves])
    best = order[: math.ceil(len(curves) / reduction)]
    if not best:
        return []
    later = {k: _extrapolated(curves[k], reduction) for k in order}
    steep = [k for k in order[len(best) :] if _is_steep(curves[k]) and later[k] < later[best[-1]]]
    return best + sorted(steep, key=later.__getitem__)[: len(best)]


def ahead(scores: Sequence[float], reduction: int) -> list[int]:
    """Return which finished trials may be promoted before their rung is complete, the best first (ASHA)."""
    return ranked(scores)[: len(scores) // reduction]


def ranked(scores: Sequence[float]) -> list[int]:
    """Return the trials with a finite score, the lowest first; ties in their order."""
    return sorted((k for k, score in enumerate(scores) if math.isfinite(score)), key=scores.__getitem__)


def _extrapolated(losses: Sequence[float], reduction: int) -> float:
    """Extrapolate the running loss to the next rung: each doubling of the steps lowers it as much as the last one.

    Losses fall about linearly in the logarithm of the steps; a line in the steps themselves would soon be below zero.
    """
    return running_loss(losses) - max(0.0, _fall(losses)) * math.log2(reduction)


def _is_steep(losses: Sequence[float]) -> bool:
    return _fall(losses) > FLAT_FALL * abs(running_loss(losses))


def _fall(losses: Sequence[float]) -> float:
    """Return by how much the running loss fell over the second half of the rung."""
    half = losses[: max(1, len(losses) // 2)]
    return _mean_of_last(half, _window(losses)) - running_loss(losses)


def _window(losses: Sequence[float]) -> int:
    return max(LEAST_AVERAGED, len(losses) // AVERAGED_PART)


def _mean_of_last(losses: Sequence[float], count: int) -> float:
    last = losses[-count:]
    return sum(last) / len(last) if last else math.inf
