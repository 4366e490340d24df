"""Searches to run on problems, and the ways to run many at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dejavu.foundation.registry import named
from dejavu.foundation.units import plural
from dejavu.plans import Answer, Plan
from dejavu.plans.priced_problem import PricedProblem
from dejavu.search import SEARCHES, Search
from dejavu.search.fan_out import Client, answers

BASELINES = ("uniform", "proportional", "balanced")  # what people do without a planner; always run, always shown
QUICK = (*BASELINES, "pipedream")  # end by themselves in milliseconds; the others start from their plans


@dataclass(frozen=True, eq=False)
class Question:
    """One search to run on one problem.

    Attributes:
        start: a plan of the problem for the search to start from, where it takes one.
    """

    search: str
    priced: PricedProblem
    budget_seconds: float
    seed: int = 0
    start: Plan | None = None

    @property
    def num_microbatches(self) -> int:
        return self.priced.problem.num_microbatches

    @property
    def asked(self) -> Search:
        """The search with its incumbent."""
        return named(SEARCHES, self.search)().started_from(self.start)

    @property
    def is_quick(self) -> bool:
        """Whether the search ends by itself in milliseconds."""
        return self.search in QUICK

    def answer(self) -> Answer:
        """Run the search."""
        return self.asked.run(self.priced.problem, budget_seconds=self.budget_seconds, seed=self.seed)

    def __str__(self) -> str:
        return f"{self.search}, {plural(self.num_microbatches, 'microbatch')}"


Ask = Callable[[Sequence[Question]], list[Answer]]  # one answer for each question, in their order


def in_this_process(questions: Sequence[Question]) -> list[Answer]:
    """Run the searches in threads, one for each core: their compiled loops release the GIL."""
    if len(questions) < 2:
        return [question.answer() for question in questions]
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="search") as pool:
        return list(pool.map(Question.answer, questions))


def on_dask(client: Client) -> Ask:
    """Run the searches as tasks of a Dask client, on whatever workers it has."""

    def ask(questions: Sequence[Question]) -> list[Answer]:
        budgets = {q.budget_seconds for q in questions}  # one budget for all that run together
        return answers([(q.asked, q.priced.problem, q.seed) for q in questions], max(budgets), client)

    return ask


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
