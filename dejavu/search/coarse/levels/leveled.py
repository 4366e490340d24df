"""The bound under one limit with the number of stages in the state: every stage's memory is that of its place.

Shape suffixes as in `coarse.relaxed` and `coarse.levels.counted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem, Stage
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.levels import counted, leveled_beam
from dejavu.search.coarse.levels.minima import Stops
from dejavu.search.coarse.relaxed import ROUNDING, Kept, Relaxed
from dejavu.search.exact.cutting_planes import MOST_ROUNDS, PricedPlan

Ints = NDArray[np.int64]

_MORE_LEVELS = 3  # than the best plan has stages, if plans can have so many; with more there is no bound yet to lose
_MOST_BYTES = 9e8  # of what is kept for each level
_MOST_PASSES, _ROUNDS_EACH = 8, 3  # of prices with all cuts, which begin with those that few cuts need
_LEAST_GAIN, _MOST_IDLE = 0.95, 3  # of what was missing: a pass that leaves more is idle; so many end it, as some leap
_MOST_MET = 200  # of the plans that prices brought forth with all cuts, the last ones
_MORE = 0.01  # of the best price: by so much the limit and the cutoff are higher where there are fewer cuts
_SHORT = 2**16  # layers, from which on a stop takes four bytes


class Leveled:
    """The relaxed problem, for one limit on the bottleneck after another, with stages counted in the state.

    What is left of the relaxation: counts of devices have prices, messages of a stage's cuts are the least, the
    memory of a node is not looked at, and from the last level on stages hold what they hold there at least. Under a
    schedule whose stages hold the same everywhere one level is enough.
    """

    def __init__(self, relaxed: Relaxed, few: Leveled | None = None, *, num_levels: int | None = None) -> None:
        """`few`: the same with some of these cuts, for prices at first; `num_levels` in place of the best plan's."""
        self._relaxed, self._few = relaxed, few
        L1 = relaxed.seconds_CL1.shape[1]
        A = len(relaxed.links.latency_AA)
        most = relaxed.most_stages
        need_N1 = [relaxed.problem.in_flight(0, n) for n in range(1, most + 1)]
        self._num = min(num_levels or self.wanted_levels(relaxed, relaxed.num_stages), most)
        self._is_open = self._num < most
        self._need_N1 = np.array(need_N1[: self._num], dtype=np.int64)
        self._rest_NAL1 = np.empty((self._num + 1, A, L1))

    @property
    def problem(self) -> Problem:
        return self._relaxed.problem

    @property
    def num_levels(self) -> int:
        """Without that of no stages."""
        return self._num

    def beside(self, few: Leveled | None = None) -> Leveled:
        """The same for another thread; `prepare` comes first, and what it does is then shared."""
        other = copy(self)
        if few is None and self._few is not None:
            few = self._few.beside()
        other._few, other._rest_NAL1 = few, np.empty_like(self._rest_NAL1)
        return other

    def counting(self, num_stages: int) -> Leveled:
        """The same with levels for this many stages, and some more, where these are more than there are."""
        wanted = self.wanted_levels(self._relaxed, num_stages)
        few = None if self._few is None else self._few.counting(num_stages)
        return self if wanted <= self._num else Leveled(self._relaxed, few, num_levels=wanted)

    @staticmethod
    def wanted_levels(relaxed: Relaxed, num_stages: int) -> int:
        """Some more than such a plan has stages, where plans can have them and memory has room."""
        problem, most = relaxed.problem, relaxed.most_stages
        need_N1 = [problem.in_flight(0, n) for n in range(1, most + 1)]
        wanted = min(num_stages + _MORE_LEVELS, need_N1.index(need_N1[-1]) + 1)  # the first of those that hold the most
        L, A = problem.num_layers, len(relaxed.links.latency_AA)
        bytes_each = len(relaxed.kept) * L * (2 if L < _SHORT else 4) + 8 * A * L
        return max(1, min(wanted, int(_MOST_BYTES / bytes_each)))

    def prepare(self) -> None:
        """Find out which stages fit from which level."""
        assert self._fitting_N1CL.size

    @cached_property
    def _fitting_N1CL(self) -> Stops:
        """Whatever the limit, so it is asked for once."""
        C, L1 = self._relaxed.seconds_CL1.shape
        found = np.empty((self._num, C, L1 - 1), dtype=np.uint16 if L1 < _SHORT else np.int32)
        counted.fitting_stops(self._need_N1, self._relaxed.costs, found)
        return found

    def everything(self) -> Kept:
        """Nothing is known yet."""
        C, L1 = self._relaxed.seconds_CL1.shape
        return Kept(np.arange(C), np.zeros(L1, dtype=np.int64), np.zeros(len(self._relaxed.devices.count_R)))

    def everything_at(self, prices_R: Floats) -> Kept:
        """Nothing is known yet but prices."""
        return replace(self.everything(), prices_R=prices_R)

    def tightened(self, known: Kept, limit: float, cutoff: float, near_seconds: float = 0.0) -> Kept:
        """The same of the plans with no bottleneck above the limit and Σ below the cutoff; Σ inf: there is none.

        Prices bound Σ; then states and configurations go whose every plan comes to the cutoff at these prices.
        `near_seconds`: see `CuttingPlanes.bound`.
        """
        known = replace(known, alive_NL1=self._alive(known))
        if self._few is None:
            return self._looked(known, limit, cutoff, MOST_ROUNDS, near_seconds)
        for _ in range(_MOST_PASSES):
            guess = self.guessed(known, limit, cutoff, near_seconds)
            if guess.sum_seconds < known.sum_seconds + (1 - _LEAST_GAIN) * (cutoff - known.sum_seconds):
                break
            known = self.glanced(replace(known, prices_R=guess.prices_R), limit, cutoff)
            if known.sum_seconds >= cutoff or self._relaxed.best.is_late:
                break
        return known

    def glanced(self, known: Kept, limit: float, cutoff: float) -> Kept:
        """What the prices say that are known, and where that is something what is left at them: maybe few states."""
        return self._looked(replace(known, alive_NL1=self._alive(known)), limit, cutoff, 1)

    def looked(self, known: Kept, limit: float, cutoff: float, near_seconds: float = 0.0) -> Kept:
        """What more rounds of prices say, from those that are known on, a few at a time: each leaves fewer states."""
        known = replace(known, alive_NL1=self._alive(known))
        idle = 0
        for _ in range(_MOST_PASSES):
            before = cutoff - known.sum_seconds
            known = self._looked(known, limit, cutoff, _ROUNDS_EACH, near_seconds)
            missing = cutoff - known.sum_seconds
            idle = idle + 1 if missing > _LEAST_GAIN * before else 0
            if missing <= 0 or idle == _MOST_IDLE or self._relaxed.best.is_late:
                break
        return known

    def _looked(self, known: Kept, limit: float, cutoff: float, most_rounds: int, near_seconds: float = 0.0) -> Kept:
        """What so many rounds of prices say, and what is left at the best of them; Σ inf: nothing is."""
        assert known.alive_NL1 is not None
        if not known.alive_NL1[:, 0].any():
            return replace(known, sum_seconds=np.inf)
        levels = self._levels(known.alive_NL1, known.among_K, limit)
        sum_seconds, prices_R = self._bound(known, levels, limit, cutoff, most_rounds, near_seconds)
        if most_rounds == 1 and sum_seconds <= known.sum_seconds:
            return known
        known = replace(known, prices_R=prices_R, sum_seconds=max(sum_seconds, known.sum_seconds))
        if sum_seconds >= cutoff or self._relaxed.best.is_late:
            return known
        return self._narrowed(known, limit, cutoff, levels, is_filled=most_rounds == 1)

    def guessed(self, known: Kept, limit: float, cutoff: float, near_seconds: float = 0.0) -> Kept:
        """The best prices, and Σ at them, of plans that cut where `few` does and of those met with all cuts.

        Of those that were met before, under other limits too, as far as they are of interest here: they often have
        stages that are too short for few cuts, and prices without them say nothing of all cuts.
        """
        few = self._few
        assert few is not None
        cuts, alive_NL1 = np.searchsorted(self._relaxed.cuts_L1, few._relaxed.cuts_L1), self._alive(known)
        levels = self._levels(alive_NL1, known.among_K, limit)
        met = [plan for plan in self._relaxed.planes.known[-_MOST_MET:] if self._allows(plan, known.among_K, levels)]
        more = _MORE * self._relaxed.best.step_seconds  # few cuts cost more
        few_NL1 = np.ascontiguousarray(alive_NL1[:, cuts])  # loops are compiled for one order
        few_levels = few._levels(few_NL1, known.among_K, limit + more)
        sum_seconds, prices_R = few._bound(
            known, few_levels, limit + more, cutoff + more, MOST_ROUNDS, near_seconds, met
        )
        return replace(known, prices_R=prices_R, sum_seconds=sum_seconds)

    def _bound(
        self,
        known: Kept,
        levels: counted.Levels,
        limit: float,
        cutoff: float,
        most_rounds: int,
        near_seconds: float,
        also: Sequence[PricedPlan] = (),
    ) -> tuple[float, Floats]:
        """A bound on Σ, up to the cutoff, and its prices."""
        among_K = known.among_K
        return self._relaxed.bound(
            lambda prices_R: self._cheapest(limit, self._ways(among_K, prices_R), levels, prices_R),
            lambda plan: self._allows(plan, among_K, levels),
            cutoff,
            known.prices_R,
            most_rounds,
            near_seconds,
            also,
        )

    def cheapest(self, known: Kept, limit: float) -> PricedPlan | None:
        """The cheapest plan of the relaxed problem at the prices that are known."""
        levels = self._levels(self._alive(known), known.among_K, limit)
        return self._cheapest(limit, self._ways(known.among_K, known.prices_R), levels, known.prices_R)

    def plan_under(self, known: Kept, limit: float, cutoff: float, width: int) -> Plan | None:
        """A plan with no bottleneck above the limit and Σ below the cutoff, if a beam at the known prices meets one."""
        relaxed, devices, problem = self._relaxed, self._relaxed.devices, self._relaxed.problem
        if not devices.bits or not len(known.among_K):
            return None
        levels = self._levels(self._alive(known), known.among_K, limit)
        prices_JR = self._prices_around(known.prices_R, cutoff)
        rest_JNAL1 = np.empty((len(prices_JR), *self._rest_NAL1.shape))
        for prices_R, rest_NAL1 in zip(prices_JR, rest_JNAL1, strict=True):
            counted.downstream(limit, self._ways(known.among_K, prices_R), relaxed.links, levels, rest_NAL1)
        guide = leveled_beam.Guide(
            aim=leveled_beam.Aim(limit, cutoff, width),
            ways=self._ways(known.among_K, known.prices_R),
            links=relaxed.links,
            levels=levels,
            devices=devices.priced(known.prices_R, problem.use_all_devices),
            price_JK=prices_JR @ devices.use_CR[known.among_K].T,
            spent_J=prices_JR @ devices.count_R,
            rest_JNAL1=rest_JNAL1,
        )
        found = leveled_beam.beam(guide)
        if not found.shape[1]:
            return None
        stages = (
            Stage(int(start), int(stop), problem.configurations[relaxed.kept[c]])
            for c, start, stop in zip(found[0], relaxed.cuts_L1[found[1]], relaxed.cuts_L1[found[2]], strict=True)
        )
        return Plan(tuple(stages), problem.schedule, problem.num_microbatches)

    def _prices_around(self, prices_R: Floats, cutoff: float) -> Floats:
        """[j, resource] these prices, and for each type of devices the same with a higher one for that type."""
        devices = self._relaxed.devices
        higher = 0.5 * cutoff / devices.count_R[: devices.num_types].sum()
        found_JR = np.tile(prices_R, (1 + devices.num_types, 1))
        for t in range(devices.num_types):
            found_JR[1 + t, t] += abs(prices_R[t]) + higher
        return found_JR

    def _levels(self, alive_NL1: NDArray[np.bool_], among_K: Ints, limit: float) -> counted.Levels:
        busy_KL, band_N2 = counted.busy_stops(limit, self._relaxed.costs, among_K), counted.bands(alive_NL1)
        better_KK = self._relaxed.better_CC[np.ix_(among_K, among_K)]
        return counted.Levels(
            alive_NL1=alive_NL1,
            band_N2=band_N2,
            is_open=self._is_open,
            fitting_N1CL=self._fitting_N1CL,
            busy_KL=busy_KL,
            looked_NK=counted.looked_at(better_KK, among_K, band_N2, self._fitting_N1CL, busy_KL),
        )

    def _alive(self, known: Kept) -> NDArray[np.bool_]:
        """The states that are left: at first those with as many stages as are known to come from a cut on."""
        if known.alive_NL1 is not None:
            return known.alive_NL1
        L1 = len(known.after_L1)
        level_N, left_L1 = np.arange(self._num + 1)[:, None], np.arange(L1)[::-1]
        fewest_L1 = np.clip(known.after_L1, 1, self._num if self._is_open else None)
        most_L1 = left_L1 if known.most_L1 is None else np.minimum(left_L1, known.most_L1)
        alive_NL1: NDArray[np.bool_] = (level_N >= fewest_L1) & (level_N <= most_L1)
        alive_NL1[:, -1] = level_N[:, 0] == 0
        return alive_NL1

    def _ways(self, among_K: Ints, prices_R: Floats) -> counted.Ways:
        relaxed = self._relaxed
        return counted.Ways(
            among_K=among_K,
            price_K=relaxed.devices.use_CR[among_K] @ prices_R,
            class_K=relaxed.class_C[among_K],
            seconds_CL1=relaxed.seconds_CL1,
        )

    def _cheapest(
        self, limit: float, ways: counted.Ways, levels: counted.Levels, prices_R: Floats
    ) -> PricedPlan | None:
        rest_NAL1 = self._rest_NAL1
        counted.downstream(limit, ways, self._relaxed.links, levels, rest_NAL1)
        total = float(rest_NAL1[1:, :, 0].min())
        if total == np.inf:
            return None
        return self._relaxed.plan(
            total, prices_R, counted.followed(limit, ways, self._relaxed.links, levels, rest_NAL1)
        )

    def _allows(self, plan: PricedPlan, among_K: Ints, levels: counted.Levels) -> bool:
        """Whether a plan that was met before has states and stages that are left."""
        assert plan.stages_3S is not None
        how, start, stop = plan.stages_3S
        level = np.minimum(np.arange(len(how), 0, -1), self._num)
        if len(how) > self._num and not self._is_open:
            return False
        k = np.minimum(np.searchsorted(among_K, how), len(among_K) - 1)
        furthest = np.minimum(levels.fitting_N1CL[level - 1, how, start], levels.busy_KL[k, start])
        return bool((among_K[k] == how).all() and levels.alive_NL1[level, start].all() and (furthest >= stop).all())

    def _narrowed(self, known: Kept, limit: float, cutoff: float, levels: counted.Levels, *, is_filled: bool) -> Kept:
        """Without the states and configurations of which the prices at hand prove that no plan of interest has them.

        `is_filled`: these are the prices that were looked at last.
        """
        relaxed, prices_R, among_K = self._relaxed, known.prices_R, known.among_K
        ways = self._ways(among_K, prices_R)
        if not is_filled:
            counted.downstream(limit, ways, relaxed.links, levels, self._rest_NAL1)
        through_NL1, through_K = counted.through(limit, ways, relaxed.links, levels, self._rest_NAL1)
        count_R = relaxed.devices.count_R
        slack = ROUNDING * (abs(cutoff) + float(count_R @ np.abs(prices_R)))
        most = cutoff + float(count_R @ prices_R) + slack
        return replace(known, among_K=among_K[through_K <= most], alive_NL1=levels.alive_NL1 & (through_NL1 <= most))
