"""The same layers for every schedule: even and uneven, with and without messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.schedules import PIPELINE_SCHEDULES, PipelineSchedule, cut_evenly, simulate_schedule
from dejavu.simulation import StageSeconds

LAYERS_A_RANK = 8
# What a rank's share of the model takes and holds where layers are alike; a unit system as good as any.
FORWARD_SECONDS, UPDATE_SECONDS, MESSAGE_SECONDS = 0.010, 0.002, 0.001
WEIGHT_BYTES, FIXED_BYTES, ACTIVATION_BYTES = 2.0**30, 4 * 2.0**30, 2.0**29  # fixed: weights, gradients, two moments
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """Layers of one kind.

    Attributes:
        backward: times as long as forward.
        message_seconds: across a cut, one way.
        is_uneven: each layer's work is drawn between half and one and a half of the even one's.
        update_seconds: of a rank's share.
    """

    backward: float = 2.0
    message_seconds: float = 0.0
    is_uneven: bool = False
    update_seconds: float = 0.0


KINDS = {
    "equal passes": Kind(backward=1.0),
    "even": Kind(),
    "messages": Kind(message_seconds=MESSAGE_SECONDS, update_seconds=UPDATE_SECONDS),
    "uneven": Kind(message_seconds=MESSAGE_SECONDS, update_seconds=UPDATE_SECONDS, is_uneven=True),
}


def layers_of(kind: Kind, num_ranks: int, seed: int) -> tuple[StageSeconds, ...]:
    """Return the layers of a model for so many ranks."""
    count = LAYERS_A_RANK * num_ranks
    drawn = np.random.default_rng(seed).uniform(0.5, 1.5, count) if kind.is_uneven else np.ones(count)
    forward = FORWARD_SECONDS * drawn / drawn.sum() * num_ranks
    return tuple(
        StageSeconds(
            forward_seconds=float(seconds),
            backward_seconds=float(seconds * kind.backward),
            per_step_seconds=kind.update_seconds / LAYERS_A_RANK,
            transfer_seconds=kind.message_seconds,
            activation_bytes=ACTIVATION_BYTES / LAYERS_A_RANK,
            fixed_bytes=FIXED_BYTES / LAYERS_A_RANK,
        )
        for seconds in forward
    )


def schedule_rows(seed: int) -> Iterator[Row]:
    """Yield a row for each schedule on each problem that it has an order for."""
    for name, kind in KINDS.items():
        for num_ranks in (4, 8):
            layers = layers_of(kind, num_ranks, seed)
            for num_microbatches in (num_ranks, 2 * num_ranks, 4 * num_ranks):
                for schedule_name, schedule in PIPELINE_SCHEDULES.items():
                    try:
                        schedule.check(num_ranks, num_microbatches)
                    except InputError:
                        continue
                    found = _row(schedule, layers, num_ranks, num_microbatches)
                    said = schedule.theory(num_ranks, num_microbatches).bubble_fraction
                    yield {
                        "what": "schedule",
                        "problem": name,
                        "ranks": num_ranks,
                        "microbatches": num_microbatches,
                        "schedule": schedule_name,
                        **found,
                        "formula_bubble_percent": None if said is None or name != "equal passes" else 100.0 * said,
                    }


def _row(schedule: PipelineSchedule, layers: tuple[StageSeconds, ...], num_ranks: int, num_microbatches: int) -> Row:
    stages = cut_evenly(layers, schedule.stages_per_rank * num_ranks)
    weights = [stage.fixed_bytes * WEIGHT_BYTES / FIXED_BYTES for stage in stages]
    found = simulate_schedule(schedule, stages, num_microbatches, weight_bytes=weights)
    return {
        "synchronous": schedule.is_synchronous,
        "runs": schedule.runs_as is not None,
        "step_ms": 1e3 * found.step_seconds,
        "bubble_percent": 100.0 * found.bubble_fraction,
        "activations": max(found.activations_P),
        "weight_versions": max(found.weight_versions_P),
        "peak_gib": max(found.peak_bytes_P) / 2**30,
        "staleness_steps": found.staleness_steps,
    }
