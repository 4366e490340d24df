"""The losses of a pipeline against one process: every schedule × every way to spread a stage, 2 to 4 ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.pipeline.plans import by_hand, even_bounds, job_of, one_device
from benchmarks.pipeline.ranks import train_all
from dejavu.foundation.registry import named
from dejavu.init import Draw
from dejavu.plans import StageConfiguration
from dejavu.plans.schedule import SCHEDULES
from dejavu.runtime.single import train_single
from dejavu.workload import OptimizerSettings, SyntheticSettings, TrialSettings, Workload

NUM_MICROBATCHES = 4
WORKLOAD = Workload(
    model_options={"num_blocks": 6, "width": 48, "num_heads": 4},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=64),
    sequence_length=32,
    batch_size=24,
    num_microbatches=NUM_MICROBATCHES,
    optimizer=OptimizerSettings(learning_rate=3e-3, clip_norm=1.0),
    trials=TrialSettings(count=0),
)
NUM_LAYERS = 8
QUICK: dict[str, Any] = {"num_steps": 5}


class Spread(NamedTuple):
    """How two pipeline ranks are spread."""

    name: str
    ranks: Sequence[StageConfiguration]
    is_even: bool = True


SPREADS = (
    Spread("uneven cuts", [one_device()] * 2, is_even=False),
    Spread("2 replicas", [one_device(2)] * 2),
    Spread("2 replicas, ZeRO 1", [one_device(2, zero_level=1)] * 2),
    Spread("2 shards", [one_device(1, 2)] * 2),
    Spread("3 replicas and 1", [one_device(3), one_device()]),
    Spread("recompute", [one_device(recompute=True)] * 2),
)


def table(*, num_steps: int = 20) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """One training for each pair; the reference is one process that never heard of pipelines."""
    pairs = list(_pairs())
    jobs = [
        job_of(WORKLOAD, by_hand(name, bounds, spread.ranks, NUM_MICROBATCHES), num_steps)
        for name, bounds, spread in pairs
    ]
    expected = train_single(WORKLOAD, Draw(), range(num_steps))
    rows: list[dict[str, Any]] = []
    for (name, bounds, spread), found in zip(pairs, train_all(jobs), strict=True):
        difference = max(abs(a - b) for a, b in zip(found.losses, expected, strict=True))
        rows.append(
            {
                "schedule": name,
                "spread": spread.name,
                "ranks": sum(configuration.num_devices for configuration in spread.ranks),
                "cuts": " ".join(map(str, bounds[1:-1])),
                "steps": num_steps,
                "first_loss": found.losses[0],
                "last_loss": found.losses[-1],
                "largest_difference": difference,
            }
        )
    summary = {
        "worst_loss_difference": max(row["largest_difference"] for row in rows),
        "loss_rows": len(rows),
        "reference_last_loss": expected[-1],
    }
    return f"Losses against one process, {num_steps} steps", rows, summary


def _pairs() -> Iterator[tuple[str, tuple[int, ...], Spread]]:
    for name in SCHEDULES:
        even = even_bounds(NUM_LAYERS, 2 * named(SCHEDULES, name).stages_per_rank)
        for spread in SPREADS:
            moved = tuple(cut - (k == 1) for k, cut in enumerate(even))
            yield name, even if spread.is_even else moved, spread
