"""Branch and bound over intervals of the bottleneck: the exact search where a table over devices would be too large."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from dejavu.plans.stage_costs import Floats
from dejavu.search._base import Incumbent
from dejavu.search.exact.device_prices import Ints, PricedOptions

ROUNDING = 1e-12  # prices closer than this, relative, are the same
_GAPS = (0.02, 0.005, 0.001)  # proved one after the other, before the one that was asked for
# Of the best price: intervals narrower than this are searched as they are, with more work each time until it was much;
# wider ones where the best plan is already as near to the bound as _NEAR.
_NARROWEST, _NARROW, _NEAR, _MUCH_WORK = 2e-3, 2e-2, 0.05, 6e8
_BEAMS, _BEAM_WORK = (32, 256), 5e7  # of looks for a plan: labels at a cut; comparisons and extensions in all
_FIRST_WORK, _WORK_GROWTH = 1e7, 8.0  # of the first attempt at a proof; each next one may take so many times more
_STEPS_PER_SECOND = 4e7  # of labels' work, cautiously: no attempt is begun that the budget would not see end


@dataclass(order=True)
class _Interval:
    """Bottlenecks values[lo:hi] that may hold a better plan: any such plan has one of `rows`, and at least this Σ."""

    bound: float
    tie: int
    lo: int = field(compare=False)
    hi: int = field(compare=False)
    sum_seconds: float = field(compare=False)
    rows: Ints | None = field(compare=False)
    prices_T: Floats = field(compare=False)
    work: float = field(compare=False)


class Intervals:
    """Splits the range of bottlenecks until no part can hold a plan that is better by more than a gap.

    Attributes:
        values: every bottleneck that a plan can have, sorted.
        gap: that is being proved, as a fraction of the best price.
    """

    def __init__(self, priced: PricedOptions, best: Incumbent, values: Floats) -> None:
        self._priced, self._best, self._values = priced, best, values
        self._gap = 1.0
        self._open: list[_Interval] = []
        self._tie = count()

    def bound(self, relative_gap: float) -> float:
        """What was proved within the budget; inf with no plan found: there is none.

        First a wide gap is proved, which is quick and finds good plans, then narrower ones.
        """
        priced, values = self._priced, self._values
        if not len(values):
            return np.inf
        zeros = np.zeros(len(priced.count_T))
        sum_seconds, prices_T = priced.bound(priced.rows(None, np.inf), priced.most_sum_seconds, zeros)
        if sum_seconds >= priced.most_sum_seconds:
            return np.inf
        proved = sum_seconds + float(values[0])
        for gap in [*(gap for gap in _GAPS if gap > relative_gap), relative_gap]:
            self._gap = gap
            self._open.clear()
            self._keep(0, len(values), sum_seconds, None, prices_T)
            self._split_all()
            if self._best.plan is None and not self._open:
                return np.inf
            proved = max(proved, min([self._target, *(interval.bound for interval in self._open[:1])]))
            if self._best.is_late:
                break
        price = self._best.step_seconds
        return price if proved >= price * (1 - 2 * ROUNDING) else proved

    @property
    def _target(self) -> float:
        """Plans that are not cheaper than this are of no interest; while there is none, every plan is of interest.

        Then whatever gap is allowed: all of an infinite price taken away would leave no number.
        """
        if self._best.plan is None:
            return np.inf
        return self._best.step_seconds * (1 - max(self._gap, ROUNDING))

    def _cutoff(self, lo: int) -> float:
        """Plans with such bottlenecks that are of interest have a Σ below this."""
        return min(self._target - float(self._values[lo]), self._priced.most_sum_seconds)

    def _keep(
        self, lo: int, hi: int, sum_seconds: float, rows: Ints | None, prices_T: Floats, work: float = 0.0
    ) -> None:
        if lo < hi and sum_seconds < self._cutoff(lo):
            bound = sum_seconds + float(self._values[lo])
            heapq.heappush(self._open, _Interval(bound, next(self._tie), lo, hi, sum_seconds, rows, prices_T, work))

    def _split_all(self) -> None:
        """The interval with the least bound first."""
        values = self._values
        tried = False  # even with the budget at its end a plan is looked for once
        while self._open and self._open[0].bound < self._target:
            self._best.take_over()
            if self._best.remaining_seconds < 0 and (tried or self._best.plan is not None):
                break
            tried = True
            at = heapq.heappop(self._open)
            hi = min(at.hi, int(np.searchsorted(values, self._target - at.sum_seconds)))
            if at.lo >= hi:
                continue
            width = values[hi - 1] - values[at.lo]
            near = at.bound >= self._best.step_seconds * (1 - _NEAR)
            narrow = width <= (_NARROW if near else _NARROWEST) * self._best.step_seconds
            if hi - at.lo == 1 or (narrow and at.work < _MUCH_WORK):
                self._search(at, hi, max(_FIRST_WORK, at.work * _WORK_GROWTH))
            else:
                mid = middle(values, at.lo, hi)
                work = at.work / _WORK_GROWTH
                self._keep(mid + 1, hi, at.sum_seconds, at.rows, at.prices_T, work)
                self._search(at, mid + 1, max(_FIRST_WORK, work))

    def _search(self, at: _Interval, hi: int, work: float) -> None:
        """Bottlenecks of values[at.lo:hi]: a bound by prices, plans by a beam, then every label."""
        priced, limit = self._priced, float(self._values[hi - 1])
        rows = priced.rows(at.rows, limit)
        sum_seconds, prices_T = priced.bound(rows, self._cutoff(at.lo), at.prices_T)
        if sum_seconds >= self._cutoff(at.lo):
            return
        rows = priced.fixed(rows, self._cutoff(at.lo), prices_T)
        affordable = _STEPS_PER_SECOND * max(self._best.remaining_seconds, 0.0)
        if self._best.plan is None:
            affordable = max(affordable, _BEAM_WORK)
        attempts = [(2**31, min(work, affordable))]
        if sum_seconds + limit < self._target:  # so good a plan may be there: look for it first
            attempts = [*((beam, min(_BEAM_WORK, affordable)) for beam in _BEAMS), *attempts]
        for beam, most_work in attempts:
            found = priced.labels(rows, self._cutoff(at.lo), prices_T, beam, most_work)
            if found.is_proved or len(found.rows):
                break
        if not found.is_proved:
            self._keep(at.lo, hi, max(sum_seconds, at.sum_seconds), rows.rows, prices_T, work)
        elif len(found.rows):  # the least Σ there is: better plans have lower bottlenecks than this one
            below = int(np.searchsorted(self._values, priced.bottleneck_seconds(found.rows)))
            self._keep(at.lo, min(below, hi), max(found.sum_seconds, at.sum_seconds), rows.rows, prices_T)


def middle(values: Floats, lo: int, hi: int) -> int:
    """The index in lo to hi − 1 whose value is nearest below the middle; the last only where it is the only one."""
    half = 0.5 * (values[lo] + values[hi - 1])
    return max(lo, min(int(np.searchsorted(values, half, side="right")) - 1, hi - 2))
