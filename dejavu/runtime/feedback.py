"""What a training measured becomes rows of the database, and what steps remembered say of the next plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

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
    steps = len(result.losses)
    rows = [
        Measurement(
            kind="step",
            subject=step_subject(graph, plan),
            name=f"{job.workload.model}, {len(plan.stages)} stages, {plan.schedule} × {plan.num_microbatches}",
            device_type=plan.stages[0].configuration.device_type,
            direction="both",
            seconds=result.step_seconds,
            repeats=steps,
            how="median step of a pipeline training",
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
    for times in result.stages:
        stage = plan.stages[times.stage]
        how = stage.configuration
        if times.replica or how.tensor_parallel > 1 or job.workload.microbatch_size % how.data_parallel:
            continue  # one replica speaks for all; parts of layers are no layers
        shared["microbatch_size"] = job.workload.microbatch_size // how.data_parallel
        record = StageRecord.of(graph, stage, job.workload.optimizer)
        for direction, seconds, repeats, what in (
            ("forward", times.forward_seconds, steps * plan.num_microbatches, "microbatch"),
            ("backward", times.backward_seconds, steps * plan.num_microbatches, "microbatch"),
            ("optimizer", times.optimizer_seconds, steps, "step"),
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
                    peak_bytes=times.peak_bytes,
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
    """What this very plan took when it was last trained; None: never."""
    rows = database.latest(kind="step", subject=step_subject(graph, plan))
    return max(rows, key=lambda row: row.measured_at).seconds if rows else None


def remembered_plans(graph: Graph, database: ProfileDatabase) -> list[Plan]:
    """Every plan under which this very model was trained, at this microbatch size."""
    rows = database.latest(kind="step", microbatch_size=graph.microbatch_size, dtype=graph.dtype)
    known = [json.loads(row.extra or "{}") for row in rows]
    return [Plan.from_dict(one["plan"]) for one in known if one.get("graph") == graph.fingerprint]


def step_factor(graph: Graph, plan: Plan, database: ProfileDatabase, play: Callable[[Plan], float]) -> float:
    """What the played step of a plan has to be multiplied with, as remembered steps of this model say.

    Messages and waiting cost time that no price holds. A plan that was trained knows its own factor; a plan like it
    (as many stages, the same schedule and microbatches, the same devices) takes the geometric mean of the others', and
    any other plan that of all remembered steps of this model: what was never tried is not the faster for it.
    1.0 where nothing is remembered.

    Args:
        play: the step seconds of a plan by today's prices; may refuse one that is not of today's question.
    """
    own = remembered_step_seconds(graph, plan, database)
    if own is not None:
        return own / play(plan)
    rows = database.latest(kind="step", microbatch_size=graph.microbatch_size, dtype=graph.dtype)
    alike, others = list[float](), list[float]()
    for row in rows:
        known = json.loads(row.extra or "{}")
        if known.get("graph") != graph.fingerprint:
            continue
        other = Plan.from_dict(known["plan"])
        try:
            factor = math.log(row.seconds / play(other))
        except PlanError:
            continue
        others.append(factor)
        if _alike(other, plan):
            alike.append(factor)
    logs = alike or others
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def _alike(a: Plan, b: Plan) -> bool:
    return (a.schedule, a.num_microbatches, [s.configuration for s in a.stages]) == (
        b.schedule,
        b.num_microbatches,
        [s.configuration for s in b.stages],
    )
