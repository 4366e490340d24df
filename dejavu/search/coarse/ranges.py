"""What threads share: the ranges of the bottleneck that are left of a proof, and how far the look for plans is."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from threading import Condition, Event

from dejavu.search._base import Incumbent
from dejavu.search.coarse.relaxed import Kept

Split = Callable[["Range", float], Iterable["Range"]]


@dataclass(order=True)
class Range:
    """Plans with bottlenecks above `low`, up to `high`: none costs less than `bound`, or than what is being proved."""

    bound: float
    tie: int
    low: float = field(compare=False)
    high: float = field(compare=False)
    known: Kept = field(compare=False)
    is_done: bool = field(compare=False, default=False)


class Ranges:
    """What is left of one proof after another. Everything here may be called from any thread.

    Attributes:
        left: the ranges, the least bound first, once a proof has ended.
        is_late: a proof has ended for want of time.
    """

    def __init__(self, best: Incumbent) -> None:
        self._best, self._changed = best, Condition()
        self.left: list[Range] = []
        self._target, self._gap, self._until = 0.0, 0.0, Event()
        self._num_looked_at, self._is_closed, self.is_late = 0, False, False

    def prove(self, ranges: Iterable[Range], gap: float, split: Split, until: Event | None = None) -> float:
        """What none of the ranges has a plan below: the best price less the gap, or what was reached in time.

        Other threads that `help` look at ranges too.

        Args:
            until: no range is looked at any more once it is set.
        """
        with self._changed:
            self.left = sorted(ranges)
            self._gap, self._target, self._until = gap, self._best.step_seconds * (1 - gap), until or Event()
            self._changed.notify_all()
        self._look(split, goes_on=False)
        return min([self._target, *(part.bound for part in self.left[:1])])

    def help(self, split: Split) -> None:
        """Look at ranges of this proof and of those after it, until `close`."""
        self._look(split, goes_on=True)

    def lower(self, target: float) -> None:
        """Prove no more than this for now: what was looked at has shown that more cannot be proved."""
        with self._changed:
            self._target = min(self._target, target)

    def close(self) -> None:
        """Nothing more is to be proved."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _look(self, split: Split, *, goes_on: bool) -> None:
        while (part := self._next(goes_on=goes_on)) is not None:
            found: Iterable[Range] = [replace(part, is_done=True)]  # where looking at it fails it is left as it was
            try:
                found = split(part, self._target)
            finally:
                with self._changed:
                    for one in found:
                        heapq.heappush(self.left, one)
                    self._num_looked_at -= 1
                    self._changed.notify_all()

    def _next(self, *, goes_on: bool) -> Range | None:
        """Wait for a range to look at; None: there will be none, or this proof has ended and nobody goes on."""
        with self._changed:
            while not self._is_closed:
                if self._is_worth_looking():
                    self._num_looked_at += 1
                    return heapq.heappop(self.left)
                if self._num_looked_at == 0 and not goes_on:
                    return None
                self._changed.wait()
        return None

    def _is_worth_looking(self) -> bool:
        """Whether the range with the least bound says how far this proof gets, and could say more."""
        self.is_late = self.is_late or self._best.remaining_seconds < 0
        # A better plan may have been met beside this proof.
        self._target = min(self._target, self._best.step_seconds * (1 - self._gap))
        least = self.left[0] if self.left else None
        is_over = self.is_late or self._until.is_set()
        return least is not None and not least.is_done and least.bound < self._target and not is_over


@dataclass(eq=False)
class Sought:
    """What the look for plans tells the proof beside it, and the part of it that the proof's thread may do.

    Attributes:
        counted, given, found: it knows how many stages plans have; there is something to help with; it has ended.
        enough: the best plan is proved to be as near to the best as was asked; no better one is needed.
        num_levels: for so many stages.
    """

    counted: Event = field(default_factory=Event)
    given: Event = field(default_factory=Event)
    found: Event = field(default_factory=Event)
    enough: Event = field(default_factory=Event)
    num_levels: int = 0
    _helped: Event = field(default_factory=Event)
    _work: Callable[[], object] | None = None

    def count(self, num_levels: int) -> None:
        self.num_levels = num_levels
        self.counted.set()

    def give(self, work: Callable[[], object]) -> None:
        """Have somebody who helps do this."""
        self._work = work
        self.given.set()

    def help(self) -> None:
        """Wait for what there is to help with, if anything, and do it."""
        self.given.wait()
        try:
            if self._work is not None:
                self._work()
        finally:
            self._helped.set()

    def wait_for_help(self) -> None:
        """Until what was given is done; then it is let go, with some hundred megabytes."""
        if self._work is not None:
            self._helped.wait()
            self._work = None

    def end(self) -> None:
        for event in (self.counted, self.given, self.found):
            event.set()
