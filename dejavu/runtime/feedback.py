"""What a training measured becomes rows of the database, and what steps remembered say of the next plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from dejavu.cost.believed import NORMAL_90, believed, deviation_of, pooled_deviation
from dejavu.cost.remembered import StageRecord
from dejavu.graph import Graph
from dejavu.plan import Plan
from dejavu.profiles import Measurement, ProfileDatabase, host_fingerprint, stable_hash
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.measured import bubble_fraction, waited_messages
from dejavu.stage_costs import PlanError

MESSAGE = "message"  # subject of what a training's messages took; a link measured alone is an "exchange"


def remember(job: TrainingJob, result: TrainingResult, graph: Graph, database: ProfileDatabase) -> int:
    """Append the measured times of the step and of every stage; the number of rows written."""
    if result.step_seconds is None:
        return 0
    plan = job.binding.plan
    shared: dict[str, Any] = {
        "dtype": job.workload.dtype,
        "microbatch_size": job.workload.microbatch_size,
        "num_ranks": len(job.binding.placements),
        "host_fingerprint": host_fingerprint(),
        "torch_version": torch.__version__,
        "source": "training",
        "measured_at": datetime.now(UTC),
    }
    times = result.step_times
    steps = times.num_counted if times else len(result.losses)
    shared["disturbed_share"] = times.disturbed_share if times else None
    rows = [
        Measurement(
            kind="step",
            subject=step_subject(graph, plan),
            name=f"{job.workload.model}, {len(plan.stages)} stages, {plan.schedule} × {plan.num_microbatches}",
            device_type=plan.stages[0].configuration.device_type,
            direction="both",
            seconds=result.step_seconds,
            seconds_low=times.low_seconds if times else None,
            seconds_high=times.high_seconds if times else None,
            repeats=steps,
            how="median step of a pipeline training, of the undisturbed ones where there are any",
            extra=json.dumps(
                {
                    "graph": graph.fingerprint,
                    "plan": plan.to_dict(),
                    "bubble_fraction": bubble_fraction(job.binding, result.last_step_passes),
                }
            ),
            **shared,
        )
    ]
    for stage_times in result.stages:
        stage = plan.stages[stage_times.stage]
        how = stage.configuration
        if stage_times.replica or how.tensor_parallel > 1 or job.workload.microbatch_size % how.data_parallel:
            continue  # one replica speaks for all; parts of layers are no layers
        shared["microbatch_size"] = job.workload.microbatch_size // how.data_parallel
        record = StageRecord.of(graph, stage, job.workload.optimizer)
        for direction, seconds, repeats, what in (
            ("forward", stage_times.forward_seconds, steps * plan.num_microbatches, "microbatch"),
            ("backward", stage_times.backward_seconds, steps * plan.num_microbatches, "microbatch"),
            ("optimizer", stage_times.optimizer_seconds, steps, "step"),
        ):
            if seconds <= 0:  # such a stage has nothing to do in this pass
                continue
            rows.append(
                Measurement(
                    kind="stage",
                    subject=record.subject,
                    name=f"{job.workload.model} {stage}",
                    device_type=how.device_type,
                    direction=direction,
                    seconds=seconds,
                    repeats=repeats,
                    peak_bytes=stage_times.peak_bytes,
                    how=f"median {what} of a pipeline training",
                    extra=record.to_json(),
                    **shared,
                )
            )
    rows += _message_rows(job, result, graph, shared)
    return database.append(rows)


def _message_rows(job: TrainingJob, result: TrainingResult, graph: Graph, shared: dict[str, Any]) -> list[Measurement]:
    """What a message took across each cut in the last step, where somebody waited for it; prices do not use these."""
    plan, found = job.binding.plan, dict[tuple[int, int], list[float]]()
    for event in waited_messages(job.binding, result.last_step_passes):
        cut, way = (event.stage, 0) if event.name[0] == "F" else (event.stage - 1, 1)
        found.setdefault((cut, way), []).append(event.seconds)
    rows = []
    for (cut, way), seconds in sorted(found.items()):
        ends = [plan.stages[s].configuration for s in (cut, cut + 1)]
        layer, replicas = graph.layers[plan.cuts[cut] - 1], ends[0].data_parallel
        low, middle, high = np.percentile(seconds, (10, 50, 90))
        rows.append(
            Measurement(
                kind="transfer",
                subject=MESSAGE,
                name=f"{job.workload.model}, {'gradient' if way else 'activation'} behind {layer.name}",
                device_type=ends[way].device_type,
                peer_device_type=ends[1 - way].device_type,
                size_bytes=layer.output_bytes // replicas,
                seconds=float(middle),
                seconds_low=float(low),
                seconds_high=float(high),
                repeats=len(seconds),
                how="from a pass to the pass that waited for it, in the last step of a pipeline training",
                **{**shared, "microbatch_size": max(1, job.workload.microbatch_size // replicas)},
            )
        )
    return rows


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


def is_surely_faster(new_seconds: float, new: StepFactor, kept_seconds: float, kept: StepFactor) -> bool:
    """Whether the gain of a new plan over one that is kept otherwise is larger than what is uncertain of the two.

    Args:
        new_seconds, kept_seconds: the two predicted steps, their factors included.
    """
    deviation = math.hypot(new.deviation, kept.deviation)
    return math.log(kept_seconds / new_seconds) > NORMAL_90 * deviation


class _Trained(NamedTuple):
    """A plan with the undisturbed steps of its trainings, the oldest first."""

    plan: Plan
    rows: list[Measurement]


def _trained(graph: Graph, database: ProfileDatabase) -> list[_Trained]:
    found = []
    for rows in database.history(kind="step", microbatch_size=graph.microbatch_size, dtype=graph.dtype):
        known = json.loads(rows[-1].extra or "{}")
        if known.get("graph") == graph.fingerprint and not rows[-1].is_disturbed:
            found.append(_Trained(Plan.from_dict(known["plan"]), rows))
    return found


def step_factor(graph: Graph, plan: Plan, database: ProfileDatabase, play: Callable[[Plan], float]) -> StepFactor:
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
            simulated_seconds = play(trained.plan)
        except PlanError:
            continue
        logs[trained.plan] = [math.log(row.seconds / simulated_seconds) for row in trained.rows]
        expected += [deviation_of(row.seconds, row.seconds_low, row.seconds_high) for row in trained.rows]
    return factor_from(logs, fmean(expected or [0.0]), plan)


def factor_from(logs: Mapping[Plan, Sequence[float]], expected: float, plan: Plan) -> StepFactor:
    """The rule of `step_factor`.

    Args:
        logs: of each plan that was trained, the logarithms of its measured steps over the simulated one.
        expected: by how much equal trainings are thought to differ before any were repeated, as a deviation of these.
    """
    if not logs:
        return StepFactor(1.0, math.inf, Basis.NOTHING, 0)
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
