"""Which search, by the size of the problem and the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dejavu.plans import Answer, Plan, Problem
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.search._base import Incumbent, Search
from dejavu.search.coarse import Coarse
from dejavu.search.exact import Exact
from dejavu.search.hybrid import Hybrid
from dejavu.search.mcmc import MCMC


@dataclass(frozen=True)
class Auto(Search):
    """Picks a search and runs it; the answer names the one picked after a colon.

    Few steps of the exact dynamic program: `small`, alone. More layers than can be listed as stages: `long`, where
    costs are sums. Everything else: `mixed`. Choose it when in doubt; it proves what the one picked proves.

    Attributes:
        small, mixed, long: the searches to pick from.
        steps_per_second: of the dynamic program, by which `small` must be able to end in half of the budget.
        most_small_steps: more than this is not small, whatever the budget.
        long_layers: from so many layers on a problem is long.
        incumbent: a plan for the one picked to start from.
    """

    name: ClassVar[str] = "auto"
    small: Search = field(default_factory=Exact)
    mixed: Search = field(default_factory=Hybrid)
    long: Search = field(default_factory=lambda: Hybrid(searching=(MCMC(),), proving=Coarse(), alone_seconds=0.0))
    steps_per_second: float = 2e8
    most_small_steps: float = 1e8
    long_layers: int = 257
    incumbent: Plan | None = None

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        picked = self.pick(problem, best.budget_seconds).started_from(self.incumbent)
        answer = picked.run(problem, budget_seconds=best.budget_seconds, seed=seed)
        return replace(answer, search=f"{self.name}: {answer.search}")

    def pick(self, problem: Problem, budget_seconds: float) -> Search:
        """The search for a problem."""
        if problem.num_layers >= self.long_layers and isinstance(problem.costs, AdditiveCosts):
            return self.long
        affordable = min(self.most_small_steps, 0.5 * budget_seconds * self.steps_per_second)
        return self.small if exact_steps(problem) <= affordable else self.mixed


def exact_steps(problem: Problem) -> float:
    """Steps of one dynamic program of the exact search, at most: stages × stages downstream × vectors of devices."""
    counts = problem.device_counts
    stages = len(problem.configurations) * problem.num_layers * (problem.num_layers + 1) / 2
    downstream = min(problem.most_stages, problem.num_microbatches, max(1, sum(counts.values())))
    return stages * downstream * math.prod(count + 1 for count in counts.values())
