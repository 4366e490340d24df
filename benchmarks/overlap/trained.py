"""Two replicas of a convolutional network, trained in turn in every way to sum their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.pipeline.emulation import NOTHING_EMULATED, Emulation, EmulationError, apart
from benchmarks.pipeline.plans import by_hand, even_bounds, one_device
from benchmarks.pipeline.ranks import AT_THE_END, DDP, OURS, train_in_turn
from dejavu.binding import Binding
from dejavu.foundation.registry import named
from dejavu.init import Draw
from dejavu.plans.schedule import SCHEDULES
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.single import train_single
from dejavu.workload import SyntheticSettings, TrialSettings, Workload
from dejavu.workload.models import layers_of

HOSTS = ("alpha", "beta")
WAYS = (OURS, AT_THE_END, DDP)


def workload_of(width: int, num_microbatches: int) -> Workload:
    """Convolutions on small images: as much to send as to compute, over tens of Mbit/s."""
    return Workload(
        model="cnn",
        model_options={"num_blocks": 4, "width": width},
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=10, image_shape=(3, 32, 32)),
        batch_size=8 * num_microbatches,
        num_microbatches=num_microbatches,
        trials=TrialSettings(count=0),
    )


@contextmanager
def joined(megabits: float) -> Iterator[Emulation]:
    """Yield two hosts with such a link; this machine for none."""
    if not megabits:
        yield NOTHING_EMULATED
        return
    with apart(HOSTS, 1e6 * megabits) as names:
        yield Emulation(namespaces=names)


def rows_of(
    megabits: float, schedules: Sequence[str], width: int, num_microbatches: int, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Train in every way over one link."""
    workload = workload_of(width, num_microbatches)
    link = f"{megabits:g} Mbit a second" if megabits else "loopback"
    try:
        with joined(megabits) as emulation:
            return [
                {"link": link, "microbatches": num_microbatches, **row}
                for schedule in schedules
                for row in _trained(workload, schedule, emulation, rounds, steps)
            ]
    except EmulationError as error:
        return [{"link": link, "skipped": str(error)}]


def _trained(workload: Workload, schedule: str, emulation: Emulation, rounds: int, steps: int) -> list[dict[str, Any]]:
    ways = WAYS if schedule == "gpipe" else (OURS, AT_THE_END)  # DDP runs no schedule
    job = TrainingJob(
        workload.model_copy(update={"schedule": schedule}), _bound(workload, schedule), Draw(), None, 0, steps, ""
    )
    trained = train_in_turn([job] * len(ways) * rounds, emulation=emulation, ways=ways * rounds)
    expected = train_single(workload, Draw(), range(steps))
    found = list[dict[str, Any]]()
    for k, way in enumerate(ways):
        own = trained[k :: len(ways)]
        found.append(
            {
                "schedule": schedule,
                "summed": way,
                "measured_ms": 1e3 * median(second for one in own for second in one.step_seconds),
                "loss_difference": max(
                    abs(a - b) for one in own for a, b in zip(one.losses, expected[: len(one.losses)], strict=True)
                ),
            }
        )
    ours = float(found[0]["measured_ms"])
    return [row | {"over_ours": row["measured_ms"] / ours} for row in found]


def _bound(workload: Workload, schedule: str) -> Binding:
    """One stage, or as many as the schedule gives a rank, on each host."""
    stages = named(SCHEDULES, schedule).stages_per_rank
    bounds = even_bounds(len(layers_of(workload)), stages)
    made = by_hand(schedule, bounds, [one_device(2)], workload.num_microbatches)
    placements = [
        replace(placed, device=replace(placed.device, host=host))
        for placed, host in zip(made.placements, HOSTS, strict=True)
    ]
    return replace(made, placements=tuple(placements))
