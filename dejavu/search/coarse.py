"""Thousands of operators: search over clusters of them, move the cuts one by one, and prove it on the original."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from dejavu.errors import DejavuError, InputError
from dejavu.plan import InfeasibleError, Plan, Problem, SearchResult
from dejavu.search._base import Incumbent, Search
from dejavu.search._clusters import Ints, boundaries, clustered, reclustered, refined, unclustered
from dejavu.search._windowed import WindowedBound, undominated
from dejavu.search.exact import Exact
from dejavu.search.pipedream import PipeDream
from dejavu.stage_costs import AdditiveCosts, PlanError

_FIRST_REACH = 4.0  # in clusters: how far a cut may move at once; less each time that nothing was gained


@dataclass(frozen=True)
class Coarse(Search):
    """Operators clustered into layers by cut size and balance, an exact search over those, and cuts refined at the end.

    The bound is one of the original problem, with all of its cuts: prices on devices, and memory by the fewest stages
    behind (`_windowed`). Choose it for more layers than `exact` can list the stages of, on as many devices as there
    are; costs have to be sums over layers.

    Attributes:
        quick: gives the first plan, in seconds.
        inner: searches the clustered problem.
        incumbent: a plan to start from in place of the quick one.
        num_clusters: so many layers at most.
        num_rounds: of searching; from the second on the best plan's cuts are among those between clusters.
        round_share: of the budget, for each round; the proof runs beside the rounds from the second on.
        max_options: fewer clusters where they and the configurations would make more stages than this.
        relative_gap: proved to be as close as this to the best, it stops.
    """

    name: ClassVar[str] = "coarse"
    quick: Search = field(default_factory=PipeDream)
    inner: Exact = field(default_factory=lambda: Exact(relative_gap=0.01))
    incumbent: Plan | None = None
    num_clusters: int = 192
    num_rounds: int = 4
    round_share: float = 0.22
    max_options: float = 6e6
    relative_gap: float = 0.005

    def run(self, problem: Problem, *, budget_seconds: float = 60.0, seed: int = 0) -> SearchResult:
        """The plan, and a bound on every plan of the original problem.

        Raises:
            InputError: the costs are no sums over layers.
            InfeasibleError: no plan fits that cuts between clusters; one with other cuts may.
        """
        if problem.num_layers <= self._affordable(problem):
            return replace(self.inner.run(problem, budget_seconds=budget_seconds, seed=seed), search=self.name)
        if not isinstance(problem.costs, AdditiveCosts):
            raise InputError("coarse search clusters layers whose costs add up; these are given stage by stage")
        best = Incumbent(problem, self.name, budget_seconds)
        smaller = _with(problem, undominated(problem))
        num_clusters = self._affordable(smaller)
        self._start(problem, best, seed)
        self._round(smaller, best, num_clusters, seed, around=None)
        with ThreadPoolExecutor(max_workers=1) as pool:  # compiled loops run beside each other
            proof = pool.submit(WindowedBound(problem, best).prove, self.relative_gap)
            for k in range(1, self.num_rounds):
                if best.remaining_seconds < 0 or proof.done():
                    break
                self._round(smaller, best, num_clusters + k, seed, best.plan)
            return best.result(proof.result())

    def _start(self, problem: Problem, best: Incumbent, seed: int) -> None:
        """A first plan, if the quick search finds one."""
        if self.incumbent is not None:
            best.offer(self.incumbent)
        else:
            try:
                best.offer(self.quick.run(problem, budget_seconds=best.remaining_seconds, seed=seed).plan)
            except DejavuError:
                return
        _move_cuts(problem, best, _FIRST_REACH * problem.num_layers / self.num_clusters)

    def _round(self, problem: Problem, best: Incumbent, num_clusters: int, seed: int, around: Plan | None) -> None:
        """Search over clusters, the cuts of a plan among those between them; then move the cuts of the best."""
        cuts, inner = boundaries(problem, num_clusters), self.inner
        if around is not None:
            own = [0, *around.cuts, problem.num_layers]
            cuts = np.union1d(boundaries(problem, max(num_clusters - len(own), 1)), own)
            inner = replace(inner, incumbent=reclustered(around, cuts))
        share = min(self.round_share * best.budget_seconds, max(best.remaining_seconds, 0.0))
        try:
            found = inner.run(clustered(problem, cuts), budget_seconds=share, seed=seed)
        except DejavuError:
            if best.plan is None:
                raise
            return
        best.offer(unclustered(found.plan, cuts))
        _move_cuts(problem, best, _FIRST_REACH * problem.num_layers / len(cuts))

    def _affordable(self, problem: Problem) -> int:
        """So many clusters that the exact search over them can list its stages."""
        return int(min(self.num_clusters, np.sqrt(2.0 * self.max_options / len(problem.configurations))))


def _move_cuts(problem: Problem, best: Incumbent, reach: float) -> None:
    """Refine the best plan's cuts until that gains nothing."""
    while reach >= 1.0 and best.remaining_seconds > 0:
        assert best.plan is not None
        before = best.step_seconds
        for plan in refined(problem, best.plan, int(reach)):
            try:
                best.offer(plan)
            except (PlanError, InfeasibleError):  # sums in another order: it just does not fit
                continue
        if best.step_seconds >= before * (1 - 1e-6):
            reach /= 4.0


def _with(problem: Problem, kept: Ints) -> Problem:
    """The problem with some of its configurations only."""
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    return replace(
        problem,
        configurations=tuple(problem.configurations[c] for c in kept),
        costs=AdditiveCosts(**{name: getattr(costs, name)[kept] for name in AdditiveCosts.__dataclass_fields__}),
        link_latency_seconds_CC=problem.link_latency_seconds_CC[np.ix_(kept, kept)],
        link_seconds_per_byte_CC=problem.link_seconds_per_byte_CC[np.ix_(kept, kept)],
    )
