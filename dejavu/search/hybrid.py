"""A search that is quick and one that proves, side by side: as good as the better of both at any time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from dejavu.errors import DejavuError
from dejavu.plan import InfeasibleError, Plan, Problem, SearchResult
from dejavu.search._base import STOPPED, Incumbent, Search
from dejavu.search.exact import Exact
from dejavu.search.mcmc import MCMC
from dejavu.search.pipedream import PipeDream

History = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Hybrid(Search):
    """A plan in milliseconds is the incumbent of two searches that then run side by side, one of which proves.

    `quick` gives the first plan; both others start from it where they take an incumbent. They run in two threads, as
    they would alone: on two cores the plan at any time is the better of both parents' at that time, later by what
    `quick` took; on one core they share it, so that each is at most twice as late. When `proving` ends with an answer
    the other is stopped; where it refuses the problem as too large, or ends without a plan, the plan is the other's and
    nothing is proved. The bound is `proving`'s.

    Choose it where it is not known beforehand whether the exact search ends in time, and always when cores are idle.

    Attributes:
        quick: ends by itself in milliseconds.
        searching, proving: the parents.
    """

    name: ClassVar[str] = "hybrid"
    quick: Search = field(default_factory=PipeDream)
    searching: Search = field(default_factory=MCMC)
    proving: Search = field(default_factory=Exact)

    def run(self, problem: Problem, *, budget_seconds: float = 30.0, seed: int = 0) -> SearchResult:
        """The best plan of the parents, and the bound that was proved.

        Raises:
            InfeasibleError: `proving` proved that no plan fits, or no parent found one, which the message says.
        """
        best = Incumbent(problem, self.name, budget_seconds)
        first, spent = None, 0.0
        try:
            first = self.quick.run(problem, budget_seconds=budget_seconds, seed=seed)
            spent = first.seconds  # what compiling took, once in a process, is nobody's budget
        except DejavuError:
            spent = best.elapsed_seconds
        start = None if first is None else first.plan
        proved, searched = self._side_by_side(problem, start, budget_seconds - spent, seed)
        parents = [result for result in (proved, first, searched) if result is not None]
        cheapest = min(parents, key=lambda result: result.step_seconds)  # of equal ones the proved one: it repeats
        best.offer(cheapest.plan)
        later = [result.history for result in (proved, searched) if result is not None]
        history = merged([(0.0, first.history if first else ()), *((spent, each) for each in later)])
        bound = 0.0 if proved is None else proved.lower_bound_seconds
        return replace(best.result(bound), history=history)

    def _side_by_side(
        self, problem: Problem, start: Plan | None, budget_seconds: float, seed: int
    ) -> tuple[SearchResult | None, SearchResult | None]:
        """The answers of `proving` and `searching`; None of one that has none.

        Raises:
            InfeasibleError: none has one; of `proving`, if it said so.
        """
        stopped = threading.Event()
        context = copy_context()
        context.run(STOPPED.set, stopped)
        refusal: DejavuError | None = None
        proved = searched = None
        with ThreadPoolExecutor(1, thread_name_prefix=self.name) as beside:
            searching = _started_from(self.searching, start)
            future = beside.submit(context.run, _answer, searching, problem, budget_seconds, seed)
            try:
                proved = _started_from(self.proving, start).run(problem, budget_seconds=budget_seconds, seed=seed)
                stopped.set()
            except InfeasibleError:
                stopped.set()
                raise
            except DejavuError as error:  # too large, or no plan in time
                refusal = error
            except BaseException:
                stopped.set()
                raise
            searched = future.result()
        if proved is None and searched is None and start is None:
            raise InfeasibleError(f"neither {self.searching.name} nor {self.proving.name} found a plan: {refusal}")
        return proved, searched


def merged(histories: Sequence[tuple[float, History]]) -> History:
    """One history of several that began at these seconds: each improvement on all of them."""
    rows = sorted((began + seconds, price) for began, history in histories for seconds, price in history)
    kept: list[tuple[float, float]] = []
    for seconds, price in rows:
        if not kept or price < kept[-1][1]:
            kept.append((seconds, price))
    return tuple(kept)


def _started_from(search: Search, plan: Plan | None) -> Search:
    """The same search with an incumbent, if it takes one and has none."""
    takes = any(setting.name == "incumbent" for setting in fields(search))
    return replace(search, incumbent=plan) if takes and plan is not None else search  # type: ignore[call-arg]


def _answer(search: Search, problem: Problem, budget_seconds: float, seed: int) -> SearchResult | None:
    try:
        return search.run(problem, budget_seconds=budget_seconds, seed=seed)
    except DejavuError:
        return None
