"""A Metropolis walk over plans: takes any costs and any memory rule, proves nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from dejavu.foundation.units import counted_devices, format_seconds
from dejavu.plans import Answer, Obstacle, Plan, Problem
from dejavu.search._base import Incumbent, Search
from dejavu.search.mcmc.moves import CONFIGURATION, STOP, random_state
from dejavu.search.mcmc.walk import Chain, Cooling, Rows, random_plans, rows_for, value, walk
from dejavu.search.shared.compiling import tiny_problem
from dejavu.search.shared.stage_table import Arrays, StageTable, plan_of

_SECONDS_PER_CALL = 0.004  # between two looks at the clock, about
_STEPS_PER_SECOND = 2e6  # of a plan of few stages; each stage more takes _STAGE_SHARE of a step more
_STAGE_SHARE = 0.1
_INCUMBENT_SHARE = 0.25  # of the longest chain's steps, for the chain from a given plan: the others are late by that
_TRIES_PER_CALL = 25  # random plans between two looks at the clock


@dataclass(frozen=True)
class MCMC(Search):
    """A Metropolis walk over plans, as FlexFlow searches parallelization strategies.

    From a random plan that fits, each step moves a cut, changes a stage's configuration, swaps two stages'
    configurations, splits, merges or carries stages; half of the plans of a new shape are cut anew, so that no stage
    is busier than about the bottleneck so far. A dearer plan is accepted with probability exp(−Δ / temperature), which
    cools. A feasible plan is never left for one that is not. Chains start from plans of their own and grow longer, so
    that the first ends after milliseconds.

    Choose it for a good plan of any problem in a second, or as the first of a hybrid. It proves nothing about the
    distance to the best plan, and a chain can stay where many stages would have to change at once.
    See [Jia et al., MLSys 2019](https://arxiv.org/abs/1807.05358), section 6.2.

    Attributes:
        num_steps: of the longest two chains; each pair before has half as many.
        num_chains: how many chains, if the budget lasts.
        hot, cold: the temperature at a chain's beginning and end, as fractions of the current step time.
        num_starts: random plans that each chain looks at for its first.
        incumbent: a plan of another search, from which one more chain starts before the others.
        steps_per_choice: small problems take no more steps a chain than this × layers × configurations × stages.
    """

    name: ClassVar[str] = "mcmc"
    num_steps: int = 100_000
    num_chains: int = 8
    hot: float = 0.05
    cold: float = 0.01
    num_starts: int = 300
    incumbent: Plan | None = None
    steps_per_choice: int = 20

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        with best.clock_stopped():
            _load_compiled_loops()
        return self._walk(problem, best, seed)

    def _walk(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        table = StageTable.of(problem)
        if not table.num_usable:
            counts = counted_devices(problem.device_counts)
            return best.infeasible(f"every stage configuration takes more devices than there are ({counts})")
        choices = problem.num_layers * table.num_usable * table.most_stages
        most = min(self.num_steps, self.steps_per_choice * choices)
        lengths = [max(1, most >> ((self.num_chains - 1 - k) // 2)) for k in range(self.num_chains)]
        if self.incumbent is not None:
            best.offer(self.incumbent)
            num_steps = max(1, int(_INCUMBENT_SHARE * most))
            self._chain(table, best, problem, self.incumbent, num_steps, random_state(seed, self.num_chains))
        for k, num_steps in enumerate(lengths):
            if best.is_late or (k and best.remaining_seconds < 0):
                break
            self._chain(table, best, problem, None, num_steps, random_state(seed, k))
        if best.plan is None:
            return best.not_found(
                Obstacle.NONE_CONSIDERED_FITS,
                f"the walk met no plan that fits in {format_seconds(best.elapsed_seconds, 2)}",
            )
        return best.result(lower_bound_seconds=0.0)

    def _chain(
        self,
        table: StageTable,
        best: Incumbent,
        problem: Problem,
        start: Plan | None,
        num_steps: int,
        state: np.ndarray,
    ) -> None:
        arrays = (table.costs, table.links, table.kinds, table.rules)
        here, there, met = (rows_for(table) for _ in range(3))
        met_4 = _first_plan(table, met, arrays, problem, start)
        for tried in range(0, self.num_starts if start is None else 0, _TRIES_PER_CALL):
            random_plans(arrays, there, met, met_4, state, min(_TRIES_PER_CALL, self.num_starts - tried))
            _offer(best, problem, met, met_4)
            if best.remaining_seconds < 0:
                return
        here_4 = met_4.copy()
        for array, found in zip(here, met, strict=True):
            array[:] = found
        chain, cooling = Chain(here, here_4, met, met_4, there, state), Cooling(num_steps, self.hot, self.cold)
        per_call = int(_SECONDS_PER_CALL * _STEPS_PER_SECOND / (1 + _STAGE_SHARE * table.most_stages)) + 1
        for step in range(0, num_steps, per_call):
            stop = min(step + per_call, num_steps)
            walk(arrays, chain, cooling, step, stop)
            _offer(best, problem, met, met_4)
            if best.remaining_seconds < 0:
                return


def _first_plan(table: StageTable, rows: Rows, arrays: Arrays, problem: Problem, plan: Plan | None) -> np.ndarray:
    """Put a plan into rows, or one stage, fitting or not, where no plan is given; its number of stages and value."""
    stages = [(problem.num_layers, int(table.kinds[2][-1]))]
    if plan is not None:
        stages = [(stage.stop, problem.index(stage.configuration)) for stage in plan.stages]
    rows[0][: len(stages), [STOP, CONFIGURATION]] = stages
    return np.array([len(stages), *value(arrays, rows, len(stages))])


def _offer(best: Incumbent, problem: Problem, rows: Rows, value_4: np.ndarray) -> None:
    """Offer a chain's best plan, if it fits and is better than any chain's before."""
    num_stages, price, distance, _ = value_4
    if distance == 0 and (best.plan is None or price < best.step_seconds) and price < np.inf:
        stages = rows[0][: int(num_stages)]
        best.offer(plan_of(problem, stages[:, STOP], stages[:, CONFIGURATION]))


@cache
def _load_compiled_loops() -> None:
    """Compile, or load from numba's cache, on a problem of one layer."""
    problem = tiny_problem()
    MCMC(num_chains=1)._walk(problem, Incumbent(problem, MCMC.name, np.inf), seed=0)
