"""Searches to run on problems, and the ways to run many at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dejavu.foundation.processes.homes import Homes
from dejavu.foundation.registry import named
from dejavu.foundation.units import plural
from dejavu.plans import Answer, Plan
from dejavu.plans.priced_problem import PricedProblem
from dejavu.search import SEARCHES, Search
from dejavu.search.fan_out import Client, answers
from dejavu.simulation.bound import Bounding, RankChoices

BASELINES = ("uniform", "proportional", "balanced")  # what people do without a planner; always run, always shown
PROVER = "auto"
FURTHER = ("differentiable", "mcmc")  # run where the proof leaves a gap
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
        return self.priced.problem.whole_microbatches

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


@dataclass
class Posed:
    """A problem, and its bound on its way, once that was begun; see `Homes`.

    Attributes:
        choices, known: as of `bounding`.
    """

    priced: PricedProblem
    choices: RankChoices | None = None
    known: Mapping[tuple[str, int], float] | None = None
    bounding: Bounding | None = None


def at_home(homes: Homes[Posed]) -> Ask:
    """Run the searches where their problems live."""
    places = {id(posed.priced): k for k, posed in enumerate(homes.kept)}

    def ask(questions: Sequence[Question]) -> list[Answer]:
        return homes.each(
            [(places[id(q.priced)], (q.search, q.budget_seconds, q.seed, q.start)) for q in questions], _answer
        )

    return ask


def _answer(posed: Posed, search: str, budget_seconds: float, seed: int, start: Plan | None) -> Answer:
    return Question(search, posed.priced, budget_seconds, seed, start).answer()


def on_dask(client: Client) -> Ask:
    """Run the searches as tasks of a Dask client, on whatever workers it has."""

    def ask(questions: Sequence[Question]) -> list[Answer]:
        budgets = {q.budget_seconds for q in questions}  # one budget for all that run together
        return answers([(q.asked, q.priced.problem, q.seed) for q in questions], max(budgets), client)

    return ask
