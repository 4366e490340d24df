"""Beams with every cut, next to the bound: plans that they meet, and what they prove where prices prove no more.

Prices let devices be parts of one: of a mean of plans whole plans may be some percent dearer, the more the fewer stages
they have. A beam counts devices in whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dejavu.plans import Plan
from dejavu.search._base import Incumbent
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.relaxed import Kept, apart

GAP = 0.015  # of the best price, above the bound: plans that are looked for
WIDER_GAPS = (GAP, 0.03, 0.06, 0.12)  # the same where no plan is known that is near, one after the other
_MET = 0.0  # in place of a gap: the states of plans that prices brought forth
_VARIED = (0.7, 1.4)  # times prices, see `Leveled.plan_under`
_MOST_GAP = 0.03  # where many states are left
_SHARE = 0.35  # of the time that is left, for one beam
_WIDTH = 2048  # in labels at a level
_NUM_STARTS = 3  # of a stage to a cut, further from the bound
_MANY_STATES = 200_000  # of which a beam with few starts and labels takes a second
_NARROW_WIDTH, _FEWEST_STARTS = 512, 1  # of such a beam
_PROVING_WIDTH, _WIDENED = 1024, 4  # of one that proves, and how many times as wide the next ones are
_FEW_STATES = 60_000  # of which a beam takes a part of a second
_FEWEST_STATES = 5_000  # of which it takes so little that wider ones follow at once
_NEAR_BEST = 0.01  # of the best price: prices that prove less than the best by more are no guide
_APART = 0.005  # of their sum, limits whose beams meet different plans
_BETTER = 0.004  # of the best price: plans that may be cheaper by that are looked for


class Beams:
    """Looks next to the bound with beams, once for each gap and limits that are near each other.

    Attributes:
        is_narrow: one that proves has left labels out, and a wider one may prove more.
    """

    def __init__(self, best: Incumbent, improve: Callable[[Plan], None] | None) -> None:
        """`improve`: is handed the plans that are met; None: none are looked for."""
        self._best, self._improve = best, improve
        self._looked = list[tuple[float, float]]()
        self._width, self.is_narrow = _PROVING_WIDTH, False

    def widen(self) -> None:
        self._width, self.is_narrow = _WIDENED * self._width, False

    def are_few(self, known: Kept, leveled: Leveled) -> bool:
        """Whether so few states are left that a beam is quick; False where none can be."""
        return leveled.has_beams and _num_states(known) <= _FEW_STATES

    def raised(self, known: Kept, limit: float, leveled: Leveled, wanted_seconds: float) -> Kept:
        """With what beams prove of the plans whose Σ is next to the bound, all or many of which they keep.

        Of very few states one after the other, each twice as far from the bound, until one has left plans out or met
        one.

        Args:
            wanted_seconds: a Σ that is enough.
        """
        gap_seconds = GAP * self._best.step_seconds
        while True:
            cutoff, until_seconds = min(known.cutoff, known.sum_seconds + gap_seconds), self._until_seconds
            plan, least_seconds = leveled.plan_under(
                known, limit, cutoff, self._width, until_seconds=until_seconds, proves=True
            )
            if plan is not None and self._improve is not None:
                self._improve(plan)
            self.is_narrow = self.is_narrow or (plan is None and -math.inf < least_seconds < cutoff)
            has_room = plan is None and known.sum_seconds < cutoff <= least_seconds
            known = replace(known, sum_seconds=max(known.sum_seconds, least_seconds))
            is_enough = cutoff >= min(wanted_seconds, known.cutoff) or _num_states(known) > _FEWEST_STATES
            if not has_room or is_enough or self._best.remaining_seconds < 0:
                return known
            gap_seconds *= 2

    def look(self, known: Kept, limit: float, leveled: Leveled, gaps: Sequence[float] = (GAP,)) -> None:
        """Look for a plan that is better than the best, of states that are next to the bound; until one is met."""
        best_seconds = self._best.step_seconds
        bound, about = known.sum_seconds + limit, known.about_seconds + limit
        if about - bound > _NEAR_BEST * best_seconds or self._improve is None or known.near is None:
            return
        if not self._has_looked(limit, _MET):
            self._looked.append((limit, _MET))
            if self._from_few_starts(known, limit, leveled):
                return
            least_seconds = bound + _BETTER * best_seconds
            if put_together(leveled, known, limit, self._best, self._improve, least_seconds, self._until_seconds):
                return
        if not self.are_few(replace(known, states=known.near), leveled):
            return
        for gap in gaps:
            most = min(about * (1 + gap), best_seconds)
            if gap > _MOST_GAP and not self.are_few(known, leveled):
                return
            if self._has_looked(limit, gap) or most < bound + _BETTER * best_seconds:
                continue
            self._looked.append((limit, gap))
            here = replace(known, states=known.near if gap <= GAP else known.states)
            num_starts, until_seconds = None if gap <= GAP else _NUM_STARTS, self._until_seconds
            plan, least_seconds = leveled.plan_under(here, limit, most - limit, _WIDTH, num_starts, until_seconds)
            if plan is not None:
                self._improve(plan)
            if self._best.step_seconds < best_seconds or most == best_seconds or least_seconds == -math.inf:
                return  # a wider one would take longer

    def _from_few_starts(self, known: Kept, limit: float, leveled: Leveled) -> bool:
        """Whether a plan is met that is better than the best, among all states that are next to the bound.

        With the best start of each stage alone labels differ in what they have taken, which is what plans fail at.
        """
        here, before = replace(known, states=known.near), self._best.step_seconds
        if not leveled.has_beams or self._improve is None or _num_states(here) > _MANY_STATES:
            return False
        for varied in ((), _VARIED):
            most = min((known.about_seconds + limit) * (1 + GAP), self._best.step_seconds)
            if most < known.sum_seconds + limit + _BETTER * before:
                break
            plan, _ = leveled.plan_under(
                here, limit, most - limit, _NARROW_WIDTH, _FEWEST_STARTS, self._until_seconds, varied=varied
            )
            if plan is not None:
                self._improve(plan)
            if self._best.step_seconds < before:
                return True
        return False

    @property
    def _until_seconds(self) -> float:
        return self._best.elapsed_seconds + _SHARE * self._best.remaining_seconds

    def _has_looked(self, limit: float, gap: float) -> bool:
        """Whether at this limit, or at one that is as good as the same."""
        return any(gap == other_gap and apart(limit, other) < _APART for other, other_gap in self._looked)


def put_together(
    leveled: Leveled,
    known: Kept,
    limit: float,
    best: Incumbent,
    improve: Callable[[Plan], None],
    least_seconds: float = 0.0,
    until_seconds: float = math.inf,
) -> bool:
    """Hand over plans that are put together of those that prices brought forth; whether one is better than the best.

    These are few states, so this takes a second or two where a beam over all that is near takes many.

    Args:
        least_seconds: better plans are not looked for.
        until_seconds: as the search's clock has it.
    """
    before, here = best.step_seconds, replace(known, states=leveled.of_plans_met(known, limit))
    for varied in ((), _VARIED):
        if (most := best.step_seconds) <= max(least_seconds, limit):
            break
        plan, _ = leveled.plan_under(here, limit, most - limit, _WIDTH, until_seconds=until_seconds, varied=varied)
        if plan is not None:
            improve(plan)
    return best.step_seconds < before


def _num_states(known: Kept) -> float:
    return math.inf if known.states is None else float(known.states.alive_NL1.sum())
