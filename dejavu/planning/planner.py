"""From a request to a plan: asks searches side by side, simulates what they find, takes the fastest that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dejavu.cost.remembered_steps import is_surely_faster, remembered_plans
from dejavu.plan import Answer, Infeasible, NoPlanError, NotFound, Obstacle, Plan, SearchResult
from dejavu.planning.candidates import Candidate, Simulator
from dejavu.planning.choice import Choice, Considered
from dejavu.planning.prices import Prices, under_gpipe_memory
from dejavu.planning.questions import BASELINES, QUICK, Ask, Question, in_this_process, num_cores
from dejavu.planning.request import PlanRequest
from dejavu.problem import Posed
from dejavu.profiles import ProfileDatabase
from dejavu.simulated_bound import CLOSE, Bounding, SimulatedBound, bounding
from dejavu.stage_costs import PlanError

PROVER = "auto"
FURTHER = ("differentiable", "mcmc")  # asked where the proof leaves something open
REMEMBERED = "remembered"
MET = "bound"  # met while the simulated step was bounded
QUICK_SHARE = 0.15  # of the budget, at most
EXPLAIN_SECONDS = 10.0  # to find the least memory that would do where nothing fits
BOUND_SHARE = 0.5  # of the budget, at most, goes to the bound on the simulated step
LEAST_SHARE = 0.01  # of that; less is not worth another turn

Tell = Callable[[str, int, int], None]  # what is done now, how many are done, of how many


def _quietly(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Planner:
    """The one way from a question to a plan, for the commands and the flows.

    Attributes:
        ask: how questions to searches are answered: in threads, on Dask, as task runs of a flow.
        num_workers: how many of them at the same time.
        tell: hears how far it is.
    """

    ask: Ask = in_this_process
    num_workers: int = field(default_factory=num_cores)
    tell: Tell = _quietly

    def plan(self, request: PlanRequest, prices: Prices | None = None) -> Choice:
        """The plan with the least predicted step of all that were found and fit, with what was proved.

        Quick searches come first, and the baselines with them; a search that proves starts from their best plans; where
        that leaves a gap, others look for better ones. Every plan is simulated under every allowed schedule.

        Args:
            prices: of the request, where they are made already.

        Raises:
            NoPlanError: no plan was found; its answer says whether it is proved that there is none.
            InputError: the model cannot be captured.
            CostError: a number is missing; it names layer and device.
        """
        return _Planning(self, request, prices or Prices(request)).choice()


class _Planning:
    """One request on its way to a choice."""

    def __init__(self, planner: Planner, request: PlanRequest, prices: Prices) -> None:
        self.planner, self.request, self.prices = planner, request, prices
        self.simulator = Simulator(prices)
        self.left_seconds = request.budget_seconds
        self.rows: list[Considered] = []
        self.places: dict[int, SimulatedBound] = {}  # by microbatches, where every schedule had to be looked at

    def choice(self) -> Choice:
        counts, tell = self.request.counts, self.planner.tell
        for done, count in enumerate(counts):
            tell(f"pricing {count} microbatches", done, len(counts))
            self.prices.posed(count)
        posed = [self.prices.posed(count) for count in counts]
        named = [name for name in self.request.searches if name not in BASELINES]
        self._ask(BASELINES if self.request.searches else QUICK, posed, QUICK_SHARE)
        self._consider_remembered()
        self._ask(named if self.request.searches else [PROVER], posed, 1.0)
        if not self.request.searches and self.left_seconds > 0:
            self._ask([PROVER, *FURTHER], [one for one in posed if self._is_open(one)], 1.0)
        if not self._has_plan:
            left = [under_gpipe_memory(one) for one in posed if not self._is_proved_empty(one)]
            self._ask(named or [PROVER], left, 1.0)
        if not self._has_plan:
            self._meet()
        tell("moving cuts", 0, 1)
        origin, best = self._fastest()
        chosen = self.simulator.polished(best)
        bounds = self._bounds(chosen)
        other, best = self._fastest()  # maybe one that was met while bounding
        if best.step_seconds < chosen.step_seconds:
            origin, chosen = other, self.simulator.polished(best)
        origin, chosen = self._unless_kept(origin, chosen)
        return Choice(self.request, self.prices, tuple(self.rows), chosen, origin, self.simulator, bounds)

    @property
    def _has_plan(self) -> bool:
        return any(row.best for row in self.rows)

    def _ask(self, searches: Iterable[str], posed: Sequence[Posed], share: float) -> None:
        """Ask each search about each problem, side by side, within a share of what is left of the budget."""
        pairs = [(name, one) for one in posed for name in searches]
        if not pairs:
            return
        workers = min(self.planner.num_workers, len(pairs))
        seconds = max(self.left_seconds, 0.0) * share * workers / len(pairs)
        questions = [Question(name, one, seconds, self.request.seed, self._start(one)) for name, one in pairs]
        self.planner.tell(f"asking {', '.join(dict.fromkeys(name for name, _ in pairs))}", 0, len(questions))
        answers = self.planner.ask(questions)
        self.left_seconds -= sum(answer.seconds for answer in answers) / workers
        for done, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            self.planner.tell(f"simulating {question}", done, len(questions))
            self._consider(question.search, question.posed, answer)

    def _consider(self, search: str, posed: Posed, answer: Answer) -> None:
        found: list[Candidate] = []
        if isinstance(answer, SearchResult):
            found = self.simulator.under_schedules(posed, answer.plan, self.request.allowed_schedules)
        found.sort(key=lambda one: (not one.fits, one.step_seconds))
        self.rows.append(Considered(search, posed, answer, tuple(found)))

    def _consider_remembered(self) -> None:
        """Plans that were trained before and answer today's question are candidates, too."""
        rows = ProfileDatabase(self.request.database)
        for count in self.request.counts:
            posed = self.prices.posed(count)
            for plan in remembered_plans(self.prices.graph_of(count), rows):
                if plan.num_microbatches != count or plan.schedule not in self.request.allowed_schedules:
                    continue
                try:
                    if _devices(plan) <= Counter(posed.problem.device_counts):
                        made = self.simulator.candidate(posed, plan)
                        self.rows.append(Considered(REMEMBERED, posed, None, (made,)))
                except PlanError:  # of devices or degrees that are not considered today
                    continue

    def _start(self, posed: Posed) -> Plan | None:
        """The cheapest plan of this very problem so far."""
        found = [row.result for row in self.rows if row.posed is posed and row.result is not None]
        return min(found, key=lambda result: result.step_seconds).plan if found else None

    def _is_open(self, posed: Posed) -> bool:
        """Whether a better plan of this problem than the cheapest of all is possible, by the searches' formula."""
        found = [row.result.step_seconds for row in self.rows if row.result is not None]
        bound = max(row.lower_bound_seconds for row in self.rows if row.posed is posed)
        return bound < (1 - CLOSE) * min(found, default=float("inf"))

    def _fastest(self) -> tuple[Considered, Candidate]:
        """The row whose best candidate is predicted to be the fastest, and that candidate.

        Raises:
            NoPlanError: nothing that was found fits.
        """
        fitting = [(row, row.best) for row in self.rows if row.best is not None]
        if not fitting:
            raise NoPlanError(*self._why_none())
        return min(fitting, key=lambda pair: pair[1].step_seconds)

    def _unless_kept(self, origin: Considered, chosen: Candidate) -> tuple[Considered, Candidate]:
        """The best plan that was trained before, unless the chosen one gains more than is uncertain of the two."""
        trained = [(row, row.best) for row in self.rows if row.best is not None and row.best.was_trained]
        if not trained or chosen.was_trained:
            return origin, chosen
        row, kept = min(trained, key=lambda pair: pair[1].step_seconds)
        if is_surely_faster(chosen.step_seconds, chosen.factor, kept.step_seconds, kept.factor):
            return origin, chosen
        return row, kept

    def _why_none(self) -> tuple[Infeasible | NotFound, str]:
        """The answer of the most microbatches, and a sentence about all.

        Infeasible only where it is proved of every problem, under every schedule: the searches' proofs are of one stage
        on each rank; for the other schedules the bound's own places have to be empty.
        """
        request = self.request
        counts, names = request.counts, ", ".join(request.allowed_schedules)
        others = f" (nor in {', '.join(map(str, counts[:-1]))})" if len(counts) > 1 else ""
        problems = [self.prices.posed(count) for count in counts]
        proved = all(map(self._is_proved_empty, problems))
        if proved and (request.one_stage_a_rank or all(map(self._has_no_place, problems))):
            answer = Question(PROVER, problems[-1], EXPLAIN_SECONDS).answer()  # with time for a good sentence
            if isinstance(answer, Infeasible):
                return answer, f"in {counts[-1]} microbatches{others}: {answer}"
        own = [row for row in self.rows if row.posed is problems[-1] and row.search not in QUICK]
        said = next((str(row.answer) for row in reversed(own) if not isinstance(row.answer, SearchResult)), "")
        reason = said or "the plans that were found do not fit their memory"
        if proved:
            reason = f"with one stage on each rank {reason}; with two a plan may fit, and none was found"
        found = NotFound(PROVER, Obstacle.NONE_CONSIDERED_FITS, reason, 0.0)
        return (
            found,
            f"no plan was found under {names} in {counts[-1]} microbatches{others}, which proves nothing: {reason}",
        )

    def _is_proved_empty(self, posed: Posed) -> bool:
        """Whether a search proved that no plan of one stage on each rank fits."""
        return any(row.proves_infeasible(posed) for row in self.rows)

    def _has_no_place(self, posed: Posed) -> bool:
        """Whether it is proved that no plan of the problem fits under any allowed schedule.

        A bound above what a plan takes that does everything in turn is above every plan.
        """
        found = self.places.get(posed.problem.num_microbatches)
        return found is not None and found.seconds > serial_seconds(posed)

    def _meet(self) -> None:
        """Where no search found a plan that fits: look for one under every allowed schedule, as the bound does.

        The searches' plans have one stage on each rank; with two, layers that are not neighbours share a rank's memory.
        """
        counts = self.request.counts
        for done, count in enumerate(counts):
            self.planner.tell(f"looking at every schedule, {count} microbatches", done, len(counts))
            seconds = self.request.budget_seconds / len(counts)
            self.places[count] = self._met(count, self._bounding(count, float("inf")).go_on(seconds))

    def _bounds(self, chosen: Candidate) -> dict[int, SimulatedBound]:
        """By number of microbatches, what no plan's simulated step is below; plans that are met are candidates.

        The bound of all is the least of them, so each gets a little of the budget first, and then always the least
        ones, side by side, as much again as they had, until all are close, the least cannot rise or the budget ends.
        """
        counts, workers = self.request.counts, min(self.planner.num_workers, len(self.request.counts))
        seconds = BOUND_SHARE * self.request.budget_seconds * workers
        on_their_way = {count: self._bounding(count, chosen.simulated_seconds) for count in counts}
        found = dict[int, SimulatedBound]()
        more = dict.fromkeys(counts, seconds / (4 * len(counts)))
        with ThreadPoolExecutor(workers, thread_name_prefix="bound") as pool:
            while True:
                self.planner.tell(f"bounding {', '.join(map(str, more))} microbatches", len(found), len(counts))
                bounds = pool.map(lambda count, seconds: on_their_way[count].go_on(seconds), more, more.values())
                found |= {count: self._met(count, bound) for count, bound in zip(more, bounds, strict=True)}
                left = seconds - sum(bound.spent_seconds for bound in found.values())
                open_ = [count for count in counts if found[count].seconds < (1 - CLOSE) * chosen.simulated_seconds]
                least = sorted(open_, key=lambda count: found[count].seconds)[:workers]
                if not least or not found[least[0]].can_rise or left < LEAST_SHARE * seconds:
                    break
                more = {count: min(found[count].spent_seconds, left / workers) for count in least}
        return found

    def _bounding(self, count: int, best_seconds: float) -> Bounding:
        schedules = self.request.allowed_schedules
        return bounding(self.prices.posed(count), schedules=schedules, best_seconds=best_seconds)

    def _met(self, count: int, bound: SimulatedBound) -> SimulatedBound:
        """The bound; the plan that was met while it was proved is a candidate."""
        if bound.plan is not None:
            met = self.simulator.candidate(self.prices.posed(count), bound.plan)
            if met.fits and all(met not in row.candidates for row in self.rows):
                self.rows.append(Considered(MET, met.posed, None, (met,)))
        return bound


