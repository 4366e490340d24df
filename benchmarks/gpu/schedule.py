"""Units of work in limited time: what does not fit is said to be skipped, what fails is said, the rest goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

MARGIN = 1.2  # a unit may take so many times what the one before it took
CHARACTERS = 1500  # of an error


class OutOfTimeError(Exception):
    """The campaign's time is over in the middle of a unit."""


@dataclass(frozen=True)
class Unit:
    """One thing to do: it adds rows and files by itself."""

    name: str
    run: Callable[[], None]


@dataclass(frozen=True)
class Part:
    """Units of one kind.

    Attributes:
        until: the share of the campaign's time at whose end the last of its units must be done.
        guess_seconds: what its first unit may take.
        units: listed when the part begins.
    """

    name: str
    until: float
    guess_seconds: float
    units: Callable[[], Sequence[Unit]]


@dataclass(frozen=True)
class Done:
    """What became of one unit.

    Attributes:
        why: it was skipped, cut off or failed; empty otherwise.
    """

    part: str
    unit: str
    outcome: Literal["done", "skipped", "cut off", "failed"]
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        told = f": {self.why}" if self.why else ""
        return f"{self.part}, {self.unit}: {self.outcome} after {self.seconds:.1f} s{told}"


@dataclass
class Timetable:
    """Runs parts one after another until the time is over.

    Attributes:
        tell: called with each unit before it starts and after it ends.
        after_each: called when a unit has ended, however.
    """

    total_seconds: float
    tell: Callable[[str], None]
    after_each: Callable[[], None]
    done: list[Done] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _until: float = 1.0  # of the part that runs

    @property
    def left_seconds(self) -> float:
        """Until the end of the whole campaign."""
        return self.total_seconds - (time.monotonic() - self._began)

    @property
    def part_left_seconds(self) -> float:
        """Until the end of the time of the part that runs."""
        return self.left_seconds - (1.0 - self._until) * self.total_seconds

    def run(self, part: Part) -> None:
        """Run the part's units; which were skipped, cut off or failed is in `done`."""
        expected, self._until = part.guess_seconds, part.until
        for unit in part.units():
            left = self.part_left_seconds
            if left < expected:
                why = f"it may take {expected:.0f} s, and {max(left, 0):.0f} s of this part's time are left"
                self._note(Done(part.name, unit.name, "skipped", 0.0, why))
                continue
            self.tell(f"{part.name}, {unit.name} … ({self.left_seconds:.0f} s left)")
            began = time.monotonic()
            outcome, why = self._outcome(unit)
            seconds = time.monotonic() - began
            if outcome == "done":
                expected = MARGIN * seconds
            self._note(Done(part.name, unit.name, outcome, seconds, why))

    def _outcome(self, unit: Unit) -> tuple[Literal["done", "cut off", "failed"], str]:
        try:
            with _ends_in(self.left_seconds):
                unit.run()
        except OutOfTimeError:
            return "cut off", "the campaign's time was over"
        except Exception as error:  # whatever it is, the other units are worth their time
            said = " ".join(str(error).split())
            kept = said if len(said) <= CHARACTERS else f"{said[: CHARACTERS // 4]} … {said[-3 * CHARACTERS // 4 :]}"
            return "failed", f"{type(error).__name__}: {kept}"
        return "done", ""

    def _note(self, done: Done) -> None:
        self.done.append(done)
        self.tell(str(done))
        self.after_each()


@contextmanager
def _ends_in(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in this block, in the main thread, when so many seconds are over."""

    def end(number: int, frame: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
