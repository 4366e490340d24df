"""Whether any plan fits: one that does, or the proof that none does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dejavu.plans import Answer, Obstacle, Problem
from dejavu.search._base import Incumbent, Search
from dejavu.search.feasible.fit import fit, is_feasible, load_compiled_loops
from dejavu.search.feasible.infeasible import why_infeasible


@dataclass(frozen=True)
class Feasible(Search):
    """Any plan that fits, or a proof that there is none, on the problem's own layers: memory alone, seconds aside.

    A table over the stages after a cut and the devices that they use holds the cuts from which all layers to the last
    can be run; where what a stage needs grows with its layers, stages as long as they can be are enough. The first cut
    is reached, or every way was tried. Choose it to know whether a problem has a plan where memory is so tight that
    other searches meet none; the plan is the first that it meets.

    Attributes:
        explain_share: of the time that is left goes to what would do, once it is proved that nothing fits.
    """

    name: ClassVar[str] = "feasible"
    explain_share: float = 0.5

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        with best.clock_stopped():
            load_compiled_loops()
        plan, is_settled = fit(problem, best.remaining_seconds)
        if plan is not None:
            best.offer(plan)
            return best.result(lower_bound_seconds=0.0)
        if not is_settled:
            late = f"feasible search met no plan in {best.budget_seconds:g} s, nor did it try every way"
            return best.not_found(Obstacle.OUT_OF_TIME, late)
        return best.infeasible(why_infeasible(problem, is_feasible, self.explain_share * best.remaining_seconds))
