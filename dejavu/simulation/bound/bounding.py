"""A lower bound on the simulated step of every plan, under every schedule that is asked about."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from dejavu.foundation.registry import named
from dejavu.plans import Plan, Problem, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.simulation.bound._plan_family import Faster, Place
from dejavu.simulation.bound._prefix_sums import BoundProblem, RankChoices, bound_problem
from dejavu.simulation.bound.first.balance import balance_seconds
from dejavu.simulation.bound.first.fewest_devices import FewestDevices
from dejavu.simulation.bound.proof import Proof

CLOSE = 1e-3  # of the best step: a bound so near it is near enough, a plan so near to it counts as the best
_ROUNDING = 1e-9  # the bound is this much lower: sums in another order must not lift it above a plan's simulated step
_FEW_STAGES = 16
_ASKED = 3  # times as long as limits are asked, tables are refined
_FIRST_STEPS = 1_000_000  # of the first walk of each schedule and number of ranks
_STEPS = 10_000_000  # of later ones; tenths of a second


@dataclass(frozen=True)
class SimulatedBound:
    """No plan's simulated step is shorter.

    Attributes:
        seconds: the bound; not above the best step that was given, or that was found on the way.
        by_schedule: for each schedule alone, its own plans' bound, up to the best step; inf where it runs no plan.
        by_ranks: the same for each schedule and number of stages alone, where there are any such plans.
        proved_by: what gave the weakest part of it.
        plan, plan_seconds: a plan faster than the best one given, where one was met; else None, and the step given.
        spent_seconds: processor time of the calling thread.
        shortfall: how far bounds that more time may raise are below the best step, as shares of it, summed over
            schedules and numbers of ranks.
    """

    seconds: float
    by_schedule: Mapping[str, float]
    by_ranks: Mapping[tuple[str, int], float]
    proved_by: Proof
    plan: Plan | None
    plan_seconds: float
    spent_seconds: float
    shortfall: float

    @property
    def can_rise(self) -> bool:
        return self.shortfall > 0

    def and_of(self, other: SimulatedBound) -> SimulatedBound:
        """Return the bound on these plans and on others, under other schedules."""
        return SimulatedBound(
            seconds=min(self.seconds, other.seconds),
            by_schedule={**self.by_schedule, **other.by_schedule},
            by_ranks={**self.by_ranks, **other.by_ranks},
            proved_by=min(self, other, key=lambda one: one.seconds).proved_by,
            plan=min(self, other, key=lambda one: one.plan_seconds).plan,
            plan_seconds=min(self.plan_seconds, other.plan_seconds),
            spent_seconds=self.spent_seconds + other.spent_seconds,
            shortfall=self.shortfall + other.shortfall,
        )


def simulated_lower_bound(
    priced: PricedProblem,
    *,
    schedules: Sequence[str],
    best_seconds: float,
    budget_seconds: float,
    close: float = CLOSE,
) -> SimulatedBound:
    """Bound the simulated step (`simulation.simulate_plan`) of all plans of the problem under the schedules from below.

    A plan here is any cut of all layers into stages on pipeline ranks, at most `problem.most_stages` ranks, within the
    device counts and the devices' memory, the stages of a rank under one configuration. It holds for the problem's own
    number of microbatches.

    Args:
        best_seconds: the simulated step of the best plan known; inf for none. The nearer to the least, the better.
        budget_seconds: processor time; what is not refined by then keeps the bound that it has.
        close: how near to the best step is near enough, as a fraction of it.

    Raises:
        InputError: there is no such schedule.
    """
    return bounding(priced, schedules=schedules, best_seconds=best_seconds, close=close).go_on(budget_seconds)


def bounding(
    priced: PricedProblem,
    *,
    schedules: Sequence[str],
    best_seconds: float,
    close: float = CLOSE,
    choices: RankChoices | None = None,
    known: Mapping[tuple[str, int], float] | None = None,
) -> Bounding:
    """The same bound before any time was given to it; see `simulated_lower_bound`.

    Args:
        known: a bound on plans of a schedule and number of stages, as of `SimulatedBound.by_ranks`.
        choices: of plans whose ranks have such configurations; None: of all.

    Raises:
        InputError: there is no such schedule.
    """
    load_compiled_loops()
    return Bounding(priced, schedules, best_seconds, close, choices, known or {})


@lru_cache(maxsize=1)
def load_compiled_loops() -> None:
    """Compile the loops, or load them from numba's cache, before a clock starts."""
    C, L = 1, 4
    ones = np.ones((C, L))
    costs = AdditiveCosts(ones, ones, np.ones(C), ones, ones, ones, np.full(C, 1e9))
    nothing = np.zeros((C, C))
    configuration = StageConfiguration("")
    problem = Problem(
        ("",) * L, (configuration,), {"": 2}, costs, np.zeros(L + 1), nothing, nothing, "1f1b", 2, False, 2
    )
    for name in ("1f1b", "zbv"):
        Bounding(PricedProblem(problem, ones, ones), (name,), 1e3, 0.0).go_on(np.inf)


