"""Saving what a training measured as rows of the database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from dejavu.binding.binding import Binding
from dejavu.cluster import Cluster
from dejavu.cost.trainings.stages import StageRecord
from dejavu.cost.trainings.steps import Links, links_of, step_subject
from dejavu.cost.work import Work
from dejavu.graphs.graph import Graph
from dejavu.plans import Plan
from dejavu.profiles import Measurement, ProfileDatabase, host_fingerprint
from dejavu.timing.events import bubble_fraction, waited_messages
from dejavu.timing.training_times import TrainingTimes
from dejavu.workload import Workload

MESSAGE = "message"  # subject of the messages of a training; a link measured alone is an "exchange"


def remember(
    workload: Workload,
    binding: Binding,
    measured: TrainingTimes,
    graph: Graph,
    database: ProfileDatabase,
    cluster: Cluster | None = None,
) -> int:
    """Append the measured times of the step and of every stage; return the number of rows written.

    Of sequences in slices, and of two copies of the model, the step alone: stages' rows correct layers' prices, and a
    layer's passes have more kernels in slices; a rank of two copies does once a step what two stages do.

    Args:
        cluster: the links that it has between the binding's devices are kept with the step, if it has these devices.
    """
    if measured.step_seconds is None:
        return 0
    plan = binding.plan
    shared: dict[str, Any] = {
        "dtype": workload.dtype,
        "microbatch_size": workload.microbatch_size,
        "num_ranks": len(binding.placements),
        "host_fingerprint": host_fingerprint(),
        "torch_version": torch.__version__,
        "source": "training",
        "measured_at": datetime.now(UTC),
    }
    times = measured.step_times
    shared["disturbed_share"] = times.disturbed_share if times else None
    # A rule other than the mean makes steps longer, which is no news of the plan.
    is_known = cluster is not None and {placed.device for placed in binding.placements} <= set(cluster.devices())
    links = {"links": links_of(binding, cluster)} if cluster is not None and is_known else {}
    whole = [] if workload.gradients.gathers else [_step_row(workload, binding, measured, graph, shared, links)]
    if workload.in_slices or workload.both_ways:
        return database.append(whole)
    rows = [
        *whole,
        *_stage_rows(workload, plan, measured, graph, shared),
        *_message_rows(workload, binding, measured, graph, shared),
    ]
    return database.append(rows)


def _step_row(
    workload: Workload,
    binding: Binding,
    measured: TrainingTimes,
    graph: Graph,
    shared: Mapping[str, Any],
    links: Mapping[str, Links],
) -> Measurement:
    """Make the row of the step, with the work that it did, so that it can be held against physics."""
    assert measured.step_seconds is not None
    plan, times = binding.plan, measured.step_times
    dtype, optimizer = workload.dtype, workload.optimizer
    passes = [Work.of(graph.layers, direction, dtype, optimizer) for direction in ("forward", "backward")]
    whole = (passes[0] + passes[1]).times(workload.microbatches_in_a_step) + Work.of(
        graph.layers, "optimizer", dtype, optimizer
    )
    return Measurement(
        kind="step",
        subject=step_subject(graph, plan, workload.accumulate),
        name=f"{workload.model}, {len(plan.stages)} stages, {plan.schedule_name} × {plan.num_microbatches}",
        device_type=plan.stages[0].configuration.device_type,
        direction="both",
        seconds=measured.step_seconds,
        seconds_low=times.low_seconds if times else None,
        seconds_high=times.high_seconds if times else None,
        repeats=_num_steps(measured),
        flops=whole.flops,
        how="median step of a pipeline training, of the undisturbed ones where there are any",
        extra=json.dumps(
            {
                "graph": graph.fingerprint,
                "plan": plan.to_dict(),
                "accumulate": workload.accumulate,
                **links,
                "bubble_fraction": bubble_fraction(binding, measured.last_step_passes),
                **whole.to_dict(),
                **_messages_of_a_step(workload, plan, graph),
            }
        ),
        **shared,
    )


def _stage_rows(
    workload: Workload, plan: Plan, measured: TrainingTimes, graph: Graph, shared: Mapping[str, Any]
) -> list[Measurement]:
    """Make the rows of each stage's passes."""
    rows, steps = [], _num_steps(measured)
    for stage_times in measured.stages:
        stage = plan.stages[stage_times.stage]
        configuration = stage.configuration
        if (
            stage_times.replica
            or configuration.tensor_parallel > 1
            or configuration.context_parallel > 1
            or configuration.offload
            or workload.microbatch_size % configuration.data_parallel
        ):
            continue  # one replica speaks for all; parts of layers are no layers, nor are copies to the node's memory
        record = StageRecord.of(graph, stage, workload.optimizer)
        for direction, seconds, repeats, what in (
            ("forward", stage_times.forward_seconds, steps * workload.microbatches_in_a_step, "microbatch"),
            ("backward", stage_times.backward_seconds, steps * workload.microbatches_in_a_step, "microbatch"),
            ("optimizer", stage_times.optimizer_seconds, steps, "step"),
        ):
            if seconds <= 0:  # such a stage has nothing to do in this pass
                continue
            work = Work.of(graph.layers[stage.start : stage.stop], direction, workload.dtype, workload.optimizer)
            rows.append(
                Measurement(
                    kind="stage",
                    subject=record.subject,
                    name=f"{workload.model} {stage}",
                    device_type=configuration.device_type,
                    direction=direction,
                    seconds=seconds,
                    repeats=repeats,
                    peak_bytes=stage_times.peak_bytes,
                    flops=work.flops,
                    how=f"median {what} of a pipeline training",
                    extra=json.dumps({**json.loads(record.to_json()), **work.to_dict()}),
                    **{**shared, "microbatch_size": workload.microbatch_size // configuration.data_parallel},
                )
            )
    return rows


def _num_steps(measured: TrainingTimes) -> int:
    """Return how many steps the medians are of."""
    return measured.step_times.num_counted if measured.step_times else measured.num_steps


def _messages_of_a_step(workload: Workload, plan: Plan, graph: Graph) -> dict[str, int]:
    """Count the messages that a step sends between stages, and their bytes together."""
    sent = [graph.layers[cut - 1].output_bytes for cut in plan.cuts]
    each_way = 2 * workload.microbatches_in_a_step
    return {"num_messages": each_way * plan.num_slices * len(sent), "sent_bytes": each_way * sum(sent)}


def _message_rows(
    workload: Workload, binding: Binding, measured: TrainingTimes, graph: Graph, shared: Mapping[str, Any]
) -> list[Measurement]:
    """Make rows of the messages across each cut in the last step that a rank waited for; prices do not use these."""
    plan, found = binding.plan, dict[tuple[int, int], list[float]]()
    for event in waited_messages(binding, measured.last_step_passes):
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
                name=f"{workload.model}, {'gradient' if way else 'activation'} after {layer.name}",
                device_type=ends[way].device_type,
                peer_device_type=ends[1 - way].device_type,
                size_bytes=layer.output_bytes // replicas,
                seconds=float(middle),
                seconds_low=float(low),
                seconds_high=float(high),
                repeats=len(seconds),
                how="from a pass to the pass that waited for it, in the last step of a pipeline training",
                **{**shared, "microbatch_size": max(1, workload.microbatch_size // replicas)},
            )
        )
    return rows
