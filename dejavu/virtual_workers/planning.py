"""Divide a cluster among virtual workers: quick plans for every division, whole ones for the best of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from dejavu.binding import bind_in_order
from dejavu.foundation.errors import InputError
from dejavu.parallelism import Parallelism
from dejavu.planning import Choice, Planner, PlanRequest, Prices
from dejavu.planning.candidates import messages_of
from dejavu.planning.questions import QUICK, Question
from dejavu.plans import NoPlanError, Plan, SearchResult
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import CHIMERA
from dejavu.runtime.layout import World
from dejavu.simulation import simulate_plan, stages_of
from dejavu.virtual_workers.divisions import MOST_WORKERS, Division, WorkerDevices, divisions
from dejavu.virtual_workers.shares import balanced, num_units
from dejavu.virtual_workers.sums import SharedSums
from dejavu.virtual_workers.team import Team, TeamWorker, Tried, together

SKETCH_SECONDS = 1.0  # for the exact search of one quick plan
QUICK_SIZES = 4  # of microbatches, for quick plans
WHOLE = 2  # divisions that are planned as a whole, the best of the quick ones
PROVER = "exact"
ONE_COPY = f"each runs one copy of the model, and the plan may use schedule {CHIMERA} alone, which runs two."


class NoTeam(NamedTuple):
    """No way to divide the devices has a plan for each worker.

    Attributes:
        tried: the divisions that were considered; empty: the devices cannot be divided.
        reason: why none was considered at all; empty: some were, or the devices cannot be divided.
    """

    tried: tuple[Tried, ...]
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"No virtual workers: {self.reason}"
        if not self.tried:
            return f"No virtual workers: the devices cannot be divided among 2 to {MOST_WORKERS} of them."
        return f"No virtual workers: in none of {len(self.tried)} divisions was a plan found for each worker."


@dataclass(frozen=True, eq=False)
class _Sketch:
    """A quick plan of a worker at one microbatch size, for any number of microbatches that its schedule can run."""

    priced: PricedProblem
    plan: Plan
    prices: Prices

    def seconds(self, num_microbatches: int) -> float:
        """Return the time of so many microbatches, by a line through two simulated steps; inf: too few."""
        least = len(self.plan.stages)
        if num_microbatches < least:
            return math.inf
        first, second = self._line
        return first + (second - first) / least * (num_microbatches - least)

    @cached_property
    def _line(self) -> tuple[float, float]:
        least = len(self.plan.stages)
        first, second = (
            seconds_without_sums(self.prices, self.priced, self.with_microbatches(count))
            for count in (least, 2 * least)
        )
        return first, second

    def with_microbatches(self, count: int) -> Plan:
        """Return the plan with so many microbatches."""
        return replace(self.plan, num_microbatches=count)


class _Part(NamedTuple):
    """A worker's part of a batch by a quick plan.

    Attributes:
        microbatch_size: its own.
    """

    seconds: float
    num_examples: int
    microbatch_size: int
    sketch: _Sketch


class _Row(NamedTuple):
    """A division that was considered."""

    tried: Tried
    division: Division


def seconds_without_sums(
    prices: Prices, priced: PricedProblem, plan: Plan, message_seconds: Sequence[float] | None = None
) -> float:
    """Return a pipeline's simulated step without the sums over its replicas, which virtual workers make together.

    Args:
        message_seconds: as of `simulate_plan`.
    """
    size = prices.request.workload.run_size // priced.problem.num_microbatches
    rows = [
        replace(row, per_step_seconds=max(0.0, row.per_step_seconds - prices.sum_seconds(stage, size)))
        for row, stage in zip(stages_of(priced, plan), plan.stages, strict=True)
    ]
    return simulate_plan(priced, plan, stages=rows, message_seconds=message_seconds).step_seconds


class Teams:
    """Plans virtual workers for the request of a choice.

    Args:
        choice: one pipeline on the whole cluster, which gives microbatch sizes, captured layers and the comparison.
        planner: plans each worker, and tells the progress.
    """

    def __init__(self, choice: Choice, planner: Planner) -> None:
        self._alone, self._planner, self._tell = choice, planner, planner.tell
        self._request, self._prices = choice.request, dict[object, Prices]()
        self._sketches, self._whole = dict[object, _Sketch | None](), dict[object, Choice | None]()

    def best(self) -> Team | NoTeam:
        """Return the team with the least predicted step, however it compares with one pipeline."""
        if not self._request.listed_schedules:
            return NoTeam((), ONE_COPY)
        rows, every = list[_Row](), divisions(self._request.cluster)
        for done, division in enumerate(every):
            self._tell(f"virtual workers: {division.name}", done, len(every))
            rows += self._tried(division)
        tried, teams = tuple(row.tried for row in rows), list[Team]()
        for done, row in enumerate(_best_of_each(rows)[:WHOLE]):
            self._tell(f"virtual workers: {row.division.name}, planned", done, WHOLE)
            if (team := self._team(row.tried, row.division, tried)) is not None:
                teams.append(team)
        return min(teams, key=lambda team: team.step_seconds) if teams else NoTeam(tried)

    def _tried(self, division: Division) -> Iterator[_Row]:
        """Yield the division at each tensor-parallel degree, with the examples of each worker."""
        batch = self._request.workload.run_size
        unit = batch // num_units(batch)
        for degree in self._degrees():
            known = [self._parts(worker, degree, unit) for worker in division.workers]
            seconds = [[one.seconds if one else math.inf for one in parts] for parts in known]
            shares = balanced(seconds)
            step, examples = None, list[int]()
            if shares is not None:
                parts = [own[units - 1] for own, units in zip(known, shares, strict=True)]
                fitting = [one for one in parts if one is not None]
                step = max(one.seconds for one in fitting) + self._sum_seconds(division, fitting)
                examples = [one.num_examples * self._request.workload.accumulate for one in fitting]
            yield _Row(Tried(division.name, tuple(examples), len(division.workers), degree, step), division)

    def _parts(self, worker: WorkerDevices, degree: int, unit: int) -> list[_Part | None]:
        """Return the worker's fastest quick plan for 1, 2 … units of the batch; None: it has none."""
        found = list[_Part | None]()
        for examples in range(unit, self._request.workload.run_size + 1, unit):
            best: _Part | None = None
            for size in self._sizes():
                sketch = None if examples % size else self._sketch(worker, size, degree)
                seconds = sketch.seconds(examples // size) if sketch else math.inf
                if sketch and seconds < (best.seconds if best else math.inf):
                    best = _Part(seconds, examples, size, sketch)
            found.append(best)
        return found

    def _sizes(self) -> list[int]:
        """Return the microbatch sizes of quick plans: the smallest, and some from twice the chosen plan's downwards."""
        run, chosen = self._request.workload.run_size, self._alone.plan.num_microbatches
        fitting = [run // count for count in self._request.counts if 2 * count >= chosen]
        return [*fitting[:QUICK_SIZES], *fitting[QUICK_SIZES:][-1:]]

    def _degrees(self) -> list[int]:
        """Return the tensor-parallel degrees that are tried, the same for all workers: they sum part by part."""
        used = {stage.configuration.tensor_parallel for stage in self._alone.plan.stages}
        return sorted({1} | used)

    def _spread(self, degree: int) -> Parallelism:
        wanted = self._request.spread
        return replace(
            wanted, min_tensor_parallel=degree, max_tensor_parallel=degree, zero_levels=(0,), context_parallel=False
        )

    def _request_of(self, worker: WorkerDevices, degree: int) -> PlanRequest:
        own = self._request
        cluster = worker.cluster(own.cluster)
        workload = own.workload.model_copy(update={"slices": 1})  # virtual workers are priced with whole sequences,
        asked = replace(own, workload=workload, schedules=own.listed_schedules)  # through one copy of the model each
        return replace(asked, cluster=cluster, parallelism=self._spread(degree), searches=(), microbatches=())

    def _sketch(self, worker: WorkerDevices, size: int, degree: int) -> _Sketch | None:
        kind = worker.kind_in(self._request.cluster)
        if (kind, size, degree) not in self._sketches:
            self._sketches[kind, size, degree] = self._sketched(worker, (kind, degree), size, degree)
        return self._sketches[kind, size, degree]

    def _sketched(self, worker: WorkerDevices, key: object, size: int, degree: int) -> _Sketch | None:
        try:
            if key not in self._prices:
                self._prices[key] = Prices(self._request_of(worker, degree), graph_at=self._alone.prices.graph)
            prices = self._prices[key]
            priced = prices.priced(self._request.workload.run_size // size)
        except InputError:  # the devices or the model do not split so
            return None
        best: SearchResult | None = None
        for name in (*QUICK, PROVER):
            found = Question(name, priced, SKETCH_SECONDS, start=best.plan if best else None).answer()
            if isinstance(found, SearchResult) and (best is None or found.step_seconds < best.step_seconds):
                best = found
        return None if best is None else _Sketch(priced, best.plan, prices)

    def _sum_seconds(self, division: Division, parts: Sequence[_Part]) -> float:
        workers = []
        for devices, one in zip(division.workers, parts, strict=True):
            plan = one.sketch.with_microbatches(one.num_examples // one.microbatch_size)
            workers.append((devices, bind_in_order(plan, one.sketch.prices.request.cluster), one.num_examples))
        return self._sums.seconds(World.of(together(self._request.cluster, workers), self._request.workload))

    @cached_property
    def _sums(self) -> SharedSums:
        prices = self._alone.prices
        return SharedSums(self._request.cluster, prices.rows, prices.graph_of(self._alone.plan.num_microbatches))

    def _team(self, row: Tried, division: Division, tried: tuple[Tried, ...]) -> Team | None:
        """Plan every worker as one plans a training of its own; None: one of them has no plan after all."""
        workers = list[TeamWorker]()
        for devices, examples in zip(division.workers, row.examples, strict=True):
            choice = self._planned(devices, examples, row.tensor_parallel)
            if choice is None:
                return None
            messages = messages_of(choice.priced, choice.binding, choice.request.cluster)
            seconds = seconds_without_sums(choice.prices, choice.priced, choice.plan, messages)
            workers.append(TeamWorker(devices, choice, seconds))
        asked, degree = self._request, row.tensor_parallel
        team = Team(asked.workload, asked.cluster, division, tuple(workers), degree, 0.0, tried, self._alone)
        summed = self._sums.seconds(World.of(team.binding, self._request.workload))
        return replace(team, sum_seconds=summed)

    def _planned(self, worker: WorkerDevices, examples: int, degree: int) -> Choice | None:
        key = (worker.kind_in(self._request.cluster), examples, degree)
        if key not in self._whole:
            asked = self._request_of(worker, degree)
            own = asked.workload.model_copy(update={"batch_size": examples, "num_microbatches": 1})
            asked = replace(asked, workload=own)
            try:
                self._whole[key] = self._planner.plan(asked, Prices(asked, graph_at=self._alone.prices.graph))
            except NoPlanError:
                self._whole[key] = None
        return self._whole[key]


def _best_of_each(rows: Sequence[_Row]) -> list[_Row]:
    """Return each division's row with the least step, the best division first."""
    found = dict[str, _Row]()
    for row in sorted(rows, key=lambda row: row.tried.step_seconds or math.inf):
        if row.tried.step_seconds is not None:
            found.setdefault(row.division.name, row)
    return list(found.values())
