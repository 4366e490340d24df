"""What threads share: the ranges of the bottleneck that are left of a proof, and how far the look for plans is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, Event

import numpy as np

from dejavu.search._base import Incumbent
from dejavu.search.coarse.relaxed import Kept, Met

Split = Callable[["Range", float], Sequence["Range"]]


@dataclass(eq=False)
class Range:
    """Plans with bottlenecks above `low`, up to `high`: none costs less than `bound`, or than what is being proved.

    Attributes:
        tie: its number.
        turn: those with a lower one are looked at before; of equal ones the one with the least bound.
    """

    bound: float
    tie: int
    low: float
    high: float
    known: Kept
    is_done: bool = False
    turn: float = np.inf


class Ranges:
    """What is left of one proof after another. Everything here may be called from any thread.

    Attributes:
        left: the ranges, once a proof has ended.
        target: what is being proved.
        final_gap: that of the last proof; what is known of ranges holds up to there.
        step: what can be proved, by all that is known, is missed by this share of it: the less, the more ranges.
        is_late: a proof has ended for want of time.
    """

    def __init__(self, best: Incumbent, step: float = 0.0) -> None:
        self._best, self._changed, self.step, self.final_gap = best, Condition(), step, 0.0
        self.left: list[Range] = []
        self.target, self._gap, self._most_seconds, self._until = 0.0, 0.0, np.inf, Event()
        self._expected_seconds = np.inf
        self._limits, self._sums = list[float](), list[float]()  # see `know`: ascending, and then descending
        self._num_looked_at, self._is_closed, self.is_late = 0, False, False

    def prove(self, ranges: Iterable[Range], gap: float, split: Split, until: Event | None = None) -> float:
        """What none of the ranges has a plan below: the best price less the gap, or what was reached in time.

        Less than that where it cannot be proved; see `cap`. Other threads that `help` look at ranges too.

        Args:
            until: no range is looked at any more once it is set.
        """
        with self._changed:
            self.left = list(ranges)
            self._raise(self.left)
            self._gap, self.target, self._until = gap, np.inf, until or Event()
            self._changed.notify_all()
        self._look(split, goes_on=False)
        with self._changed:
            return min([self._aimed_at(), *(part.bound for part in self.left)])

    def help(self, split: Split) -> None:
        """Look at ranges of this proof and of those after it, until `close`."""
        self._look(split, goes_on=True)

    def cap(self, most_seconds: float) -> None:
        """What was looked at has shown that no more than this can be proved."""
        with self._changed:
            self._most_seconds, self._expected_seconds = min(self._most_seconds, most_seconds), np.inf

    def expect(self, most_seconds: float) -> None:
        """About what can be proved, until more is known."""
        with self._changed:
            self._expected_seconds = most_seconds

    def know(self, limit: float, sum_seconds: float) -> None:
        """No plan with a bottleneck up to this limit has a lower Σ: those of a range cost that and its lower end."""
        with self._changed:
            end = bisect_left(self._limits, limit)
            if end < len(self._sums) and self._sums[end] >= sum_seconds:
                return  # as much is known under a higher limit
            begin = end
            while begin > 0 and self._sums[begin - 1] <= sum_seconds:
                begin -= 1
            end += self._limits[end : end + 1] == [limit]
            self._limits[begin:end], self._sums[begin:end] = [limit], [sum_seconds]
            self._raise(part for part in self.left if part.high <= limit)

    def _raise(self, ranges: Iterable[Range]) -> None:
        for part in ranges:
            place = bisect_left(self._limits, part.high)
            known_seconds = self._sums[place] if place < len(self._sums) else 0.0
            part.bound = max(part.bound, known_seconds + part.low)

    def uncap(self) -> None:
        """More may be proved."""
        with self._changed:
            self._most_seconds = np.inf

    @property
    def final_target(self) -> float:
        """What the last of these proofs may come to."""
        with self._changed:
            final = min(self._best.step_seconds * (1 - self.final_gap), self._most_seconds, self._expected_seconds)
            return max(final, self.target)

    def close(self) -> None:
        """Nothing more is to be proved."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _look(self, split: Split, *, goes_on: bool) -> None:
        while (worth := self._next(goes_on=goes_on)) is not None:
            part, target = worth
            found: Sequence[Range] = [replace(part, is_done=True)]  # where looking at it fails it is left as it was
            try:
                found = split(part, target)
            finally:
                with self._changed:
                    self._raise(found)
                    self.left += found
                    self._num_looked_at -= 1
                    self._changed.notify_all()

    def _next(self, *, goes_on: bool) -> tuple[Range, float] | None:
        """Wait for a range to look at, and what is to be proved of it; None: there will be none, or this proof has
        ended and nobody goes on.

        While others look at all that is below what is being proved, ranges are looked at that the last proof wants.
        """
        with self._changed:
            while not self._is_closed:
                target = self._aimed_at()
                worth = self._worth_looking_at(target)
                if not worth and self._num_looked_at > 0:
                    target = max(target, self._within(self.final_gap))
                    worth = self._worth_looking_at(target)
                if worth:
                    part = min(worth, key=lambda one: (one.turn, one.bound))
                    self.left.remove(part)
                    self._num_looked_at += 1
                    return part, target
                if self._num_looked_at == 0 and not goes_on:
                    return None
                self._changed.wait()
                self._best.catch_up()
        return None

    def _worth_looking_at(self, target: float) -> list[Range]:
        """Those of which more may be proved; none where the range with the least bound, which says how far this
        proof gets, is done."""
        self.is_late = self.is_late or self._best.remaining_seconds < 0
        below = [part for part in self.left if part.bound < target]
        if self.is_late or self._until.is_set() or not below or min(below, key=lambda one: one.bound).is_done:
            return []
        return [part for part in below if not part.is_done]

    def _aimed_at(self) -> float:
        """What is being proved: a better plan may have been met beside this proof."""
        self.target = min(self.target, self._within(self._gap))
        return self.target

    def _within(self, gap: float) -> float:
        """What has this gap to the best price, and by all that is known can be proved."""
        most_seconds = min(self._most_seconds, self._expected_seconds) * (1 - self.step)
        return min(self._best.step_seconds * (1 - gap), most_seconds)


@dataclass(eq=False)
class Sought:
    """What the look for plans and the proof beside it tell each other.

    Attributes:
        least_limit: no plan has a lower bottleneck.
        counted: it knows how many stages plans have.
        surveyed: and what the bound is under some limits, and the best prices there.
        enough: all is proved that was asked, or that can be; no better plan is needed.
        num_levels: for so many stages.
        bounds_seconds: of these limits.
        met: what is known under some limits.
    """

    least_limit: float = 0.0
    counted: Event = field(default_factory=Event)
    surveyed: Event = field(default_factory=Event)
    enough: Event = field(default_factory=Event)
    num_levels: int = 0
    bounds_seconds: dict[float, float] = field(default_factory=dict)
    met: list[Met] = field(default_factory=list)

    def count(self, num_levels: int) -> None:
        self.num_levels = num_levels
        self.counted.set()

    def survey(self, bounds_seconds: dict[float, float], met: list[Met]) -> None:
        self.bounds_seconds, self.met = bounds_seconds, met
        self.surveyed.set()

    def end(self) -> None:
        self.counted.set()
        self.surveyed.set()
