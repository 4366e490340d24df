"""Why no plan of a request was found, and whether it is proved that there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural
from dejavu.planning.candidates import Simulator
from dejavu.planning.choice import Considered
from dejavu.planning.prices import Prices
from dejavu.planning.proofs.bounds import has_no_plan
from dejavu.planning.questions import FURTHER, PROVER, Question
from dejavu.planning.request import PlanRequest
from dejavu.planning.schedules import under
from dejavu.plans import Infeasible, NotFound, Obstacle
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import CHIMERA
from dejavu.search.feasible.fit import is_feasible
from dejavu.simulation.bound import SimulatedBound

EXPLAIN_SECONDS = 10.0  # to find the least memory that suffices where nothing fits
# Before and after a proof, which is of plans with one stage on each rank, where no allowed schedule runs such: what
# would do for the one need not do for the others, whose stages share a rank's memory.
ONE_STAGE_ALONE = ("with one stage on each rank ", "; no other way fits either, and it may need more")


@dataclass(frozen=True, eq=False)
class NoneFound:
    """What is known of a request for which no plan was found so far.

    Attributes:
        problems: of all numbers of microbatches and parts of the cluster.
        rows: what was considered.
        looked: bounds by the problem's place, where every schedule had to be searched.
    """

    request: PlanRequest
    prices: Prices
    simulator: Simulator
    problems: tuple[PricedProblem, ...]
    rows: tuple[Considered, ...]
    looked: Mapping[int, SimulatedBound]

    def why(self) -> tuple[Infeasible | NotFound, str]:
        """Return the answer for the most microbatches, and a sentence about all.

        Infeasible only where it is proved for every problem and every schedule: the searches' proofs cover one stage on
        each rank; for the other schedules the bound's own search space has to be empty.
        """
        request = self.request
        counts, names = request.counts, ", ".join(request.allowed_schedules)
        most = plural(counts[-1], "microbatch")
        others = f" (nor in {', '.join(map(str, counts[:-1]))})" if len(counts) > 1 else ""
        last = [one for one in self.problems if one.problem.whole_microbatches == counts[-1]]  # on most devices first
        proved = all(map(self.is_proved_empty, self.problems))
        if proved and (request.one_stage_a_rank or all(map(self._is_empty, self.problems))):
            seconds = EXPLAIN_SECONDS / len(last)  # with time for a good sentence
            answers = [Question(PROVER, one, seconds).answer() for one in last]
            if isinstance(answers[0], Infeasible) and all(isinstance(one, Infeasible) for one in answers):
                ways = ("", "") if request.may_run_one_stage_a_rank else ONE_STAGE_ALONE
                reasons = self._of_parts(last, [f"{ways[0]}{answer}{ways[1]}" for answer in answers])
                return answers[0], f"in {most}{others}: {reasons}"
        reasons = self._of_parts(last, [self._why_missed(one, proved) for one in last])
        found = NotFound(PROVER, Obstacle.NONE_CONSIDERED_FITS, reasons, 0.0)
        return found, f"no plan was found under {names} in {most}{others}, which proves nothing: {reasons}"

    def _of_parts(self, problems: Sequence[PricedProblem], reasons: Sequence[str]) -> str:
        """Say each reason of the part of the cluster that it is of: what fits no stage of one may fit another's."""
        widths = map(self.prices.widths_of, problems)
        return "; ".join(f"where {way}, {why}" if way else why for way, why in zip(widths, reasons, strict=True))

    def _why_missed(self, priced: PricedProblem, proved: bool) -> str:
        """Say why no plan of a problem was found, where not all that could have one is proved to have none."""
        missed = self._missed(priced)
        reason = str(missed[-1]) if missed else self._why_none_of_the_found()
        if proved:
            return f"with one stage on each rank {reason}; in another way a plan may fit, and none was found"
        return reason

    def _why_none_of_the_found(self) -> str:
        """Say why no plan that a search found can be taken: what a schedule asks for, or memory."""
        found = [(row.priced, row.result.plan) for row in self.rows if row.result is not None]
        if not any(row.candidates for row in self.rows):
            for (priced, plan), name in product(found, self.request.allowed_schedules):
                try:
                    self.simulator.candidate(priced, under(priced, plan, name))
                except InputError as error:
                    return str(error)
        return "the plans that were found do not fit their memory"

    def _missed(self, priced: PricedProblem) -> list[Infeasible | NotFound]:
        """Return why the searches that were asked found no plan of this problem; a proof that there is none is last."""
        asked = self.request.searches or (PROVER, *FURTHER)
        rows = [row for row in self.rows if row.priced is priced]
        missed = [row.answer for row in rows if isinstance(row.answer, NotFound) and row.search in asked]
        return [*missed, *(row.answer for row in rows if isinstance(row.answer, Infeasible))]

    def is_proved_empty(self, priced: PricedProblem) -> bool:
        """Return whether a search proved that no plan with one stage on each rank fits."""
        return any(row.proves_infeasible(priced) for row in self.rows)

    def _is_empty(self, priced: PricedProblem) -> bool:
        """Return whether it is proved that no plan fits under any allowed schedule."""
        place = next(place for place, one in enumerate(self.problems) if one is priced)
        return place in self.looked and has_no_plan(priced, self.looked[place]) and self._fits_no_way(priced)

    def _fits_no_way(self, priced: PricedProblem) -> bool:
        """Return whether it is proved that no plan of both directions or of slices fits, if such plans may be used.

        Of both directions a rank holds a stage of each copy, with a microbatch of each at least: each stage fits by
        itself with one. So does one of slices, of which there may be more stages than microbatches.
        """
        request, problem = self.request, priced.problem
        if CHIMERA not in request.allowed_schedules and not request.may_slice:
            return True
        most = None if request.may_slice else problem.max_stages
        alone = replace(problem, num_microbatches=1, num_slices=1, max_stages=most)
        return is_feasible(alone, EXPLAIN_SECONDS) is False
