"""A bound on all plans of a problem of thousands of layers, with every cut: Lagrangian relaxation over windows."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Problem
from dejavu.search._base import Incumbent
from dejavu.search.coarse.clusters import boundaries
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.relaxation import Windowed
from dejavu.search.coarse.relaxed import ROUNDING, Kept, Relaxed

_FIRST_GAP = 0.1  # proved without stages in the state where one evaluation with them takes long: quick, and something
_GAPS = (0.0199, 0.01)  # proved one after the other, before the one that was asked for
_NARROW = 2e-4  # of the best price: ranges of the bottleneck are not split further
_WIDE = 0.3  # of what is missing: wider ranges are split before less is proved of them
_MOST_STEPS = 5e7  # of one evaluation with stages in the state; with more no range is proved in time
_FEW_FROM_STEPS = 1.5e7  # of one evaluation, from which on prices are sought with few cuts at first
_FEWEST_CUTS, _LAYERS_EACH = 256, 10  # of those few
_SHARES = (0.6, 0.3, 0.1)  # of what is missing, tried one after the other where all of it is not proved


@dataclass(order=True)
class Range:
    """Plans with bottlenecks above `low`, up to `high`: none costs less than `bound`, or than what is being proved."""

    bound: float
    tie: int
    low: float = field(compare=False)
    high: float = field(compare=False)
    known: Kept = field(compare=False)
    is_done: bool = field(compare=False, default=False)


class WindowedBound:
    """What no plan can be below. Splits the range of bottlenecks, the part with the least bound first.

    Attributes:
        num_ranges: into so many it is split before any is looked at; halves of a range wait for it, these for nothing.
    """

    def __init__(self, problem: Problem, best: Incumbent, num_ranges: int = 1) -> None:
        self._best, self.num_ranges = best, num_ranges
        relaxed = Relaxed(problem, best)
        steps = Leveled.num_levels(relaxed) * len(relaxed.kept) * problem.num_layers
        cuts = _some_cuts(problem) if steps > _FEW_FROM_STEPS else None
        self.num_cuts = problem.num_layers if cuts is None else len(cuts)
        self.few = Leveled(relaxed.at_cuts(cuts)) if cuts is not None else None
        self.windowed = Windowed(relaxed)
        self._leveled = Leveled(relaxed, self.few) if steps <= _MOST_STEPS else None
        self._tie = count()

    @property
    def counts_in_state(self) -> bool:
        """Whether one evaluation with stages in the state takes a part of a second."""
        return self._leveled is not None

    @property
    def quick(self) -> Windowed | Leveled:
        """What a look for plans is guided by, over `num_cuts` cuts."""
        return self.windowed if self.few is None else self.few

    def prove(self, relative_gap: float) -> float:
        """A bound on every plan, within the budget; inf: there is none.

        One gap after the other: that no plan is cheaper than 98 % of the best price is proved of plans below 98 %, of
        which less has to be looked at.
        """
        known = self.windowed.tightened(self.windowed.everything(), np.inf, np.inf)
        if known.sum_seconds == np.inf:
            return np.inf
        proved = known.sum_seconds
        if self._best.plan is None:
            return proved * (1 - ROUNDING)
        if self.few is not None and self._leveled is not None and relative_gap < _FIRST_GAP:
            proved = max(proved, self._proved(_FIRST_GAP, known, None))
        for gap in [*(gap for gap in _GAPS if gap > relative_gap), relative_gap]:
            proved = max(proved, self._proved(gap, known, self._leveled))
            if self._best.remaining_seconds < 0 or proved < self._best.step_seconds * (1 - gap) * (1 - ROUNDING):
                break
        return proved * (1 - ROUNDING)

    def _proved(self, gap: float, known: Kept, leveled: Leveled | None) -> float:
        """A bound on every plan: the price less the gap where that is proved."""
        best = self._best
        target = best.step_seconds * (1 - gap)
        edges = np.linspace(0.0, target - known.sum_seconds, self.num_ranges + 1).tolist()
        ranges = [Range(known.sum_seconds + low, next(self._tie), low, high, known) for low, high in pairwise(edges)]
        while ranges:
            target = min(target, best.step_seconds * (1 - gap))  # a better plan may have been met beside this proof
            if ranges[0].bound >= target or best.remaining_seconds < 0 or ranges[0].is_done:
                break
            for part in self.split(heapq.heappop(ranges), target, leveled):
                heapq.heappush(ranges, part)
        return min([target, *(part.bound for part in ranges[:1])])

    def split(self, at: Range, target: float, leveled: Leveled | None) -> list[Range]:
        """The range, or its halves, with what is proved of them.

        A plan of it that is cheaper than the target has Σ below the target less its bottleneck, which is above `low`.
        """
        width = at.high - at.low
        if width < 0:
            return []
        known, bound = at.known, at.bound
        for bounding, proves in self._ways(known, leveled):
            found = bounding(known, at.high, target - at.low)
            known = found if proves else replace(known, prices_R=found.prices_R)
            about = min(target, found.sum_seconds + at.low)
            bound = max(bound, about) if proves else bound
            missing = target - max(bound, about)
            if (proves and missing <= 0) or self._best.remaining_seconds < 0:
                return [Range(bound, next(self._tie), at.low, at.high, at.known)]
            if width > max(_NARROW * target, _WIDE * missing) and missing > 0:
                middle = 0.5 * (at.low + at.high)
                above = max(bound, min(target, known.sum_seconds + middle)) if proves else bound
                return [
                    Range(bound, next(self._tie), at.low, middle, known),
                    Range(above, next(self._tie), middle, at.high, known),
                ]
        for share in _SHARES:  # what is known of plans below the target is known of those below less
            less = bound + share * missing
            if (leveled or self.windowed).tightened(known, at.high, less - at.low).sum_seconds >= less - at.low:
                is_done = share < _SHARES[0] or target - less < _NARROW * target
                return [Range(less, next(self._tie), at.low, at.high, known, is_done)]
        return [Range(bound, next(self._tie), at.low, at.high, known, is_done=True)]

    def _ways(self, known: Kept, leveled: Leveled | None) -> list[tuple[Callable[[Kept, float, float], Kept], bool]]:
        """What a range is looked at with, the quickest first, and whether that proves.

        Few cuts prove nothing of the others, but what is not so with them is seldom so with all: where they leave
        something missing the range is split at once.
        """
        if leveled is None:
            return [(self.windowed.tightened, True)]
        if self.few is not None:
            return [(leveled.guessed, False), (leveled.tightened, True)]
        quick = [(self.windowed.tightened, True)] if known.alive_NL1 is None else []
        return [*quick, (leveled.tightened, True)]


def _some_cuts(problem: Problem) -> NDArray[np.int64] | None:
    """Few cuts for prices to begin with; None: there are few."""
    few = max(_FEWEST_CUTS, problem.num_layers // _LAYERS_EACH)
    return boundaries(problem, few) if 2 * few < problem.num_layers else None
