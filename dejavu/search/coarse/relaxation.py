"""A problem without its counts of devices, which have prices, and with every cut: the bound under one limit.

Shape suffixes as in `coarse.relaxed`.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Event

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Problem
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse import windows
from dejavu.search.coarse.relaxed import ROUNDING, Kept, Relaxed
from dejavu.search.exact.cutting_planes import PricedPlan

Ints = NDArray[np.int64]

_MOST_COUNTS = 8  # rounds of counting stages for one bound
_LEAST_GAIN = 0.04  # of what is missing to the cutoff: a round of counting that gains less is the last
_NEAR = 0.15  # of the best price: further from the cutoff than this counting finds next to nothing
_STAGE_PRICES = (0.1, 0.4, 1.6)  # seconds that a stage costs more, in those that the cheapest plan's have each
_PRICE_PRECISION = 1e-3  # of the best price: the bound under one limit is found to this
_WHOLE = 1e-6  # a number of stages this much above a whole number is that number


class Windowed:
    """The relaxed problem, for one limit on the bottleneck after another, without counting stages in the state.

    `max_stages` is not looked at. Memory is that of the fewest stages that may come after.

    Attributes:
        until: once it is set, what is known by then is said.
    """

    until: Event | None = None

    def __init__(self, relaxed: Relaxed) -> None:
        self._relaxed, self._best = relaxed, relaxed.best
        C, L1 = relaxed.seconds_CL1.shape
        A = len(relaxed.links.latency_AA)
        self._furthest_CL = np.empty((C, L1 - 1), dtype=np.int64)
        self._choices = windows.Choices(
            choice_AL1=np.zeros((A, L1), np.int32),
            start_CL1=np.zeros((C, L1), np.int32),
            class_before_AL1=np.zeros((A, L1), np.int32),
            to_AL1=np.empty((A, L1)),
        )

    @property
    def _is_over(self) -> bool:
        return self._best.is_late or (self.until is not None and self.until.is_set())

    @property
    def problem(self) -> Problem:
        return self._relaxed.problem

    def beside(self) -> Windowed:
        """The same for another thread."""
        other = Windowed(self._relaxed)
        other.until = self.until
        return other

    def everything(self) -> Kept:
        """Nothing is known yet."""
        C, L1 = self._relaxed.seconds_CL1.shape
        return Kept(np.arange(C), np.zeros(L1, dtype=np.int64), np.zeros(len(self._relaxed.devices.count_R)))

    def tightened(self, known: Kept, limit: float, cutoff: float) -> Kept:
        """The same of the plans with no bottleneck above the limit and Σ below the cutoff; Σ inf: there is none.

        Prices bound Σ, and with the same prices the stages from each cut on are counted: fewer than some number would
        take Σ above the cutoff. With them there are more microbatches in flight, less fits, and the next bound is
        higher, until one is above the cutoff or little is gained.
        """
        before = -np.inf
        for _ in range(_MOST_COUNTS):
            sum_seconds, prices_R = self._bound(known, limit, cutoff)
            known = replace(known, prices_R=prices_R, sum_seconds=max(sum_seconds, known.sum_seconds))
            missing = cutoff - sum_seconds
            is_far = missing > _NEAR * self._best.step_seconds
            if (
                missing <= 0
                or cutoff == np.inf
                or is_far
                or sum_seconds - before < _LEAST_GAIN * missing
                or self._is_over
            ):
                break
            before = sum_seconds
            known = self._counted(known, limit, cutoff)
            if not len(known.among_K):
                return replace(known, sum_seconds=np.inf)
        return known

    def _windows(self, known: Kept, limit: float) -> bool:
        most_in_flight = float(self._relaxed.problem.in_flight(0, self._relaxed.problem.most_stages))
        among, after = known.among_K, known.after_L1
        return windows.furthest_stops(limit, most_in_flight, self._relaxed.costs, among, after, self._furthest_CL)

    def _bound(self, known: Kept, limit: float, cutoff: float) -> tuple[float, Floats]:
        """A bound on Σ, up to the cutoff, and its prices."""
        if not self._windows(known, limit):
            return np.inf, known.prices_R
        is_among_C = np.zeros(len(self._furthest_CL), dtype=np.bool_)
        is_among_C[known.among_K] = True

        def allows(plan: PricedPlan) -> bool:
            assert plan.stages_3S is not None
            how, start, stop = plan.stages_3S
            return bool(is_among_C[how].all() and (self._furthest_CL[how, start] >= stop).all())

        found = self._relaxed.bound(
            self._relaxed.planes,
            lambda prices_R: self._cheapest(limit, known, prices_R),
            allows,
            cutoff,
            known.prices_R,
            self._relaxed.enough(_PRICE_PRECISION),
            self.until,
        )
        return found.sum_seconds, found.prices_T

    def _stages(self, known: Kept, prices_R: Floats) -> windows.Stages:
        relaxed = self._relaxed
        price_C = relaxed.devices.use_CR @ prices_R
        return windows.Stages(price_C, relaxed.class_C, relaxed.seconds_CL1, self._furthest_CL, known.among_K)

    def _cheapest(self, limit: float, known: Kept, prices_R: Floats) -> PricedPlan | None:
        choices = self._choices
        total, a = windows.cheapest(limit, self._stages(known, prices_R), self._relaxed.links, choices)
        if total == np.inf:
            return None
        stages, stop = [], self._relaxed.problem.num_layers
        while stop > 0:
            c = choices.choice_AL1[a, stop]
            start = choices.start_CL1[c, stop]
            stages.append((c, start, stop))
            a, stop = choices.class_before_AL1[self._relaxed.class_C[c], start], start
        return self._relaxed.plan(total, prices_R, np.array(stages[::-1], dtype=np.int64).T)

    def _counted(self, known: Kept, limit: float, cutoff: float) -> Kept:
        """With more stages from each cut on, and without configurations, as the prices at hand prove.

        A plan of interest has Σ + prices · use ≤ `most`. Let every stage from a cut on cost `more` in addition: the
        least of that, less `more` for each stage there is, and the least of what is before, come to `most` at most.
        Let it cost less, and the same says how many stages there are at most.
        """
        prices_R, choices = known.prices_R, self._choices
        plan = self._cheapest(limit, known, prices_R)
        assert plan is not None and plan.stages_3S is not None
        slack = ROUNDING * (abs(cutoff) + float(self._relaxed.devices.count_R @ np.abs(prices_R)))
        most = cutoff + float(self._relaxed.devices.count_R @ prices_R) + slack
        stages = self._stages(known, prices_R)
        _, through_C = windows.downstream(limit, 0.0, stages, self._relaxed.links, choices.to_AL1)
        each = (plan.sum_seconds + float(plan.use_T @ prices_R)) / plan.stages_3S.shape[1]
        after_L1, L = known.after_L1, self._relaxed.problem.num_layers
        most_L1 = np.full(len(after_L1), L, dtype=np.int64) if known.most_L1 is None else known.most_L1
        is_reached_AL1 = np.isfinite(choices.to_AL1)  # nothing leads to the other cuts: no plan has them
        room_AL1 = most - np.where(is_reached_AL1, choices.to_AL1, 0.0)
        for share in _STAGE_PRICES:
            more = share * each
            if more <= 0:
                continue
            for price in (more, -more):
                here_AL1, _ = windows.downstream(limit, price, stages, self._relaxed.links, choices.to_AL1)
                is_on_AL1 = is_reached_AL1 & np.isfinite(here_AL1)
                stages_AL1 = np.where(is_on_AL1, (here_AL1 - room_AL1) / price, np.sign(price) * np.inf)
                if price > 0:
                    fewest_L1 = np.ceil(np.minimum(stages_AL1.min(axis=0), L)[:-1] - _WHOLE)
                    after_L1 = np.maximum(after_L1, np.append(fewest_L1, 0.0).astype(np.int64))
                else:
                    mosts_L1 = np.floor(np.maximum(stages_AL1.max(axis=0), -1.0)[:-1] + _WHOLE)
                    most_L1 = np.minimum(most_L1, np.append(mosts_L1, 0.0).astype(np.int64))
        among_K = known.among_K[through_C[known.among_K] <= most]
        return replace(known, among_K=among_K, after_L1=after_L1, most_L1=most_L1)
