"""A plan that was chosen, and everything it was chosen from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dejavu.binding import Binding
from dejavu.cluster import Cluster
from dejavu.cost import MEASURED, TRAINED
from dejavu.cost.priced_problem import split_into
from dejavu.cost.ranges import Range
from dejavu.cost.rates import Rates, rates
from dejavu.cost.sources.assumed_hosts import AssumedHost
from dejavu.foundation.units import counted_devices
from dejavu.planning.candidates import LONG_WAITING, Candidate, Simulator
from dejavu.planning.prices import Prices
from dejavu.planning.questions import BASELINES
from dejavu.planning.request import PlanRequest
from dejavu.plans import Answer, Infeasible, NotFound, Plan, SearchResult
from dejavu.plans.priced_problem import PricedProblem
from dejavu.simulation.bound import SimulatedBound
from dejavu.workload import Workload

BOTH_WAYS, SLICES = "both ways", "slices"  # of what was compared beside the searches' plans


@dataclass(frozen=True, eq=False)
class Considered:
    """One search's answer for one number of microbatches, and how its plan would run.

    Attributes:
        search: its name; `remembered` for a plan that was trained before, `bound` for one found while bounding,
            `annealing` for one found near another by the simulated step, `slow links` and `one node` for those found
            because links are slow, `both ways` and `slices` for those that were compared besides.
        answer: None for all of these.
        candidates: its plan under the schedules that can run it, on its devices; those that fit first, then by
            predicted step.
    """

    search: str
    priced: PricedProblem
    answer: Answer | None
    candidates: tuple[Candidate, ...] = ()

    @property
    def num_microbatches(self) -> int:
        return self.priced.problem.whole_microbatches

    @property
    def devices(self) -> str:
        """The devices that the search's plans may have: searches for other parts of the cluster have others."""
        return counted_devices(self.priced.problem.device_counts)

    @property
    def result(self) -> SearchResult | None:
        """The plan that the search found."""
        return self.answer if isinstance(self.answer, SearchResult) else None

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate that fits its memory."""
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None

    @property
    def shown(self) -> Candidate | None:
        """The candidate to show: the best, or the first of all where none fits."""
        return self.candidates[0] if self.candidates else None

    @property
    def is_proved_infeasible(self) -> bool:
        return isinstance(self.answer, Infeasible)

    def proves_infeasible(self, priced: PricedProblem) -> bool:
        """Return whether this proves that the given problem has no plan; a problem with less memory proves nothing."""
        return self.is_proved_infeasible and self.priced is priced

    @property
    def failure(self) -> str:
        """Why no candidate can be chosen; empty where one can."""
        if isinstance(self.answer, Infeasible | NotFound):
            return str(self.answer)
        if self.best is None and self.shown is not None and not self.shown.has_devices:
            return "its stages find no devices together on the nodes"
        if self.best is None:
            return "its plan does not fit its memory, or its layers are too few, under the schedules that are allowed"
        return ""

    @property
    def lower_bound_seconds(self) -> float:
        """Lower bound on the cost model's step over plans with one stage per rank; inf: there is no plan."""
        if isinstance(self.answer, Infeasible):
            return float("inf")
        return self.answer.lower_bound_seconds if self.answer is not None else 0.0


