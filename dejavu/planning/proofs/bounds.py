"""Lower bounds on the simulated step of any plan of a request, for each of its problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from dejavu.foundation.processes.homes import Homes
from dejavu.foundation.units import plural
from dejavu.planning.questions import Posed
from dejavu.planning.request import PlanRequest
from dejavu.plans.priced_problem import PricedProblem
from dejavu.simulation.bound import CLOSE, SimulatedBound, bounding

BOUND_SHARE = 0.6  # of the budget, at most
LEAST_SHARE = 0.01  # of that; less is not worth another turn
LEAST_RISE = 0.01  # of the gap; a turn that closes less of it is idle
HOPELESS = 1.5  # times what is left of the budget: an idle turn at whose rate all would take longer to close
MOST_IDLE = 2  # turns in succession without hope

Tell = Callable[[str, int, int], None]  # the current item, how many are done, the total


def unheard(seconds: float) -> None:
    """Take no notice of a bound."""


def quietly(what: str, done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class RequestBounds:
    """The bounds on the simulated steps of a request's plans.

    Attributes:
        homes: where the request's problems live, those of all numbers of microbatches; each is known by its place.
        hear: called with the bound over all problems, as it rises.
        schedules: those that bounds are about; empty: all that the request lists.
        share: of the request's budget, at most.
    """

    request: PlanRequest
    homes: Homes[Posed]
    tell: Tell = quietly
    hear: Callable[[float], None] = unheard
    schedules: tuple[str, ...] = ()
    share: float = BOUND_SHARE

    def raised(self, best_seconds: float) -> dict[int, SimulatedBound]:
        """Return lower bounds by problem, as close to the best step as the budget allows.

        The bound over all problems is the least of them. So each gets a little of the budget first; then, side by side,
        the least one of each home gets as much again as it had, until all are close, the least cannot rise, the budget
        ends, or turns do no more than find that there is nothing to be found.

        Args:
            best_seconds: step of the best plan known.
        """
        places, workers = self._places, self.homes.num_homes
        seconds = self.share * self.request.budget_seconds * workers
        self._begin(best_seconds)
        more, found = dict.fromkeys(places, seconds / (4 * len(places))), dict[int, SimulatedBound]()
        state, idle = _Progress(0.0, inf, inf, 0.0), 0
        while True:
            self.tell(f"bounding {self._named(more)}", len(found), len(places))
            found |= self._go_on(more)
            before, state = state, _Progress.of(found, best_seconds)
            self.hear(state.bound_seconds)
            left = seconds - state.spent_seconds
            idle = idle + 1 if state.is_idle_after(before, left) else 0
            open_ = [place for place in places if found[place].seconds < (1 - CLOSE) * best_seconds]
            open_.sort(key=lambda place: found[place].seconds)
            is_over = left <= LEAST_SHARE * seconds or idle >= MOST_IDLE
            if is_over or not open_ or not found[open_[0]].can_rise:
                return found
            least = self._one_of_each_home([place for place in open_ if found[place].can_rise])
            again = max(found[place].spent_seconds for place in least)  # they run side by side
            more = dict.fromkeys(least, min(again, left / workers))

    def looked(self) -> dict[int, SimulatedBound]:
        """Bound where no plan is known: each problem gets its part of the budget, and returns the plan it found."""
        places = self._places
        self.tell("looking at every schedule", 0, len(places))
        self._begin(inf)
        return self._go_on(dict.fromkeys(places, self.request.budget_seconds * self.homes.num_homes / len(places)))

    @property
    def _places(self) -> range:
        return range(len(self.homes.kept))

    def _named(self, places: Iterable[int]) -> str:
        counts = (self.homes.kept[place].priced.problem.whole_microbatches for place in places)
        *others, last = dict.fromkeys(counts)
        return ", ".join([*map(str, others), plural(last, "microbatch")])

    def _one_of_each_home(self, places: Sequence[int]) -> list[int]:
        """Return the first of these problems in each home."""
        first = dict[int, int]()
        for place in places:
            first.setdefault(self.homes.home_of(place), place)
        return list(first.values())

    def _begin(self, best_seconds: float) -> None:
        asked = (self.schedules or self.request.listed_schedules, best_seconds)
        self.homes.each([(place, asked) for place in self._places], _begin)

    def _go_on(self, seconds: Mapping[int, float]) -> dict[int, SimulatedBound]:
        """Continue each side by side for so much more time."""
        calls = [(place, (more,)) for place, more in seconds.items()]
        return dict(zip(seconds, self.homes.each(calls, _go_on), strict=True))


def _begin(posed: Posed, schedules: Sequence[str], best_seconds: float) -> None:
    posed.bounding = bounding(
        posed.priced, schedules=schedules, best_seconds=best_seconds, choices=posed.choices, known=posed.known
    )


def _go_on(posed: Posed, seconds: float) -> SimulatedBound:
    assert posed.bounding is not None
    return posed.bounding.go_on(seconds)


@dataclass(frozen=True)
class _Progress:
    """How far all problems together are.

    Attributes:
        bound_seconds, met_seconds: no plan is faster; the fastest one met, or given.
        shortfall: see `SimulatedBound`.
        spent_seconds: processor time of all threads.
    """

    bound_seconds: float
    met_seconds: float
    shortfall: float
    spent_seconds: float

    @classmethod
    def of(cls, found: Mapping[int, SimulatedBound], best_seconds: float) -> _Progress:
        return cls(
            bound_seconds=min(best_seconds, *(one.seconds for one in found.values())),
            met_seconds=min(one.plan_seconds for one in found.values()),
            shortfall=sum(one.shortfall for one in found.values()),
            spent_seconds=sum(one.spent_seconds for one in found.values()),
        )

    @property
    def gap_seconds(self) -> float:
        return self.met_seconds - self.bound_seconds

    def is_idle_after(self, before: _Progress, left_seconds: float) -> bool:
        """Whether the turn closed next to nothing of the gap, and at its rate all would be close long after the budget.

        The rate is that of the shortfall: bounds of other schedules and numbers of ranks rise before the least does.
        """
        if self.gap_seconds < (1 - LEAST_RISE) * before.gap_seconds:
            return False
        won, took_seconds = before.shortfall - self.shortfall, self.spent_seconds - before.spent_seconds
        return self.shortfall * took_seconds > HOPELESS * left_seconds * won


def has_no_plan(priced: PricedProblem, bound: SimulatedBound) -> bool:
    """Return whether the bound proves that no plan fits: it exceeds what a fully serial plan would take."""
    return bound.seconds > serial_seconds(priced)


def serial_seconds(priced: PricedProblem) -> float:
    """Return more than any plan's simulated step: each layer a stage on its slowest device, every action in series."""
    problem, costs = priced.problem, priced.problem.costs
    C, L, B = len(problem.configurations), problem.num_layers, problem.num_microbatches
    layers = [[costs.stage_seconds(k, k + 1, c) for c in range(C)] for k in range(L)]
    once = [[costs.per_step_seconds(k, k + 1, c) for c in range(C)] for k in range(L)]
    beside = max((cost.pass_seconds for cost in priced.pass_costs.values()), default=0.0)
    parts = max((float(shares.max()) for shares in priced.backward_parts_L2.values()), default=1.0)  # of a split pass
    link = problem.link_latency_seconds_CC.max() + problem.link_seconds_per_byte_CC.max() * problem.cut_bytes_L1
    ends = [cost.of_message(size) for cost in priced.pass_costs.values() for size in problem.cut_bytes_L1]
    work = 2.0 * (1.0 + parts) * sum(map(_finite_max, layers)) + 3.0 * L * beside
    if priced.unshared_seconds_CL3 is not None:  # a second part fetches weights again; what is recomputed counts twice
        work += float(priced.unshared_seconds_CL3[:, :, 1:].sum(axis=2).max(axis=0).sum())
    messages = 2.0 * float(link.sum()) + 4.0 * L * max(ends, default=0.0)
    return B * (work + messages) + sum(map(_finite_max, once))


def _finite_max(seconds: Sequence[float]) -> float:
    """Return the time on the slowest device that can run it at all."""
    return max((one for one in seconds if one < float("inf")), default=0.0)
