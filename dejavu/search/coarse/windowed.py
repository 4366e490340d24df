"""A bound on all plans of a problem of thousands of layers, with every cut: Lagrangian relaxation over windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise, product
from threading import Event

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem
from dejavu.search._base import Incumbent
from dejavu.search.coarse import clusters
from dejavu.search.coarse.busiest import least_bottleneck_seconds
from dejavu.search.coarse.levels.beams import GAP, WIDER_GAPS, Beams
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.levels.stops import FittingStops
from dejavu.search.coarse.looking.deepening import CUTS_EACH
from dejavu.search.coarse.ranges import Range, Ranges, Sought
from dejavu.search.coarse.relaxation import Windowed
from dejavu.search.coarse.relaxed import ROUNDING, Kept, Met, Relaxed, Through, apart, bottleneck_seconds

_FIRST_GAP = 0.1  # proved without stages in the state, before it is known how many plans have: quick, and something
_GAPS = (0.0199, 0.01)  # proved one after the other, before the one that was asked for
_NARROW = 2e-4  # of the best price: ranges of the bottleneck are not split further
_CLOSE = 2e-5  # of what is being proved: where less is missing, that will do
_WIDE = 0.3  # of what is missing: wider ranges are split before less is proved of them
_MOST_STEPS = 8e8  # of one evaluation with stages in the state; with more no range is proved in time
_MORE_STAGES = 1.25  # times as many as the best plan has: levels for plans with lower bottlenecks, which have more
_FEW_MORE = 1.15  # times as many stages as there are levels: the last level, which stands for more, says enough of them
_FEW_FROM_STEPS = 1.5e7  # of one evaluation, from which on plans are looked for over few cuts
_FEWER = 3  # times fewer cuts, over which plans are looked for first
_SHARES = (0.6, 0.3, 0.1)  # of what is missing, tried one after the other where all of it is not proved
# Of the best plan's bottleneck: the ranges next to it are looked at first.
_EDGES = (0.5, 0.65, 0.8, 0.87, 0.93, 1.0, 1.07)
_SECOND = 1e-9  # the turn after that of the range that ends at the best plan's bottleneck
_SURVEYED = 1.01  # times the least bound of a survey: no more is expected to be proved
_NEXT = 0.05  # of what is being proved: a range below one that leaves something is no wider, so that states go
_FAR_DOWN = 0.7  # of its upper end: a part below this is left whole, since next to nothing keeps to such a limit
_STEPS = (0.02, 0.008, 0.002, 0.0005, 0.0004)  # see `Ranges`; the next one where time is left, with wider beams
_PRECISE = 0.001  # of what is being proved: better prices that may prove so little more are not looked for
_NEARLY = 0.25  # of a range: where more than the rest is proved, the rest is looked at by itself
_THINNEST = 0.02  # of a range, a part of it
_WORTH = 0.2  # of a range: so much of it is proved before the rest is looked at again
_MOST_PASSES = 8  # of prices for one range
_GROWN = 0.003  # of what is being proved: a range of which a beam has proved so much more waits for its turn
_SURE = 5e-4  # of what is being proved: no narrower range says more of what a beam can prove


@dataclass(frozen=True, eq=False)
class Looks:
    """What a thread looks at a range with.

    Attributes:
        windowed, leveled: without stages in the state; with them. None: one evaluation takes too long.
    """

    windowed: Windowed
    leveled: Leveled | None

    def beside(self) -> Looks:
        """The same for another thread."""
        return Looks(self.windowed.beside(), None if self.leveled is None else self.leveled.beside())


class WindowedBound:
    """What no plan can be below. Splits the range of bottlenecks, the part with the least bound first.

    Attributes:
        num_ranges: into so many it is split before any is looked at; halves of a range wait for it, these for nothing.
        num_cuts: over which plans are looked for.
    """

    def __init__(
        self,
        problem: Problem,
        best: Incumbent,
        num_ranges: int = 1,
        improve: Callable[[Plan], None] | None = None,
        kept: NDArray[np.int64] | None = None,
    ) -> None:
        """The bound on a problem.

        Args:
            improve: is handed plans that are met where the bound is least; None: none are looked for.
            kept: the configurations that are not dominated, where they are known.
        """
        self._best, self.num_ranges, self._beams = best, num_ranges, Beams(best, improve)
        self._relaxed = relaxed = Relaxed(problem, best, kept)
        self._cuts = _some_cuts(problem) if self._num_steps > _FEW_FROM_STEPS else None
        self.num_cuts = problem.num_layers if self._cuts is None else len(self._cuts)
        self._looks = Looks(Windowed(relaxed), None)
        self._ranges, self._is_prepared = Ranges(best, _STEPS[0]), Event()
        self._tie = count()
        self._met: list[Met] = []  # what is known under some limits
        self._met_over_few: list[Met] = []  # with few cuts
        self._through: list[tuple[float, Through]] = []  # and of all plans there
        self._num_levels = 1  # the most that were wanted so far
        self._surveyed: dict[float, float] = {}  # about what is the bound under some limits

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

    @cached_property
    def least_limit(self) -> float:
        """No plan has a lower bottleneck."""
        return least_bottleneck_seconds(self._relaxed)

    def plan_looks(self) -> list[Leveled]:
        """What a look for plans is guided by, over few cuts and more."""
        relaxed = self._relaxed
        if self._cuts is None:
            return [Leveled(relaxed)]
        looks = [Leveled(relaxed.at_cuts(self._cuts))]
        if self.num_cuts > 2 * clusters.FEWEST_CUTS:
            looks.insert(0, Leveled(relaxed.at_cuts(np.union1d(self._cuts[::_FEWER], self._cuts[-1:]))))
        return looks

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
        self._ranges.final_gap = relative_gap
        proved, gaps = known.sum_seconds, [*(gap for gap in _GAPS if gap > relative_gap), relative_gap]
        if sought is not None:
            self._find_stops(1, until=sought.counted)
            proved = max(proved, self._proved(_FIRST_GAP, known, until=sought.counted))
            sought.counted.wait()
            windowed.until = None  # before it is shared with other threads
            self._find_stops(sought.num_levels)
            sought.surveyed.wait()
            self._best.catch_up()
            self._surveyed, self._met_over_few = sought.bounds_seconds, sought.met
            self._ranges.expect(_SURVEYED * min(self._surveyed.values(), default=np.inf))
        for step, gap in product(_STEPS, gaps):
            is_late = self._best.remaining_seconds < 0  # what is known by then may prove smaller gaps, too
            if step != self._ranges.step:
                if is_late:
                    break
                self._ranges.expect(np.inf)
                if self._beams.is_narrow:
                    self._beams.widen()
                    self._ranges.uncap()
            self._ranges.step = step
            if not is_late:
                self._prepare()
            proved = max(proved, self._proved(gap, known))
            if self._is_proved(proved, relative_gap):
                break
        if sought is not None and self._is_proved(proved, relative_gap):
            sought.enough.set()
        return proved * (1 - ROUNDING)

    def _is_proved(self, proved_seconds: float, gap: float) -> bool:
        return proved_seconds >= self._best.step_seconds * (1 - gap) * (1 - ROUNDING)

    @cached_property
    def _stops(self) -> FittingStops:
        return Leveled.stops_of(self._relaxed)

    @property
    def _wanted_levels(self) -> int:
        """For as many stages as the best plan has by now, and some more."""
        return Leveled.wanted_levels(self._relaxed, int(_MORE_STAGES * self._relaxed.num_stages))

    def _find_stops(self, num_levels: int, until: Event | None = None) -> None:
        """Have the stops of so many levels, and of those wanted by now; what is missing is found out when it is needed.

        Args:
            until: what is wanted will be known better then.
        """
        if self.counts_in_state:
            self._num_levels = max(self._num_levels, num_levels, self._wanted_levels)
            self._stops.upto(self._num_levels, until)

    def _prepare(self) -> None:
        """Have what ranges are looked at with, for as many stages as the best plan has by now, and some more."""
        leveled, relaxed = self._looks.leveled, self._relaxed
        least = Leveled.wanted_levels(relaxed, relaxed.num_stages)
        if self.counts_in_state and (leveled is None or _FEW_MORE * leveled.num_levels < least):
            is_far = self.num_cuts < CUTS_EACH * self._num_levels  # the best plan, which may have few stages
            wanted = max(self._num_levels, self._wanted_levels) if is_far else self._wanted_levels
            leveled = Leveled(relaxed, wanted, self._stops)
            self._num_levels = max(self._num_levels, leveled.num_levels)
            self._looks, self._through = Looks(self._looks.windowed, leveled), []
        self._is_prepared.set()

    def _proved(self, gap: float, known: Kept, until: Event | None = None) -> float:
        """A bound on every plan: the price less the gap where that is proved.

        Goes on from the ranges that a proof of less has left, with what was proved of them, and what else is known of
        them where that holds of all plans below the price less the gap.

        Args:
            known: of every plan.
        """
        self._looks.windowed.until = until
        least, left = known.sum_seconds, self._ranges.left
        if self._looks.leveled is not None and not any(part.known.states for part in left):
            left = []  # what was proved without levels is little
        begin = max((part.high for part in left), default=self.least_limit)
        end = self._best.step_seconds * (1 - gap) - least
        edges = np.linspace(begin, max(begin, end), self.num_ranges + 1).tolist()
        ranges = [self._again(part, known, self._best.step_seconds * (1 - gap)) for part in left]
        if not left and self._looks.leveled is not None:
            ranges = self._around_the_best(edges, least, known)
        else:
            ranges += [self._range(least, low, high, known) for low, high in pairwise(edges) if high > low]
        return self._ranges.prove(ranges, gap, lambda at, target: self.split(at, target, self._looks), until)

    def _again(self, part: Range, known: Kept, target: float) -> Range:
        """A range that a proof has left, for one up to this price; `known`: of every plan."""
        has, leveled = part.known, self._looks.leveled
        if leveled is None or has.states is None or has.cutoff < target - part.low:
            return replace(part, known=replace(known, prices_R=has.prices_R), is_done=False)
        if has.states.num_levels < leveled.num_levels:
            has = replace(has, states=has.states.deeper(leveled.num_levels), near=None, about_seconds=np.inf)
            part = replace(part, known=has)
        return replace(part, bound=max(part.bound, min(target, has.sum_seconds + part.low)), is_done=False)

    def _range(self, least: float, low: float, high: float, known: Kept, turn: float = np.inf) -> Range:
        return Range(least + low, next(self._tie), low, high, known, turn=turn)

    def _around_the_best(self, edges: list[float], least: float, known: Kept) -> list[Range]:
        """Ranges that are split next to the best plan's bottleneck, too, and are looked at from there on.

        Or at the limits that were surveyed, of which prices are known, from the one with the least bound on. Below one
        where Σ alone comes to what is being proved nothing is split. The lowest range is the second that is looked at,
        and its lowest parts the next ones: least is known of them.
        """
        assert self._best.plan is not None
        begin, end = edges[0], edges[-1]
        own_seconds = bottleneck_seconds(self._relaxed.problem, self._best.plan)
        between = [share * own_seconds for share in _EDGES]
        if len(self._surveyed) > 1:
            own_seconds = self._least_at
            proved = [at for at, bound in self._surveyed.items() if bound - at >= least + end]
            lowest = max(proved, default=0.0)
            edges = [begin, *(edge for edge in edges if edge > lowest)]
            between = [at for at in self._surveyed if at >= lowest]
        edges = sorted({*edges, *(at for at in between if begin < at < end)})
        return [
            self._range(least, low, high, known, _SECOND if low == begin else apart(high, own_seconds))
            for low, high in pairwise(edges)
        ]

    @property
    def _least_at(self) -> float:
        """The limit that was surveyed with the least bound; inf: none was."""
        return min(self._surveyed, key=self._surveyed.__getitem__, default=np.inf)

    def split(self, at: Range, target: float, looks: Looks) -> list[Range]:
        """The range, or its parts, with what is proved of them.

        A plan of it that is cheaper than the target has Σ below the target less its bottleneck, which is above `low`.
        """
        if looks.leveled is None:
            return self._split_aside(at, target, looks.windowed)
        return self._split_counted(at, target, looks.leveled)

    def _split_aside(self, at: Range, target: float, windowed: Windowed) -> list[Range]:
        width = at.high - at.low
        known = windowed.tightened(at.known, at.high, target - at.low)
        bound = max(at.bound, min(target, known.sum_seconds + at.low))
        missing = target - bound
        if missing <= 0 or self._best.remaining_seconds < 0:
            return [Range(bound, next(self._tie), at.low, at.high, at.known)]
        if width > max(_NARROW * target, _WIDE * missing):
            return self._halves(at, target, bound, known)
        for share in _SHARES:  # what is known of plans below the target is known of those below less
            less = bound + share * missing
            if windowed.tightened(known, at.high, less - at.low).sum_seconds >= less - at.low:
                return [Range(less, next(self._tie), at.low, at.high, known, missing < _CLOSE * target)]
        if width > _NARROW * target:
            return self._halves(at, target, bound, known)
        return [Range(bound, next(self._tie), at.low, at.high, known, is_done=True)]

    def _halves(self, at: Range, target: float, bound: float, known: Kept) -> list[Range]:
        middle = 0.5 * (at.low + at.high)
        above = max(bound, min(target, known.sum_seconds + middle))
        return [
            Range(bound, next(self._tie), at.low, middle, known),
            Range(above, next(self._tie), middle, at.high, known),
        ]

    def _split_counted(self, at: Range, target: float, leveled: Leveled) -> list[Range]:
        """Prices for the upper end; plans whose bottleneck is so near to it that they come to the target are proved."""
        known, bound, missing, cutoff = at.known, at.bound, 0.0, self._ranges.final_target - at.low
        if known.states is None:
            known = self._without_dear(self._beginning(leveled, known, at.high, cutoff), at.high, cutoff)
        through, is_stuck = None, False
        for _ in range(_MOST_PASSES):
            if known.about_seconds - known.sum_seconds > _PRECISE * target:  # else better prices prove no more
                before, known = known, leveled.closer(known, at.high, cutoff, target - at.low)
                through = known.through
                if through is not None and through.cutoff == np.inf:
                    self._through.append((at.high, through))
                has_plans = known.sum_seconds < cutoff
                self._met.append(leveled.what_was_met(at.high, known)._replace(has_plans=has_plans))
                known, is_stuck = replace(known, through=None), _is_as_before(known, before)
            bound = max(bound, min(target, known.sum_seconds + at.low))
            self._ranges.know(at.high, min(known.sum_seconds, known.cutoff))
            if bound >= target or self._best.remaining_seconds < 0:
                return [Range(bound, next(self._tie), at.low, at.high, known)]
            is_for_beams = is_stuck and self._beams.are_few(known, leveled)  # prices prove no more, a beam may
            reached = known.sum_seconds if is_for_beams else known.about_seconds
            missing = target - at.low - reached
            is_proved_above = at.high - (target - known.sum_seconds) > _WORTH * (at.high - at.low)
            if missing > 0 or is_proved_above:
                break
        self._beams.look(known, at.high, leveled, WIDER_GAPS if at.high == self._least_at else (GAP,))
        if missing > 0 and reached + at.high < target * (1 + 0.5 * self._ranges.step):
            known = replace(known, through=through)
            return self._beyond_prices(replace(at, bound=bound), target, known, reached + at.high, leveled)
        if at.high - at.low <= _NARROW * target:
            return [Range(bound, next(self._tie), at.low, at.high, known, is_done=True)]
        return self._parts(at, target, replace(known, through=through), missing if missing > 0 else target - bound)

    def _beyond_prices(
        self, at: Range, target: float, known: Kept, about_seconds: float, leveled: Leveled
    ) -> list[Range]:
        """A range that no prices prove, however narrow: a beam may, of a narrow one where few states are left.

        Args:
            about_seconds: what prices prove of plans at its upper end.
        """
        width = at.high - at.low
        are_few = self._beams.are_few(known, leveled)
        if are_few and width > GAP * target:
            return self._parts(at, target, known, 0.5 * width)
        raised, bound, is_done = known, at.bound, False
        if are_few:
            raised = self._beams.raised(known, at.high, leveled, target - at.low)
            bound = max(bound, min(target, raised.sum_seconds + at.low))
            is_enough = bound >= target or raised.sum_seconds - known.sum_seconds > _GROWN * target
            if not is_enough and width > _SURE * target:
                return self._parts(at, target, raised, 0.5 * width)
            about_seconds, is_done = max(about_seconds, raised.sum_seconds + at.high), not is_enough
        if is_done or not are_few:
            self._ranges.cap(about_seconds)
        return [Range(bound, next(self._tie), at.low, at.high, replace(raised, through=None), is_done=is_done)]

    def _beginning(self, leveled: Leveled, known: Kept, limit: float, cutoff: float) -> Kept:
        """With prices of the nearest limit.

        With few cuts they say where the bound is least, but not why there are no plans under a low limit.
        """
        has_none = self._surveyed.get(limit, 0.0) >= self._best.step_seconds
        if self._met and has_none:
            return leveled.beginning_near(self._met, limit, known)
        begun = leveled.beginning_near(self._met_over_few + self._met, limit, known)
        has_own = begun.near is not None and begun.near.alive_NL1.shape[1] == len(known.after_L1)
        if has_own or has_none:
            return begun
        prices_R = leveled.guessed(self._met_over_few, limit, cutoff)
        return begun if prices_R is None else replace(begun, prices_R=prices_R, near=None)

    def _without_dear(self, known: Kept, limit: float, cutoff: float) -> Kept:
        """Without the states that come to the cutoff at prices that were met under a higher limit."""
        for above, through in self._through:
            if above >= limit and through.cutoff >= cutoff:
                left = through.below(cutoff)
                states = left if known.states is None else left.among(known.states)
                known = replace(known, states=states, cutoff=cutoff)
        return known

    def _parts(self, at: Range, target: float, known: Kept, missing_seconds: float) -> list[Range]:
        """Of a range, of which this is known: what is proved above, and what is below, next to it and further down."""
        width, proved_from = at.high - at.low, target - known.sum_seconds - at.low
        if 0 < proved_from < width:
            missing_seconds = proved_from if proved_from < _NEARLY * width else min(missing_seconds, proved_from)
        middle = at.low + min(max(missing_seconds, _THINNEST * width), (1 - _THINNEST) * width)
        edges = [at.low, middle, at.high]
        if middle - at.low > 1.5 * _NEXT * target and middle > _FAR_DOWN * at.high:
            edges.insert(1, middle - _NEXT * target)
        return [
            Range(
                max(at.bound, min(target, known.sum_seconds + low)),
                next(self._tie),
                low,
                high,
                self._part_of(known, low - at.low, high == at.high),
                turn=at.turn if low == at.low and at.turn == _SECOND else np.inf,
            )
            for low, high in pairwise(edges)
        ]

    def _part_of(self, known: Kept, up_seconds: float, is_same_limit: bool) -> Kept:
        """What is known of a part of a range that begins so much further up."""
        through, cutoff = known.through, known.cutoff - up_seconds
        known = replace(known, through=None, about_seconds=known.about_seconds if is_same_limit else np.inf)
        if through is None or known.states is None or up_seconds <= 0:
            return known
        return replace(known, states=through.below(cutoff).among(known.states), cutoff=cutoff)


def _is_as_before(known: Kept, before: Kept) -> bool:
    """Whether prices have proved no more and found no less than was known: the next ones are the same."""
    return known.sum_seconds <= before.sum_seconds and known.about_seconds >= before.about_seconds < np.inf


def _some_cuts(problem: Problem) -> NDArray[np.int64] | None:
    """Few cuts for prices to begin with; None: there are few."""
    few = clusters.num_few(problem)
    return clusters.boundaries(problem, few) if 2 * few < problem.num_layers else None
