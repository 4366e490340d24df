"""A bound on all plans of a problem of thousands of layers, with every cut: Lagrangian relaxation over windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from threading import Event
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Problem
from dejavu.search._base import Incumbent
from dejavu.search.coarse.clusters import boundaries
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.ranges import Range, Ranges, Sought
from dejavu.search.coarse.relaxation import Windowed
from dejavu.search.coarse.relaxed import ROUNDING, Kept, Relaxed

_FIRST_GAP = 0.1  # proved without stages in the state, before it is known how many plans have: quick, and something
_EARLY_GAP = 0.05  # proved while better plans are looked for: of those to come about as much as is wanted in the end
_WEAK = 0.01  # of what is being proved: where few cuts leave more missing in a narrow range, less is to be proved
_WEAKER = 0.25  # of that, by so much less still
_GAPS = (0.0199, 0.01)  # proved one after the other, before the one that was asked for
_NARROW = 2e-4  # of the best price: ranges of the bottleneck are not split further
_CLOSE = 2e-5  # of what is being proved: where less is missing, that will do
_WIDE = 0.3  # of what is missing: wider ranges are split before less is proved of them
_MOST_GLANCES = 8  # at all cuts, each at the prices that are best for few and for what the glances before brought forth
_MOST_STEPS = 4e8  # of one evaluation with stages in the state; with more no range is proved in time
_WHOLE = 0.08  # of what is being proved: a range no wider is looked at whole, so that its parts have fewer states
_SURE = 1.1  # times what few cuts leave missing, all may
_THINNEST = 0.02  # of a range, a part of it
_FEW_FROM_STEPS = 1.5e7  # of one evaluation, from which on prices are sought with few cuts at first
_FEWEST_CUTS, _LAYERS_EACH = 256, 10  # of those few
_PATIENCE = 0.3  # see `CuttingPlanes`: plans are looked for at prices that need not be the best
_FEWER = 3  # times fewer cuts, over which plans are looked for first, and times more, over which they are in the end
_SHARES = (0.6, 0.3, 0.1)  # of what is missing, tried one after the other where all of it is not proved


class Way(NamedTuple):
    """How a range is looked at, whether that proves, and the widest range that is looked at more where it leaves some.

    Of a range that is wider, by this share of what is being proved, parts are looked at; None: as is missing.
    """

    bounding: Callable[[Kept, float, float], Kept]
    proves: bool = True
    widest: float | None = None


@dataclass(frozen=True, eq=False)
class Looks:
    """What a thread looks at a range with.

    Attributes:
        windowed, leveled, few: without stages in the state; with them; and these with some of the cuts only. None:
            one evaluation takes too long; it takes so little that few cuts gain nothing.
    """

    windowed: Windowed
    leveled: Leveled | None
    few: Leveled | None

    def beside(self) -> Looks:
        """The same for another thread."""
        few = None if self.few is None else self.few.beside()
        return Looks(self.windowed.beside(), None if self.leveled is None else self.leveled.beside(few), few)

    def ways(self, known: Kept, near_seconds: float, *, is_whole: bool) -> list[Way]:
        """What a range is looked at with, the quickest first, and whether that proves.

        Few cuts prove nothing of the others, but what is not so with them is seldom so with all: where they leave
        something missing the range is split at once.

        Args:
            near_seconds: of what is missing, for which the range is split.
            is_whole: what is left of it is looked at before it is split.
        """
        if self.leveled is None:
            return [Way(self.windowed.tightened)]
        looked = Way(partial(self.leveled.looked, near_seconds=near_seconds))
        if self.few is None:
            quick = [Way(self.windowed.tightened)] if known.alive_NL1 is None else []
            return [*quick, Way(self.leveled.tightened), looked]
        is_new = known.alive_NL1 is None
        first = [Way(self.windowed.glanced, widest=np.inf if is_whole else None)] if is_new else []
        guess = partial(self.leveled.guessed, near_seconds=near_seconds)
        glanced = Way(self.leveled.glanced, widest=np.inf)
        guessed = Way(guess, proves=False, widest=np.inf if is_new and is_whole else None)
        again = [Way(guess, proves=False), glanced] * _MOST_GLANCES
        return [*first, guessed, glanced, *again]

    def tightened(self, known: Kept, limit: float, cutoff: float) -> Kept:
        """What proves most; see there."""
        return (self.leveled or self.windowed).tightened(known, limit, cutoff)


class WindowedBound:
    """What no plan can be below. Splits the range of bottlenecks, the part with the least bound first.

    Attributes:
        num_ranges: into so many it is split before any is looked at; halves of a range wait for it, these for nothing.
        num_cuts: over which plans are looked for.
    """

    def __init__(self, problem: Problem, best: Incumbent, num_ranges: int = 1) -> None:
        self._best, self.num_ranges = best, num_ranges
        self._relaxed = relaxed = Relaxed(problem, best)
        self._cuts = _some_cuts(problem) if self._num_steps > _FEW_FROM_STEPS else None
        self.num_cuts = problem.num_layers if self._cuts is None else len(self._cuts)
        self._looks = Looks(Windowed(relaxed), None, None)
        self._ranges, self._is_prepared = Ranges(best), Event()
        self._tie = count()

    @property
    def _num_steps(self) -> float:
        """Of one evaluation with stages in the state, for as many as the best plan has."""
        relaxed = self._relaxed
        levels = Leveled.wanted_levels(relaxed, relaxed.num_stages)
        return float(levels * len(relaxed.kept) * relaxed.problem.num_layers)

    @property
    def counts_in_state(self) -> bool:
        """Whether one evaluation with stages in the state takes a part of a second."""
        return self._num_steps <= _MOST_STEPS

    def plan_looks(self) -> list[Leveled]:
        """What a look for plans is guided by, over few cuts and more."""
        relaxed = self._relaxed
        if self._cuts is None:
            return [Leveled(relaxed)]
        if self._num_fewer is None:
            return [Leveled(relaxed.at_cuts(self._cuts, _PATIENCE))]
        fewer = boundaries(relaxed.problem, self._num_fewer)
        looks = [Leveled(relaxed.at_cuts(fewer, _PATIENCE)), Leveled(relaxed.at_cuts(self._cuts))]
        if self._is_helped:
            cuts = np.union1d(self._cuts, boundaries(relaxed.problem, _FEWER * self.num_cuts))
            looks.append(Leveled(relaxed.at_cuts(cuts)))
        return looks

    @property
    def _num_fewer(self) -> int | None:
        """The cuts over which plans are looked for first; None: there are few anyhow."""
        fewer = max(_FEWEST_CUTS, self.num_cuts // _FEWER)
        return fewer if self._cuts is not None and 2 * fewer < self.num_cuts else None

    @property
    def _is_helped(self) -> bool:
        """Whether the look for plans has a part for the proof's thread."""
        return self._num_fewer is not None and 2 * _FEWER * self.num_cuts < self._relaxed.problem.num_layers

    def prove(self, relative_gap: float, sought: Sought | None = None) -> float:
        """A bound on every plan, within the budget; inf: there is none.

        One gap after the other: that no plan is cheaper than 98 % of the best price is proved of plans below 98 %, of
        which less has to be looked at.

        Args:
            sought: the look for plans beside it; below a better plan there is less to look at, so less is proved
                until it has ended.
        """
        try:
            return self._prove(relative_gap, sought)
        finally:
            self._is_prepared.set()
            self._ranges.close()

    def help(self) -> None:
        """Look at ranges beside `prove`, from another thread, until that has ended."""
        self._is_prepared.wait()
        shared = self._looks
        own = shared.beside()

        def split(at: Range, target: float) -> list[Range]:
            nonlocal shared, own
            if shared is not self._looks:
                shared = self._looks
                own = shared.beside()
            return self.split(at, target, own)

        self._ranges.help(split)

    @property
    def is_late(self) -> bool:
        """Whether the proof has ended because there was no more time."""
        return self._ranges.is_late

    def _prove(self, relative_gap: float, sought: Sought | None) -> float:
        windowed = self._looks.windowed
        known = windowed.tightened(windowed.everything(), np.inf, np.inf)
        if known.sum_seconds == np.inf:
            return np.inf
        if self._best.plan is None:
            return known.sum_seconds * (1 - ROUNDING)
        proved, gaps = known.sum_seconds, [*(gap for gap in _GAPS if gap > relative_gap), relative_gap]
        if sought is not None:
            until = sought.given if self._is_helped else sought.counted
            proved = max(proved, self._proved(_FIRST_GAP, known, until=until))
            if self._is_helped:
                sought.help()
            sought.counted.wait()
            self._prepare(sought.num_levels)
            for gap in (_EARLY_GAP, *gaps):
                proved = max(proved, self._proved(gap, known, until=sought.found))
                if sought.found.is_set() or proved < self._best.step_seconds * (1 - gap) * (1 - ROUNDING):
                    break
            if proved >= self._best.step_seconds * (1 - relative_gap) * (1 - ROUNDING):
                sought.enough.set()
            sought.found.wait()
        self._prepare()
        for gap in gaps:
            proved = max(proved, self._proved(gap, known))
            if self._best.remaining_seconds < 0 or proved < self._best.step_seconds * (1 - gap) * (1 - ROUNDING):
                break
        return proved * (1 - ROUNDING)

    def _prepare(self, num_levels: int = 1) -> None:
        """Have what ranges are looked at with, for as many stages as the best plan has by now, or for these."""
        leveled = self._looks.leveled
        wanted = max(num_levels, Leveled.wanted_levels(self._relaxed, self._relaxed.num_stages))
        if self.counts_in_state and (leveled is None or leveled.num_levels < wanted):
            few = None
            if self._cuts is not None:
                few = Leveled(self._relaxed.at_cuts(self._cuts, is_near=True), num_levels=wanted)
                few.prepare()
            leveled = Leveled(self._relaxed, few, num_levels=wanted)
            leveled.prepare()
            self._looks = Looks(self._looks.windowed, leveled, few)
        self._is_prepared.set()

    def _proved(self, gap: float, known: Kept, until: Event | None = None) -> float:
        """A bound on every plan: the price less the gap where that is proved.

        Goes on from the ranges that a proof of less has left, with what was proved of them; what else was known of them
        held below that.

        Args:
            known: of every plan.
        """
        least, left = known.sum_seconds, self._ranges.left
        begin = max((part.high for part in left), default=0.0)
        edges = np.linspace(begin, self._best.step_seconds * (1 - gap) - least, self.num_ranges + 1).tolist()
        ranges = [replace(part, known=replace(known, prices_R=part.known.prices_R), is_done=False) for part in left]
        ranges += [Range(least + low, next(self._tie), low, high, known) for low, high in pairwise(edges) if high > low]
        return self._ranges.prove(ranges, gap, lambda at, target: self.split(at, target, self._looks), until)

    def split(self, at: Range, target: float, looks: Looks) -> list[Range]:
        """The range, or its halves, with what is proved of them.

        A plan of it that is cheaper than the target has Σ below the target less its bottleneck, which is above `low`.
        """
        width = at.high - at.low
        known, bound = at.known, at.bound
        ways = looks.ways(known, width / _WIDE, is_whole=width <= _WHOLE * target)
        for bounding, proves, widest in ways:
            found = bounding(known, at.high, target - at.low)
            known = found if proves else replace(known, prices_R=found.prices_R)
            about = min(target, found.sum_seconds + at.low)
            bound = max(bound, about) if proves else bound
            missing = target - max(bound, about)
            is_weak = missing > _WEAK * target and width <= _WIDE * missing
            if is_weak and not proves and known.alive_NL1 is not None:
                self._ranges.lower(target - (1 + _WEAKER) * missing)
                return [Range(bound, next(self._tie), at.low, at.high, known)]
            if (proves and missing <= 0) or self._best.remaining_seconds < 0:
                return [Range(bound, next(self._tie), at.low, at.high, at.known)]
            most = _WIDE * missing if widest is None else widest * target
            if missing > 0 and width > max(_NARROW * target, most):
                return self._parts(at, target, bound, known, missing if proves else _SURE * missing)
        for share in _SHARES:  # what is known of plans below the target is known of those below less
            less = bound + share * missing
            if looks.tightened(known, at.high, less - at.low).sum_seconds >= less - at.low:
                return [Range(less, next(self._tie), at.low, at.high, known, missing < _CLOSE * target)]
        if width > _NARROW * target:
            return self._parts(at, target, bound, known, missing)
        return [Range(bound, next(self._tie), at.low, at.high, known, is_done=True)]

    def _parts(
        self, at: Range, target: float, bound: float, known: Kept, missing_seconds: float = np.inf
    ) -> list[Range]:
        """Two parts of a range, of which this bound is proved, and what is known; of the upper one maybe more.

        Halves, or at what is missing: plans with a bottleneck that is by so much higher have nothing missing.
        """
        width = at.high - at.low
        middle = at.low + min(max(missing_seconds, _THINNEST * width), 0.5 * width)
        above = max(bound, min(target, known.sum_seconds + middle))
        return [
            Range(bound, next(self._tie), at.low, middle, known),
            Range(above, next(self._tie), middle, at.high, known),
        ]


def _some_cuts(problem: Problem) -> NDArray[np.int64] | None:
    """Few cuts for prices to begin with; None: there are few."""
    few = max(_FEWEST_CUTS, problem.num_layers // _LAYERS_EACH)
    return boundaries(problem, few) if 2 * few < problem.num_layers else None
