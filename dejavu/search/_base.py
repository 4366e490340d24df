"""What all searches share: the contract, the unit of time, and the record of the best plan so far."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from dejavu.plans import Answer, Infeasible, NotFound, Obstacle, Plan, Problem, SearchResult, step_seconds
from dejavu.search.shared.clock import SearchClock
from dejavu.search.shared.unit import in_units, unit_seconds


@dataclass(eq=False)
class HandOver:
    """A plan of a problem that one search leaves for another that runs beside it; replaced whole, so without a lock."""

    problem: Problem
    plan: Plan | None = None


# Set by a search that runs others beside each other (`hybrid`): when it needs one no more, no time remains for that
# one; and plans of one that another may go on from.
STOPPED: ContextVar[threading.Event | None] = ContextVar("STOPPED", default=None)
HANDED: ContextVar[HandOver | None] = ContextVar("HANDED", default=None)


@dataclass(frozen=True)
class Search(ABC):
    """Finds a plan for a problem. Settings are fields with defaults; work is `run`.

    Every member is priced by `plans.price`, so results compare; randomness comes only from `seed`. Members see the
    problem with times in units of about the least step, so that what they do does not depend on the unit that the
    problem is given in (`shared.unit`).
    """

    name: ClassVar[str]

    def run(self, problem: Problem, *, budget_seconds: float = 30.0, seed: int = 0) -> Answer:
        """The best plan found within the budget with what was proved about it, a proof that there is none, or neither.

        Args:
            budget_seconds: of processor time, as `Clock` counts it.

        Raises:
            PlanError, DoesNotFitError: the plan that this search was given to start from is none of the problem's.
        """
        unit = unit_seconds(problem)
        scaled = problem if unit == 1.0 else in_units(problem, unit)
        best = Incumbent(scaled, self.name, budget_seconds, unit)
        try:
            answer = self._answer(scaled, best, seed)
        except TooLargeError as refusal:
            answer = best.not_found(Obstacle.TOO_LARGE, str(refusal))
        return answer if unit == 1.0 else _in_seconds(answer, unit)

    def started_from(self, plan: Plan | None) -> Self:
        """The same search with an incumbent, if it takes one and there is one."""
        takes = any(setting.name == "incumbent" for setting in fields(self))
        return replace(self, incumbent=plan) if takes and plan is not None else self  # type: ignore[call-arg]

    @abstractmethod
    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        """The same, plans being offered to `best`.

        Raises:
            TooLargeError: the problem is larger than this search takes, or of a form that it does not take.
        """


class TooLargeError(Exception):
    """A search refuses a problem; the message says what it takes. `Search.run` makes it an outcome."""


class Incumbent:
    """The best plan so far, its price, and when each improvement came.

    Attributes:
        unit_seconds: a search's prices and bounds times this are the seconds of the problem that was asked.
    """

    def __init__(self, problem: Problem, search: str, budget_seconds: float, unit_seconds: float = 1.0) -> None:
        self._problem, self._search, self.unit_seconds = problem, search, unit_seconds
        self.budget_seconds = budget_seconds
        self._stopped, self._handed = STOPPED.get(), HANDED.get()
        self._clock = SearchClock()
        self._history: list[tuple[float, float]] = []
        self._taken: Plan | None = None
        self._lock = threading.Lock()  # some searches look for plans in two threads
        self.plan: Plan | None = None
        self.step_seconds = float("inf")

    @property
    def elapsed_seconds(self) -> float:
        return self._clock.elapsed_seconds

    @property
    def remaining_seconds(self) -> float:
        if self._stopped is not None and self._stopped.is_set():
            return -1.0
        return self.budget_seconds - self.elapsed_seconds

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """What is done inside takes nothing from the budget: compiling, which a process does once."""
        with self._clock.stopped():
            yield

    @property
    def is_late(self) -> bool:
        """Whether to stop: the budget has ended, and there is a plan to return."""
        return self.plan is not None and self.remaining_seconds < 0

    def offer(self, plan: Plan) -> float:
        """The plan's price; the plan is kept if it is the best so far.

        Raises:
            PlanError, DoesNotFitError: as `plans.check` does.
        """
        seconds = step_seconds(self._problem, plan)
        with self._lock:
            if self.plan is None or seconds < self.step_seconds:
                self.plan, self.step_seconds = plan, seconds
                self._history.append((self.elapsed_seconds, seconds))
        return seconds

    def catch_up(self) -> None:
        """Say that this thread has waited for others of this search, so that its time is theirs; see `SearchClock`."""
        self._clock.catch_up()

    def take_over(self) -> None:
        """Offer what a search beside this one left, if it left a plan of this problem."""
        handed = self._handed
        if handed is not None and handed.problem is self._problem and handed.plan is not self._taken:
            self._taken = handed.plan
            if self._taken is not None:
                self.offer(self._taken)

    def result(self, lower_bound_seconds: float) -> SearchResult:
        """The answer where there is a plan."""
        assert self.plan is not None
        return SearchResult(
            plan=self.plan,
            step_seconds=self.step_seconds,
            lower_bound_seconds=min(lower_bound_seconds, self.step_seconds),
            search=self._search,
            seconds=self.elapsed_seconds,
            history=tuple(self._history),
        )

    def infeasible(self, proof: str) -> Infeasible:
        """The answer where it is proved that there is no plan."""
        assert self.plan is None
        return Infeasible(self._search, proof, self.elapsed_seconds)

    def not_found(self, obstacle: Obstacle, reason: str, lower_bound_seconds: float = 0.0) -> SearchResult | NotFound:
        """The answer of a search that stopped without a proof: the plan that it has, if it was given one."""
        if self.plan is not None:
            return self.result(lower_bound_seconds)
        return NotFound(self._search, obstacle, reason, self.elapsed_seconds, lower_bound_seconds)


def _in_seconds(answer: Answer, unit: float) -> Answer:
    """An answer whose times are in this unit, in seconds; a power of two, so that nothing is rounded."""
    if isinstance(answer, Infeasible):
        return answer
    bound = answer.lower_bound_seconds * unit
    if isinstance(answer, NotFound):
        return replace(answer, lower_bound_seconds=bound)
    history = tuple((at, price * unit) for at, price in answer.history)
    return replace(answer, step_seconds=answer.step_seconds * unit, lower_bound_seconds=bound, history=history)
