"""What steps that trainings measured say of the next plan's predicted step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from dejavu.graph import Graph
from dejavu.plan import Plan
from dejavu.profiles import ProfileDatabase, stable_hash
from dejavu.stage_costs import PlanError

Simulate = Callable[[Plan], float]
UNTRIED = 0.03  # a plan that was never trained has to promise so much more: predictions err, and steps vary by that


@dataclass(frozen=True)
class Correction:
    """Of a simulated step.

    Attributes:
        factor: what such steps took when they were trained, over what is simulated of them today.
        uncertainty: relative; by so much more than a trained plan's gain has one to be that was never trained.
        is_own: this very plan was trained.
    """

    factor: float = 1.0
    uncertainty: float = 0.0
    is_own: bool = False


@dataclass(frozen=True)
class StepMemory:
    """The measured steps of a database."""

    database: ProfileDatabase

    def step_seconds(self, graph: Graph, plan: Plan) -> float | None:
        """What this very plan took when it was last trained; None: never."""
        rows = self.database.latest(kind="step", subject=step_subject(graph, plan))
        return max(rows, key=lambda row: row.measured_at).seconds if rows else None

    def plans(self, graph: Graph) -> list[Plan]:
        """Every plan under which this very model was trained, at this microbatch size."""
        return [plan for plan, _ in self._trained(graph)]

    def correction(self, graph: Graph, plan: Plan, simulate: Simulate) -> Correction:
        """What the simulated step of a plan has to be multiplied with.

        Messages and waiting cost time that no price holds. A plan that was trained knows its own factor; a plan like it
        (as many stages, the same schedule and microbatches, the same devices) takes the geometric mean of the others',
        and any other plan that of all remembered steps of this model: what was never tried is not the faster for it.

        Args:
            simulate: the step seconds of a plan by today's prices; may refuse one that is not of today's problem.
        """
        own = self.step_seconds(graph, plan)
        if own is not None:
            return Correction(own / simulate(plan), is_own=True)
        alike, others = list[float](), list[float]()
        for other, seconds in self._trained(graph):
            try:
                factor = math.log(seconds / simulate(other))
            except PlanError:
                continue
            others.append(factor)
            if _alike(other, plan):
                alike.append(factor)
        logs = alike or others
        return Correction(math.exp(sum(logs) / len(logs)), UNTRIED) if logs else Correction()

    def _trained(self, graph: Graph) -> list[tuple[Plan, float]]:
        rows = self.database.latest(kind="step", microbatch_size=graph.microbatch_size, dtype=graph.dtype)
        known = [(json.loads(row.extra or "{}"), row.seconds) for row in rows]
        return [(Plan.from_dict(one["plan"]), s) for one, s in known if one.get("graph") == graph.fingerprint]


def step_subject(graph: Graph, plan: Plan) -> str:
    """Under which key a plan's measured step is remembered."""
    return stable_hash([graph.fingerprint, plan.to_dict()])


def _alike(a: Plan, b: Plan) -> bool:
    return (a.schedule, a.num_microbatches, [s.configuration for s in a.stages]) == (
        b.schedule,
        b.num_microbatches,
        [s.configuration for s in b.stages],
    )
