"""The most that weights on lines and prices on devices prove: cutting planes over plans (Kelley, 1960).

For any weights λ ≥ 0 with Σ λ = 1 and prices μ ≥ 0, each plan within the counts takes at least
Σ λ · line + μ · (devices − counts), because it takes at least each line. The least of that over all plans, a dynamic
program, is a bound; the plan where it is least says which weights to try next, and its own longest path is a new line.

Letters: S = stages, N = lines, K = plans, T = device types, C = configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from scipy.optimize import linprog

from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import ActionTable, Integers
from dejavu.simulation.bound._chain import Mask, Table, Weights, weights
from dejavu.simulation.bound._paths import Line, Times, longest_path
from dejavu.simulation.bound._prefix_sums import BoundPrices
from dejavu.simulation.bound._vee import VeeTable

_ENOUGH = 1e-4  # of the bound: rounds that can win less are left out


class Cheapest(Protocol):
    """Makes a table of the cheapest ways."""

    def __call__(self, weigh: Weights, alive_SCLL1: Mask, /) -> Table | VeeTable: ...


class _Seen(NamedTuple):
    """A plan that was the least for some weights.

    Attributes:
        use_T: devices of each type, in shares.
        values_N: of the lines that there were when it was last looked at, in units of the step.
    """

    stop_S: Integers
    how_S: Integers
    times: Times
    use_T: Floats
    values_N: list[float]

    def is_alive(self, alive_SCLL1: Mask) -> bool:
        start_S = np.append(0, self.stop_S[:-1])
        return bool(alive_SCLL1[np.arange(len(start_S)), self.how_S, start_S, self.stop_S].all())


@dataclass(eq=False)
class Dual:
    """One schedule's and one number of ranks' weights and prices, with all lines and plans seen.

    Attributes:
        cheapest: the least of a weighted sum over plans of stages still considered.
        share: of a rank's devices that each of its stages is charged.
        scale_seconds: about a step; the linear program is in its units.
        met: plans that the devices suffice for, and whose ranks have one configuration each; with their longest paths.
        best_seconds: the most that was proved for the stages still considered, and how.
    """

    prices: BoundPrices
    order: ActionTable
    cheapest: Cheapest
    share: float
    scale_seconds: float
    lines: list[Line]
    met: list[tuple[float, Integers, Integers]] = field(default_factory=list)
    best_seconds: float = 0.0
    best_weights: Weights | None = None
    best_constant: float = 0.0
    _plans: list[_Seen] = field(default_factory=list)

    def add_plan(self, stop_S: Integers, how_S: Integers) -> None:
        """Add a plan that weights should make expensive, and its longest path."""
        times = times_of(self.prices, self.order, stop_S, how_S)
        seconds, line = longest_path(self.order, times)
        use_T = self.share * self.prices.use_CT[how_S].sum(axis=0)
        self._plans.append(_Seen(stop_S, how_S, times, use_T, []))
        self.lines.append(line)
        first_S = np.unique(self.order.rank_S, return_index=True)[1][self.order.rank_S]  # the first stage of its rank
        if (use_T <= self.prices.count_T).all() and (how_S[first_S] == how_S).all():
            self.met.append((seconds, stop_S, how_S))

    def raise_bound(self, alive_SCLL1: Mask, *, limit: float, rounds: int, is_late: Callable[[], bool]) -> float:
        """The bound for plans of stages still considered, at most the limit; inf where no such plan is left."""
        self.best_seconds = 0.0
        self._plans = [plan for plan in self._plans if plan.is_alive(alive_SCLL1)]  # others hold the bound down
        for _ in range(rounds):
            weight_N, price_T, most = self._next()
            found, weigh, constant = self._least(weight_N, price_T, alive_SCLL1)
            if found.least == np.inf:
                self.best_seconds = np.inf
                break
            value = found.least + constant
            if value > self.best_seconds or self.best_weights is None:
                self.best_seconds, self.best_weights, self.best_constant = value, weigh, constant
            if self.best_seconds >= limit or most - self.best_seconds < _ENOUGH * self.scale_seconds or is_late():
                break
            self.add_plan(*found.plan())
        return min(self.best_seconds, limit) if self.best_seconds < np.inf else np.inf

    def _least(self, weight_N: Floats, price_T: Floats, alive_SCLL1: Mask) -> tuple[Table | VeeTable, Weights, float]:
        used = np.flatnonzero(weight_N > 0)
        stage_S5 = sum(weight_N[n] * self.lines[n].stage_S5 for n in used)
        cut_S3 = sum(weight_N[n] * self.lines[n].cut_S3 for n in used)
        prices = self.prices
        price_C = self.share * (prices.use_CT @ price_T)
        weigh = weights(stage_S5, cut_S3, price_C, back_after(self.order, prices))
        return self.cheapest(weigh, alive_SCLL1), weigh, -float(price_T @ prices.count_T)

    def _next(self) -> tuple[Floats, Floats, float]:
        """Weights and prices that no plan seen so far contradicts, and what they would prove."""
        N, K, T = len(self.lines), len(self._plans), len(self.prices.count_T)
        if K == 0:
            return np.full(N, 1.0 / N), np.zeros(T), np.inf
        for plan in self._plans:
            new = self.lines[len(plan.values_N) :]
            plan.values_N.extend(line.seconds(plan.times) / self.scale_seconds for line in new)
        values_KN = np.array([plan.values_N for plan in self._plans])
        over_KT = np.array([plan.use_T for plan in self._plans]) - self.prices.count_T
        planes = np.hstack([-values_KN, -over_KT, np.ones((K, 1))])
        goal = np.append(np.zeros(N + T), -1.0)
        sums_to_one = np.append(np.ones(N), np.zeros(T + 1))[None, :]
        bounds = [*[(0.0, None)] * N, *[(0.0, 10.0)] * T, (None, None)]
        answer = linprog(goal, planes, np.zeros(K), sums_to_one, [1.0], bounds=bounds, method="highs")
        if not answer.success:
            return np.full(N, 1.0 / N), np.zeros(T), np.inf
        weight_N = np.maximum(answer.x[:N], 0.0)
        # Rounding must not make the weights more than one in all.
        weight_N /= weight_N.sum() * (1.0 + 1e-12)
        return weight_N, np.maximum(answer.x[N : N + T], 0.0) * self.scale_seconds, -answer.fun * self.scale_seconds


def back_after(order: ActionTable, prices: BoundPrices) -> Mask | None:
    """Return whether the message after each stage goes back to the rank before; None where that is all the same."""
    if prices.message_L1GGM.shape[3] == 3:
        return None
    return np.append(order.rank_S[1:] == order.rank_S[:-1] - 1, False)


def times_of(prices: BoundPrices, order: ActionTable, stop_S: Integers, how_S: Integers) -> Times:
    """What the stages of a plan take; as `simulation.plans` says."""
    start_S = np.append(0, stop_S[:-1])
    stage_S5 = (prices.sum_5CL1[:, how_S, stop_S] - prices.sum_5CL1[:, how_S, start_S]).T
    stage_S5[0, 2:4] = 0.0, stage_S5[0, 1]
    stage_S5[:, :4] += prices.pass_C[how_S, None]
    stage_S5[:, 4] += prices.per_step_C[how_S]
    cut_S3 = np.zeros((len(stop_S), 3))
    g_S = prices.class_C[how_S]
    cut_SM = prices.message_L1GGM[stop_S[:-1], g_S[:-1], g_S[1:]]
    back_S = back_after(order, prices)
    cut_S3[:-1] = cut_SM if back_S is None else np.where(back_S[:-1, None], cut_SM[:, 3:], cut_SM[:, :3])
    cut_S3[:-1] *= (order.rank_S[:-1] != order.rank_S[1:])[:, None]
    return Times(np.ascontiguousarray(stage_S5), cut_S3)
