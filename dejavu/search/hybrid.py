"""A search that is quick and one that proves, side by side: as good as the better of both at any time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from dejavu.plan import Answer, Infeasible, NotFound, Obstacle, Plan, Problem, SearchResult
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
    the other is stopped; where it refuses the problem as too large, or ends without a plan, the plan is the other's.
    The bound is the highest that anyone proved, and that there is no plan is proved where one of them proved it.

    Choose it where it is not known beforehand whether the exact search ends in time, and always when cores are idle.

    Attributes:
        quick: ends by itself in milliseconds.
        searching, proving: the parents.
    """

    name: ClassVar[str] = "hybrid"
    quick: Search = field(default_factory=PipeDream)
    searching: Search = field(default_factory=MCMC)
    proving: Search = field(default_factory=Exact)

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        first = self.quick.run(problem, budget_seconds=best.budget_seconds, seed=seed)
        if isinstance(first, Infeasible):
            return replace(first, search=self.name)
        start = first.plan if isinstance(first, SearchResult) else None
        spent = first.seconds  # what compiling took, once in a process, is nobody's budget
        proved, searched = self._side_by_side(problem, start, best.budget_seconds - spent, seed)
        answers = (proved, first, searched)
        found = [answer for answer in answers if isinstance(answer, SearchResult)]
        if not found:
            return self._without_a_plan(best, answers)
        best.offer(min(found, key=lambda result: result.step_seconds).plan)  # of equal ones the proved one: it repeats
        histories = [
            (began, answer.history)
            for began, answer in zip((spent, 0.0, spent), answers, strict=True)
            if isinstance(answer, SearchResult)
        ]
        return replace(best.result(_highest_bound(answers)), history=merged(histories))

    def _side_by_side(
        self, problem: Problem, start: Plan | None, budget_seconds: float, seed: int
    ) -> tuple[Answer, Answer]:
        """The answers of `proving` and `searching`; the first answer that settles everything stops the other."""
        stopped = threading.Event()
        context = copy_context()
        context.run(STOPPED.set, stopped)
        proving, searching = _started_from(self.proving, start), _started_from(self.searching, start)
        with ThreadPoolExecutor(1, thread_name_prefix=self.name) as beside:

            def search() -> Answer:
                return searching.run(problem, budget_seconds=budget_seconds, seed=seed)

            future = beside.submit(context.run, search)
            try:
                proved = proving.run(problem, budget_seconds=budget_seconds, seed=seed)
            except BaseException:
                stopped.set()
                raise
            if not isinstance(proved, NotFound):
                stopped.set()
            return proved, future.result()

    def _without_a_plan(self, best: Incumbent, answers: Sequence[Answer]) -> Answer:
        """A proof, whoever has it; otherwise what kept the parents from an answer."""
        for answer in answers:
            if isinstance(answer, Infeasible):
                return best.infeasible(answer.proof)
        missed = [answer for answer in answers if isinstance(answer, NotFound)]
        obstacle = Obstacle.OUT_OF_TIME if best.remaining_seconds < 0 else missed[0].obstacle
        said = "; ".join(dict.fromkeys(f"{answer.search}: {answer.reason}" for answer in missed))
        return best.not_found(obstacle, f"no plan was found ({said})", _highest_bound(answers))


def _highest_bound(answers: Sequence[Answer]) -> float:
    """Each bound is one on every plan of the problem."""
    return max((answer.lower_bound_seconds for answer in answers if not isinstance(answer, Infeasible)), default=0.0)


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
