"""Plans with every cut, looked for where the bound is least: the gap to it is widened until a beam meets one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dejavu.plans import Plan, Problem, price
from dejavu.search._base import Incumbent
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.relaxation import Windowed
from dejavu.search.coarse.relaxed import Kept

_GOLDEN = 0.5 * (5**0.5 - 1)
_LOOKS = 7  # at the bound, for the limit where it is least
_LEAST_SHARE = 0.3  # of the largest limit worth a look: the first look's range begins there
_STEPS = (1.0, 1.01, 1.025, 0.99, 1.05, 1.005, 1.015)  # limits that are tried, in that one
_FINER_STEPS = (0.98, 1.0, 0.96, 0.99, 0.97)  # and from a plan over fewer cuts, whose stages are less even
_GAPS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.09, 0.14, 0.2, 0.3)  # of the best price, above the bound
_WORTH = 0.006  # of the best price: plans that are dearer by less are worth moving their cuts
_WIDTHS, _FINER_WIDTHS = (64, 1024), (512,)  # of the beam, in labels at a cut


def look_for_plans(
    looks: Sequence[Windowed | Leveled], best: Incumbent, until_seconds: float, improve: Callable[[Plan], None]
) -> float:
    """Hand plans that are better than the best one, or little worse, to `improve`, which offers them.

    Returns what no plan is much below, about: of the last looks the least.

    Args:
        looks: over few cuts first, then over more: where the bound is least, and at which prices, is nearly the same.
    """
    if best.plan is None:
        return 0.0
    top = looks[0].glanced(looks[0].everything(), np.inf, np.inf)
    if top.sum_seconds == np.inf:
        return np.inf
    limit, known = _least(looks[0], best, top, until_seconds)
    steps: tuple[float, ...] = _STEPS
    widths: tuple[int, ...] = _WIDTHS
    about = np.inf
    for look in looks:
        known, about = replace(look.everything(), prices_R=known.prices_R), np.inf
        for width in widths:
            for step in steps:
                if best.elapsed_seconds > until_seconds:
                    return about
                at = step * limit
                here = look.tightened(known, at, best.step_seconds * (1 + _WORTH) - at)
                about = min(about, here.sum_seconds + at)
                known = replace(known, prices_R=here.prices_R)  # what else is known now holds under this limit
                _deepen(look, best, here, at, width, improve)
        limit, steps, widths = _bottleneck_seconds(look.problem, best.plan), _FINER_STEPS, _FINER_WIDTHS
    return about


def _bottleneck_seconds(problem: Problem, plan: Plan) -> float:
    cost = price(problem, plan)
    return cost.step_seconds - sum(cost.stage_seconds) - sum(cost.transfer_seconds)


def _least(look: Windowed | Leveled, best: Incumbent, top: Kept, until_seconds: float) -> tuple[float, Kept]:
    """The limit at which the bound on Σ, with the limit itself, is least: by golden section; and prices there.

    Where the bounds at two limits say no more than that no plan is better than the best one, the least one is looked
    for on the side of that plan's own bottleneck.
    """
    assert best.plan is not None
    bottleneck, known = _bottleneck_seconds(look.problem, best.plan), replace(top, sum_seconds=0.0)

    def bound(limit: float) -> float:
        nonlocal known
        found = look.tightened(known, limit, best.step_seconds - limit)
        known = replace(known, prices_R=found.prices_R)
        return found.sum_seconds + limit

    high = best.step_seconds - top.sum_seconds
    low = _LEAST_SHARE * high
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = bound(a), bound(b)
    for _ in range(_LOOKS - 2):
        if best.elapsed_seconds > until_seconds:
            break
        says_nothing = min(at_a, at_b) >= best.step_seconds
        if bottleneck < b if says_nothing else at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = bound(a)
        else:  # also where no stages keep to either limit
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = bound(b)
    return (a if at_a < at_b else b), known


def _deepen(
    look: Windowed | Leveled, best: Incumbent, here: Kept, limit: float, width: int, improve: Callable[[Plan], None]
) -> None:
    """Plans with a bottleneck of about the limit: what is proved not to be there widens the gap at once."""
    bound, most = here.sum_seconds + limit, best.step_seconds * (1 + _WORTH)
    for gap in _GAPS:
        target = min(bound + gap * best.step_seconds, most)
        if here.sum_seconds + limit >= most or best.remaining_seconds < 0:
            return
        tight = look.tightened(here, limit, target - limit)
        if tight.sum_seconds < target - limit:
            plan = look.plan_under(tight, limit, target - limit, width)
            if plan is not None:
                improve(plan)
                return
        if target >= most:
            return
