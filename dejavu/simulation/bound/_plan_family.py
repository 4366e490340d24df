"""One schedule with one number of ranks: the bound for its plans, raised step by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.plans import Plan, Stage
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.simulation import simulate_plan
from dejavu.simulation._action_table import ActionTable, Integers, action_table
from dejavu.simulation.bound._chain import Mask, Spans, Table, Weights, drop, spans_of, table, weights
from dejavu.simulation.bound._chain_walk import Walked, WalkLimits, lines_of, walk
from dejavu.simulation.bound._dual import Dual, back_after
from dejavu.simulation.bound._paths import Line, busy_lines, drained_lines, max_in_flight, most_together
from dejavu.simulation.bound._prefix_sums import BoundProblem, memory_shares
from dejavu.simulation.bound._vee import VeeTable, pairs, vee_table
from dejavu.simulation.bound._vee_walk import vee_walk
from dejavu.simulation.bound.proof import Proof

_MOST_ENTRIES = 60_000_000  # stages × configurations × layers²: larger tables are not made
_MOST_PAIRS = 5e8  # pairs of stages that a table for a V looks at, about
_ROUNDS = 25  # of weights
_HARDLY = 0.98  # left of the stages: it was not worth a look
_SWEEPS = 3  # of dropping stages and weighing again
_MOST_LINE_ENTRIES = 10_000_000  # of all lines that a walk takes
_MOST_MET = 3  # of the plans that weights led to are simulated
_MOST_LEAVES = 300  # plans that a walk hands on to be simulated
_STRIDE, _LEAST_STRIDE = 0.06, 0.0005  # of the bound: by how much more it is tried to raise it, at first and at last
_NEAR = 1e-4  # of the step: what is nearer is not tried


class Faster(NamedTuple):
    """A plan that was met, and its simulated step."""

    seconds: float
    plan: Plan


class Place:
    """One schedule with one number of ranks.

    Attributes:
        bound_seconds: no plan here takes less; at most the best step known when it was proved; inf: there is no plan.
        can_move: whether more work may raise it.
        is_weighed: its first bound by paths was made.
    """

    def __init__(
        self, problem: BoundProblem, schedule: str, num_stages: int, bound_seconds: float, proved_by: Proof
    ) -> None:
        self.problem, self.schedule, self.num_stages = problem, schedule, num_stages
        self.bound_seconds, self.proved_by = bound_seconds, proved_by
        self.can_move = self._entries <= _MOST_ENTRIES
        self._best = (
            np.inf
        )  # of the best plan known: what stages were dropped for, so that a faster plan has none of them
        self._stride = _STRIDE
        self._spanned: tuple[Mask, Spans] | None = None
        self.is_weighed = False

    @property
    def _entries(self) -> int:
        return self.num_stages * len(self.problem.prices.class_C) * self.problem.priced.problem.num_layers**2

    @cached_property
    def _order(self) -> ActionTable | None:
        """None where torch does not run so many stages or microbatches."""
        try:
            return action_table(named(SCHEDULES, self.schedule), self.num_stages, self.problem.num_microbatches)
        except InputError:
            return None

    def weigh(self, best_seconds: float, is_late: Callable[[], bool]) -> Faster | None:
        """A first bound by weighted paths; stages that no better plan has are dropped. A faster plan, if one is met."""
        self.is_weighed = True
        order = self._order
        if order is None:
            self._nothing()
            return None
        self._best = best_seconds
        self._alive_SCLL1 = self._fitting(order)
        self._share_SCLL1 = np.empty((0, 0, 0, 0), np.float32)
        if named(SCHEDULES, self.schedule).stages_per_rank > 1 and self._entries <= _MOST_ENTRIES:
            self._share_SCLL1 = memory_shares(self.problem.priced, most_together(order))
        self._back_S = back_after(order, self.problem.prices)
        busy, drained = busy_lines(order), drained_lines(order)
        self._busy, self._drained = list(map(self._weights, busy)), list(map(self._weights, drained))
        self._limit = best_seconds
        share = 1.0 / named(SCHEDULES, self.schedule).stages_per_rank
        scale = best_seconds if np.isfinite(best_seconds) else self.bound_seconds
        self._dual = Dual(self.problem.prices, order, self._cheapest, share, scale or 1.0, [*busy, *drained])
        least = self._cheapest(self._busy[0], self._alive_SCLL1)
        if least.least == np.inf:
            if np.isinf(best_seconds):
                self._nothing()
            else:
                self.raise_to(best_seconds, Proof.PATHS)
            return None
        self._dual.add_plan(*least.plan())
        self.raise_to(self._raised(self._alive_SCLL1, best_seconds, is_late), Proof.PATHS)
        return self._met()

    def refine(self, best_seconds: float, most_steps: int, is_late: Callable[[], bool]) -> Faster | None:
        """Prove a higher bound, or find that this is as far as it goes; a plan faster than the best, if one is met.

        Args:
            best_seconds: of the best plan known: what is proved up to there is enough.
            most_steps: of a walk over plans.
        """
        if not self.is_weighed:
            return self.weigh(best_seconds, is_late)
        self._best = best_seconds
        limit = min(best_seconds, self.bound_seconds * (1.0 + self._stride))
        alive_SCLL1 = self._alive_SCLL1 if limit == best_seconds else self._alive_SCLL1.copy()
        self.raise_to(self._raised(alive_SCLL1, limit, is_late), Proof.PATHS)
        found = self._met()
        if self.bound_seconds < limit and not is_late():
            walked = self._walked(alive_SCLL1, limit, most_steps)
            found = min((one for one in (found, walked) if one), key=lambda one: one.seconds, default=None)
        if self.bound_seconds < limit and not found and not is_late():
            self._stride /= 3.0  # nearer to the bound there is more to drop
            self.can_move = self._stride > _LEAST_STRIDE
        return found

    @property
    def _is_vee(self) -> bool:
        """Whether ranks are looked at as pairs of stages: where the schedule is a V, and that is affordable."""
        L, ranks = self.problem.priced.problem.num_layers, self.num_stages // 2
        longest = min(L, 2 * L // ranks) if ranks else 0  # of a stage that no better plan drops, about
        steps = ranks * len(self.problem.prices.class_C) * L**2 / 2 * longest**2 / 2
        return named(SCHEDULES, self.schedule).placement == "v" and steps < _MOST_PAIRS

    def _cheapest(self, weigh: Weights, alive_SCLL1: Mask) -> Table | VeeTable:
        prices = self.problem.prices
        if not self._is_vee:
            return table(prices, weigh, alive_SCLL1, self._spans_of(alive_SCLL1))
        allowed = pairs(prices, self._busy, alive_SCLL1, self._limit, self._share_SCLL1)
        return vee_table(prices, weigh, alive_SCLL1, allowed)

    def _raised(self, alive_SCLL1: Mask, limit: float, is_late: Callable[[], bool]) -> float:
        """The bound up to the limit for all plans: those that have a dropped stage take at least the limit."""
        self._limit = limit
        value, left = 0.0, self._drop(alive_SCLL1, limit, is_late)
        if left == 0:
            return limit
        for _ in range(_SWEEPS):
            value = self._dual.raise_bound(alive_SCLL1, limit=limit, rounds=_ROUNDS, is_late=is_late)
            if value >= limit or is_late():
                break
            before, left = left, self._drop(alive_SCLL1, limit, is_late)
            if left == 0:
                return limit
            if left > _HARDLY * before:
                break
        return min(value, limit)

    def _drop(self, alive_SCLL1: Mask, limit: float, is_late: Callable[[], bool]) -> int:
        """How many stages are left without those that no plan below the limit has, by one line after the other.

        A rank's first line drops most that its second one would; where one of these drops hardly any, so would the
        others.
        """
        left = 1
        for line in self._busy:
            if left and not is_late():
                left = self._drop_by(line, alive_SCLL1, limit)
        for line in self._drained:
            before = left
            if left and not is_late():
                left = self._drop_by(line, alive_SCLL1, limit)
            if left > _HARDLY * before:
                break
        if left and self._dual.best_weights is not None:
            left = self._drop_by(self._dual.best_weights, alive_SCLL1, limit - self._dual.best_constant)
        return left

    def _drop_by(self, weigh: Weights, alive_SCLL1: Mask, limit: float) -> int:
        prices, spans = self.problem.prices, self._spans_of(alive_SCLL1)
        left_SL1G = table(prices, weigh, alive_SCLL1, spans).left_SL1G
        return int(drop(prices, weigh, left_SL1G, alive_SCLL1, spans, limit))

    def _spans_of(self, alive_SCLL1: Mask) -> Spans:
        """Of the mask that is looked at now; only `drop` changes it, and them with it."""
        if self._spanned is None or self._spanned[0] is not alive_SCLL1:
            self._spanned = (alive_SCLL1, spans_of(alive_SCLL1))
        return self._spanned[1]

    def _met(self) -> Faster | None:
        """The fastest of the plans that weights led to, where it is faster than the best."""
        met = sorted(self._dual.met, key=lambda plan: plan[0])
        self._dual.met.clear()
        for seconds, *plan in met[:_MOST_MET]:
            found = self._simulated(*plan) if seconds < self._best else None
            if found and found.seconds < self._best:
                return found
        return None

    def _walked(self, alive_SCLL1: Mask, limit: float, most_steps: int) -> Faster | None:
        """Look at all plans below the limit, each one that is met lowering it.

        Where the step is longer than its longest path, because messages and passes share devices, the plans between the
        two are then looked at again, and simulated.
        """
        best: Faster | None = None
        walked = self._walk(alive_SCLL1, WalkLimits(limit, most_steps, True, _MOST_LEAVES))
        met = [self._simulated(*leaf) for leaf in zip(walked.stop_KS, walked.configuration_KS, strict=True)]
        best = min((one for one in met if one), default=None, key=lambda one: one.seconds)
        if not walked.is_complete:
            return best
        self.raise_to(walked.limit, Proof.EVERY_PLAN)
        until = limit if best is None else min(limit, best.seconds)
        if walked.limit < until * (1.0 - _NEAR):
            again = self._walk(alive_SCLL1, WalkLimits(until, most_steps, False, _MOST_LEAVES))
            met = [self._simulated(*leaf) for leaf in zip(again.stop_KS, again.configuration_KS, strict=True)]
            best = min((one for one in [best, *met] if one), default=None, key=lambda one: one.seconds)
            if again.is_complete:
                self.raise_to(until if best is None else min(until, best.seconds), Proof.EVERY_PLAN)
        return best

    def _walk(self, alive_SCLL1: Mask, limits: WalkLimits) -> Walked:
        prices, order = self.problem.prices, self._order
        assert order is not None and self._dual.best_weights is not None
        weighs = [(self._dual.best_weights, self._dual.best_constant)]
        every = [*self._busy, *self._drained]
        weighs += [(line, 0.0) for line in every[:: self._stride_of(len(every))]]
        if not self._is_vee:
            lines = lines_of(prices, weighs, alive_SCLL1)
            return walk(prices, order, lines, alive_SCLL1, self._share_SCLL1, limits)
        allowed = pairs(prices, self._busy, alive_SCLL1, limits.seconds, self._share_SCLL1)
        return vee_walk(prices, order, weighs, alive_SCLL1, allowed, limits)

    def _stride_of(self, num_lines: int) -> int:
        """Of the ranks' lines, a walk takes one in so many: their tables are large where there are many layers."""
        S, C, L, _ = self._alive_SCLL1.shape
        entries: int = S * C * (L + 1)
        if self._is_vee:
            entries += S // 2 * (L + 1) ** 2 * self.problem.prices.message_L1GGM.shape[1]
        return max(1, -(-num_lines * entries // _MOST_LINE_ENTRIES))

    def _simulated(self, stop_S: Integers, how_S: Integers) -> Faster | None:
        """None where the plan's ranks do not fit their memory, or devices are idle that must not be."""
        problem, order = self.problem.priced.problem, self._order
        assert order is not None
        start_S = [0, *map(int, stop_S[:-1])]
        spans = [(a, int(b), int(c)) for a, b, c in zip(start_S, stop_S, how_S, strict=True)]
        configuration = problem.configurations
        stages = tuple(Stage(a, b, configuration[c]) for a, b, c in spans)
        plan = Plan(stages, self.schedule, self.problem.num_microbatches)
        seconds = self.problem.message_seconds(stop_S, how_S, order.rank_S)
        simulated = simulate_plan(self.problem.priced, plan, message_seconds=seconds)
        if isinstance(problem.costs, AdditiveCosts):
            for rank, own in enumerate(plan.ranks):
                if simulated.peak_bytes[rank] > problem.costs.capacity_bytes_C[spans[own[0]][2]] * (1.0 + 1e-9):
                    return None
                if sum(problem.costs.host_share(*spans[s], simulated.in_flight[s]) for s in own) > 1.0 + 1e-9:
                    return None
        return Faster(simulated.step_seconds, plan)

    def _fitting(self, order: ActionTable) -> Mask:
        """Stages that alone fit with what they hold in flight, and that their ranks may have."""
        C, L = len(self.problem.prices.class_C), self.problem.priced.problem.num_layers
        most_CLL1, choices = self.problem.max_in_flight_CLL1, self.problem.choices
        alive_SCLL1 = np.ones((self.num_stages, C, L, L + 1), np.bool_)
        if most_CLL1 is not None:
            for s, in_flight in enumerate(max_in_flight(order)):
                np.greater_equal(most_CLL1, in_flight, out=alive_SCLL1[s])
        if choices is not None:
            for s, rank in enumerate(order.rank_S):
                alive_SCLL1[s, ~choices.of(int(rank), len(order.first_P1) - 1)] = False
        return alive_SCLL1

    def _weights(self, line: Line) -> Weights:
        return weights(line.stage_S5, line.cut_S3, np.zeros(len(self.problem.prices.class_C)), self._back_S)

    def raise_to(self, seconds: float, proved_by: Proof) -> None:
        """Take a bound that is proved, where it is higher."""
        if seconds > self.bound_seconds:
            self.bound_seconds, self.proved_by = min(seconds, self._best), proved_by

    def _nothing(self) -> None:
        self.bound_seconds, self.proved_by, self.can_move = np.inf, Proof.NO_PLAN, False
