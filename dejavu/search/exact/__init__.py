"""The best plan, with the proof: a dynamic program inside a search over the bottleneck."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from dejavu.plans import Answer, Obstacle, Plan, Problem, Stage
from dejavu.plans.stage_costs import Floats
from dejavu.search._base import Incumbent, Search
from dejavu.search.exact.device_prices import PricedOptions
from dejavu.search.exact.intervals import ROUNDING, Intervals, middle
from dejavu.search.feasible.fit import is_feasible
from dejavu.search.feasible.infeasible import why_infeasible
from dejavu.search.shared import suffix_table
from dejavu.search.shared.compiling import tiny_problem
from dejavu.search.shared.options import Options, check_number_of_options

_ANY_BOTTLENECK = (0.0, np.inf)
_EXPLAIN_SHARE = 0.5  # of the time that is left goes to what would do, once it is proved that nothing fits
_STEPS_PER_CALL = 2e8  # inner-loop steps between two looks at the clock: about a tenth of a second


class _OutOfTimeError(Exception):
    """The budget ended inside a dynamic program."""


@dataclass(frozen=True)
class _Answer:
    """The least Σ of stage and transfer seconds under a limit on the bottleneck, and a plan that has it."""

    sum_seconds: float
    bottleneck_seconds: float
    plan: Plan


@dataclass(frozen=True)
class Exact(Search):
    """The best plan and its proof: a bisection over the bottleneck, with bounds.

    A step costs Σ + bottleneck. With f(b) the least Σ of a plan whose bottleneck is at most b, no plan with a
    bottleneck between lo and hi is cheaper than f(hi) + lo. Intervals of bottleneck values are split, the least bound
    first, until none can hold a better plan; f is a step function, so each answer also says how far to jump. That takes
    10 to 30 values of f where Alpa's loop over all of them takes thousands (Zheng et al., OSDI 2022, section 5.2).

    Where few devices make a small table, f is a dynamic program over (layer, stages downstream, link class, devices of
    each type). Where it would be large, prices on devices take them out of the state: that bounds f, drops most of the
    options (`exact.priced_stages`), and labels with the devices that they use settle the rest (`exact.labels`).

    Memory follows the schedule's rule by position; links between neighbouring configurations are in the state where
    they differ, and the number of stages where the problem's `max_stages` is less than the layers and devices allow.
    The first run in a process loads the compiled loops before the clock starts. Out of budget it returns the best plan
    so far and the bound proved so far; a first plan is looked for even then.

    Attributes:
        relative_gap: proved to be as close as this to the best, it stops.
        incumbent: a plan to start from, of another search; it only saves time.
        max_table_steps: of one dynamic program over devices; larger problems go the way of prices.
        max_options_bytes: problems with more stages to list are refused; cluster their layers first.
        bottleneck_range_seconds: from and to, not included: the bound is one of the plans with such bottlenecks, if
            they are better than the plan found; parts of one search, for several machines.
    """

    name: ClassVar[str] = "exact"
    relative_gap: float = 0.0
    incumbent: Plan | None = None
    max_table_steps: float = 2e8
    max_options_bytes: float = 4 * 2**30
    bottleneck_range_seconds: tuple[float, float] = _ANY_BOTTLENECK

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        check_number_of_options(problem, self.name, self.max_options_bytes)
        if self.incumbent is not None:
            best.offer(self.incumbent)
        bound = self._bound(problem, best)
        if best.plan is not None:
            return best.result(bound)
        if bound < np.inf:
            late = f"exact search found no plan in {best.budget_seconds:g} s, nor that there is none"
            return best.not_found(Obstacle.OUT_OF_TIME, late, bound)
        if self.bottleneck_range_seconds != _ANY_BOTTLENECK:
            return best.not_found(Obstacle.NONE_CONSIDERED_FITS, "no plan has a bottleneck in the range; others may")
        return best.infeasible(why_infeasible(problem, is_feasible, _EXPLAIN_SHARE * best.remaining_seconds))

    def _bound(self, problem: Problem, best: Incumbent) -> float:
        """The bound that was proved, plans being offered on the way; inf with none found: there is none."""
        with best.clock_stopped():
            _compile_table()
        options = Options.of(problem)
        least_L1, bottleneck_L1 = suffix_table.chain_bounds(
            options.first_L1, options.stop_N, options.seconds_N, options.busy_N
        )
        if _table_steps(options) <= self.max_table_steps:
            return self._by_table(problem, options, best, least_L1, float(bottleneck_L1[-1]))
        with best.clock_stopped():
            _compile_prices()
        values = self._bottlenecks(options, float(bottleneck_L1[-1]), best)
        return Intervals(PricedOptions(problem, options, best), best, values).bound(self.relative_gap)

    def _by_table(
        self, problem: Problem, options: Options, best: Incumbent, least_L1: Floats, least_bottleneck: float
    ) -> float:
        table = _Table(problem, options, least_L1, best)
        try:
            first = table.solve(np.inf, np.inf)
        except _OutOfTimeError:
            return float(least_L1[-1]) + least_bottleneck
        if first is None:
            return np.inf
        best.offer(first.plan)
        return self._narrow(options, table, best, first, least_bottleneck)

    def _narrow(
        self, options: Options, table: _Table, best: Incumbent, first: _Answer, least_bottleneck: float
    ) -> float:
        """Split intervals of the bottleneck until none can hold a better plan; the bound that was proved."""
        values = self._bottlenecks(options, least_bottleneck, best)
        values = values[values < min(best.step_seconds - first.sum_seconds, first.bottleneck_seconds)]
        # (bound, lo, hi, sum): bottlenecks values[lo:hi] are open, and any plan with one of them has at least this sum.
        open_intervals: list[tuple[float, int, int, float]] = []

        def keep_open(lo: int, hi: int, sum_seconds: float) -> None:
            hi = min(hi, int(np.searchsorted(values, best.step_seconds - sum_seconds)))
            if lo < hi:
                heapq.heappush(open_intervals, (sum_seconds + float(values[lo]), lo, hi, sum_seconds))

        keep_open(0, len(values), first.sum_seconds)
        while open_intervals:
            best.take_over()
            bound, lo, hi, sum_seconds = open_intervals[0]
            if bound >= best.step_seconds * (1 - max(self.relative_gap, ROUNDING)):
                break
            heapq.heappop(open_intervals)
            hi = min(hi, int(np.searchsorted(values, best.step_seconds - sum_seconds)))
            if lo >= hi:
                continue
            mid = middle(values, lo, hi)
            try:
                answer = table.solve(float(values[mid]), best.step_seconds - float(values[lo]))
            except _OutOfTimeError:
                heapq.heappush(open_intervals, (bound, lo, hi, sum_seconds))
                break
            if answer is not None:
                best.offer(answer.plan)
                keep_open(lo, int(np.searchsorted(values, answer.bottleneck_seconds)), answer.sum_seconds)
            keep_open(mid + 1, hi, sum_seconds)
        bound = open_intervals[0][0] if open_intervals else best.step_seconds
        return best.step_seconds if bound >= best.step_seconds * (1 - ROUNDING) else bound

    def _bottlenecks(self, options: Options, least: float, best: Incumbent) -> Floats:
        """Every bottleneck that a plan in the range can have, sorted."""
        low, high = (seconds / best.unit_seconds for seconds in self.bottleneck_range_seconds)
        values = np.concatenate([options.busy_N, options.link_busy_L1AA.ravel()])
        return np.unique(values[(values >= max(low, least * (1 - ROUNDING))) & (values < high)])


class _Table:
    """The dynamic program's table, allocated once and filled for one limit after another."""

    def __init__(self, problem: Problem, options: Options, least_L1: Floats, best: Incumbent) -> None:
        L1, J, A, D = options.table_shape
        self._problem, self._options, self._least_L1, self._best = problem, options, least_L1, best
        self._groups = suffix_table.Groups(options.offset_G, options.block_G, options.class_G)
        self._table = suffix_table.Table(
            rest_L1JAD=np.full((L1, J, A, D), np.inf),
            alive_L1JA=np.zeros((L1, J, A), dtype=np.bool_),
            here_JAD=np.empty((J, A, D)),
        )
        self._table.rest_L1JAD[-1, 0, :, : 1 if options.use_all_devices else D] = 0.0
        self._table.alive_L1JA[-1, 0] = True
        steps_per_start = max(1.0, J * D * (len(options.stop_N) / L1 + A * A))
        self._starts_per_call = max(1, int(_STEPS_PER_CALL / steps_per_start))

    def solve(self, limit: float, cutoff: float) -> _Answer | None:
        """The cheapest sum with no bottleneck above the limit; None if there is none below the cutoff."""
        stages, rules = self._options.stages, self._options.rules(limit)
        end = self._problem.num_layers
        while end > 0:
            if self._best.is_late:
                raise _OutOfTimeError
            begin = max(0, end - self._starts_per_call)
            suffix_table.fill(begin, end, cutoff, stages, self._groups, rules, self._least_L1, self._table)
            end = begin
        total = float(self._table.here_JAD[:, :, -1].min())
        if not total < cutoff:
            return None
        chosen = suffix_table.trace(stages, self._groups, rules, self._table)
        return self._answer(total, chosen)

    def _answer(self, total: float, chosen: np.ndarray) -> _Answer:
        o, problem = self._options, self._problem
        stages, start, bottleneck = [], 0, 0.0
        for k, i in enumerate(chosen):
            stop = int(o.stop_N[i])
            stages.append(Stage(start, stop, problem.configurations[o.configuration_N[i]]))
            bottleneck = max(bottleneck, float(o.busy_N[i]))
            if k:
                here, before = o.class_G[o.group_N[i]], o.class_G[o.group_N[chosen[k - 1]]]
                bottleneck = max(bottleneck, float(o.link_busy_L1AA[start, before, here]))
            start = stop
        return _Answer(total, bottleneck, Plan(tuple(stages), problem.schedule, problem.num_microbatches))


def _table_steps(options: Options) -> float:
    """Inner-loop steps of one dynamic program over devices."""
    L1, J, A, D = options.table_shape
    return float(D) * J * (len(options.stop_N) + L1 * A * A)


def load_compiled_loops() -> None:
    """Compile all loops, or load them from numba's cache."""
    _compile_table()
    _compile_prices()


@cache
def _compile_table() -> None:
    """Compile the loops over tables, or load them from numba's cache, on a problem of one layer."""
    problem = tiny_problem()
    options, best = Options.of(problem), Incumbent(problem, Exact.name, np.inf)
    least_L1, _ = suffix_table.chain_bounds(options.first_L1, options.stop_N, options.seconds_N, options.busy_N)
    _Table(problem, options, least_L1, best).solve(np.inf, np.inf)


@cache
def _compile_prices() -> None:
    """The same with the loops over prices and labels."""
    problem = tiny_problem()
    priced = PricedOptions(problem, Options.of(problem), Incumbent(problem, Exact.name, np.inf))
    rows, prices_T = priced.rows(None, np.inf), np.zeros(1)
    priced.bound(rows, np.inf, prices_T)
    priced.labels(priced.fixed(rows, np.inf, prices_T), np.inf, prices_T, beam=1, work=1.0)