class Bounding:
    """A bound on its way, to which time may be given bit by bit; made by `bounding`.

    It has a place for each schedule and number of ranks, and the best step so far.
    """

    def __init__(
        self,
        priced: PricedProblem,
        schedules: Sequence[str],
        best_seconds: float,
        close: float,
        choices: RankChoices | None = None,
        known: Mapping[tuple[str, int], float] = MappingProxyType({}),
    ) -> None:
        self._until, self.spent_seconds = 0.0, 0.0
        began = time.thread_time()
        self.problem: BoundProblem = bound_problem(priced, best_seconds, choices)
        self.schedules = tuple(dict.fromkeys(schedules))
        self.best_seconds, self.close = best_seconds, close
        self.plan: Plan | None = None
        self._asked = dict[str, _Asked]()
        self.places = self._places(known)
        few = [place for place in self.places if place.num_stages <= _FEW_STAGES]
        few.sort(key=lambda place: (place.num_stages, place.bound_seconds))
        self._few = deque(place for place in few for _ in range(2))
        self._num_refined = Counter[Place]()
        self._asked_seconds, self._refined_seconds = 0.0, 0.0
        self.spent_seconds = time.thread_time() - began

    def go_on(self, budget_seconds: float) -> SimulatedBound:
        """What is proved after so much more processor time of this thread: a step at least, whose time is not known."""
        began = time.thread_time()
        self._until = began + budget_seconds
        while self._go_a_step() and not self.is_late():
            pass
        self.spent_seconds += time.thread_time() - began
        return self._result()

    def _go_a_step(self) -> bool:
        """Raise the least bound, for which all others wait; return whether there was anything to do.

        Limits and the places' own tables take turns, tables for longer, as walks through them meet plans. Where no plan
        is known, places of few ranks come first: they are quickly walked through, and a plan among them spares others
        most.
        """
        place = min(self._left(), key=lambda place: place.bound_seconds, default=None)
        if place is None:
            return False
        began, of_schedule = time.thread_time(), self._asked[place.schedule]
        is_turn = _ASKED * self._asked_seconds <= self._refined_seconds or not place.can_move
        if is_turn and of_schedule.may_raise(place):
            of_schedule.ask(place)
            self._asked_seconds += time.thread_time() - began
            return True
        if self._few and np.isinf(self.best_seconds):
            place = self._few.popleft()
        most_steps = _STEPS if self._num_refined[place] > 1 else _FIRST_STEPS
        self._num_refined[place] += 1
        if place.can_move and self._is_wanted(place):
            self._take(place.refine(self.best_seconds, most_steps, self.is_late))
            self._asked[place.schedule].know(place)
        self._refined_seconds += time.thread_time() - began
        return True

    def _left(self) -> list[Place]:
        """Where more work may raise the bound."""
        wanted = filter(self._is_wanted, self.places)
        return [place for place in wanted if place.can_move or self._asked[place.schedule].may_raise(place)]

    def _is_wanted(self, place: Place) -> bool:
        return place.bound_seconds < (1.0 - self.close) * self.best_seconds

    def is_late(self) -> bool:
        return time.thread_time() > self._until

    def _places(self, known: Mapping[tuple[str, int], float]) -> list[Place]:
        L = self.problem.priced.problem.num_layers
        most = self.problem.most_ranks
        balance_P = balance_seconds(self.problem, most)
        places = []
        for name in self.schedules:
            each = named(SCHEDULES, name).stages_per_rank
            stages = [each * ranks for ranks in range(1, min(most, L // each) + 1)]
            floor_P = np.array([max(balance_P[s // each - 1], known.get((name, s), 0.0)) for s in stages])
            of_schedule = [
                Place(self.problem, name, s, min(float(floor), self.best_seconds), Proof.BALANCE)
                for s, floor in zip(stages, floor_P, strict=True)
            ]
            self._asked[name] = _Asked(FewestDevices(self.problem, name, floor_P, self.best_seconds), of_schedule)
            places += of_schedule
        return places

    def _take(self, found: Faster | None) -> None:
        if found and found.seconds < self.best_seconds:
            self.best_seconds, self.plan = found.seconds, found.plan

    def _result(self) -> SimulatedBound:
        places = self.places
        bounds, by_ranks = dict.fromkeys(self.schedules, np.inf), dict[tuple[str, int], float]()
        for place in places:  # a plan met later is below what was proved before it
            found = (
                place.bound_seconds if np.isinf(place.bound_seconds) else min(place.bound_seconds, self.best_seconds)
            )
            by_ranks[place.schedule, place.num_stages] = found * (1.0 - _ROUNDING)
            bounds[place.schedule] = min(bounds[place.schedule], found * (1.0 - _ROUNDING))
        # Of those that are least, the one that took most to prove.
        order = list(Proof)
        least = min(places, key=lambda place: (place.bound_seconds, -order.index(place.proved_by)), default=None)
        return SimulatedBound(
            seconds=min([*bounds.values(), self.best_seconds * (1.0 - _ROUNDING)]),
            by_schedule=bounds,
            by_ranks=by_ranks,
            proved_by=Proof.NO_PLAN if least is None or np.isinf(least.bound_seconds) else least.proved_by,
            plan=self.plan,
            plan_seconds=self.best_seconds,
            spent_seconds=self.spent_seconds,
            shortfall=sum(1.0 - place.bound_seconds / self.best_seconds for place in self._left()),
        )


class _Asked:
    """The limits that are asked of the places of one schedule, in the order of their numbers of ranks."""

    def __init__(self, fewest: FewestDevices, places: Sequence[Place]) -> None:
        self._fewest, self._places = fewest, places
        self._number = {place: number for number, place in enumerate(places)}

    def may_raise(self, place: Place) -> bool:
        return bool(self._fewest.is_open_P[self._number[place]])

    def know(self, place: Place) -> None:
        """Ask no limit below what is proved of the place otherwise."""
        number = self._number[place]
        self._fewest.bound_P[number] = max(self._fewest.bound_P[number], place.bound_seconds)

    def ask(self, place: Place) -> None:
        """Ask one limit for this place; the others have what it proves of them."""
        self._fewest.ask(self._number[place])
        for of_ranks, bound in zip(self._places, self._fewest.bound_P, strict=True):
            of_ranks.raise_to(float(bound), Proof.DEVICES)
