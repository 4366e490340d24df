"""A search that is quick and one that proves, side by side: as good as the better of both at any time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dejavu.plans import Answer, Infeasible, NotFound, Obstacle, Plan, Problem, SearchResult
from dejavu.search._base import HANDED, STOPPED, HandOver, Incumbent, Search
from dejavu.search.differentiable import Differentiable
from dejavu.search.exact import Exact
from dejavu.search.feasible import Feasible
from dejavu.search.mcmc import MCMC
from dejavu.search.pipedream import PipeDream
from dejavu.search.shared.clock import ThreadClock

History = tuple[tuple[float, float], ...]

_MOST_ALONE = 0.25  # of the budget
_LOOK_SECONDS = 0.02  # of real time: how often a thread that waits looks at the other's clock


@dataclass(frozen=True)
class Hybrid(Search):
    """A plan in milliseconds is the incumbent of searches that then run side by side, one of which proves.

    `quick` gives the first plan, where none was given; where it has none, `fitting` gives one or proves that there is
    none. `proving` goes on alone for a moment, which is enough for many problems. Then a second thread runs the members
    of `searching` beside it, one after the other, each from the best plan so far. What a member ends with is handed to
    `proving`, which goes on from it: a gradient finds plans near the best where the exact search's bounds are still
    wide, and such a plan is what lets bounds drop the rest.

    Each thread has the whole budget of processor time (`Clock`), so with two idle cores the plan at any time is the
    better of the parents' at that time, later by what the first plan and the moment took. When `proving` ends with an
    answer the others are stopped. The bound is the highest that anyone proved, and that there is no plan is proved
    where one of them did.

    Choose it where it is not known beforehand whether the exact search ends in time, and always when cores are idle.

    Attributes:
        quick: ends by itself in milliseconds.
        fitting: for problems whose memory is tight.
        searching: the parents that look for plans, in order.
        proving: the parent that proves.
        alone_seconds: `proving`'s moment of processor time, and no more than a quarter of the budget.
        incumbent: a plan to start from, of another search, in place of `quick`'s.
    """

    name: ClassVar[str] = "hybrid"
    quick: Search = field(default_factory=PipeDream)
    fitting: Search = field(default_factory=Feasible)
    searching: tuple[Search, ...] = field(default_factory=lambda: (MCMC(), Differentiable()))
    proving: Search = field(default_factory=Exact)
    alone_seconds: float = 1.0
    incumbent: Plan | None = None

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        first = self._first(problem, best, seed)
        if isinstance(first, Infeasible):
            return replace(first, search=self.name)
        answers = (*self._side_by_side(problem, first, best.budget_seconds, seed), first)
        found = [answer for answer in answers if isinstance(answer, SearchResult)]
        if not found:
            return self._without_a_plan(best, answers)
        best.offer(min(found, key=lambda result: result.step_seconds).plan)  # of equal ones the proved one: it repeats
        history = merged([answer.history for answer in found])
        return replace(best.result(_highest_bound(answers)), history=history)

    def _first(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        """The first plan, or why there is none."""
        if self.incumbent is not None:
            best.offer(self.incumbent)
            return best.result(0.0)
        quick = self.quick.run(problem, budget_seconds=best.budget_seconds, seed=seed)
        if not isinstance(quick, NotFound):
            return quick
        left = max(best.budget_seconds - quick.seconds, 0.0)
        return _later(self.fitting.run(problem, budget_seconds=left, seed=seed), quick.seconds)

    def _side_by_side(self, problem: Problem, first: Answer, budget_seconds: float, seed: int) -> list[Answer]:
        """The answers of `proving` and of the members of `searching`, with times since the hybrid began."""
        start, left_seconds = _plan_of(first), max(budget_seconds - first.seconds, 0.0)
        moment = min(self.alone_seconds, _MOST_ALONE * budget_seconds)
        ended, handed = threading.Event(), HandOver(problem)
        aside, here = copy_context(), copy_context()
        aside.run(STOPPED.set, ended)
        here.run(HANDED.set, handed)
        proving, its_clock = self.proving.started_from(start), ThreadClock()
        with ThreadPoolExecutor(1, thread_name_prefix=self.name) as beside:

            def search() -> list[Answer]:
                while its_clock.elapsed_seconds < moment:
                    if ended.wait(_LOOK_SECONDS):
                        return []
                found = self._one_after_the_other(problem, start, max(left_seconds - moment, 0.0), seed, ended, handed)
                return [_later(answer, moment) for answer in found]

            future = beside.submit(aside.run, search)
            try:
                proved = here.run(proving.run, problem, budget_seconds=left_seconds, seed=seed)
            except BaseException:
                ended.set()
                raise
            if not isinstance(proved, NotFound):
                ended.set()
            its_clock.stop()
            return [_later(answer, first.seconds) for answer in (proved, *future.result())]

    def _one_after_the_other(
        self,
        problem: Problem,
        start: Plan | None,
        budget_seconds: float,
        seed: int,
        stopped: threading.Event,
        handed: HandOver,
    ) -> list[Answer]:
        """Each member of `searching` from the best plan of those before it; each one's best is handed over."""
        answers: list[Answer] = []
        spent, best_seconds = 0.0, float("inf")
        for member in self.searching:
            if stopped.is_set() or (answers and spent >= budget_seconds):
                break
            search = member.started_from(start)
            answer = _later(search.run(problem, budget_seconds=budget_seconds - spent, seed=seed), spent)
            answers.append(answer)
            spent = answer.seconds
            if isinstance(answer, SearchResult) and answer.step_seconds < best_seconds:
                start, best_seconds = answer.plan, answer.step_seconds
                handed.plan = start
        return answers

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


def _plan_of(answer: Answer) -> Plan | None:
    return answer.plan if isinstance(answer, SearchResult) else None


def merged(histories: Sequence[History]) -> History:
    """One history of several with one beginning: each improvement on all of them."""
    kept: list[tuple[float, float]] = []
    for seconds, price in sorted(row for history in histories for row in history):
        if not kept or price < kept[-1][1]:
            kept.append((seconds, price))
    return tuple(kept)


def _later(answer: Answer, seconds: float) -> Answer:
    """The answer of a search that began so much later."""
    if isinstance(answer, SearchResult):
        history = tuple((at + seconds, price) for at, price in answer.history)
        return replace(answer, seconds=answer.seconds + seconds, history=history)
    return replace(answer, seconds=answer.seconds + seconds)
