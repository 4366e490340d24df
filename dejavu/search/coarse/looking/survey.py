"""What some of the cuts say of one limit after another: where the bound is least, and prices that are about right.

With few cuts stages end before they are as large as they could be, so fewer plans keep to a limit, and to memory. For
plans that is as it should be. Prices that are to be about right for every cut are of stages that may reach a part of
the way to the next cut for nothing: what a stage loses does not grow with its size, so small ones lose most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dejavu.plans.stage_costs import Floats
from dejavu.search._base import Incumbent
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.ranges import Sought
from dejavu.search.coarse.relaxed import Kept, Met

# Of what is between a stage's last two cuts: those stages are chosen that lose little. By what all cuts say of three
# generated problems (10,000 operators, seeds 18, 31 and 33), of 0.15 to 0.5.
EARLY = 0.2
_LOWER, _HIGHER = 0.85, 1.15  # times the limit before
_FURTHEST = 1.25  # times the least bound: limits with higher ones are of no interest
_BETWEEN = (0.93, 1.07)  # limits, in the one with the least bound so far
_ROUGHLY = 0.04  # of the least bound: once one is as much above it, the least is behind
_WORTH = 0.006  # of the best price: plans that are dearer by less are worth moving their cuts


@dataclass
class Survey:
    """Bounds over some cuts, and their prices, told to the proof, which has every cut.

    Attributes:
        look: over these cuts.
        best, sought: see `deepening.look_for_plans`.
        prices_R: where none of a limit are known.
        is_late: whether to stop with what there is.
        bounds_seconds: of the limits that were looked at, as they are with every cut.
        met: what is known there.
    """

    look: Leveled
    best: Incumbent
    sought: Sought
    prices_R: Floats
    is_late: Callable[[], bool]
    bounds_seconds: dict[float, float] = field(default_factory=dict)
    met: list[Met] = field(default_factory=list)

    def at(self, limit: float, cutoff: float | None = None) -> Kept:
        """What the best prices say under this limit, of plans whose Σ is below the cutoff."""
        cutoff = self.most_seconds - limit if cutoff is None else cutoff
        here = self.look.tightened(self._beginning(limit, cutoff), limit, cutoff)
        met = self.look.what_was_met(limit, here)
        self.met.append(met._replace(has_plans=here.sum_seconds < cutoff))
        return here

    def nearest(self, limit: float) -> Kept:
        """The prices of the nearest limit that was looked at, over these cuts where there is one."""
        everything = self.look.everything_at(self.prices_R)
        return self.look.beginning_near(self.own_met or self.met, limit, everything)

    def _beginning(self, limit: float, cutoff: float) -> Kept:
        """With the nearest prices; what is known over fewer cuts only is made to fit these."""
        begun = self.nearest(limit)
        if self.own_met:
            return begun
        prices_R = self.look.guessed(self.met, limit, cutoff)
        return begun if prices_R is None else self.look.everything_at(prices_R)

    @property
    def own_met(self) -> list[Met]:
        """What is known over these cuts, not over fewer."""
        return [met for met in self.met if len(met.cuts_L1) == self.look.num_cuts + 1]

    @property
    def most_seconds(self) -> float:
        """Dearer plans are of no interest."""
        least = min(self.bounds_seconds.values(), default=np.inf)
        return min(_FURTHEST * least, self.best.step_seconds * (1 + _WORTH))

    def over(self, look: Leveled, met: Sequence[Met] | None = None) -> Survey:
        """Another one over other cuts, or of stages that end elsewhere, beginning with what is known here, or this."""
        return replace(self, look=look, bounds_seconds={}, met=[*(self.met if met is None else met)])

    def least_near(self, limit: float) -> float:
        """The limit under which the bound is about the least, of some above and below this one.

        Or above the first one that plans over these cuts keep to.
        """
        while not self.is_late() and limit < self.best.step_seconds and self.bound(limit) >= self.most_seconds:
            limit *= _HIGHER
        self._onward(limit, _HIGHER, _ROUGHLY)
        self._onward(_LOWER * limit, _LOWER, _ROUGHLY)
        return self.least_at(limit)

    def beside(self) -> Survey:
        """The same for another thread: what one of both has found out is known to the other."""
        return replace(self, look=self.look.beside())

    def up(self, limit: float) -> None:
        """Survey limits above this one, to where the bound is far above the least."""
        self._onward(_HIGHER * limit, _HIGHER)

    def down(self, limit: float) -> None:
        """Survey limits below this one, to one below which no plan is better than the best one."""
        lowest = self._onward(_LOWER * limit, _LOWER)
        self._down_to_none(_LOWER * lowest)

    def between(self, limit: float) -> None:
        """Survey limits next to the one with the least bound; `limit`: where none was surveyed."""
        least_at = self.least_at(limit)
        for step in _BETWEEN:
            self.bound(step * least_at)

    def least_at(self, otherwise: float) -> float:
        """The limit with the least bound that was looked at; the other one where none was."""
        return min(self.bounds_seconds, key=self.bounds_seconds.__getitem__, default=otherwise)

    def _onward(self, limit: float, step: float, higher_by: float = np.inf) -> float:
        """Survey a limit and others, each so many times the one before, until the bound is high; the last one."""
        while limit > self.sought.least_limit and not self.is_late():
            seconds, least = self.bound(limit), min(self.bounds_seconds.values(), default=np.inf)
            if seconds >= min(self.most_seconds * (1 - _WORTH), least * (1 + higher_by)):
                break
            limit *= step
        return limit

    def bound(self, limit: float) -> float:
        """What no plan over these cuts under this limit costs less than; of what is above `most_seconds` no more."""
        if self.is_late():
            return np.inf
        if limit not in self.bounds_seconds:
            self.bounds_seconds[limit] = limit + self.at(limit).sum_seconds
        return self.bounds_seconds[limit]

    def _down_to_none(self, limit: float) -> None:
        """Further down until Σ alone is as high."""
        while not self.is_late() and limit > self.sought.least_limit:
            sum_seconds = self.at(limit, self.most_seconds).sum_seconds
            self.bounds_seconds[limit] = limit + sum_seconds
            if sum_seconds >= self.most_seconds * (1 - _WORTH):
                return
            limit *= _LOWER
