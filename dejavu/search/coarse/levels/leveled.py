"""The bound under one limit with the number of stages in the state: every stage's memory is that of its place.

Shape suffixes as in `coarse.relaxed` and `coarse.levels.counted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Plan, Problem, Stage
from dejavu.plans.stage_costs import Floats
from dejavu.search.coarse.levels import counted, leveled_beam
from dejavu.search.coarse.levels.crossing import crossing
from dejavu.search.coarse.levels.stops import FittingStops, bytes_of_a_stop
from dejavu.search.coarse.relaxed import ROUNDING, Kept, Met, Relaxed, States, Through, apart
from dejavu.search.exact.cutting_planes import Bounded, PricedPlan

Ints = NDArray[np.int64]

_MORE_LEVELS = 3  # than the best plan has stages, if plans can have so many; with more there is no bound yet to lose
_MOST_BYTES = 1.8e9  # of what is kept for each level: with fewer levels plans seem to fit that do not
_NEAR = 0.003  # of the best price, and of what prices take from it: states are next to a plan that is dearer by less
_SPENT = 0.3  # of what all devices cost, so much counts as the best price there
_PRECISION = 0.003  # of the best price: to this the best prices of states near the cheapest plans are found
_NEARLY = 4.0  # times this, where it was not found more precisely
_STEP = 0.3  # of the bound: prices that seem to prove more by that are not looked for, as little is known so far up
_NEAR_SHARE = 0.15  # of what prices may still prove: states are near whose plans are dearer by less
_PULL = 0.5  # towards the prices that proved most, where the last ones proved less: those of what is near jump about
_PATIENCE = 0.02  # see `CuttingPlanes`
_MOST_PASSES = 12
_MOST_MET = 1000  # plans, the last ones, whose states are looked at
_LESS = (1.0, 0.5, 0.25, 0.125)  # times prices, one after the other while they prove nothing


class Leveled:
    """The relaxed problem, for one limit on the bottleneck after another, with stages counted in the state.

    What is left of the relaxation: counts of devices have prices, messages of a stage's cuts are the least, the
    memory of a node is not looked at, and from the last level on stages hold what they hold there at least. Under a
    schedule whose stages hold the same everywhere one level is enough.
    """

    def __init__(self, relaxed: Relaxed, num_levels: int | None = None, stops: FittingStops | None = None) -> None:
        """Of a relaxed problem.

        Args:
            num_levels: in place of those for the best plan.
            stops: of the same problem, where others ask for them, too; there are no more levels than it has.
        """
        self._relaxed = relaxed
        L1 = relaxed.seconds_CL1.shape[1]
        A = len(relaxed.links.latency_AA)
        most = relaxed.most_stages
        num_levels = num_levels or self.wanted_levels(relaxed, relaxed.num_stages)
        self._stops = stops or self.stops_of(relaxed, num_levels)
        self._num = min(num_levels, self._stops.most_levels)
        self._is_open = self._num < most
        # Whether what stages hold on the last level is what they hold from there on.
        self._is_exact = relaxed.problem.in_flight(0, self._num) == relaxed.problem.in_flight(0, most)
        self._rest_NAL1 = np.empty((self._num + 1, A, L1))
        self._after, self._before = crossing(relaxed.links, True), crossing(relaxed.links, False)
        self._planes = replace(relaxed.planes, patience=_PATIENCE, is_near=True, known=relaxed.met)

    @property
    def problem(self) -> Problem:
        return self._relaxed.problem

    @property
    def num_levels(self) -> int:
        """Without that of no stages."""
        return self._num

    @property
    def num_cuts(self) -> int:
        """Without the first."""
        return len(self._relaxed.cuts_L1) - 1

    @property
    def has_beams(self) -> bool:
        """Whether the devices of a stage go into one number, which beams count them in."""
        return self._relaxed.devices.bits > 0

    def beside(self) -> Leveled:
        """The same for another thread."""
        other = copy(self)
        other._rest_NAL1 = np.empty_like(self._rest_NAL1)
        return other

    def counting(self, num_stages: int) -> Leveled:
        """The same with levels for this many stages, and some more, where these are more than there are."""
        wanted = self.wanted_levels(self._relaxed, num_stages)
        return self if wanted <= self._num else Leveled(self._relaxed, wanted, self._stops)

    def ending_early(self, early: float) -> Leveled:
        """The same for stages that end early, see `Relaxed.ending_early`: no plan that fits here is lost there.

        Where no cut is missing none has to.
        """
        if self.num_cuts == self.problem.num_layers:
            return self
        return Leveled(self._relaxed.ending_early(early), self._num)

    @staticmethod
    def wanted_levels(relaxed: Relaxed, num_stages: int) -> int:
        """Some more than such a plan has stages, where plans can have them and memory has room."""
        problem, most = relaxed.problem, relaxed.most_stages
        need_N1 = [problem.in_flight(0, n) for n in range(1, most + 1)]
        wanted = min(num_stages + _MORE_LEVELS, need_N1.index(need_N1[-1]) + 1)  # the first of those that hold the most
        L, A = problem.num_layers, len(relaxed.links.latency_AA)
        bytes_each = len(relaxed.kept) * L * bytes_of_a_stop(L) + 8 * A * L
        return max(1, min(wanted, int(_MOST_BYTES / bytes_each)))

    @classmethod
    def stops_of(cls, relaxed: Relaxed, num_levels: int = 1) -> FittingStops:
        """For as many levels as any plan needs, or memory has room for, and as these."""
        most = min(max(num_levels, cls.wanted_levels(relaxed, relaxed.most_stages)), relaxed.most_stages)
        need_N1 = [relaxed.problem.in_flight(0, n) for n in range(1, most + 1)]
        return FittingStops(relaxed.costs, np.array(need_N1, dtype=np.int64))

    def everything(self) -> Kept:
        """Nothing is known yet."""
        C, L1 = self._relaxed.seconds_CL1.shape
        return Kept(np.arange(C), np.zeros(L1, dtype=np.int64), np.zeros(len(self._relaxed.devices.count_R)))

    def everything_at(self, prices_R: Floats) -> Kept:
        """Nothing is known yet but prices."""
        return replace(self.everything(), prices_R=prices_R)

    def beginning_near(self, met: Sequence[Met], limit: float, known: Kept) -> Kept:
        """With the prices that were met under the nearest limit, maybe with other cuts, and the states near to it."""
        if not met:
            return known
        hold = [one for one in met if one.has_plans or one.limit >= limit] or met
        nearest = min(reversed(hold), key=lambda one: apart(one.limit, limit)).known
        return replace(known, prices_R=nearest.prices_R, near=nearest.near)

    def guessed(self, met: Sequence[Met], limit: float, cutoff: float) -> Floats | None:
        """The best prices of the states that were near under the nearest limit with fewer cuts.

        None: none are known, or any plan of these states comes to the cutoff: too few were near.

        They say nothing of other states, but take a small part of the time, and with few cuts prices are not quite
        those of more.
        """
        hold = [one for one in met if one.has_plans]
        nearest = min(reversed(hold), key=lambda one: apart(one.limit, limit), default=None)
        if nearest is None or nearest.known.near is None:
            return None
        everything = self._states(self.everything())
        near = nearest.known.near.over(nearest.cuts_L1, self._relaxed.cuts_L1, self._num).among(everything)
        if not near.alive_NL1[:, 0].any():
            return None
        best = self._best_prices(near, everything, limit, cutoff, nearest.known.prices_R)
        return best.prices_T if best.sum_seconds < cutoff else None

    def what_was_met(self, limit: float, known: Kept) -> Met:
        """Without what holds under this limit only; near are the states that are at the last prices."""
        near = known.near
        if known.through is not None and near is not None and known.about_seconds < known.cutoff:
            near = known.through.below(known.about_seconds + self._near_seconds(known, limit)).among(near)
        return Met(limit, replace(self.everything_at(known.prices_R), near=near), self._relaxed.cuts_L1)

    def _near_seconds(self, known: Kept, limit: float) -> float:
        """States are near whose plans are dearer than the cheapest by less."""
        about = min(known.sum_seconds + limit, self._relaxed.best.step_seconds)
        return _NEAR * max(about, _SPENT * float(self._relaxed.devices.count_R @ known.prices_R))

    def tightened(self, known: Kept, limit: float, cutoff: float) -> Kept:
        """The same of the plans with no bottleneck above the limit and Σ below the cutoff; Σ inf: there is none.

        As `closer`, until the best prices are known, or the cutoff is reached.
        """
        for _ in range(_MOST_PASSES):
            before, known = known, self.closer(known, limit, cutoff)
            missing = min(known.about_seconds, cutoff) - known.sum_seconds
            is_the_same = known.sum_seconds <= before.sum_seconds and known.about_seconds >= before.about_seconds
            enough = (_NEARLY if is_the_same else 1.0) * _PRECISION * self._relaxed.about_seconds
            if missing <= enough or self._relaxed.best.is_late:
                break
        return known

    def closer(self, known: Kept, limit: float, cutoff: float, enough: float | None = None) -> Kept:
        """What the known prices say of Σ, and what is left at them; then the best prices of what is near.

        Of all states that are left these prices prove something, the next ones are the best for the few that are next
        to the cheapest plans: of those all plans are known at once, where a plan at a time says little of the others.
        States and configurations go whose every plan comes to the cutoff. Where prices prove less than others before
        them the next ones are halfway to those (smoothing: Wentges, 1997), and more states are near.

        Args:
            enough: more need not be proved of Σ; what the cutoff is where it is not given.
        """
        relaxed, states, before = self._relaxed, self._states(known), known
        known = replace(known, states=states, about_seconds=np.inf)
        levels = self._levels(states, limit)
        for times in _LESS if relaxed.seconds_CL1[:, -1].any() else _LESS[:1]:  # of prices alone less says the same
            prices_R = times * known.prices_R
            ways = self._ways(states, prices_R)
            plan = self._cheapest(limit, ways, levels, prices_R) if states.alive_NL1[:, 0].any() else None
            if plan is None:
                return replace(known, sum_seconds=np.inf)
            self._planes.known.add(plan)
            sum_seconds = plan.bound_seconds(prices_R, relaxed.devices.count_R)
            if sum_seconds > 0.0:
                break
        if sum_seconds > before.proved_seconds:
            known = replace(known, proved_R=prices_R, proved_seconds=sum_seconds)
        known = replace(known, sum_seconds=max(sum_seconds, known.sum_seconds))
        if sum_seconds >= (cutoff if enough is None else enough) or relaxed.best.is_late:
            return known
        through = replace(self._through(limit, ways, levels, states, prices_R), cutoff=known.cutoff)
        left = through.below(cutoff).among(states)
        missing = before.about_seconds - sum_seconds if before.about_seconds < cutoff else 0.0
        near_seconds = max(self._near_seconds(known, limit), _NEAR_SHARE * missing)
        around = through.below(sum_seconds + near_seconds).with_those(known.near).among(left)
        best = self._best_prices(around, left, limit, self._reached(sum_seconds, before, limit, cutoff), prices_R)
        next_R = best.prices_T
        if sum_seconds <= before.proved_seconds and best.most_seconds < cutoff and known.proved_R is not None:
            next_R = _PULL * known.proved_R + (1 - _PULL) * next_R
        return replace(
            known,
            states=left,
            near=around,
            through=through,
            cutoff=cutoff,
            prices_R=next_R,
            about_seconds=max(best.most_seconds, sum_seconds),
        )

    def _reached(self, sum_seconds: float, before: Kept, limit: float, cutoff: float) -> float:
        """What the next prices are to prove: far above what is proved now they would be those of few states."""
        if limit == np.inf:
            return cutoff
        gain = sum_seconds - before.sum_seconds if before.sum_seconds > 0.0 else 0.0
        return min(cutoff, sum_seconds + max(2.0 * gain, _STEP * (sum_seconds + limit)))

    def _best_prices(self, near: States, left: States, limit: float, cutoff: float, prices_R: Floats) -> Bounded:
        """Those that prove most, up to the cutoff, of plans with states that are near, and of those that were met."""
        levels = self._levels(near, limit)
        return self._relaxed.bound(
            self._planes,
            lambda prices_R: self._cheapest(limit, self._ways(near, prices_R), levels, prices_R),
            lambda plan: self._allows(plan, left, limit),
            cutoff,
            prices_R,
            self._relaxed.enough(_PRECISION),
        )

    def of_plans_met(self, known: Kept, limit: float) -> States:
        """Those of the plans that prices brought forth, of all that are known to be left.

        Each takes more of some devices than there are, and less of others. Where two have a state in common, the one's
        stages before it and the other's from there on make another plan.
        """
        left = self._states(known)
        alive_NL1, used_NC = np.zeros_like(left.alive_NL1), np.zeros_like(left.used_NC)
        alive_NL1[0, -1] = True
        for plan in self._planes.known.latest(_MOST_MET):
            if self._allows(plan, left, limit):
                assert plan.stages_3S is not None
                level = self._levels_of(len(plan.stages_3S[0]))
                alive_NL1[level, self._relaxed.place_L1[plan.stages_3S[1]]] = True
                used_NC[level, plan.stages_3S[0]] = True
        return States(alive_NL1, used_NC)

    def _levels_of(self, num_stages: int) -> Ints:
        """Of each stage of a plan."""
        return np.minimum(np.arange(num_stages, 0, -1), self._num)

    def cheapest(self, known: Kept, limit: float) -> PricedPlan | None:
        """The cheapest plan of the relaxed problem at the prices that are known."""
        states = self._states(known)
        return self._cheapest(limit, self._ways(states, known.prices_R), self._levels(states, limit), known.prices_R)

    def plan_under(
        self,
        known: Kept,
        limit: float,
        cutoff: float,
        width: int,
        num_starts: int | None = None,
        until_seconds: float = np.inf,
        *,
        proves: bool = False,
        varied: Sequence[float] = (),
    ) -> tuple[Plan | None, float]:
        """The best plan with no bottleneck above the limit and Σ below the cutoff that a beam at these prices meets.

        And a bound on Σ of all such plans, up to the cutoff, which it is where the beam had room for all and met none.

        Args:
            num_starts: that are tried of a stage to a cut; None: all.
            until_seconds: as the search's clock has it; a plan is met by then, or none.
            proves: the bound holds of plans with more stages than there are levels, too. Of those that are met some do
                not fit memory, so else none is looked for.
            varied: times the prices of one type of devices after the other. Of what labels come to at all these prices
                the most counts: it says which have taken more or less of a type than goes with what is left to do.
        """
        relaxed, problem, prices_R, states = self._relaxed, self.problem, known.prices_R, self._states(known)
        if not self.has_beams:
            return None, -np.inf
        levels, ways = self._levels(states, limit), self._ways(states, prices_R)
        counted.downstream(limit, ways, self._after, levels, self._rest_NAL1)
        states = self._through(limit, ways, levels, states, prices_R).below(cutoff).among(states)
        if not states.alive_NL1[:, 0].any():
            return None, cutoff
        levels, ways = self._levels(states, limit), self._ways(states, prices_R)
        prices = self._at_prices(limit, levels, states, [prices_R, *self._varied(prices_R, varied)])
        guide = leveled_beam.Guide(
            aim=leveled_beam.Aim(limit, cutoff, width, num_starts or len(relaxed.cuts_L1), relaxed.most_stages),
            ways=ways,
            links=relaxed.links,
            levels=levels if proves or self._is_exact else levels._replace(is_open=False),
            devices=relaxed.devices.packed(problem.use_all_devices),
            prices=prices,
        )
        found, bound_seconds = leveled_beam.beam(guide, lambda: relaxed.best.elapsed_seconds > until_seconds)
        if not found.shape[1]:
            return None, bound_seconds
        stages = (
            Stage(int(start), int(stop), problem.configurations[relaxed.kept[c]])
            for c, start, stop in zip(found[0], relaxed.cuts_L1[found[1]], relaxed.cuts_L1[found[2]], strict=True)
        )
        return Plan(tuple(stages), problem.schedule, problem.num_microbatches), bound_seconds

    def _at_prices(
        self, limit: float, levels: counted.Levels, states: States, prices: Sequence[Floats]
    ) -> leveled_beam.Prices:
        """What a beam reads of each of these prices."""
        level_S, cut_S = np.nonzero(states.alive_NL1)
        state_NL1 = np.full(states.alive_NL1.shape, -1)
        state_NL1[level_S, cut_S] = np.arange(len(level_S))
        price, spent = [], []
        before_SA = np.empty((len(level_S), self._rest_NAL1.shape[1]))
        others_QSA = np.empty((len(prices) - 1, *before_SA.shape), np.float32)
        for p, prices_R in enumerate(prices):
            ways = self._ways(states, prices_R)
            counted.downstream(limit, ways, self._after, levels, self._rest_NAL1)
            spent.append(self._through(limit, ways, levels, states, prices_R).spent_seconds)
            price.append(ways.price_K)
            (others_QSA[p - 1] if p else before_SA)[:] = self._rest_NAL1[level_S, :, cut_S]
        np.nextafter(others_QSA, np.float32(-np.inf), out=others_QSA, where=np.isfinite(others_QSA))
        return leveled_beam.Prices(np.array(price), np.array(spent), before_SA, others_QSA, state_NL1)

    def _varied(self, prices_R: Floats, shares: Sequence[float]) -> list[Floats]:
        """With all prices of one type of devices times each of these, one type after the other."""
        if not shares:
            return []
        devices = self._relaxed.devices
        of_type_TR = devices.use_CR[:, : devices.num_types].T.astype(bool) @ devices.use_CR.astype(bool)
        return [np.where(of_R, share * prices_R, prices_R) for of_R in of_type_TR for share in shares]

    def _states(self, known: Kept) -> States:
        """The states that are left: at first those with as many stages as are known to come from a cut on."""
        if known.states is not None:
            return known.states
        L1 = len(known.after_L1)
        level_N, left_L1 = np.arange(self._num + 1)[:, None], np.arange(L1)[::-1]
        fewest_L1 = np.clip(known.after_L1, 1, self._num if self._is_open else None)
        most_L1 = left_L1 if known.most_L1 is None else np.minimum(left_L1, known.most_L1)
        alive_NL1: NDArray[np.bool_] = (level_N >= fewest_L1) & (level_N <= most_L1)
        alive_NL1[:, -1] = level_N[:, 0] == 0
        used_NC = np.zeros((self._num + 1, len(self._relaxed.kept)), dtype=np.bool_)
        used_NC[:, known.among_K] = True
        return States(alive_NL1, used_NC)

    def _through(
        self,
        limit: float,
        ways: counted.Ways,
        levels: counted.Levels,
        states: States,
        prices_R: Floats,
    ) -> Through:
        """After `counted.downstream` with the same, of which nothing is left."""
        through_NL1, through_NK = counted.through(limit, ways, self._before, levels, self._rest_NAL1)
        through_NC = np.full(states.used_NC.shape, np.inf)
        through_NC[:, states.among_K] = through_NK
        count_R = self._relaxed.devices.count_R
        most_spent = float(count_R @ prices_R) + ROUNDING * float(count_R @ np.abs(prices_R))
        return Through(through_NL1, through_NC, most_spent, np.inf)

    def _levels(self, states: States, limit: float) -> counted.Levels:
        among_K, better_CC, costs = states.among_K, self._relaxed.better_CC, self._relaxed.costs
        busy_KL, band_N2 = counted.busy_stops(limit, costs, among_K), counted.bands(states.alive_NL1)
        used_NK, fitting_N1CL = np.ascontiguousarray(states.used_NC[:, among_K]), self._stops.upto(self._num)
        better_KK = better_CC[np.ix_(among_K, among_K)]
        return counted.Levels(
            alive_NL1=states.alive_NL1,
            band_N2=band_N2,
            is_open=self._is_open,
            fitting_N1CL=fitting_N1CL,
            busy_KL=busy_KL,
            looked_NK=counted.looked_at(used_NK, better_KK, among_K, band_N2, fitting_N1CL, busy_KL),
        )

    def _ways(self, states: States, prices_R: Floats) -> counted.Ways:
        relaxed, among_K = self._relaxed, states.among_K
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
        counted.downstream(limit, ways, self._after, levels, rest_NAL1)
        total = float(rest_NAL1[1:, :, 0].min())
        if total == np.inf:
            return None
        return self._relaxed.plan(
            total, prices_R, counted.followed(limit, ways, self._relaxed.links, levels, rest_NAL1)
        )

    def _allows(self, plan: PricedPlan, states: States, limit: float) -> bool:
        """Whether a plan that was met before, maybe with other cuts, has states and stages that are left."""
        assert plan.stages_3S is not None
        how, (start, stop) = plan.stages_3S[0], self._relaxed.place_L1[plan.stages_3S[1:]]
        if start.min() < 0 or stop.min() < 0:
            return False
        level = self._levels_of(len(how))
        if self._relaxed.bottleneck_seconds(np.stack([how, start, stop])) > limit or (
            len(how) > self._num and not self._is_open
        ):
            return False
        is_left = states.alive_NL1[level, start] & states.used_NC[level, how]
        fitting_N1CL = self._stops.upto(self._num)
        return bool((is_left & (fitting_N1CL[level - 1, how, start] >= stop)).all())
