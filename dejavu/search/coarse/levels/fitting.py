"""Whether any plan fits: one that a beam meets at the best prices, or prices that prove that there is none.

Where nothing costs time but devices have prices, and the cheapest plan even so costs more than all devices do, no plan
keeps to their counts (Farkas' lemma).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from dejavu.plans import Plan, Problem, is_valid
from dejavu.search._base import Incumbent
from dejavu.search.coarse.clusters import boundaries, num_few
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.relaxed import ROUNDING, Relaxed

_LIMITS = (np.inf, 1.0, 2.0, 4.0, 8.0)  # on the bottleneck, times the least Σ under none; low ones make for many stages
_GAPS = (0.03, 0.3, 3.0)  # of Σ at the best prices, above it
_WIDTHS = (64, 1024)  # of the beam, in labels at a level
_LOOK_STEPS, _PROOF_STEPS = 1e7, 2e8  # of one evaluation; for more there are fewer levels, which say less of memory
_NUM_STARTS = 3  # of a stage to a cut, that a beam tries
_MOST_PASSES = 6


def fit(problem: Problem, best: Incumbent) -> bool:
    """Offer a plan that fits, if one is met; whether it is proved that there is none. No: that is not settled."""
    relaxed = Relaxed(problem, best)
    few = relaxed.at_cuts(boundaries(problem, num_few(problem)))
    if _none_fits(relaxed, few):
        return True
    for plan in _plans(few):
        if is_valid(problem, plan):
            best.offer(plan)
            break
    return False


def is_feasible(problem: Problem, seconds: float) -> bool | None:
    """Whether a plan fits; None: that was not settled in this time, or so."""
    best = Incumbent(problem, "coarse", seconds)
    return False if fit(problem, best) else True if best.plan is not None else None


def _plans(few: Relaxed) -> Iterator[Plan]:
    """Plans that may fit: the memory of stages is looked at, not that of nodes, and messages as they are at the least.

    A low limit makes for many stages, which may be what fits.
    """
    look = Leveled(few, _affordable_levels(few, _LOOK_STEPS))
    top = look.tightened(look.everything(), np.inf, np.inf)
    for share in _LIMITS if top.sum_seconds < np.inf else ():
        limit = share * top.sum_seconds
        here = look.tightened(look.everything_at(top.prices_R), limit, np.inf)
        for width, gap in product(_WIDTHS, _GAPS if here.sum_seconds < np.inf else ()):
            if few.best.remaining_seconds < 0:
                return
            plan, _ = look.plan_under(here, limit, here.sum_seconds * (1 + gap), width, _NUM_STARTS)
            if plan is not None:
                yield plan


def _none_fits(relaxed: Relaxed, few: Relaxed) -> bool:
    """Whether prices prove it; over some of the cuts, few, they are found, and with every cut they are tried."""
    num_levels = _affordable_levels(relaxed, _PROOF_STEPS)
    quick, look = Leveled(few.without_seconds(), num_levels), Leveled(relaxed.without_seconds(), num_levels)
    known = look.everything_at(quick.tightened(quick.everything(), np.inf, np.inf).prices_R)
    for _ in range(_MOST_PASSES):
        known = look.closer(known, np.inf, np.inf)
        least = ROUNDING * (1.0 + float(relaxed.devices.count_R @ np.abs(known.prices_R)))
        if known.sum_seconds > least:
            return True
        if known.about_seconds <= least or relaxed.best.remaining_seconds < 0:
            return False
    return False


def _affordable_levels(relaxed: Relaxed, most_steps: float) -> int:
    num_cuts = len(relaxed.cuts_L1) - 1
    most = max(1, int(most_steps / (len(relaxed.kept) * num_cuts)))
    return min(most, Leveled.wanted_levels(relaxed, relaxed.num_stages))
