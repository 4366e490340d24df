"""Plans with every cut, looked for where the bound is least: the gap to it is widened until a beam meets one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from dejavu.plans import Plan
from dejavu.search._base import Incumbent
from dejavu.search.coarse.levels.beams import put_together
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.looking.survey import EARLY, Survey
from dejavu.search.coarse.ranges import Sought
from dejavu.search.coarse.relaxed import Kept, bottleneck_seconds

_GOLDEN = 0.5 * (5**0.5 - 1)
_LEAST_SHARE = 0.02  # of the first plan's price: lower limits are not worth a look
_MOST_HIGHER = 1.6  # times as high the best limit is at most where more stages are counted
_FEW_MORE = 1.15  # times as many levels: the last one stands for more, and says enough of so few
_MORE_STAGES = 1.2  # times as many as that plan has: as levels are added the next one has more
_ROUGHLY = 0.02  # of the best price, by which bounds that were found in a few passes may be too low
_CLOSE = 0.2  # limits whose logarithms are no further from each other are one
_STEPS = (1.0, 1.01, 1.025, 0.99, 1.05, 1.005, 1.015)  # limits that are tried, in that one
_FROM = 1.1  # times the limit with the least bound over fewer cuts: prices are found sooner under higher ones
_FAR_STEPS = (1.1, 1.2, 1.4, 1.7, 2.2, 3.0, 5.0)  # where the first of these brings no plan
# For each level: with fewer cuts plans over them are far from those with every cut, and where the bound over them is
# least says little.
CUTS_EACH = 10
_HIGHER_STEPS = (1.06, 1.12)  # limits, in the first over more cuts, under which plans are looked for until one is met
_NEAR_STEPS = (1.0, 0.95, 1.1)  # the same for better ones, in the one with the least bound
_GAPS = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the bound, above it
_FINER_GAPS = (0.03, 0.3)  # the same over more cuts
_BETTER = 0.004  # of the best price: plans that are cheaper by less are not looked for
_FAR = 0.1  # of the bound: a plan that is dearer by more is far from it
_NUM_STARTS = 3  # of a stage to a cut: far from the bound there are too many
_WIDTHS, _FINER_WIDTH = (64, 1024), 1024  # of the beam, in labels at a cut


def look_for_plans(
    looks: Sequence[Leveled], best: Incumbent, until_seconds: float, improve: Callable[[Plan], None], sought: Sought
) -> None:
    """Hand plans that are better than the best one, or little worse, to `improve`, which offers them.

    Args:
        looks: over few cuts first, then over more: where the bound is least, and at which prices, is nearly the same.
        until_seconds: as the search's clock has it; as long again while the best plan is far from the bound, since
            below such a plan little can be proved.
        sought: is told what is known.
    """
    if best.plan is None:
        return
    top = looks[0].closer(looks[0].everything(), np.inf, np.inf)
    if top.sum_seconds == np.inf:
        return
    until = (until_seconds, 2.0 * until_seconds - best.elapsed_seconds)

    def is_late() -> bool:
        return sought.enough.is_set() or best.elapsed_seconds > until[1]

    look = looks[0].ending_early(EARLY) if len(looks) > 1 else looks[0]
    survey, limit = _counting(Survey(look, best, sought, top.prices_R, is_late), top, until_seconds)
    sought.met = survey.met
    sought.count(survey.look.num_levels)
    one = _Looking(survey, best, until, improve, _GAPS)
    if len(looks) > 1:
        _over_more(looks, one, limit)
        return
    _far_and_near(one, limit)
    first, *near = [step * limit for step in _STEPS]
    one.improves(_WIDTHS[0], near)
    one.improves(_WIDTHS[1], [first, *near])


def _far_and_near(one: _Looking, limit: float) -> None:
    """Under this limit, or where that brings no plan under higher ones: such a plan may be many times better, too."""
    if not any(one.improves(width, [limit]) for width in _WIDTHS):
        one.improves(_WIDTHS[0], [step * limit for step in _FAR_STEPS], once=True)


def _over_more(looks: Sequence[Leveled], counted: _Looking, limit: float) -> None:
    """Look for plans over more cuts, and survey them beside; `limit`: that with the least bound over few of them.

    Both begin with the prices that are the best there where stages end early. Plans do not, so they need higher limits.
    """
    few, own = (counted.survey.over(look.counting(counted.survey.look.num_levels - 1)) for look in looks)
    early, begin = own.over(own.look.ending_early(EARLY)), _FROM * limit
    early.bound(begin)
    survey = own.over(own.look, early.met)
    one = replace(counted, survey=survey, until_seconds=(counted.until_seconds[1],) * 2, gaps=_FINER_GAPS)
    with ThreadPoolExecutor(max_workers=1) as pool:
        surveyed = pool.submit(early.down, begin)
        has_enough = own.look.num_cuts >= CUTS_EACH * own.look.num_levels
        first = survey.least_near(_for_plans(own.look, begin)) if has_enough else begin
        if not one.improves(_FINER_WIDTH, [first]):
            _far_and_near(replace(counted, survey=few), _for_plans(few.look, limit))
            one.improves(_FINER_WIDTH, [step * first for step in _HIGHER_STEPS], once=True)
        early.beside().up(begin)
        surveyed.result()
    early.between(limit)
    early.sought.survey(early.bounds_seconds, [met for met in early.own_met if met.has_plans])
    counted.best.catch_up()
    if has_enough and min(early.bounds_seconds.values(), default=0.0) < counted.best.step_seconds * (1 - _BETTER):
        one.improves(_FINER_WIDTH, [step * first for step in _NEAR_STEPS])


def _for_plans(look: Leveled, limit: float) -> float:
    """About the limit that plans over these cuts keep to, where with every cut they would keep to this one."""
    return limit * (1.0 + look.num_levels / look.num_cuts)


@dataclass
class _Looking:
    """Looks for plans over some cuts.

    Attributes:
        survey: over these.
        best, improve: see `look_for_plans`.
        until_seconds: where the best plan is near the bound, and where it is far.
        gaps: of the bound, above it, within which beams look for plans.
        about_seconds: the last bound.
    """

    survey: Survey
    best: Incumbent
    until_seconds: tuple[float, float]
    improve: Callable[[Plan], None]
    gaps: Sequence[float]
    about_seconds: float = np.inf

    @property
    def is_late(self) -> bool:
        is_far = self.about_seconds == np.inf or self.best.step_seconds > (1 + _FAR) * self.about_seconds
        near_seconds, far_seconds = self.until_seconds
        enough = self.survey.sought.enough
        return enough.is_set() or self.best.elapsed_seconds > (far_seconds if is_far else near_seconds)

    def improves(self, width: int, limits: Sequence[float], *, once: bool = False) -> bool:
        """Whether a beam of this width meets a better plan under one of the limits; `once`: the first is enough."""
        before = self.best.step_seconds
        for limit in limits:
            if self.is_late or (once and self.best.step_seconds < before):
                break
            here = self.survey.at(limit)
            self.about_seconds = here.sum_seconds + limit
            self._deepen(here, limit, width)
        return self.best.step_seconds < before

    def _deepen(self, here: Kept, limit: float, width: int) -> None:
        """Plans with a bottleneck of about the limit: what is proved not to be there widens the gap at once."""
        bound, most = here.sum_seconds + limit, self.survey.most_seconds
        look = self.survey.look
        if bound < most and put_together(look, here, limit, self.best, self.improve, bound, self.until_seconds[1]):
            return
        for gap in self.gaps:
            target = min(bound * (1 + gap), most)
            if here.sum_seconds + limit >= most or self.best.remaining_seconds < 0:
                return
            until_seconds = self.until_seconds[1]
            plan, _ = look.plan_under(here, limit, target - limit, width, _NUM_STARTS, until_seconds)
            if plan is not None:
                self.improve(plan)
                return
            if target >= most:
                return


def _counting(survey: Survey, top: Kept, until_seconds: float) -> tuple[Survey, float]:
    """With as many levels as the cheapest relaxed plan has stages, and the limit with about the least bound.

    A first plan that is slow may have few stages where good ones have many.
    """
    look, best = survey.look, survey.best
    most, least = best.step_seconds - top.sum_seconds, max(survey.sought.least_limit, best.step_seconds * _LEAST_SHARE)
    if most <= least:  # of one microbatch the busiest stage adds little, or nothing
        return survey, max(most, 0.0)
    low, high = math.log(least), math.log(most)
    while True:
        limit = _least(survey, (low, high), until_seconds)
        plan = look.cheapest(survey.nearest(limit), limit)
        if plan is None or best.elapsed_seconds > until_seconds:
            return survey, limit
        assert plan.stages_3S is not None
        deeper = look.counting(int(_MORE_STAGES * plan.stages_3S.shape[1]))
        if deeper.num_levels < _FEW_MORE * look.num_levels:
            return survey, limit
        low, high = math.log(limit), min(high, math.log(_MOST_HIGHER * limit))
        survey, look = replace(survey, look=deeper), deeper


def _least(survey: Survey, between: tuple[float, float], until_seconds: float) -> float:
    """The limit at which the bound on Σ, with the limit itself, is about the least: by golden section.

    Between two logarithms, as a first plan may be many times as slow as the best one.

    Where the bounds at two limits say no more than that no plan is better than the best one, the least one is looked
    for on the side of that plan's own bottleneck.
    """
    best = survey.best
    assert best.plan is not None
    own_seconds = bottleneck_seconds(survey.look.problem, best.plan)

    def bound(limit: float) -> float:
        return limit + survey.at(limit, best.step_seconds - limit).sum_seconds

    low, high = between
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = bound(math.exp(a)), bound(math.exp(b))
    while high - low > _CLOSE and best.elapsed_seconds < until_seconds:
        says_nothing = min(at_a, at_b) >= best.step_seconds * (1 - _ROUGHLY)
        if own_seconds < math.exp(b) if says_nothing else at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = bound(math.exp(a))
        else:  # also where no stages keep to either limit
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = bound(math.exp(b))
    return math.exp(a if at_a < at_b else b)
