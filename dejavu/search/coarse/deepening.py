"""Plans with every cut, looked for where the bound is least: the gap to it is widened until a beam meets one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dejavu.plans import Plan
from dejavu.search._base import Incumbent
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.relaxation import Windowed
from dejavu.search.coarse.relaxed import Kept

_GOLDEN = 0.5 * (5**0.5 - 1)
_LOOKS = 7  # at the bound, for the limit where it is least
_LEAST_SHARE = 0.3  # of the largest limit worth a look: the first look's range begins there
_STEPS = (1.0, 1.01, 1.025, 0.99, 1.05, 1.005, 1.015)  # limits that are tried, in that one
_GAPS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.09)  # of the best price, above the bound
_WIDTHS = (64, 1024)  # of the beam, in labels at a cut


def look_for_plans(
    windowed: Windowed | Leveled, best: Incumbent, until_seconds: float, improve: Callable[[Plan], None]
) -> None:
    """Hand plans that are better than the best one to `improve`, which offers them."""
    if best.plan is None:
        return
    top = windowed.tightened(windowed.everything(), np.inf, np.inf)
    if top.sum_seconds == np.inf:
        return
    least, known = _least(windowed, best, top, until_seconds)
    for width in _WIDTHS:
        for step in _STEPS:
            if best.elapsed_seconds > until_seconds:
                return
            _deepen(windowed, best, known, step * least, width, improve)


def _least(windowed: Windowed | Leveled, best: Incumbent, top: Kept, until_seconds: float) -> tuple[float, Kept]:
    """The limit at which the bound on Σ, with the limit itself, is least: by golden section; and prices there."""
    known = replace(top, sum_seconds=0.0)

    def bound(limit: float) -> float:
        nonlocal known
        cutoff = best.step_seconds - limit
        found = windowed.tightened(known, limit, cutoff)
        known = replace(top, prices_R=found.prices_R, sum_seconds=0.0)  # what was counted holds under this limit
        return found.sum_seconds + limit

    high = best.step_seconds - top.sum_seconds
    low = _LEAST_SHARE * high
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = bound(a), bound(b)
    for _ in range(_LOOKS - 2):
        if best.elapsed_seconds > until_seconds:
            break
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = bound(a)
        else:  # also where no stages keep to either limit
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = bound(b)
    return (a if at_a < at_b else b), known


def _deepen(
    windowed: Windowed | Leveled,
    best: Incumbent,
    known: Kept,
    limit: float,
    width: int,
    improve: Callable[[Plan], None],
) -> None:
    """Plans with a bottleneck of about the limit: what is proved not to be there widens the gap at once."""
    here = windowed.tightened(known, limit, best.step_seconds - limit)
    bound = here.sum_seconds + limit
    for gap in _GAPS:
        target = bound + gap * best.step_seconds
        if here.sum_seconds + limit >= best.step_seconds or best.remaining_seconds < 0:
            return
        cutoff = min(target, best.step_seconds) - limit
        tight = windowed.tightened(here, limit, cutoff)
        if tight.sum_seconds < cutoff:
            plan = windowed.plan_under(tight, limit, cutoff, width)
            if plan is not None:
                improve(plan)
                return
        if target >= best.step_seconds:
            return
