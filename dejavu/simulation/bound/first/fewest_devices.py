"""A bound that asks how few devices would do for every rank and every link to do its part within a limit.

Where the fewest are more than there are, no plan's step is within the limit. Each stage and each message has to be done
in time with the least that must come before it and after it; so plans are built from their last stage on, with only a
few numbers to remember at each cut: the fewest devices so far, the shortest way of a microbatch through what is left,
and the least sums of both. Plans with every number of ranks are looked at together; a table over a plan's own stages
is of one.
Letters: C = configurations, G = classes of them whose messages cost the same, L = layers, L1 = L + 1 cuts, T = kinds of
devices, P = numbers of ranks, S = numbers of stages, R = stages by how many are after them, W = ways of a link.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from dejavu.foundation.registry import named
from dejavu.plans.schedule import SCHEDULES, Schedule
from dejavu.plans.stage_costs import Floats
from dejavu.simulation._action_table import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PER_STEP
from dejavu.simulation.bound._prefix_sums import BoundProblem
from dejavu.simulation.bound.first.sides import Reached
from dejavu.simulation.bound.first.sums import (
    ROUNDING,
    Mask,
    Places,
    Stages,
    Sums,
    Times,
    fewest,
    heads,
    keeping,
    prices_of,
    stages_within,
    tails,
)

_MOST_STEPS = 50_000_000  # of the loop over stages for one limit; with more nothing is proved
_NEAR = 1.003  # limits are tried until bounds are known so well
_SWEEPS = 3  # of leaving out stages that no plan within a limit has
_HARDLY = 0.98  # left of them: it was not worth another sweep


class FewestDevices:
    """A bound on plans of a schedule with 1, 2, … ranks, raised by one limit after another.

    Attributes:
        bound_P: no plan with so many ranks is faster; at first, what is known.
    """

    def __init__(self, problem: BoundProblem, schedule: str, floor_P: Floats, best_seconds: float) -> None:
        """Ask nothing yet.

        Args:
            floor_P: bounds that are known.
            best_seconds: no bound is wanted above it.
        """
        self._problem, self._kind, self._best = problem, named(SCHEDULES, schedule), best_seconds
        self.bound_P = floor_P.copy()
        self._kept_P = np.full(len(floor_P), np.inf)  # the least limits that could be kept, as far as was looked at
        if self._kind.stages_per_rank > 1:  # one rank sends no messages between its stages: nothing is asked of it
            self._kept_P[:1] = 0.0
        if not np.isfinite(best_seconds) or (problem.choices is None and self._kind.placement != "loop"):
            self._kept_P[:] = 0.0  # no limit is known, or not where the order of ranks turns

    @property
    def is_open_P(self) -> Mask:
        """Whether another limit may raise the bound."""
        is_open_P: Mask = (self.bound_P < self._best) & (self._kept_P > self.bound_P * _NEAR)
        return is_open_P

    def ask(self, number: int) -> None:
        """Ask the highest limit at first, then one in the middle of where the bound for this number of ranks may be."""
        limit = min(self._best, (self.bound_P[number] + self._kept_P[number]) / 2)
        is_asked_P = (self.bound_P < limit) & (limit < self._kept_P)
        is_kept_P = is_asked_P & self._can_keep(limit, is_asked_P)
        self.bound_P[is_asked_P & ~is_kept_P] = limit
        self._kept_P[is_kept_P] = limit if self._stages else 0.0
        if not self.is_open_P.any():
            del self._stages  # they may be hundreds of megabytes

    def _can_keep(self, limit: float, is_asked_P: Mask) -> Mask:
        """Return which numbers of ranks have plans within the limit, as far as is looked at."""
        each, times, turns = self._kind.stages_per_rank, self._times, self._kind.placement != "loop"
        together = [one for one in self._together if is_asked_P[one[0]].any()]
        can_P, every = np.zeros(len(is_asked_P), np.bool_), self._stages
        if every is None:
            return ~can_P
        for inside_C, paid in self._reached.within(limit):
            sums = Sums.of(paid, limit)
            stages = every if inside_C.all() else every.of(inside_C[every.configuration_N])
            for _ in range(_SWEEPS):
                price_NK = prices_of(sums, stages)
                before = heads(times, sums, stages, price_NK, turns)
                after_L1GK = tails(times, sums, stages, price_NK, turns)
                asked = np.ones(len(inside_C), np.bool_), int(times.ahead_R.max()), 1
                kept_N = keeping(times, sums, stages, price_NK, (before, after_L1GK), asked)
                stages = stages.of(kept_N)
                if kept_N.sum() >= _HARDLY * len(kept_N):
                    break
            price_NK = prices_of(sums, stages)
            for ranks, places in together:
                if len(stages.start_N) * len(places.may_RC) > _MOST_STEPS:
                    can_P[ranks] = True
                else:
                    can_P[ranks] |= fewest(times, sums, stages, price_NK, before, places)[each - 1 :: each][ranks]
        return can_P

    @cached_property
    def _times(self) -> Times:
        return _times(self._problem, self._kind, len(self.bound_P))

    @cached_property
    def _reached(self) -> Reached:
        return Reached(self._problem, self._times, by_work=self._kind.stages_per_rank > 1)

    @cached_property
    def _together(self) -> list[tuple[slice, Places]]:
        return list(_together(self._problem, self._kind, len(self.bound_P)))

    @cached_property
    def _stages(self) -> Stages | None:
        return stages_within(self._times, self._best * (1.0 + ROUNDING), self._kind.stages_per_rank * len(self.bound_P))


def _together(problem: BoundProblem, kind: Schedule, num_ranks: int) -> Iterator[tuple[slice, Places]]:
    """Yield which numbers of ranks are looked at together, and the places of their stages."""
    each, C = kind.stages_per_rank, len(problem.prices.class_C)
    if problem.choices is None:
        ones = np.ones(num_ranks * each, np.int64)
        yield slice(num_ranks), Places(np.ones((num_ranks * each, C), np.bool_), ones, 0 * ones)
        return
    is_directed = problem.prices.message_L1GGM.shape[3] > 3
    for ranks in range(1, num_ranks + 1):
        S = ranks * each
        rank_S = [kind.rank_of(s, S) for s in range(S)]
        may = [problem.choices.of(rank, ranks) for rank in rank_S]
        ends = [frozenset(pair) for pair in itertools.pairwise(rank_S)]
        number = Counter(ends)
        shared = [1, *(number[pair] if len(pair) == 2 else 0 for pair in ends)]
        goes_back = [0, *(int(b == a - 1 and is_directed) for a, b in itertools.pairwise(rank_S))]
        found = map(np.array, (may[::-1], shared[::-1], goes_back[::-1]))
        yield slice(ranks - 1, ranks), Places(*found)


def _times(problem: BoundProblem, kind: Schedule, num_ranks: int) -> Times:
    prices, B = problem.prices, problem.num_microbatches
    sum_5CL1, is_whole = prices.sum_5CL1, not kind.splits_backward
    parts_CL1 = sum_5CL1[BACKWARD_INPUT] + sum_5CL1[BACKWARD_WEIGHT]
    layers_CL = np.diff(sum_5CL1[BACKWARD], axis=1)
    if not is_whole:  # the first stage's backward pass is whole
        layers_CL = np.minimum(layers_CL, np.diff(parts_CL1, axis=1))
    work_CL = B * (np.diff(sum_5CL1[FORWARD], axis=1) + layers_CL)
    message_WL1GGM = np.stack(np.split(prices.message_L1GGM, prices.message_L1GGM.shape[3] // 3, axis=3))
    wire_WL1GG = message_WL1GGM[..., :2].sum(axis=-1)
    least_GG = wire_WL1GG[:, 1:-1].min(axis=(0, 1), initial=np.inf)
    C, L = work_CL.shape
    fits_CLL1 = problem.max_in_flight_CLL1
    rest = range(1, num_ranks * kind.stages_per_rank + 1)
    is_plain = kind.stages_per_rank == 1
    return Times(
        num_microbatches=B,
        ahead_R=np.array([kind.in_flight(0, r, B) if is_plain else B for r in rest]),
        forward_CL1=sum_5CL1[FORWARD],
        backward_CL1=sum_5CL1[BACKWARD if is_whole else BACKWARD_INPUT],
        work_CL1=np.pad(np.cumsum(work_CL, axis=1), ((0, 0), (1, 0))),
        step_CL1=sum_5CL1[PER_STEP],
        step_C=prices.per_step_C,
        pass_C=prices.pass_C,
        wire_WL1GG=wire_WL1GG,
        message_WL1GG=message_WL1GGM.sum(axis=-1),
        least_GG=np.minimum(least_GG, least_GG.T),
        returns=is_whole,
        class_C=prices.class_C,
        fits_CLL1=np.full((C, L, L + 1), B, np.int32) if fits_CLL1 is None else fits_CLL1,
    )
