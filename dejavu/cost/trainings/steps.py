"""Correcting the predicted step by steps that earlier trainings measured."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations_with_replacement
from statistics import fmean
from typing import NamedTuple

from dejavu.binding.binding import Binding
from dejavu.cluster import Cluster, pair
from dejavu.cost.trainings.absurd import believable
from dejavu.cost.trainings.believed import NORMAL_90, believed, deviation_of, pooled_deviation
from dejavu.foundation.hashing import stable_hash
from dejavu.graphs.graph import Graph
from dejavu.plans import Plan
from dejavu.plans.stage_costs import PlanError
from dejavu.profiles import Measurement, ProfileDatabase

Links = list[list[float]]  # bytes per second and seconds of latency of each, in order


def links_of(binding: Binding, cluster: Cluster) -> Links:
    """Return the links between a binding's devices, inside nodes and between them, as the cluster's file has them."""
    on_node = Counter((placed.device.group, placed.device.node_index) for placed in binding.placements)
    on_group = Counter(group for group, _ in on_node)
    found = {cluster.group(group).link for (group, _), count in on_node.items() if count > 1}
    for a, b in combinations_with_replacement(sorted(on_group), 2):
        if a != b or on_group[a] > 1:
            found.add(cluster.links_between[pair(a, b)])
    return [list(one) for one in sorted({(link.bytes_per_second, link.latency_seconds) for link in found})]


def step_subject(graph: Graph, plan: Plan, accumulate: int = 1) -> str:
    """Return the key of a plan's measured step in the database; `accumulate`: runs of its schedule in a step."""
    return stable_hash([graph.fingerprint, plan.to_dict(), *([accumulate] if accumulate > 1 else [])])


def remembered_step_seconds(graph: Graph, plan: Plan, database: ProfileDatabase, accumulate: int = 1) -> float | None:
    """Return this plan's step when it was last trained undisturbed; None: never."""
    rows = database.latest(kind="step", subject=step_subject(graph, plan, accumulate))
    quiet = [row for row in rows if not row.is_disturbed]
    return max(quiet, key=lambda row: row.measured_at).seconds if quiet else None


def remembered_plans(graph: Graph, database: ProfileDatabase, accumulate: int = 1) -> list[Plan]:
    """Return every plan under which this model was trained undisturbed, at this microbatch size."""
    return [trained.plan for trained in _trained(graph, database, accumulate)]


class Basis(StrEnum):
    """Which trainings a factor is based on."""

    OWN = "this plan's own trainings"
    ALIKE = "trainings of plans that differ only in their cuts"
    OTHERS = "trainings of other plans of this model, which agree"
    NOTHING = "no training"


@dataclass(frozen=True)
class StepFactor:
    """The factor on a plan's simulated step that remembered trainings give, and its uncertainty.

    Attributes:
        deviation: standard deviation of the logarithm of the plan's actual over its predicted step; infinite where no
            training of this model is remembered.
        num_trainings: on how many trainings it is based.
        num_steps: of these, how many steps of this plan their medians are of.
    """

    factor: float
    deviation: float
    basis: Basis
    num_trainings: int
    num_steps: int = 0

    def interval(self, step_seconds: float) -> tuple[float, float]:
        """Return the 90 % interval of the step that is predicted at `step_seconds`, the factor included."""
        if math.isinf(self.deviation):
            return 0.0, math.inf
        reach = math.exp(NORMAL_90 * self.deviation)
        return step_seconds / reach, step_seconds * reach


NO_FACTOR = StepFactor(1.0, math.inf, Basis.NOTHING, 0)


def is_surely_faster(new_seconds: float, new: StepFactor, kept_seconds: float, kept: StepFactor) -> bool:
    """Return whether a new plan's gain over one that is kept otherwise exceeds the uncertainty of the two.

    Args:
        new_seconds, kept_seconds: the two predicted steps, their factors included.
    """
    deviation = math.hypot(new.deviation, kept.deviation)
    return math.log(kept_seconds / new_seconds) > NORMAL_90 * deviation


class _TrainedStep(NamedTuple):
    """A plan with the undisturbed steps of its trainings, the oldest first."""

    plan: Plan
    rows: list[Measurement]


def _trained(graph: Graph, database: ProfileDatabase, accumulate: int) -> list[_TrainedStep]:
    found = []
    for rows in database.history(kind="step", microbatch_size=graph.microbatch_size, dtype=graph.dtype):
        known = json.loads(rows[-1].extra or "{}")
        is_same = (known.get("graph"), known.get("accumulate", 1)) == (graph.fingerprint, accumulate)
        if is_same and not rows[-1].is_disturbed:
            found.append(_TrainedStep(Plan.from_dict(known["plan"]), rows))
    return found


