"""Thousands of operators: search over clusters of them, move the cuts one by one, and prove it on the original."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from threading import Event
from typing import ClassVar

import numpy as np

from dejavu.foundation.cores import num_cores
from dejavu.plans import (
    Answer,
    Infeasible,
    Obstacle,
    Plan,
    Problem,
    SearchResult,
    StageConfiguration,
    is_valid,
    step_seconds,
)
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.search._base import STOPPED, Incumbent, Search, TooLargeError
from dejavu.search.coarse.clusters import boundaries, clustered, reclustered, refined, unclustered
from dejavu.search.coarse.levels import fitting
from dejavu.search.coarse.looking.deepening import look_for_plans
from dejavu.search.coarse.loops import load_compiled_loops
from dejavu.search.coarse.ranges import Sought
from dejavu.search.coarse.undominated import Undominated
from dejavu.search.coarse.windowed import WindowedBound
from dejavu.search.exact import Exact
from dejavu.search.feasible import Feasible
from dejavu.search.feasible.infeasible import why_infeasible
from dejavu.search.pipedream import PipeDream
from dejavu.search.shared.stage_table import StageTable

_GAIN = 1e-4  # of the price: less is not worth moving the cuts as far once more
_MOST_THREADS = 4  # each with some hundred megabytes of its own at ten thousand operators
_FITTING_SHARE = 0.3  # of the time that is left goes to trying every way, before prices are tried
_EXPLAIN_SHARE = 0.5  # of the time that is left goes to what would do, once it is proved that nothing fits
_FIRST_CLUSTERS = (95, 190)  # for a first plan; more where few bring none
_FIRST_REACH = 4.0  # in clusters: how far a cut may move at once; less each time that nothing was gained


@dataclass(frozen=True)
class Coarse(Search):
    """Operators clustered into layers by cut size and balance, an exact search over those, and cuts refined at the end.

    A beam over some hundred cuts, or all, comes before, where the bound is least (`coarse.looking.deepening`). The
    bound is one of the original problem, with all of its cuts: prices on devices and on rounded counts of them, and
    memory by the stages downstream, which are counted (`coarse.windowed`, `coarse.levels.leveled`).
    Choose it for more layers than `exact` can list the stages of, on as many devices as there are; costs have to be
    sums over layers.

    Attributes:
        quick: gives the first plan, in seconds.
        fitting: gives it where the quick search has none, or proves that there is none; where it settles neither,
            prices on devices are tried (`coarse.levels.fitting`).
        inner: searches the clustered problem.
        incumbent: a plan to start from in place of the quick one.
        num_clusters: so many layers at most.
        num_rounds: of searching; from the second on the best plan's cuts are among those between clusters.
        guided_share: of the budget, for plans where the bound is least.
        round_share: of the budget, for each round; the proof runs beside them.
        max_options: fewer clusters where they and the configurations would make more stages than this.
        relative_gap: proved to be as close as this to the best, it stops.
    """

    name: ClassVar[str] = "coarse"
    quick: Search = field(default_factory=lambda: PipeDream(precision=0.01, max_cuts=192))
    fitting: Search = field(default_factory=Feasible)
    inner: Exact = field(default_factory=lambda: Exact(relative_gap=0.01))
    incumbent: Plan | None = None
    num_clusters: int = 192
    num_rounds: int = 4
    guided_share: float = 0.3
    round_share: float = 0.22
    max_options: float = 6e6
    relative_gap: float = 0.005

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        if self.incumbent is not None:
            best.offer(self.incumbent)
        if problem.num_layers <= self._affordable(len(problem.configurations)):
            inner = replace(self.inner, incumbent=best.plan)
            return replace(inner.run(problem, budget_seconds=best.budget_seconds, seed=seed), search=self.name)
        if not isinstance(problem.costs, AdditiveCosts):
            raise TooLargeError("coarse search clusters layers whose costs add up; these are given stage by stage")
        with best.clock_stopped():
            load_compiled_loops()
        kept = Undominated.of(problem)
        num_clusters = self._affordable(len(kept.kept) or len(problem.configurations))
        first = self._start(kept, best, seed)
        if isinstance(first, Infeasible):
            return replace(first, search=self.name)
        if best.plan is None and fitting.fit(problem, best):
            return best.infeasible(
                why_infeasible(problem, fitting.is_feasible, _EXPLAIN_SHARE * best.remaining_seconds)
            )
        improve = _Improving(problem, best, _FIRST_REACH)
        bound, ended = WindowedBound(problem, best, improve=improve, kept=kept.kept), Event()
        sought = Sought(bound.least_limit)
        with ThreadPoolExecutor(max_workers=_MOST_THREADS) as pool:  # compiled loops run beside each other
            proof = pool.submit(bound.prove, self.relative_gap, sought)
            proof.add_done_callback(lambda _: ended.set())
            helpers = [pool.submit(bound.help) for _ in range(min(num_cores(), _MOST_THREADS) - 2)]
            try:
                self._look(bound, kept, best, num_clusters, seed, sought)
            finally:
                sought.end()
            if not bound.counts_in_state:
                self._rounds(kept, best, num_clusters, seed, ended)
            bound.help()
            for helper in helpers:
                helper.result()
            proved_seconds = proof.result()
        best.take_over()
        return self._combined(best, proved_seconds)

    def _rounds(self, kept: Undominated, best: Incumbent, num_clusters: int, seed: int, ended: Event) -> None:
        """Search while there is time and the proof has not ended, each round over one cluster more."""
        for k in range(self.num_rounds):
            if best.remaining_seconds < 0 or ended.is_set():
                return
            best.take_over()
            self._round(kept, best, num_clusters + k, seed, ended)

    def _look(
        self, bound: WindowedBound, kept: Undominated, best: Incumbent, num_clusters: int, seed: int, sought: Sought
    ) -> None:
        """Look for plans before anything near is proved: the proof goes better below a good one."""
        if not bound.counts_in_state:
            self._round(kept, best, num_clusters, seed, None)
            return
        problem = kept.original
        reach = max(_FIRST_REACH * problem.num_layers / bound.num_cuts, _FIRST_REACH)
        until_seconds = best.elapsed_seconds + self.guided_share * best.budget_seconds
        look_for_plans(bound.plan_looks(), best, until_seconds, _Improving(problem, best, reach), sought)

    def _combined(self, best: Incumbent, bound: float) -> Answer:
        """The answer with a bound on all plans of the original problem; inf: there are none."""
        if best.plan is not None:
            return best.result(bound)
        if bound == np.inf:
            return best.infeasible("no plan fits: with every cut and devices without number no stages cover the layers")
        late = best.remaining_seconds < 0
        obstacle = Obstacle.OUT_OF_TIME if late else Obstacle.NONE_CONSIDERED_FITS
        return best.not_found(obstacle, "no plan was met, nor is it proved that none fits", bound)

    def _start(self, kept: Undominated, best: Incumbent, seed: int) -> Answer | None:
        """A first plan, from the searches for one where none was given; what the last of them said.

        Few clusters will do for a quick one.
        """
        for num_clusters in _FIRST_CLUSTERS:
            if best.plan is not None:
                return None
            cuts = boundaries(kept.original, num_clusters)
            few = kept.among(clustered(kept.original, cuts))
            answer = self.quick.run(few, budget_seconds=max(best.remaining_seconds, 0.0), seed=seed)
            if isinstance(answer, SearchResult):
                best.offer(unclustered(answer.plan, cuts))
        if best.plan is not None:
            return None
        budget_seconds = _FITTING_SHARE * max(best.remaining_seconds, 0.0)
        answer = self.fitting.run(kept.problem, budget_seconds=budget_seconds, seed=seed)
        if isinstance(answer, SearchResult):
            best.offer(answer.plan)
        return answer

    def _round(self, kept: Undominated, best: Incumbent, num_clusters: int, seed: int, ended: Event | None) -> None:
        """Search over clusters, the cuts of the best plan among those between them; then move the cuts of the best.

        It stops when `ended` is set.

        What this search says of the clusters' problem, infeasible or too large, it does not say of the original.
        """
        problem = kept.problem
        cuts, inner = boundaries(problem, num_clusters), self.inner
        if best.plan is not None:
            around = kept.plan(best.plan)
            own = [0, *around.cuts, problem.num_layers]
            cuts = np.union1d(boundaries(problem, max(num_clusters - len(own), 1)), own)
            inner = replace(inner, incumbent=reclustered(around, cuts))
        share = min(self.round_share * best.budget_seconds, max(best.remaining_seconds, 0.0))
        few = clustered(problem, cuts)
        if inner.incumbent is not None and not is_valid(few, inner.incumbent):
            inner = self.inner  # sums in another order: it just does not fit
        until_then = copy_context()
        if ended is not None:
            until_then.run(STOPPED.set, ended)
        found = until_then.run(inner.run, few, budget_seconds=share, seed=seed)
        if isinstance(found, SearchResult):
            best.offer(unclustered(found.plan, cuts))
        if best.plan is not None:  # maybe of configurations that are not kept: from the start, or handed over
            _move_cuts(kept.original, best, best.plan, _FIRST_REACH * problem.num_layers / len(cuts))

    def _affordable(self, num_configurations: int) -> int:
        """So many clusters that the exact search over them can list its stages."""
        return int(min(self.num_clusters, np.sqrt(2.0 * self.max_options / num_configurations)))


class _Improving:
    """Plans that were met, with their cuts moved."""

    def __init__(self, problem: Problem, best: Incumbent, reach: float) -> None:
        self._problem, self._best, self._reach = problem, best, reach
        self._met = set[tuple[StageConfiguration, ...]]()

    def __call__(self, plan: Plan) -> None:
        """Offer a plan, and those with its cuts moved, once for each row of configurations."""
        configurations = tuple(stage.configuration for stage in plan.stages)
        if is_valid(self._problem, plan):
            self._best.offer(plan)
            if configurations not in self._met:
                self._met.add(configurations)
                _move_cuts(self._problem, self._best, plan, self._reach)


def _move_cuts(problem: Problem, best: Incumbent, plan: Plan, reach: float) -> None:
    """Refine a plan's cuts until that gains nothing."""
    table = StageTable.of(problem, {problem.index(stage.configuration) for stage in plan.stages})
    seconds = step_seconds(problem, plan)
    while reach >= 1.0 and best.remaining_seconds > 0:
        before = seconds
        for moved in refined(problem, plan, int(reach), table):
            # Summed in another order one may just not fit.
            if is_valid(problem, moved) and (priced := best.offer(moved)) < seconds:
                plan, seconds = moved, priced
        if seconds >= before * (1 - _GAIN):
            reach /= 4.0
