"""What a training measured becomes rows of the database: the step as a whole, and each stage."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from dejavu.plan import Plan
from dejavu.profiles import Measurement, ProfileDatabase, host_fingerprint, stable_hash
from dejavu.runtime.job import TrainingJob, TrainingResult


def remember(job: TrainingJob, result: TrainingResult, graph_fingerprint: str, database: ProfileDatabase) -> int:
    """Append the measured times; the number of rows written."""
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
            subject=step_subject(graph_fingerprint, plan),
            name=f"{job.workload.model}, {len(plan.stages)} stages, {plan.schedule} × {plan.num_microbatches}",
            device_type=plan.stages[0].configuration.device_type,
            direction="both",
            seconds=result.step_seconds,
            repeats=steps,
            how="median step of a pipeline training",
            **shared,
        )
    ]
    for times in result.stages:
        stage = plan.stages[times.stage]
        for direction, seconds in (("forward", times.forward_seconds), ("backward", times.backward_seconds)):
            rows.append(
                Measurement(
                    kind="stage",
                    subject=stable_hash([graph_fingerprint, stage.start, stage.stop, str(stage.configuration)]),
                    name=f"{job.workload.model} {stage}",
                    device_type=stage.configuration.device_type,
                    direction=direction,
                    seconds=seconds,
                    repeats=steps * plan.num_microbatches,
                    peak_bytes=times.peak_bytes,
                    how="median microbatch of a pipeline training",
                    **shared,
                )
            )
    return database.append(rows)


def step_subject(graph_fingerprint: str, plan: Plan) -> str:
    """Under which key a plan's measured step is remembered."""
    return stable_hash([graph_fingerprint, plan.to_dict()])


def remembered_step_seconds(graph_fingerprint: str, plan: Plan, database: ProfileDatabase) -> float | None:
    """What this very plan took when it was last trained; None: never."""
    rows = database.latest(kind="step", subject=step_subject(graph_fingerprint, plan))
    return max(rows, key=lambda row: row.measured_at).seconds if rows else None
