"""A bound for problems of thousands of layers, with every one of their cuts: prices on devices over sliding windows.

Letters: C = configurations, L1 = cut positions, A = link classes, T = device types.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Problem
from dejavu.plans.stage_costs import AdditiveCosts, Floats
from dejavu.search._base import Incumbent
from dejavu.search.coarse import windows
from dejavu.search.coarse.undominated import Undominated
from dejavu.search.exact.cutting_planes import CuttingPlanes, PricedPlan
from dejavu.search.shared.options import link_classes

_PRICE_PRECISION = 5e-4  # of the best price: the bound under one limit is found to this
_ROUNDING = 1e-8  # sums over thousands of layers, one after the other, err by less
_NARROW = 1e-4  # of the best price: intervals of the bottleneck are not split further


class WindowedBound:
    """What no plan can be below. Memory by position is relaxed: in flight is what the fewest stages downstream ask for.

    Messages at a stage's cuts are taken at their least over all cuts, and `max_stages` is not looked at.
    """

    def __init__(self, problem: Problem, best: Incumbent) -> None:
        costs = problem.costs
        assert isinstance(costs, AdditiveCosts)
        self._problem, self._best = problem, best
        types = list(problem.device_counts)
        self._count_T = np.array([problem.device_counts[name] for name in types])
        kept = Undominated.of(problem).kept
        self._use_CT = np.zeros((len(kept), len(types)), dtype=np.int64)
        for row, c in enumerate(kept):
            configuration = problem.configurations[c]
            self._use_CT[row, types.index(configuration.device_type)] = configuration.num_devices
        class_C, heads = link_classes(problem)
        self._class_C = class_C[kept]
        self._repeats = float(problem.num_microbatches - 1)

        usable_CL = _usable(costs, best.step_seconds)[kept]

        def prefix(table_CL: Floats) -> Floats:
            return np.pad(np.cumsum(np.where(usable_CL, table_CL[kept], 0.0), axis=1), ((0, 0), (1, 0)))

        self._seconds_CL1 = prefix(costs.seconds_CL)
        self._costs = windows.Costs(
            busy_CL1=self._repeats * self._seconds_CL1 + prefix(costs.per_step_seconds_CL),
            per_step_C=costs.per_step_latency_seconds_C[kept],
            fixed_CL1=prefix(costs.fixed_bytes_CL),
            active_CL1=prefix(costs.activation_bytes_CL),
            step_CL1=prefix(costs.step_bytes_CL),
            scratch_CL=np.ascontiguousarray(costs.temporary_bytes_CL[kept]),
            # A hair more than there is: sums in another order must not make a stage that just fits too large.
            capacity_C=costs.capacity_bytes_C[kept] * (1 + _ROUNDING) - costs.message_bytes_CL1.min(axis=1)[kept],
            end_CL=_next_unusable(usable_CL),
        )
        C, L1 = self._seconds_CL1.shape
        A = len(heads)
        self._furthest_CL = np.empty((C, L1 - 1), dtype=np.int64)
        self._links = windows.Links(
            repeats=self._repeats,
            latency_AA=problem.link_latency_seconds_CC[np.ix_(heads, heads)],
            per_byte_AA=problem.link_seconds_per_byte_CC[np.ix_(heads, heads)],
            bytes_L1=problem.cut_bytes_L1,
        )
        self._choices = windows.Choices(
            choice_AL1=np.zeros((A, L1), np.int32),
            start_CL1=np.zeros((C, L1), np.int32),
            class_before_AL1=np.zeros((A, L1), np.int32),
        )
        self._planes = CuttingPlanes(self._count_T, problem.use_all_devices)
        self._prices_T = np.zeros(len(types))

    def prove(self, relative_gap: float) -> float:
        """A bound on every plan: splits the range of bottlenecks until the gap is as wanted, or time ends."""
        tie = count()
        top = self._sum_seconds(np.inf)
        if top == np.inf:
            return np.inf
        price = self._best.step_seconds  # of a plan that may become better meanwhile
        # (bound, tie, lo, hi, Σ): plans with a bottleneck in (lo, hi] have at least this Σ.
        open_intervals = [(top, next(tie), 0.0, price - top, top)]
        while self._best.remaining_seconds > 0:
            price = self._best.step_seconds
            if open_intervals[0][0] >= price * (1 - relative_gap):
                break
            _, _, lo, hi, sum_seconds = open_intervals[0]
            if hi - lo <= _NARROW * price:
                break
            heapq.heappop(open_intervals)
            middle = 0.5 * (lo + hi)
            lower = max(self._sum_seconds(middle), sum_seconds)
            heapq.heappush(open_intervals, (lower + lo, next(tie), lo, middle, lower))
            heapq.heappush(open_intervals, (sum_seconds + middle, next(tie), middle, hi, sum_seconds))
        return open_intervals[0][0] * (1 - _ROUNDING)

    def _sum_seconds(self, limit: float) -> float:
        """A bound on Σ of the plans with no bottleneck above the limit; inf: there is none."""
        most_in_flight = float(self._problem.in_flight(0, self._problem.most_stages))
        if not windows.furthest_stops(limit, most_in_flight, self._costs, self._furthest_CL):
            return np.inf
        most_price = float(self._seconds_CL1[:, -1].max()) + 1e-12
        found, prices_T = self._planes.bound(
            lambda prices_T: self._cheapest(limit, prices_T),
            limit=limit,
            cutoff=self._best.step_seconds,
            most_price=most_price,
            precision_seconds=_PRICE_PRECISION * self._best.step_seconds,
            prices_T=self._prices_T,
            is_late=lambda: self._best.is_late,
        )
        if found < self._best.step_seconds:
            self._prices_T = prices_T
        return found

    def _cheapest(self, limit: float, prices_T: Floats) -> PricedPlan | None:
        stages = windows.Stages(self._use_CT @ prices_T, self._class_C, self._seconds_CL1, self._furthest_CL)
        total, a = windows.cheapest(limit, stages, self._links, self._choices)
        if total == np.inf:
            return None
        use_T, stop, bottleneck = np.zeros_like(self._count_T), self._problem.num_layers, 0.0
        while stop > 0:
            c = self._choices.choice_AL1[a, stop]
            start = self._choices.start_CL1[c, stop]
            use_T += self._use_CT[c]
            busy = self._costs.busy_CL1[c, stop] - self._costs.busy_CL1[c, start] + self._costs.per_step_C[c]
            bottleneck = max(bottleneck, float(busy))
            a, stop = self._choices.class_before_AL1[self._class_C[c], start], start
        return PricedPlan(float(total - use_T @ prices_T), bottleneck, use_T)


def _usable(costs: AdditiveCosts, price: float) -> NDArray[np.bool_]:
    """The layers that a plan cheaper than this can run under each configuration: numbers of one size.

    What takes longer than a whole plan, or more than a device's memory, is part of none; were it part of prefix sums,
    it would take the digits of all that follows.
    """
    most_bytes_C1 = costs.capacity_bytes_C[:, None] * (1 + _ROUNDING)
    bytes_CL = costs.fixed_bytes_CL + np.maximum(costs.activation_bytes_CL, costs.step_bytes_CL)
    longest_CL = np.maximum(costs.seconds_CL, costs.per_step_seconds_CL)
    return costs.can_run_CL & (longest_CL <= price) & (bytes_CL <= most_bytes_C1)


def _next_unusable(usable_CL: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[c, start]: the first layer from there on that is not usable; L if all are."""
    L = usable_CL.shape[1]
    at = np.where(usable_CL, L, np.arange(L))
    return np.ascontiguousarray(np.minimum.accumulate(at[:, ::-1], axis=1)[:, ::-1])
