"""One search on one problem, timed; and which searches a table runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dejavu.errors import DejavuError
from dejavu.plan import InfeasibleError, Problem, SearchResult
from dejavu.search import SEARCHES, Search, search_named

PROVERS = ("exact", "exhaustive")  # when they say that no plan fits, none does
WARM_UP_SECONDS = 3.0  # of budget for the run that loads the compiled loops


@dataclass(frozen=True, eq=False)
class Run:
    """What a search answered, and what it took.

    Attributes:
        result: None where it found nothing or refused.
        complaint: why.
        infeasible: it says that no plan fits; of those that prove anything, this is a proof.
        cpu_seconds: of all threads of this process.
    """

    result: SearchResult | None
    complaint: str
    cpu_seconds: float
    wall_seconds: float
    infeasible: bool = False

    @property
    def step_seconds(self) -> float:
        """Infinite where there is no plan."""
        return self.result.step_seconds if self.result else math.inf

    @property
    def lower_bound_seconds(self) -> float:
        """Zero where nothing was proved."""
        return self.result.lower_bound_seconds if self.result else 0.0

    @property
    def gap_percent(self) -> float:
        """Between its own bound and its own price; 100 where it has no plan."""
        return 100.0 * self.result.gap if self.result else 100.0


def run(search: Search, problem: Problem, budget_seconds: float, seed: int = 0) -> Run:
    """The answer, or the complaint of a search that refuses, runs out of time or finds nothing."""
    result, complaint, infeasible = None, "", False
    cpu, wall = time.process_time(), time.perf_counter()
    try:
        result = search.run(problem, budget_seconds=budget_seconds, seed=seed)
    except DejavuError as error:
        complaint, infeasible = str(error), isinstance(error, InfeasibleError)
    return Run(result, complaint, time.process_time() - cpu, time.perf_counter() - wall, infeasible)


def chosen(names: str, default: Sequence[str]) -> dict[str, Search]:
    """The searches that a person named, with commas; of the default ones those that there are.

    Raises:
        InputError: there is none of a name.
    """
    wanted = [name for name in names.split(",") if name] or [name for name in default if name in SEARCHES]
    return {name: search_named(name)() for name in wanted}


def warm_up(searches: Iterable[Search], problems: Iterable[Problem]) -> None:
    """Compiled loops are made, or loaded from numba's cache, before anything is timed."""
    for problem in problems:
        for search in searches:
            run(search, problem, WARM_UP_SECONDS)