@dataclass(frozen=True, eq=False)
class Choice:
    """The plan that was chosen, and everything it was chosen from.

    Attributes:
        considered: in the order in which the searches ran.
        chosen: the candidate with the least predicted step of all that fit.
        origin: the row that the plan came from; its cuts may have been moved since.
        simulator: of the request, for other plans of it.
        problems: of all numbers of microbatches, one for each part of the cluster that plans may take.
        simulated_bounds: by the problem's place among them: none of its plans under any allowed schedule is simulated
            below.
    """

    request: PlanRequest
    prices: Prices
    considered: tuple[Considered, ...]
    chosen: Candidate
    origin: Considered
    simulator: Simulator
    problems: tuple[PricedProblem, ...]
    simulated_bounds: Mapping[int, SimulatedBound]

    @property
    def plan(self) -> Plan:
        return self.chosen.plan

    @property
    def priced(self) -> PricedProblem:
        return self.chosen.priced

    @property
    def cuts_moved(self) -> bool:
        """Whether the plan is its origin's with other cuts."""
        return self.origin.best is not None and self.plan != self.origin.best.plan

    def unmeasured(self, here: Cluster) -> Workload | None:
        """Return the workload at the plan's microbatches, if its layers were not measured at that size on devices here.

        A size that is interpolated between two measured ones counts as not measured.
        """
        count, types = self.plan.num_microbatches, {stage.configuration.device_type for stage in self.plan.stages}
        table = self.prices.table_of(count)
        columns = [k for k, name in enumerate(table.device_types) if name in types and name in here.device_types]
        sources = {str(one) for grid in (table.forward, table.backward) for one in grid.source_LD[:, columns].ravel()}
        return None if sources <= {MEASURED, TRAINED} else split_into(self.request.workload, count)

    def candidate(self, plan: Plan) -> Candidate:
        """Bind another plan to devices, and simulate it there; also one with stages that are not considered today.

        Raises:
            InputError: its schedule does not run so many stages or microbatches, or the cluster has no such stages.
        """
        return self.simulator.bound(self.simulator.candidate(self._priced_for(plan), plan))

    def candidate_on(self, binding: Binding) -> Candidate:
        """Simulate a plan on the devices that it has, as one that was trained.

        Raises:
            InputError: the cluster has no such stages.
        """
        return self.simulator.on(self._priced_for(binding.plan), binding)

    def _priced_for(self, plan: Plan) -> PricedProblem:
        """Return the prices of any plan, also of one with stages that are not considered today."""
        priced, used = self.prices.priced_for(plan), dict.fromkeys(stage.configuration for stage in plan.stages)
        if not used.keys() <= set(priced.problem.configurations):
            priced = self.prices.priced(plan.num_microbatches, plan.slices, tuple(used))
        return priced

    @cached_property
    def binding(self) -> Binding:
        """The plan's devices, compared with others.

        Raises:
            BindError: it cannot be bound.
        """
        known = self.chosen.binding
        return known if known and known.reasons else self.simulator.bind(self.priced, self.plan, compares=True)

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.chosen.step_seconds

    def step_range(self, candidate: Candidate) -> Range:
        """Return the 90 % range of a candidate's predicted step."""
        one, again, sums = candidate, self.simulator.simulated_again(candidate), self.simulator.sums_of(candidate)
        return self.prices.errors.step_range(
            one.priced, one.plan, one.factor, one.step_seconds, self.request.seed, again, sums
        )

    @cached_property
    def range_seconds(self) -> Range:
        """The 90 % range of the predicted step."""
        return self.step_range(self.chosen)

    def held(self, candidate: Candidate) -> list[tuple[float, float]]:
        """Return what a device of each pipeline rank holds at most, as predicted, and what it has; in bytes."""
        plan, types = candidate.plan, self.request.cluster.device_types
        return [
            (held, float(types[plan.rank_configuration(rank).device_type].memory_bytes))
            for rank, held in enumerate(candidate.price.peak_bytes)
        ]

    def fullest_of(self, candidate: Candidate) -> tuple[float, float]:
        """Return what is held and had by the device that holds the most of what it has."""
        return max(self.held(candidate), key=lambda one: one[0] / one[1])

    @property
    def fullest(self) -> tuple[float, float]:
        """What the fullest device of the plan holds at most, as predicted, and what it has; in bytes."""
        return self.fullest_of(self.chosen)

    @cached_property
    def rates(self) -> Rates:
        """What the predicted step means for the training."""
        request, count = self.request, self.plan.num_microbatches
        return rates(request.workload, self.prices.graph_of(count), request.cluster, self.plan, self.step_seconds)

    @cached_property
    def assumed_host(self) -> AssumedHost | None:
        """The host that was not measured and that launches for most of the step; None: there is none."""
        return self.prices.assumed_host(self.plan, self.step_seconds)

    @property
    def simulated_seconds(self) -> float:
        """The simulated step, before earlier trainings correct it; the bound applies to this."""
        return self.chosen.simulated_seconds

    @property
    def simulated_lower_bound_seconds(self) -> float:
        """No plan under any allowed schedule, with any considered number of microbatches, is simulated below this."""
        return min(self.simulated_seconds, *map(self.simulated_bound_seconds, self.counts))

    def simulated_bound_seconds(self, num_microbatches: int) -> float:
        """Return a lower bound on the simulated step with so many microbatches; inf: it is proved that no plan fits.

        A search's proof covers plans with one stage on each pipeline rank. Under a schedule that gives a rank two,
        layers that are not neighbours share its memory, and a plan may fit where no such plan does.
        """
        return min(map(self._simulated_bound_seconds, self._places_of(num_microbatches)), default=0.0)

    def _simulated_bound_seconds(self, place: int) -> float:
        """Return the bound of one problem."""
        priced, found = self.problems[place], self.simulated_bounds.get(place)
        if self.request.one_stage_a_rank and any(row.proves_infeasible(priced) for row in self.considered):
            return float("inf")
        return 0.0 if found is None else found.seconds  # 0: of both directions and of slices nothing is proved

    def _places_of(self, num_microbatches: int) -> list[int]:
        """Return the places of the problems with so many microbatches."""
        problems = enumerate(self.problems)
        return [place for place, one in problems if one.problem.whole_microbatches == num_microbatches]

    @property
    def gap(self) -> float | None:
        """How much of the chosen plan's simulated step the best plan could save at most; None: nothing is proved."""
        return self.gap_of(self.chosen)

    def gap_of(self, candidate: Candidate) -> float | None:
        """Return the same of another plan of the request."""
        bound, seconds = self.simulated_lower_bound_seconds, candidate.simulated_seconds
        if bound <= 0:
            return None
        return max(0.0, 1.0 - bound / seconds) if seconds > 0 else 0.0

    @cached_property
    def has_slow_links(self) -> bool:
        """Whether a plan that was considered would be faster, did its messages take the links that the bound counts."""
        found = [row.best for row in self.considered if row.best is not None]
        by_types = [self.simulator.candidate(one.priced, one.plan).simulated_seconds for one in found]
        return self.simulated_seconds > (1 + LONG_WAITING) * min(by_types, default=self.simulated_seconds)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of microbatches that were considered."""
        return tuple(sorted({row.num_microbatches for row in self.considered}))

    @cached_property
    def cheapest(self) -> SearchResult | None:
        """The result with the least step by the cost model; None where only a remembered plan is known."""
        found = [row.result for row in self.considered if row.result is not None]
        return min(found, key=lambda result: result.step_seconds, default=None)

    def bound_seconds(self, num_microbatches: int) -> float:
        """Return the cost model's lower bound with so many microbatches; inf where there is no plan."""
        problems = [self.problems[place] for place in self._places_of(num_microbatches)]
        rows = [[row.lower_bound_seconds for row in self.considered if row.priced is one] for one in problems]
        return min(max(seconds, default=0.0) for seconds in rows)

    @property
    def lower_bound_seconds(self) -> float:
        """The cost model's lower bound over all considered numbers of microbatches."""
        least = min(map(self.bound_seconds, self.counts))
        return min(least, self.cheapest.step_seconds) if self.cheapest else least

    @cached_property
    def baselines(self) -> dict[str, Considered]:
        """Each baseline's fastest answer over all numbers of microbatches and allowed schedules."""
        found = {}
        for name in BASELINES:
            rows = [row for row in self.considered if row.search == name]
            if rows:
                found[name] = min(rows, key=_speed)
        return found

    @property
    def best_baseline(self) -> Considered | None:
        """The fastest baseline; None where none fits."""
        fitting = [row for row in self.baselines.values() if row.best is not None]
        return min(fitting, key=_speed, default=None)

    @property
    def speedup(self) -> float | None:
        """The best baseline's predicted step over the chosen plan's; None where no baseline fits."""
        row = self.best_baseline
        if row is None or row.best is None or self.step_seconds <= 0:
            return None
        return row.best.step_seconds / self.step_seconds

    @cached_property
    def schedules(self) -> tuple[Candidate, ...]:
        """The chosen plan's devices and microbatches under other schedules that fit, the fastest first."""
        own = [one for row in self.considered for one in row.candidates if one.fits and _alike(one, self.chosen)]
        fastest: dict[str, Candidate] = {self.chosen.plan.schedule_name: self.chosen}
        for one in sorted(own, key=lambda one: one.simulated_seconds):
            fastest.setdefault(one.plan.schedule_name, one)
        return tuple(sorted(fastest.values(), key=lambda one: one.simulated_seconds))

    @property
    def uniform_step_seconds(self) -> float | None:
        """The cost model's step of the best even split; None where none fits."""
        found = [row.result.step_seconds for row in self.considered if row.search == "uniform" and row.result]
        return min(found, default=None)


def _speed(row: Considered) -> float:
    return row.best.step_seconds if row.best is not None else float("inf")


def _alike(one: Candidate, other: Candidate) -> bool:
    """Return whether both have the same microbatches and give each pipeline rank the same devices."""
    if one.plan.num_microbatches != other.plan.num_microbatches:
        return False
    ranks = [[c.plan.rank_configuration(rank) for rank in range(len(c.plan.ranks))] for c in (one, other)]
    return ranks[0] == ranks[1]
