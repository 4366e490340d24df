"""One search on one problem, timed; and which searches a table runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dejavu.foundation.registry import named
from dejavu.plans import Answer, Infeasible, Problem, SearchResult
from dejavu.search import SEARCHES, Search

WARM_UP_SECONDS = 3.0  # of budget for the run that loads the compiled loops


@dataclass(frozen=True, eq=False)
class Run:
    """What a search answered, and what it took.

    Attributes:
        cpu_seconds: of all threads of this process.
    """

    answer: Answer
    cpu_seconds: float
    wall_seconds: float

    @property
    def result(self) -> SearchResult | None:
        """None where it found nothing or refused."""
        return self.answer if isinstance(self.answer, SearchResult) else None

    @property
    def complaint(self) -> str:
        """Why there is no plan; empty where there is one."""
        return "" if isinstance(self.answer, SearchResult) else str(self.answer)

    @property
    def infeasible(self) -> bool:
        """It proved that no plan fits."""
        return isinstance(self.answer, Infeasible)

    @property
    def step_seconds(self) -> float:
        """Infinite where there is no plan."""
        return self.result.step_seconds if self.result else math.inf

    @property
    def lower_bound_seconds(self) -> float:
        """Zero where nothing was proved; infinite where it is that there is no plan."""
        return math.inf if isinstance(self.answer, Infeasible) else self.answer.lower_bound_seconds

    @property
    def gap_percent(self) -> float:
        """Between its own bound and its own price; 100 where it has no plan."""
        return 100.0 * self.result.gap if self.result else 100.0


def run(search: Search, problem: Problem, budget_seconds: float, seed: int = 0) -> Run:
    """The answer, timed."""
    cpu, wall = time.process_time(), time.perf_counter()
    answer = search.run(problem, budget_seconds=budget_seconds, seed=seed)
    return Run(answer, time.process_time() - cpu, time.perf_counter() - wall)


def chosen(names: str, default: Sequence[str]) -> dict[str, Search]:
    """The searches that a person named, with commas; of the default ones those that there are.

    Raises:
        InputError: there is none of a name.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()] or [
        name for name in default if name in SEARCHES
    ]
    return {name: named(SEARCHES, name)() for name in wanted}


def warm_up(searches: Iterable[Search], problems: Iterable[Problem]) -> None:
    """Compiled loops are made, or loaded from numba's cache, before anything is timed."""
    for problem in problems:
        for search in searches:
            run(search, problem, WARM_UP_SECONDS)
