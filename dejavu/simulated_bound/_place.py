"""One schedule with one number of ranks: the bound for its plans, raised step by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from dejavu.errors import InputError
from dejavu.plan import Plan, Stage
from dejavu.schedule import schedule_named
from dejavu.simulate import play_posed
from dejavu.simulate._listing import Integers, Listing, listing
from dejavu.simulated_bound._chain import Mask, Weights, drop, table, weights
from dejavu.simulated_bound._dual import Dual
from dejavu.simulated_bound._paths import Line, held_microbatches, rank_lines
from dejavu.simulated_bound._prices import Priced
from dejavu.simulated_bound._walk import lines_of, walk
from dejavu.simulated_bound.proof import Proof
from dejavu.stage_costs import AdditiveCosts

_MOST_ENTRIES = 60_000_000  # stages × configurations × layers²: larger tables are not made
_ROUNDS = 25  # of weights
_SWEEPS = 3  # of dropping stages and weighing again
_MOST_STEPS = 3_000_000  # of a walk; a second or so
_MOST_LEAVES = 300  # plans that a walk hands on to be simulated
_MOST_LIMITS = 5  # limits between the bound and the best step that are tried


class Place:
    """One schedule with one number of ranks.

    Attributes:
        bound_seconds: no plan here takes less; at most the best step known when it was proved; inf: there is no plan.
        can_move: whether more work may raise it.
    """

    def __init__(self, problem: Priced, schedule: str, num_stages: int, best_seconds: float, bound: float) -> None:
        self.problem, self.schedule, self.num_stages = problem, schedule, num_stages
        self.bound_seconds, self.proved_by = bound, Proof.BALANCE
        self.can_move = self._entries <= _MOST_ENTRIES
        self._best = best_seconds  # what stages were dropped for: those left in are all that a faster plan can have
        self._failed, self._tried = np.inf, 0

    @property
    def _entries(self) -> int:
        return self.num_stages * len(self.problem.prices.class_C) * self.problem.posed.problem.num_layers**2

    @cached_property
    def _order(self) -> Listing | None:
        """None where torch does not run so many stages or microbatches."""
        try:
            return listing(self.schedule, self.num_stages, self.problem.num_microbatches)
        except InputError:
            return None

    def weigh(self, is_late: Callable[[], bool]) -> None:
        """A first bound by weighted paths; stages that no better plan has are dropped."""
        if not self.can_move:
            return
        order = self._order
        if order is None:
            self._nothing()
            return
        self._rank_lines = rank_lines(order)
        self._alive_SCLL1 = self._fitting(order)
        share = 1.0 / schedule_named(self.schedule).stages_per_rank
        prices = self.problem.prices
        scale = self._best if np.isfinite(self._best) else self.bound_seconds
        self._dual = Dual(prices, order, share, scale or 1.0, list(self._rank_lines))
        everything = self._weights(self._rank_lines[0])
        least = table(prices, everything, self._alive_SCLL1)
        if least.least == np.inf:
            self._nothing()
            return
        self._dual.add_plan(*least.plan())
        self._raise(self._raised(self._alive_SCLL1, self._best, is_late), Proof.PATHS)

    def refine(self, is_late: Callable[[], bool]) -> tuple[float, Plan] | None:
        """Prove a higher bound, or find that this is as far as it goes; a plan faster than the best, if one is met."""
        limit = self._best
        if self._failed <= limit:
            limit = self.bound_seconds + (self._failed - self.bound_seconds) / 2
        self._tried += 1
        if self._tried >= _MOST_LIMITS:
            self.can_move = False
        alive_SCLL1 = self._alive_SCLL1 if limit == self._best else self._alive_SCLL1.copy()
        if limit < self._best:
            reached = self._raised(alive_SCLL1, limit, is_late)
            self._raise(reached, Proof.PATHS)
            if reached >= limit:
                return None
        return self._walked(alive_SCLL1, limit)

    def _raised(self, alive_SCLL1: Mask, limit: float, is_late: Callable[[], bool]) -> float:
        """The bound up to the limit for all plans: those that have a dropped stage take at least the limit."""
        value, left = 0.0, self._drop(alive_SCLL1, limit)
        if left == 0:
            return limit
        for _ in range(_SWEEPS):
            value = self._dual.raise_bound(alive_SCLL1, limit=limit, rounds=_ROUNDS, is_late=is_late)
            if value >= limit or is_late():
                break
            before, left = left, self._drop(alive_SCLL1, limit)
            if left == 0:
                return limit
            if left > 0.98 * before:
                break
        return min(value, limit)

    def _drop(self, alive_SCLL1: Mask, limit: float) -> int:
        left = 0
        for line in self._rank_lines:
            left = self._drop_by(self._weights(line), alive_SCLL1, limit)
        if left and self._dual.best_weights is not None:
            left = self._drop_by(self._dual.best_weights, alive_SCLL1, limit - self._dual.best_constant)
        return left

    def _drop_by(self, weigh: Weights, alive_SCLL1: Mask, limit: float) -> int:
        prices = self.problem.prices
        return int(drop(prices, weigh, table(prices, weigh, alive_SCLL1).left_SL1G, alive_SCLL1, limit))

    def _walked(self, alive_SCLL1: Mask, limit: float) -> tuple[float, Plan] | None:
        prices, order = self.problem.prices, self._order
        assert order is not None and self._dual.best_weights is not None
        weighs = [self._dual.best_weights, *map(self._weights, self._rank_lines)]
        lines = lines_of(prices, weighs, [self._dual.best_constant] + [0.0] * len(self._rank_lines), alive_SCLL1)
        found = walk(prices, order, lines, alive_SCLL1, limit=limit, most_steps=_MOST_STEPS, most_leaves=_MOST_LEAVES)
        if not found.is_complete:
            self._failed = limit
            return None
        plans = [self._simulated(*leaf) for leaf in zip(found.stop_KS, found.how_KS, strict=True)]
        best = min((plan for plan in plans if plan), key=lambda pair: pair[0], default=None)
        self._raise(limit if best is None else min(limit, best[0]), Proof.EVERY_PLAN)
        if limit == self._best:
            self.can_move = False
        return best

    def _simulated(self, stop_S: Integers, how_S: Integers) -> tuple[float, Plan] | None:
        """None where the plan's ranks do not fit their memory, or devices are idle that must not be."""
        problem, order = self.problem.posed.problem, self._order
        assert order is not None
        held = held_microbatches(order)
        start_S = [0, *map(int, stop_S[:-1])]
        spans = [(a, int(b), int(c)) for a, b, c in zip(start_S, stop_S, how_S, strict=True)]
        if isinstance(problem.costs, AdditiveCosts):
            for rank in range(len(order.first_P1) - 1):
                own = np.flatnonzero(order.rank_S == rank)
                needed = sum(problem.costs.peak_bytes(*spans[s], int(held[s])) for s in own)
                if needed > problem.costs.capacity_bytes_C[spans[own[0]][2]] * (1.0 + 1e-9):
                    return None
        how = problem.configurations
        stages = tuple(Stage(a, b, how[c]) for a, b, c in spans)
        plan = Plan(stages, self.schedule, self.problem.num_microbatches)
        return play_posed(self.problem.posed, plan).step_seconds, plan

    def _fitting(self, order: Listing) -> Mask:
        """Stages that alone fit with what they hold in flight."""
        C, L = len(self.problem.prices.class_C), self.problem.posed.problem.num_layers
        alive_SCLL1 = np.ones((self.num_stages, C, L, L + 1), np.bool_)
        if self.problem.most_held_CLL1 is not None:
            for s, held in enumerate(held_microbatches(order)):
                alive_SCLL1[s] = self.problem.most_held_CLL1 >= held
        return alive_SCLL1

    def _weights(self, line: Line) -> Weights:
        return weights(line.stage_S5, line.cut_S3, np.zeros(len(self.problem.prices.class_C)))

    def _raise(self, seconds: float, proved_by: Proof) -> None:
        if seconds > self.bound_seconds:
            self.bound_seconds, self.proved_by = min(seconds, self._best), proved_by

    def _nothing(self) -> None:
        self.bound_seconds, self.proved_by, self.can_move = np.inf, Proof.NO_PLAN, False