def _devices(plan: Plan) -> Counter[str]:
    """How many of each type the plan uses."""
    used: Counter[str] = Counter()
    for how in map(plan.rank_configuration, range(len(plan.ranks))):
        used[how.device_type] += how.num_devices
    return used


def serial_seconds(posed: Posed) -> float:
    """More than any plan's simulated step: each layer a stage on its slowest device, one action after the other."""
    problem, costs = posed.problem, posed.problem.costs
    C, L, B = len(problem.configurations), problem.num_layers, problem.num_microbatches
    layers = [[costs.stage_seconds(k, k + 1, c) for c in range(C)] for k in range(L)]
    once = [[costs.once_seconds(k, k + 1, c) for c in range(C)] for k in range(L)]
    beside = max((cost.pass_seconds for cost in posed.pass_costs.values()), default=0.0)
    parts = max((float(shares.max()) for shares in posed.backward_parts_L2.values()), default=1.0)  # of a split pass
    link = problem.link_latency_seconds_CC.max() + problem.link_seconds_per_byte_CC.max() * problem.cut_bytes_L1
    ends = [cost.of_message(size) for cost in posed.pass_costs.values() for size in problem.cut_bytes_L1]
    work = 2.0 * (1.0 + parts) * sum(map(_finite_max, layers)) + 3.0 * L * beside
    messages = 2.0 * float(link.sum()) + 4.0 * L * max(ends, default=0.0)
    return B * (work + messages) + sum(map(_finite_max, once))


def _finite_max(seconds: Sequence[float]) -> float:
    """The slowest of the devices on which it is possible at all."""
    return max((one for one in seconds if one < float("inf")), default=0.0)
