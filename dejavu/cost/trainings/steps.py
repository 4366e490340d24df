"""What steps that trainings measured say of the next plan's predicted step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from dejavu.cost.trainings.absurd import believable
from dejavu.cost.trainings.believed import NORMAL_90, believed, deviation_of, pooled_deviation
from dejavu.foundation.hashing import stable_hash
from dejavu.graphs.graph import Graph
from dejavu.plans import Plan
from dejavu.plans.stage_costs import PlanError
from dejavu.profiles import Measurement, ProfileDatabase


def step_subject(graph: Graph, plan: Plan) -> str:
    """Under which key a plan's measured step is remembered."""
    return stable_hash([graph.fingerprint, plan.to_dict()])


def remembered_step_seconds(graph: Graph, plan: Plan, database: ProfileDatabase) -> float | None:
    """What this very plan took when it was last trained undisturbed; None: never."""
    rows = database.latest(kind="step", subject=step_subject(graph, plan))
    quiet = [row for row in rows if not row.is_disturbed]
    return max(quiet, key=lambda row: row.measured_at).seconds if quiet else None


def remembered_plans(graph: Graph, database: ProfileDatabase) -> list[Plan]:
    """Every plan under which this very model was trained undisturbed, at this microbatch size."""
    return [trained.plan for trained in _trained(graph, database)]


class Basis(StrEnum):
    """What a factor rests on."""

    OWN = "this plan's own trainings"
    ALIKE = "trainings of plans that differ only in their cuts"
    OTHERS = "trainings of other plans of this model, which agree"
    NOTHING = "no training"


@dataclass(frozen=True)
class StepFactor:
    """What the simulated step of a plan is multiplied with, as remembered trainings say, and how sure that is.

    Attributes:
        deviation: standard deviation of the logarithm of what the plan will take over what is predicted; infinite
            where no training of this model is remembered.
        num_trainings: on how many it rests.
    """

    factor: float
    deviation: float
    basis: Basis
    num_trainings: int

    def interval(self, step_seconds: float) -> tuple[float, float]:
        """The 90 % interval of the step that is predicted at `step_seconds`, the factor included."""
        if math.isinf(self.deviation):
            return 0.0, math.inf
        reach = math.exp(NORMAL_90 * self.deviation)
        return step_seconds / reach, step_seconds * reach


NO_FACTOR = StepFactor(1.0, math.inf, Basis.NOTHING, 0)


def is_surely_faster(new_seconds: float, new: StepFactor, kept_seconds: float, kept: StepFactor) -> bool:
    """Whether the gain of a new plan over one that is kept otherwise is larger than what is uncertain of the two.

    Args:
        new_seconds, kept_seconds: the two predicted steps, their factors included.
    """
    deviation = math.hypot(new.deviation, kept.deviation)
    return math.log(kept_seconds / new_seconds) > NORMAL_90 * deviation


class _TrainedStep(NamedTuple):
    """A plan with the undisturbed steps of its trainings, the oldest first."""

    plan: Plan
    rows: list[Measurement]


def _trained(graph: Graph, database: ProfileDatabase) -> list[_TrainedStep]:
    found = []
    for rows in database.history(kind="step", microbatch_size=graph.microbatch_size, dtype=graph.dtype):
        known = json.loads(rows[-1].extra or "{}")
        if known.get("graph") == graph.fingerprint and not rows[-1].is_disturbed:
            found.append(_TrainedStep(Plan.from_dict(known["plan"]), rows))
    return found


def step_factor(graph: Graph, plan: Plan, database: ProfileDatabase, simulate: Callable[[Plan], float]) -> StepFactor:
    """What remembered trainings of this model say of a plan's simulated step.

    Messages and waiting cost time that no price holds. A plan that was trained knows its own factor best, one that
    differs from trained ones only in its cuts takes theirs. Any other plan takes what those that were trained have in
    common, as far as each of them would have been foretold by the rest: one plan's factor may be its schedule's own, so
    it says nothing of other schedules. Of each, only what chance does not explain is believed; steps that were measured
    beside other work say nothing.

    Args:
        play: the step seconds of a plan by today's prices; may refuse one that is not of today's question.
    """
    logs, expected = dict[Plan, list[float]](), list[float]()
    for trained in _trained(graph, database):
        try:
            simulated_seconds = simulate(trained.plan)
        except PlanError:
            continue
        rows = believable(trained.rows, simulated_seconds)
        if rows:
            logs[trained.plan] = [math.log(row.seconds / simulated_seconds) for row in rows]
            expected += [deviation_of(row.seconds, row.seconds_low, row.seconds_high) for row in rows]
    return factor_from(logs, fmean(expected or [0.0]), plan)


def factor_from(logs: Mapping[Plan, Sequence[float]], expected: float, plan: Plan) -> StepFactor:
    """The rule of `step_factor`.

    Args:
        logs: of each plan that was trained, the logarithms of its measured steps over the simulated one.
        expected: by how much equal trainings are thought to differ before any were repeated, as a deviation of these.
    """
    if not logs:
        return NO_FACTOR
    noise = pooled_deviation(list(logs.values()), expected)
    own = logs.get(plan)
    if own:
        log = believed(fmean(own), noise / math.sqrt(len(own)))
        # What was not believed of the difference stays as doubt.
        doubt = math.hypot(noise * math.sqrt(1 + 1 / len(own)), fmean(own) - log)
        return StepFactor(math.exp(log), doubt, Basis.OWN, len(own))
    alike = [fmean(steps) for other, steps in logs.items() if _alike(other, plan)]
    if alike:
        spread = pooled_deviation([alike], noise) * math.sqrt(1 + 1 / len(alike))
        log = believed(fmean(alike), spread)
        return StepFactor(math.exp(log), math.hypot(spread, fmean(alike) - log), Basis.ALIKE, len(alike))
    return _of_others(logs, noise)


def _of_others(logs: Mapping[Plan, Sequence[float]], noise: float) -> StepFactor:
    """What plans of other kinds have in common, tried on themselves: each foretold by the mean of the rest."""
    kinds: list[tuple[Plan, list[float]]] = []
    for plan, steps in logs.items():
        same = next((means for other, means in kinds if _alike(other, plan)), None)
        if same is None:
            kinds.append((plan, same := []))
        same.append(fmean(steps))
    means = [fmean(steps) for _, steps in kinds]
    count = sum(len(steps) for steps in logs.values())
    if len(means) == 1:  # nothing says whether it is this kind's own
        return StepFactor(1.0, math.hypot(noise, means[0]), Basis.NOTHING, count)
    rest = [(sum(means) - mean) / (len(means) - 1) for mean in means]
    explained = sum(mean * others for mean, others in zip(means, rest, strict=True))
    weight = min(max(explained / (sum(others**2 for others in rest) or 1.0), 0.0), 1.0)
    missed = math.sqrt(fmean((mean - weight * others) ** 2 for mean, others in zip(means, rest, strict=True)))
    doubt = math.hypot(noise, missed)
    log = believed(weight * fmean(means), doubt)
    return StepFactor(math.exp(log), math.hypot(doubt, weight * fmean(means) - log), Basis.OTHERS, count)


def _alike(a: Plan, b: Plan) -> bool:
    return (a.schedule, a.num_microbatches, [s.configuration for s in a.stages]) == (
        b.schedule,
        b.num_microbatches,
        [s.configuration for s in b.stages],
    )
