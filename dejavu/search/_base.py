"""What all searches share: the contract, and the record of the best plan so far."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

from dejavu.plan import Answer, Infeasible, NotFound, Obstacle, Plan, Problem, SearchResult, step_seconds

# Set by a search that runs another beside itself (`hybrid`), when it needs it no more: no time remains for that one.
STOPPED: ContextVar[threading.Event | None] = ContextVar("STOPPED", default=None)


@dataclass(frozen=True)
class Search(ABC):
    """Finds a plan for a problem. Settings are fields with defaults; work is `run`.

    Every member is priced by `plan.price`, so results compare; randomness comes only from `seed`.
    """

    name: ClassVar[str]

    def run(self, problem: Problem, *, budget_seconds: float = 30.0, seed: int = 0) -> Answer:
        """The best plan found within the budget with what was proved about it, a proof that there is none, or neither.

        Raises:
            PlanError, DoesNotFitError: the plan that this search was given to start from is none of the problem's.
        """
        best = Incumbent(problem, self.name, budget_seconds)
        try:
            return self._answer(problem, best, seed)
        except TooLargeError as refusal:
            return best.not_found(Obstacle.TOO_LARGE, str(refusal))

    @abstractmethod
    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        """The same, plans being offered to `best`.

        Raises:
            TooLargeError: the problem is larger than this search takes, or of a form that it does not take.
        """


class TooLargeError(Exception):
    """A search refuses a problem; the message says what it takes. `Search.run` makes it an outcome."""


class Incumbent:
    """The best plan so far, its price, and when each improvement came."""

    def __init__(self, problem: Problem, search: str, budget_seconds: float) -> None:
        self._problem = problem
        self._search = search
        self.budget_seconds = budget_seconds
        self._stopped = STOPPED.get()
        self._began = time.perf_counter()
        self._history: list[tuple[float, float]] = []
        self.plan: Plan | None = None
        self.step_seconds = float("inf")

    @property
    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def remaining_seconds(self) -> float:
        if self._stopped is not None and self._stopped.is_set():
            return -1.0
        return self.budget_seconds - self.elapsed_seconds

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """What is done inside takes nothing from the budget: compiling, which a process does once."""
        before = time.perf_counter()
        yield
        self._began += time.perf_counter() - before

    @property
    def is_late(self) -> bool:
        """Whether to stop: the budget has ended, and there is a plan to return."""
        return self.plan is not None and self.remaining_seconds < 0

    def offer(self, plan: Plan) -> float:
        """The plan's price; the plan is kept if it is the best so far.

        Raises:
            PlanError, DoesNotFitError: as `plan.check` does.
        """
        seconds = step_seconds(self._problem, plan)
        if self.plan is None or seconds < self.step_seconds:
            self.plan, self.step_seconds = plan, seconds
            self._history.append((self.elapsed_seconds, seconds))
        return seconds

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
