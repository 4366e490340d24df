"""All plans, one after another: the referee of the others on small problems."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import ClassVar

from dejavu.foundation.errors import InputError
from dejavu.operator_cuts._base import Answer, Best, Cutter
from dejavu.operator_cuts.problem import CutPlan, CutProblem


@dataclass(frozen=True)
class Enumeration(Cutter):
    """Prices every plan; proves its answer.

    Attributes:
        most_plans: more than so many are refused.
    """

    name: ClassVar[str] = "enumeration"
    most_plans: int = 100_000

    def run(self, problem: CutProblem, *, seed: int = 0) -> Answer:
        best, cuts = Best(problem), problem.device_cuts or ()
        points = range(1, len(problem.arrays))
        counts = range(problem.most_stages)
        count = sum(comb(len(points), k) * comb(len(cuts), k) for k in counts)
        if count > self.most_plans:
            raise InputError(f"enumeration: found {count:,} plans; wanted at most {self.most_plans:,}")
        for k in counts:
            for devices in combinations(cuts, k):
                for operators in combinations(points, k):
                    best.offer(CutPlan(operators, devices))
        if best.step_seconds == float("inf"):
            return best.none_fits(self.name, best.least_bytes)
        return best.found(self.name, best.step_seconds)