def step_factor(
    graph: Graph,
    plan: Plan,
    database: ProfileDatabase,
    simulate: Callable[[Plan], float],
    accumulate: int = 1,
    links: Callable[[Plan], Links | None] = lambda _: None,
) -> StepFactor:
    """Return the correction of a plan's simulated step by remembered trainings of this model.

    Messages and waiting cost time that no price includes. A plan that was trained uses its own factor; one that differs
    from trained ones only in its cuts uses theirs. Any other plan uses what the trained ones have in common, as far as
    each of them would have been predicted by the rest: one plan's factor may be specific to its schedule, so it says
    nothing about other schedules. Of each, only what chance does not explain is believed; steps that were measured
    beside other work are not used, nor those over other links than the plan would have today.

    Args:
        simulate: the step seconds of a plan by today's prices; may raise for one that is not of today's request.
        accumulate: runs of the schedule in a step; steps of other numbers of them are others.
        links: between the devices that a plan would have today; None: that is not known.
    """
    logs, steps, expected = dict[Plan, list[float]](), dict[Plan, int](), list[float]()
    for trained in _trained(graph, database, accumulate):
        try:
            simulated_seconds = simulate(trained.plan)
        except PlanError:
            continue
        rows = believable(_over(links(trained.plan), trained.rows), simulated_seconds)
        if rows:
            steps[trained.plan] = sum(row.repeats for row in rows)
            logs[trained.plan] = [math.log(row.seconds / simulated_seconds) for row in rows]
            expected += [deviation_of(row.seconds, row.seconds_low, row.seconds_high) for row in rows]
    return replace(factor_from(logs, fmean(expected or [0.0]), plan), num_steps=steps.get(plan, 0))


def _over(links: Links | None, rows: Sequence[Measurement]) -> list[Measurement]:
    """Return the rows that were measured over these links, and those of which that is not known."""
    return [row for row in rows if links is None or json.loads(row.extra or "{}").get("links", links) == links]


def factor_from(logs: Mapping[Plan, Sequence[float]], expected: float, plan: Plan) -> StepFactor:
    """Apply the rule of `step_factor`.

    Args:
        logs: for each trained plan, the logarithms of its measured steps over the simulated one.
        expected: prior standard deviation of these between equal trainings, before any were repeated.
    """
    if not logs:
        return NO_FACTOR
    noise = pooled_deviation(list(logs.values()), expected)
    own = logs.get(plan)
    if own:
        log = believed(fmean(own), noise / math.sqrt(len(own)))
        # The part of the difference that was not believed adds to the uncertainty.
        doubt = math.hypot(noise * math.sqrt(1 + 1 / len(own)), fmean(own) - log)
        return StepFactor(math.exp(log), doubt, Basis.OWN, len(own))
    alike = [fmean(steps) for other, steps in logs.items() if _alike(other, plan)]
    if alike:
        spread = pooled_deviation([alike], noise) * math.sqrt(1 + 1 / len(alike))
        log = believed(fmean(alike), spread)
        return StepFactor(math.exp(log), math.hypot(spread, fmean(alike) - log), Basis.ALIKE, len(alike))
    return _of_others(logs, noise)


def _of_others(logs: Mapping[Plan, Sequence[float]], noise: float) -> StepFactor:
    """Return what other plans have in common, cross-validated: each is predicted by the mean of the rest."""
    kinds: list[tuple[Plan, list[float]]] = []
    for plan, steps in logs.items():
        same = next((means for other, means in kinds if _alike(other, plan)), None)
        if same is None:
            kinds.append((plan, same := []))
        same.append(fmean(steps))
    means = [fmean(steps) for _, steps in kinds]
    count = sum(len(steps) for steps in logs.values())
    if len(means) == 1:  # it may be specific to this one plan
        return StepFactor(1.0, math.hypot(noise, means[0]), Basis.NOTHING, count)
    rest = [(sum(means) - mean) / (len(means) - 1) for mean in means]
    explained = sum(mean * others for mean, others in zip(means, rest, strict=True))
    weight = min(max(explained / (sum(others**2 for others in rest) or 1.0), 0.0), 1.0)
    missed = math.sqrt(fmean((mean - weight * others) ** 2 for mean, others in zip(means, rest, strict=True)))
    doubt = math.hypot(noise, missed)
    log = believed(weight * fmean(means), doubt)
    return StepFactor(math.exp(log), math.hypot(doubt, weight * fmean(means) - log), Basis.OTHERS, count)


def _alike(a: Plan, b: Plan) -> bool:
    """Return whether two plans differ in their cuts alone."""
    ways = [(one.schedule, one.num_microbatches, one.slices, one.both_ways) for one in (a, b)]
    return ways[0] == ways[1] and [s.configuration for s in a.stages] == [s.configuration for s in b.stages]
