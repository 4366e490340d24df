"""Plans as they would run: under a schedule, simulated, corrected by measurements of earlier trainings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from dejavu.binding import BindError, Binding, bind, message_seconds, sum_seconds
from dejavu.binding.by_steps import SecondsOf, SimulatedSteps
from dejavu.cluster import Cluster
from dejavu.cost.priced_problem import SPLIT_MARGIN
from dejavu.cost.ranges import Simulated
from dejavu.cost.trainings.steps import NO_FACTOR, Basis, Links, StepFactor, links_of, step_factor
from dejavu.foundation.errors import InputError
from dejavu.graphs.graph import Graph
from dejavu.planning.prices import Prices
from dejavu.planning.schedules import fits, under
from dejavu.plans import LayerSplit, Plan, Price
from dejavu.plans.priced_problem import Away, PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import PlanError
from dejavu.simulation import Simulation, price_of_simulated, simulate_plan, simulate_plan_blocking, stages_of

TIE = 1e-9  # steps that differ by less differ by rounding
LONG_WAITING = 0.01  # for links: worth a word, and a look for plans that wait less
MOST_SIMULATIONS = 300  # while cuts of one plan are moved
MOST_ACTIONS = 500_000  # the same, counted in simulated passes: about a second


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan as it would run.

    Attributes:
        factor: correction of the simulated step, from steps measured in trainings.
        binding: to devices, over whose links the messages of the simulation go; None: over the fastest links that their
            types may have.
        has_devices: whether the cluster may have its devices, so together on nodes; False: it was found not to.
    """

    priced: PricedProblem
    plan: Plan
    simulation: Simulation
    factor: StepFactor = NO_FACTOR
    binding: Binding | None = None
    has_devices: bool = True

    @property
    def simulated_seconds(self) -> float:
        """One step, in the schedule's own order of actions."""
        return self.simulation.step_seconds

    @property
    def step_seconds(self) -> float:
        """The predicted step: simulated, and corrected by earlier trainings."""
        return self.simulated_seconds * self.factor.factor

    @property
    def counted_seconds(self) -> float:
        """The predicted step as plans are compared by it: both directions count `SPLIT_MARGIN` more until trained.

        No proof covers such a plan, and devices hold weights twice: a gain within what predictions can tell is none.
        """
        return self.step_seconds * (1 + SPLIT_MARGIN if self.plan.both_ways and not self.was_trained else 1)

    @property
    def was_trained(self) -> bool:
        """Whether exactly this plan was trained before."""
        return self.factor.basis is Basis.OWN

    @cached_property
    def fits(self) -> bool:
        """Whether every pipeline rank has devices, and the memory for what its stages hold in this order of actions."""
        return self.has_devices and fits(self.priced, self.plan, self.simulation)

    @cached_property
    def price(self) -> Price:
        """The plan's cost, part by part."""
        return price_of_simulated(self.priced, self.plan, self.simulation)

    @cached_property
    def away(self) -> tuple[Away, ...]:
        """What a device of each stage keeps in its node."""
        in_flight = self.simulation.in_flight
        return tuple(self.priced.away(stage, in_flight[s]) for s, stage in enumerate(self.plan.stages))

    @property
    def num_devices(self) -> int:
        """The number of devices that the plan uses."""
        return self.plan.device_counts.total()


def ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates that fit first, then by what they are counted; of those that tie, the simplest is the first."""

    def simplest(one: Candidate) -> tuple[object, ...]:
        schedule = list(SCHEDULES).index(one.plan.schedule)
        return len(one.plan.stages), one.num_devices, one.plan.both_ways, schedule, one.counted_seconds

    rows = sorted(found, key=lambda one: (not one.fits, one.counted_seconds))
    if not rows:
        return rows
    most = rows[0].counted_seconds * (1 + TIE)
    first = min((one for one in rows if one.fits == rows[0].fits and one.counted_seconds <= most), key=simplest)
    return [first, *(one for one in rows if one is not first)]


def splits_of(plan: Plan, graph_at: Callable[[int], Graph], microbatch_size: int) -> tuple[LayerSplit, ...]:
    """Return what was found for a plan's layers, for every degree of its stages, at all their replicas' sizes.

    Args:
        graph_at: a microbatch size -> the model with its splits.
    """
    found = list[LayerSplit]()
    ways = {(stage.configuration.tensor_parallel, stage.configuration.example_parts) for stage in plan.stages}
    for degree in sorted({degree for degree, _ in ways if degree > 1}):
        graphs = [graph_at(microbatch_size // replicas) for one, replicas in sorted(ways) if one == degree]
        for layers in zip(*(graph.layers for graph in graphs), strict=True):
            layer, splits = layers[0], [layer.found_split(degree) for layer in layers]
            if splits[0] is not None and None not in splits:
                named = tuple((layer.weight_names[k], dim) for k, dim in splits[0].weights)
                found.append(LayerSplit(layer.name, degree, named, splits[0].whole_sums, splits[0].split_loss))
    return tuple(found)


class Simulator:
    """Turn plans into candidates; each pair of plan and schedule is simulated once.

    Args:
        prices: of the request.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices, self._rows = prices, prices.rows
        self._cluster = prices.request.cluster
        self._known, self._trained = dict[Plan, Candidate](), dict[Plan, float]()
        self._bound, self._trained_bound = dict[Plan, Candidate](), dict[Plan, float]()
        self._today = dict[Plan, Binding | None]()
        self.best: Candidate | None = None

    def under_schedules(self, priced: PricedProblem, plan: Plan, schedules: Iterable[str]) -> list[Candidate]:
        """Return the plan's devices under each of these schedules that can run them, the searched one first.

        Skip a schedule where the busiest rank's work alone exceeds the best candidate's whole step: no order of actions
        could make it the best. The first that can run is always simulated, so that every plan has a simulated step.
        """
        found: list[Candidate] = []
        for name in sorted(schedules, key=lambda name: name != plan.schedule):
            try:
                placed = under(priced, plan, name)
                if found and self.best is not None and least_seconds(priced, placed) >= self.best.simulated_seconds:
                    continue
                found.append(self.candidate(priced, placed))
            except InputError:  # too few layers, or more ranks than microbatches
                continue
        return found

    def candidate(self, priced: PricedProblem, plan: Plan) -> Candidate:
        """Simulate one plan under its own schedule.

        Raises:
            InputError: the schedule does not run so many stages or microbatches.
        """
        if plan not in self._known:
            graph = self._prices.graph_of(plan.num_microbatches)
            plan = replace(plan, splits=splits_of(plan, self._prices.graph, graph.microbatch_size))
            factor = self._factor(priced, plan, lambda other: self._simulated(priced, other))
            made = Candidate(priced, plan, simulate_plan(priced, plan), factor)
            self._known[plan] = made
            if made.fits and (self.best is None or made.step_seconds < self.best.step_seconds) and not self._is_bound:
                self.best = made
        return self._known[plan]

    @property
    def _is_bound(self) -> bool:
        """Whether the best so far is on devices, as the fastest that its types may have is not."""
        return self.best is not None and self.best.binding is not None

    def bound(self, candidate: Candidate) -> Candidate:
        """Return the candidate on the devices that `bind` gives it, simulated with the links that these have.

        Its stages may be on devices of other types than before. A plan that cannot be bound does not fit.
        """
        if candidate.binding is not None:
            return candidate
        if candidate.plan not in self._bound:
            try:
                made = self.on(candidate.priced, self.bind(candidate.priced, candidate.plan))
                made = made if made.fits or not candidate.fits else candidate
            except BindError:
                made = replace(candidate, has_devices=False)
            self._bound[candidate.plan] = made
        return self._bound[candidate.plan]

    def bind(self, priced: PricedProblem, plan: Plan, *, compares: bool = False) -> Binding:
        """Give the plan's pipeline ranks their devices; `compares` as of `binding.bind`.

        Raises:
            BindError: the cluster has too few, or a rank does not fit their memory.
        """
        return bind_by_steps(priced, plan, self._cluster, compares=compares)

    def on(self, priced: PricedProblem, binding: Binding) -> Candidate:
        """Simulate a plan on its devices."""
        factor = self._factor(priced, binding.plan, lambda other: self._simulated_bound(priced, other))
        return Candidate(priced, binding.plan, simulate_bound(priced, binding, self._cluster), factor, binding)

    def _factor(self, priced: PricedProblem, plan: Plan, simulate: Callable[[Plan], float]) -> StepFactor:
        """Return the correction of a plan's step by trainings, given the steps of trained plans at today's prices."""
        graph, accumulate = self._prices.graph_of(plan.num_microbatches), self._prices.request.workload.accumulate
        return step_factor(graph, plan, self._rows, simulate, accumulate, lambda other: self._links(priced, other))

    def _simulated(self, priced: PricedProblem, plan: Plan) -> float:
        """Return the simulated step of a plan that was trained, at today's prices.

        Raises:
            PlanError: these prices are of other slices.
        """
        if plan.slices != priced.slice_lengths:
            raise PlanError(
                f"the plan has slices {list(plan.slices)}; these prices are of {list(priced.slice_lengths)}"
            )
        if plan not in self._trained:
            self._trained[plan] = simulate_plan(priced, plan).step_seconds
        return self._trained[plan]

    def _simulated_bound(self, priced: PricedProblem, plan: Plan) -> float:
        """Return the same on the devices that the plan would have today; by types where it has none.

        Raises:
            PlanError: as `_simulated`.
        """
        if plan not in self._trained_bound:
            seconds, today = self._simulated(priced, plan), self._of_today(priced, plan)
            if today is not None:
                seconds = simulate_bound(priced, today, self._cluster).step_seconds
            self._trained_bound[plan] = seconds
        return self._trained_bound[plan]

    def _links(self, priced: PricedProblem, plan: Plan) -> Links | None:
        """Return the links between the devices that a trained plan would have today; None: it has none."""
        today = self._of_today(priced, plan)
        return None if today is None else links_of(today, self._cluster)

    def _of_today(self, priced: PricedProblem, plan: Plan) -> Binding | None:
        """Return a trained plan on the devices that it would have today; None: there are too few."""
        if plan not in self._today:
            self._today[plan] = None
            with suppress(BindError):
                self._today[plan] = self.bind(priced, plan)
        return self._today[plan]

    def polished(self, candidate: Candidate) -> Candidate:
        """Move the candidate's cuts, one layer at a time, while the simulated step gets shorter and still fits.

        Searches price by a formula; this hill climbing works on the simulated step, of a plan that is bound on its
        devices. Deterministic: it ends after a number of simulations, not after some time.
        """
        actions = max(1, len(candidate.simulation.action_table.stage_A))
        left = min(MOST_SIMULATIONS, MOST_ACTIONS // actions)
        best, improves = candidate, True
        while improves:
            improves = False
            for cut, move in itertools.product(range(len(best.plan.cuts)), (-1, 1)):
                moved = moved_cut(best.plan, cut, move)
                if moved is None:
                    continue
                if left <= 0:
                    return best
                left -= 1
                made = self._moved(best, moved)
                if made.fits and made.step_seconds < best.step_seconds * (1 - 1e-6):
                    best, improves = made, True
        return best

    def waiting(self, candidate: Candidate) -> float:
        """Return how much longer a candidate's links make its step than the fastest that its types may have."""
        by_types = self.candidate(candidate.priced, candidate.plan).simulated_seconds
        return candidate.simulated_seconds / by_types - 1 if by_types > 0 else 0.0

    def settled(self, candidate: Candidate) -> Candidate:
        """Polish a candidate that is bound, and bind it anew: with other cuts other devices may suit it."""
        polished = self.polished(candidate)
        if polished is candidate:
            return candidate
        again = self.bound(self.candidate(polished.priced, polished.plan))
        return again if again.fits and again.step_seconds < candidate.step_seconds else candidate

    def simulated_again(self, candidate: Candidate) -> Simulated:
        """Return how the candidate's step is simulated where its stages take other times."""
        if candidate.binding is None:
            return lambda priced, plan, stages: simulate_plan(priced, plan, stages=stages)
        messages, sums = messages_of(candidate.priced, candidate.binding, self._cluster), self.sums_of(candidate)
        return lambda priced, plan, stages: simulate_plan(
            priced, plan, stages=stages, message_seconds=messages, sum_seconds=sums
        )

    def sums_of(self, candidate: Candidate) -> tuple[float, ...] | None:
        """Return what sums over the candidate's two copies take on its devices; None: it has none."""
        binding = candidate.binding
        return None if binding is None else sums_of(candidate.priced, binding, self._cluster)

    def _moved(self, candidate: Candidate, plan: Plan) -> Candidate:
        """Simulate the candidate's plan with other cuts, where it is."""
        if candidate.binding is None:
            return self.candidate(candidate.priced, plan)
        return self.on(candidate.priced, replace(candidate.binding, plan=plan))


def bind_by_steps(
    priced: PricedProblem,
    plan: Plan,
    cluster: Cluster,
    *,
    seed: int = 0,
    compares: bool = False,
    moves: bool = True,
    is_blocking: bool = False,
) -> Binding:
    """Give the plan's pipeline ranks their devices: of the types that `bind` chooses, those with the least step.

    Args:
        seed, compares, moves: as of `binding.bind`.
        is_blocking: simulate messages that block both of their ends.

    Raises:
        BindError: the cluster has too few devices, or a rank does not fit their memory.
    """

    def simulated(plan: Plan) -> SecondsOf:
        stages = None if plan.both_ways else stages_of(priced, plan)  # else what is summed over copies is theirs

        def seconds(messages: tuple[float, ...], sums: tuple[float, ...]) -> float:
            if is_blocking:
                return simulate_plan_blocking(priced, plan, stages, messages).step_seconds
            return simulate_plan(priced, plan, None, stages, messages, sums).step_seconds

        return seconds

    num_actions = 2 * len(plan.stages) * plan.num_microbatches * plan.num_slices
    steps = SimulatedSteps(simulated, num_actions, priced.gradient_bytes_L)
    problem, runs = priced.problem, priced.accumulate
    return bind(problem, plan, cluster, seed=seed, runs=runs, compares=compares, moves=moves, steps=steps)


def simulate_bound(priced: PricedProblem, binding: Binding, cluster: Cluster) -> Simulation:
    """Simulate one step of a plan on its devices, with the links that these have."""
    messages, sums = messages_of(priced, binding, cluster), sums_of(priced, binding, cluster)
    return simulate_plan(priced, binding.plan, message_seconds=messages, sum_seconds=sums)


def messages_of(priced: PricedProblem, binding: Binding, cluster: Cluster) -> tuple[float, ...]:
    """Return what a microbatch's message takes one way from each seat to the next, with the links that they have."""
    return message_seconds(priced.problem, binding.plan, binding.placements, cluster, priced.accumulate)


def sums_of(priced: PricedProblem, binding: Binding, cluster: Cluster) -> tuple[float, ...]:
    """Return what the sum of each seat's gradients with the other copy's takes, with the links that the two have."""
    return sum_seconds(priced.problem, binding.plan, binding.placements, cluster, priced.gradient_bytes_L)


def moved_cut(plan: Plan, cut: int, move: int) -> Plan | None:
    """Return the plan with one cut moved by so many layers; None where a stage would have no layer left."""
    before, after = plan.stages[cut], plan.stages[cut + 1]
    at = after.start + move
    if not before.start < at < after.stop:
        return None
    stages = list(plan.stages)
    stages[cut : cut + 2] = [replace(before, stop=at), replace(after, start=at)]
    return replace(plan, stages=tuple(stages))


def least_seconds(priced: PricedProblem, plan: Plan) -> float:
    """Return the busiest pipeline rank's work in a step; no order of its actions takes less."""
    rows, B = stages_of(priced, plan), priced.problem.num_microbatches

    def work(s: int) -> float:
        forward, backward, of_input, of_weights, once = rows[s].passes_seconds
        return B * (forward + min(backward, of_input + of_weights)) / (2 if plan.both_ways else 1) + once

    return max(sum(work(s) for s in own) for own in plan.seats_of_ranks)
