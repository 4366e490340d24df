"""From a request to a plan: run searches in parallel, simulate what they find, take the fastest that fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, Unpack

from dejavu.cluster import Cluster, load_cluster
from dejavu.cost.trainings.steps import is_surely_faster, remembered_plans
from dejavu.foundation.cores import num_cores
from dejavu.foundation.processes.homes import Homes
from dejavu.foundation.registry import named
from dejavu.foundation.units import format_bound, format_seconds, plural
from dejavu.parallelism import Parallelism
from dejavu.planning.annealing import annealed
from dejavu.planning.candidates import LONG_WAITING, TIE, Candidate, Simulator, ranked
from dejavu.planning.choice import Choice, Considered
from dejavu.planning.loops import load_compiled_loops
from dejavu.planning.prices import Prices, under_gpipe_memory
from dejavu.planning.proofs.bounds import BOUND_SHARE, RequestBounds, Tell, quietly
from dejavu.planning.proofs.none_found import NoneFound
from dejavu.planning.questions import BASELINES, FURTHER, PROVER, QUICK, Ask, Posed, Question, at_home
from dejavu.planning.request import PlanRequest
from dejavu.planning.ways.both_ways import plans_both_ways
from dejavu.planning.ways.equal_ranks import plans_of_equal_ranks
from dejavu.planning.ways.nodes import as_plain
from dejavu.planning.ways.slices import plans_in_slices
from dejavu.plans import Answer, NoPlanError, Plan, SearchResult, step_seconds
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import CHIMERA, SCHEDULES
from dejavu.plans.stage_costs import PlanError
from dejavu.simulation.bound import CLOSE, SimulatedBound
from dejavu.workload import Workload
from dejavu.workload.loader import load_workload
from dejavu.workload.slices import slice_lengths

REMEMBERED = "remembered"
MET = "bound"  # found while bounding the simulated step
ANNEALED = "annealing"  # found near other plans, by the simulated step
FILLED, ONE_NODE = "slow links", "one node"  # found where messages have to leave nodes, or where none has to
QUICK_SHARE = 0.5  # of the budget, at most; they end by themselves long before
MOST_POLISHED = 4  # plans whose cuts are moved, and once more on their devices
MOST_ANNEALED = 4  # plans from which others are looked for by their simulated step
ANNEALING_SHARE = 0.15  # of the budget, at most, where a gap is left
WORTH = 0.01  # of the best step: a smaller gap is not worth it


Found = Callable[[float | None, float | None], None]


def nothing_heard(best_seconds: float | None, bound_seconds: float | None) -> None:
    """Listen to nothing."""


@dataclass(frozen=True)
class Planner:
    """The one way from a request to a plan, for the commands and the flows.

    Attributes:
        ask: runs searches: on Dask, as task runs of a flow; None: side by side on this machine.
        num_workers: how many searches run at the same time.
        forks: whether side by side is in forked processes, each with some of the numbers of microbatches, or in
            threads, of which Python runs one at a time: for a process with other threads that compute.
        tell: called with the progress.
        found: called with the best simulated step so far and the bound that no plan is simulated below, when one of
            them changes; None: not known yet.
    """

    ask: Ask | None = None
    num_workers: int = field(default_factory=num_cores)
    forks: bool = False
    tell: Tell = quietly
    found: Found = nothing_heard

    def plan(self, request: PlanRequest, prices: Prices | None = None) -> Choice:
        """Return the plan with the least predicted step of all that were found and fit, with what was proved.

        Quick searches and the baselines run first; a search that proves starts from their best plans; where that leaves
        a gap, others look for better ones. Every plan is simulated under every allowed schedule.

        Args:
            prices: of the request, where they exist already.

        Raises:
            NoPlanError: no plan was found; its answer says whether it is proved that there is none.
            InputError: the model cannot be captured.
            CostError: a number is missing; it names layer and device.
        """
        prices = prices or Prices(request, num_forks=self.num_workers if self.forks else 1)
        return _Planning(self, request, prices).choice()


class PlanOptions(TypedDict, total=False):
    """The fields of `PlanRequest` that have defaults."""

    database: Path
    parallelism: Parallelism | None
    searches: tuple[str, ...]
    schedules: tuple[str, ...]
    microbatches: tuple[int, ...]
    budget_seconds: float
    seed: int


def plan(workload: Workload | str | Path, cluster: Cluster | str | Path, **options: Unpack[PlanOptions]) -> Choice:
    """Find the pipeline plan with the least predicted step, and what is proved about it.

    Args:
        workload: what is trained, or what `load_workload` reads it from.
        cluster: the devices, or a cluster.yaml.
        options: as in `PlanRequest`: which searches, schedules and numbers of microbatches, how long; the seed is the
            workload's where none is given, as in `dejavu plan`.

    Raises:
        NoPlanError: no plan was found; its answer says whether it is proved that there is none.
        InputError: a mistake in the files or options, or the model cannot be captured.
        CostError: a price is missing; it names layer and device.

    Example:
        >>> import dejavu
        >>> choice = dejavu.plan("mlp", "examples/clusters/h100-and-l4.yaml", searches=("exact",), microbatches=(8,))
        >>> choice.plan.num_microbatches
        8
        >>> choice.simulated_lower_bound_seconds <= choice.simulated_seconds
        True
    """
    asked = workload if isinstance(workload, Workload) else load_workload(workload)
    devices = cluster if isinstance(cluster, Cluster) else load_cluster(Path(cluster))
    seeded: PlanOptions = {"seed": asked.seed, **options}
    return Planner(forks=True).plan(PlanRequest(asked, devices, **seeded))


class _Planning:
    """One request on its way to a choice."""

    def __init__(self, planner: Planner, request: PlanRequest, prices: Prices) -> None:
        self.planner, self.request, self.prices = planner, request, prices
        self.simulator = Simulator(prices)
        self.left_seconds = request.budget_seconds
        self.rows: list[Considered] = []
        self.heard: tuple[float | None, float | None] = (None, None)
        self.problems: list[PricedProblem] = []  # of all numbers of microbatches
        self.looked: dict[int, SimulatedBound] = {}  # by problem, where every schedule had to be searched

    def choice(self) -> Choice:
        counts, tell = self.request.counts, self._tell
        for done, count in enumerate(counts):
            tell(f"pricing {plural(count, 'microbatch')}", done, len(counts))
            self.problems += self.prices.problems(count)
        with self._homes(map(Posed, self.problems)) as homes:
            return self._choice(self.problems, homes)

    @contextmanager
    def _homes(self, posed: Iterable[Posed]) -> Iterator[Homes[Posed]]:
        """Let the problems live where what is asked about them is computed."""
        if self.planner.forks:
            load_compiled_loops()
        with Homes(list(posed), self.planner.num_workers, forks=self.planner.forks) as homes:
            self.ask = self.planner.ask or at_home(homes)
            yield homes

    def _choice(self, priced: Sequence[PricedProblem], homes: Homes[Posed]) -> Choice:
        bounds = RequestBounds(self.request, homes, self._tell, self._hear_bound)
        asked = self.request.searches
        searches = [name for name in asked if name not in BASELINES] if asked else [PROVER]
        self._ask(BASELINES if asked else QUICK, priced, QUICK_SHARE)
        self._consider_remembered()
        self._ask(searches, priced, 1.0)
        if not asked and self.left_seconds > 0:
            self._ask([PROVER, *FURTHER], [one for one in priced if self._is_open(one)], 1.0)
        self._compare_other_ways()
        if not self._has_plan:
            left = [under_gpipe_memory(one) for one in priced if not self._none_found.is_proved_empty(one)]
            with self._homes(map(Posed, left)):
                self._ask(searches, left, 1.0)
            if self._has_bounds:
                self._tell("comparing equal ranks", 0, 1)
                self.rows += plans_of_equal_ranks(self.problems, self.request.listed_schedules, self.simulator)
        if not self._has_plan:
            self._meet(bounds)
        self._tell("moving cuts", 0, 1)
        origin, chosen = self._polished()
        waits = self.simulator.waiting(self.simulator.bound(chosen)) > LONG_WAITING
        raised = self._raised(bounds, chosen)
        if not asked and any(bound.seconds < chosen.simulated_seconds * (1 - WORTH) for bound in raised.values()):
            self._anneal(homes)
        other, best = self._fastest()  # maybe one that was found while bounding
        if ranked((chosen, best))[0] is not chosen:
            origin, chosen = other, self.simulator.polished(best)
        fastest_seconds = chosen.simulated_seconds  # over the fastest links
        origin, chosen = self._on_devices(origin, chosen)
        if self.left_seconds > 0 and chosen.simulated_seconds > fastest_seconds * (1 + LONG_WAITING):
            place = self.rows.index(origin)
            self._ask_for_links(searches)
            origin, chosen = self._on_devices(self.rows[place], chosen)
        if waits and raised:
            num_rows, raised = len(self.rows), self._raised_by_nodes(raised, chosen)
            if len(self.rows) > num_rows:
                origin, chosen = self._on_devices(origin, chosen)
        origin, chosen = self._unless_kept(origin, chosen)
        problems = tuple(self.problems)
        return Choice(self.request, self.prices, tuple(self.rows), chosen, origin, self.simulator, problems, raised)

    def _tell(self, what: str, done: int, total: int) -> None:
        """Report the progress, with the best step so far and the bound, where they are known."""
        best = self.simulator.best
        self._hear(best.simulated_seconds if best is not None else None, self.heard[1])
        said = [
            f"{name} {form(seconds)}"
            for name, form, seconds in zip(
                ("best", "none below"), (format_seconds, format_bound), self.heard, strict=True
            )
            if seconds
        ]
        self.planner.tell(f"{what} ({', '.join(said)})" if said else what, done, total)

    def _hear_bound(self, seconds: float) -> None:
        self._hear(self.heard[0], seconds)

    def _hear(self, best_seconds: float | None, bound_seconds: float | None) -> None:
        if self.heard != (best_seconds, bound_seconds):
            self.heard = (best_seconds, bound_seconds)
            self.planner.found(*self.heard)

    @property
    def _has_plan(self) -> bool:
        return any(row.best for row in self.rows)

    def _ask(self, searches: Iterable[str], priced: Sequence[PricedProblem], share: float) -> None:
        """Run each search on each problem, in parallel, within a share of what is left of the budget."""
        pairs = [(name, one) for one in priced for name in searches]
        for question, answer in self._answered(pairs, share):
            self._consider(question.search, question.priced, answer)

    def _answered(self, pairs: Sequence[tuple[str, PricedProblem]], share: float) -> Iterator[tuple[Question, Answer]]:
        """Ask all of these, and yield each question with its answer."""
        if not pairs:
            return
        workers = min(self.planner.num_workers, len(pairs))
        seconds = max(self.left_seconds, 0.0) * share * workers / len(pairs)
        questions = [Question(name, one, seconds, self.request.seed, self._start(one)) for name, one in pairs]
        self._tell(f"searching: {', '.join(dict.fromkeys(name for name, _ in pairs))}", 0, len(questions))
        answers = self.ask(questions)
        self.left_seconds -= sum(answer.seconds for answer in answers) / workers
        for done, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            self._tell(f"simulating {question}", done, len(questions))
            yield question, answer

    def _ask_for_links(self, searches: Sequence[str]) -> None:
        """Look for plans that wait less for their links: best where nodes are filled rank by rank, or one is enough.

        So may plans under schedules that were left out since others seemed faster.
        """
        self.rows = [row if row.result is None else self._under_schedules(row, row.result.plan) for row in self.rows]
        told = [(one, self.prices.over_nodes(one, [one.problem.schedule])) for one in self.problems]
        variants = [(FILLED, one, changed.priced) for one, changed in told if changed]
        variants += [(ONE_NODE, one, inside) for one in self.problems for inside in self.prices.in_one_node(one)]
        with self._homes(Posed(changed) for *_, changed in variants):
            pairs = [(name, changed) for *_, changed in variants for name in searches]
            for k, (_, answer) in enumerate(self._answered(pairs, 1.0)):
                if isinstance(answer, SearchResult):  # its bound is of another problem
                    name, priced, _ = variants[k // len(searches)]
                    self.rows.append(self._under_schedules(Considered(name, priced, None), as_plain(answer.plan)))

    def _consider(self, search: str, priced: PricedProblem, answer: Answer) -> None:
        row = Considered(search, priced, answer)
        if not isinstance(answer, SearchResult):
            self.rows.append(row)
            return
        found = self._under_schedules(row, answer.plan)
        self.rows.append(found)
        if found.best is None or found.best.simulated_seconds <= answer.step_seconds * (1 + LONG_WAITING):
            return
        for plan in answer.near:  # what the formula leaves out may be less of these
            priced_so = replace(answer, plan=plan, step_seconds=step_seconds(priced.problem, plan), near=())
            near = self._under_schedules(replace(row, answer=priced_so), plan)
            if ranked(one.best for one in (found, near) if one.best is not None)[0] is near.best:
                found = near
        if found is not self.rows[-1]:
            self.rows.append(found)

    def _under_schedules(self, row: Considered, plan: Plan) -> Considered:
        """Return the row with its plan as it would run under each allowed schedule."""
        found = self.simulator.under_schedules(row.priced, plan, self.request.allowed_schedules)
        return replace(row, candidates=tuple(ranked(found)))

    def _consider_remembered(self) -> None:
        """Add plans that were trained before and answer today's request."""
        for count in self.request.counts:
            for plan in remembered_plans(
                self.prices.graph_of(count), self.prices.rows, self.request.workload.accumulate
            ):
                if plan.num_microbatches != count or not self._may_use(plan):
                    continue
                try:
                    priced = self.prices.priced_for(plan)
                    if plan.device_counts <= Counter(priced.problem.device_counts):
                        made = self.simulator.candidate(priced, plan)
                        self.rows.append(Considered(REMEMBERED, priced, None, (made,)))
                except PlanError:  # of devices or degrees that are not considered today
                    continue

    def _may_use(self, plan: Plan) -> bool:
        """Return whether the request allows the plan's schedule, and its slices or that it has none."""
        name = CHIMERA if plan.both_ways else plan.schedule
        if plan.slices == slice_lengths(self.request.workload):
            return name in self.request.allowed_schedules
        return name in self.request.allowed_schedules and bool(plan.slices) and self.request.may_slice

    def _start(self, priced: PricedProblem) -> Plan | None:
        """Return the cheapest plan of this problem so far."""
        found = [row.result for row in self.rows if row.priced is priced and row.result is not None]
        return min(found, key=lambda result: result.step_seconds).plan if found else None

    def _is_open(self, priced: PricedProblem) -> bool:
        """Return whether this problem may still have a plan cheaper than the cheapest of all, by the cost model."""
        found = [row.result.step_seconds for row in self.rows if row.result is not None]
        bound = max(row.lower_bound_seconds for row in self.rows if row.priced is priced)
        return bound < (1 - CLOSE) * min(found, default=float("inf"))

    def _fastest(self) -> tuple[Considered, Candidate]:
        """Return the row whose best candidate is predicted to be the fastest, and that candidate.

        Raises:
            NoPlanError: nothing that was found fits.
        """
        fitting = [row.best for row in self.rows if row.best is not None]
        if not fitting:
            raise NoPlanError(*self._none_found.why())
        best = ranked(fitting)[0]
        return next(row for row in self.rows if row.best is best), best

    def _polished(self) -> tuple[Considered, Candidate]:
        """Move the cuts of the fastest plans, and return the one that is the fastest then, with its row.

        Raises:
            NoPlanError: as `_fastest`.
        """
        self._fastest()
        row_of = {row.best: row for row in reversed(self.rows) if row.best is not None}
        polished = {self.simulator.polished(one): row_of[one] for one in ranked(row_of)[:MOST_POLISHED]}
        chosen = ranked(polished)[0]
        return polished[chosen], chosen

    @property
    def _none_found(self) -> NoneFound:
        return NoneFound(self.request, self.prices, self.simulator, tuple(self.problems), tuple(self.rows), self.looked)

    @property
    def _has_bounds(self) -> bool:
        """Whether plans are bounded: those of whole sequences through one copy of the model are."""
        return bool(self.request.listed_schedules) and not self.request.workload.in_slices

    def _compare_other_ways(self) -> None:
        """Add plans of both directions, and of slices, where they may be used."""
        if CHIMERA in self.request.allowed_schedules:
            self._tell("comparing both directions", 0, 1)
            self.rows += plans_both_ways(self.request, self.prices, self.simulator)
        if self._has_plan and self.request.may_slice:
            self._tell("comparing slices of sequences", 0, 1)
            self.rows += plans_in_slices(self.request, self.prices, self.simulator)

    def _on_devices(self, origin: Considered, chosen: Candidate) -> tuple[Considered, Candidate]:
        """Bind all candidates to devices, and return the fastest with its row, polished there.

        Until then each message went over the fastest link that its types of devices may have. Where that is not the
        one that it has, cuts are moved of the next best plans, too.

        Raises:
            NoPlanError: the cluster has the devices of none.
        """
        self._tell("binding to devices", 0, 1)
        bound, at = self.simulator.bound, self.rows.index(origin)
        self.rows = [replace(row, candidates=tuple(ranked(map(bound, row.candidates)))) for row in self.rows]
        row_of = {bound(chosen): self.rows[at]}
        row_of |= {row.best: row for row in reversed(self.rows) if row.best is not None}
        if not (fitting := ranked(one for one in row_of if one.fits)):
            raise NoPlanError(*self._none_found.why())
        first, *others = fitting
        others = [one for one in others if self.simulator.waiting(one) > TIE][: MOST_POLISHED - 1]
        settled = {self.simulator.settled(one): row_of[one] for one in (first, *others)}
        best = self.simulator.best = ranked(settled)[0]
        return settled[best], best

    def _unless_kept(self, origin: Considered, chosen: Candidate) -> tuple[Considered, Candidate]:
        """Keep the best plan that was trained before, unless the new one's gain exceeds the uncertainty of the two."""
        trained = [(row, row.best) for row in self.rows if row.best is not None and row.best.was_trained]
        if not trained or chosen.was_trained:
            return origin, chosen
        kept = ranked(one for _, one in trained)[0]
        row = next(row for row, one in trained if one is kept)
        if is_surely_faster(chosen.step_seconds, chosen.factor, kept.step_seconds, kept.factor):
            return origin, chosen
        return row, kept

    def _meet(self, bounds: RequestBounds) -> None:
        """Look for a plan under every allowed schedule with the bound's search, where no other search found one.

        The searches' plans have one stage on each rank; with two, layers that are not neighbours share a rank's memory.
        """
        if not self._has_bounds:
            return
        self.looked = bounds.looked()
        self._consider_met(self.looked)

    def _raised(self, bounds: RequestBounds, chosen: Candidate) -> dict[int, SimulatedBound]:
        """Return lower bounds on the simulated step by problem; plans found meanwhile are candidates."""
        if not self._has_bounds:
            return {}
        joint = {count: one for count in self.request.counts if (one := self.prices.of_all_parts(count))}
        found = self._raised_together(joint) if joint else bounds.raised(chosen.simulated_seconds)
        self._consider_met(found)
        return found

    def _raised_together(self, joint: Mapping[int, PricedProblem]) -> dict[int, SimulatedBound]:
        """Return the same where problems with so many microbatches have one that has all their plans.

        Plans that are known are on devices: in such a problem messages between islands take their links.
        """
        told = [joint.get(one.problem.whole_microbatches, one) for one in self.problems]
        posed = list(dict.fromkeys(told))
        on_devices = [self.simulator.bound(row.best) for row in self.rows if row.best is not None]
        best_seconds = min((one.simulated_seconds for one in on_devices if one.fits), default=math.inf)
        with self._homes(map(Posed, posed)) as homes:
            found = RequestBounds(self.request, homes, self._tell, self._hear_bound).raised(best_seconds)
        return {place: found[posed.index(one)] for place, one in enumerate(told)}

    def _anneal(self, homes: Homes[Posed]) -> None:
        """Look near the fastest plan of each schedule and number of microbatches, by the simulated step."""
        places = {id(posed.priced): place for place, posed in enumerate(homes.kept)}
        found = [one for row in self.rows for one in row.candidates if id(one.priced) in places and one.fits]
        fastest = dict[tuple[str, int], Candidate]()
        for one in ranked(one for one in found if not one.plan.both_ways):
            fastest.setdefault((one.plan.schedule, one.plan.num_microbatches), one)
        starts = list(fastest.values())[:MOST_ANNEALED]
        self._tell("annealing", 0, len(starts))
        seconds = ANNEALING_SHARE * self.request.budget_seconds * homes.num_homes / max(len(starts), 1)
        calls = [(places[id(one.priced)], (one.plan, seconds, self.request.seed)) for one in starts]
        for start, plans in zip(starts, homes.each(calls, annealed), strict=True):
            near = [self.simulator.candidate(start.priced, plan) for plan in plans]
            if near:
                self.rows.append(Considered(ANNEALED, start.priced, None, tuple(ranked(near))))

    def _raised_by_nodes(self, raised: dict[int, SimulatedBound], best: Candidate) -> dict[int, SimulatedBound]:
        """Raise bounds where messages must leave nodes; plans found meanwhile are candidates.

        Schedules with one stage on each rank are looked at by themselves: bounds on the others take most time to raise,
        and less of it finds plans.
        """
        names, best_seconds, found = self.request.listed_schedules, best.simulated_seconds, dict[int, SimulatedBound]()
        one_each = tuple(name for name in names if named(SCHEDULES, name).stages_per_rank == 1)
        kinds = [some for some in (one_each, tuple(name for name in names if name not in one_each)) if some]
        places = [place for place, bound in raised.items() if bound.seconds < (1 - CLOSE) * best_seconds]
        for some in kinds:
            told = [(place, self.prices.over_nodes(self.problems[place], some)) for place in places]
            posed = {place: Posed(one.priced, one.choices, raised[place].by_ranks) for place, one in told if one}
            if not posed:  # there is one node, or nothing to raise
                return raised
            with self._homes(posed.values()) as homes:
                bounds = RequestBounds(
                    self.request, homes, self._tell, schedules=some, share=BOUND_SHARE / len(kinds)
                ).raised(best_seconds)
            for k, place in enumerate(posed):
                met = bounds[k].plan
                bound = replace(bounds[k], plan=as_plain(met) if met else None)
                self._consider_met({place: bound})
                found[place] = found[place].and_of(bound) if place in found else bound
        raised |= {place: max(raised[place], bound, key=lambda one: one.seconds) for place, bound in found.items()}
        self._hear_bound(min(one.seconds for one in raised.values()))
        return raised

    def _consider_met(self, bounds: Mapping[int, SimulatedBound]) -> None:
        """Add the plans that were found while these were proved."""
        for place, bound in bounds.items():
            known = set(self.problems[place].problem.configurations)
            if bound.plan is not None and known.issuperset(stage.configuration for stage in bound.plan.stages):
                met = self.simulator.candidate(self.problems[place], bound.plan)
                if met.fits:
                    self.rows.append(Considered(MET, met.priced, None, (met,)))
