"""Plans for the devices of this machine, written down by hand: cuts, and how each pipeline rank is spread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dejavu.binding.binding import Binding, Placement
from dejavu.cluster import Device
from dejavu.foundation.registry import named
from dejavu.init import Draw
from dejavu.plans import Offload, Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES
from dejavu.runtime.job import TrainingJob
from dejavu.workload import Workload

CORE = "core"  # the kind of device; what it is called is not looked up

ON_DEVICE = Offload()


def one_device(
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    *,
    recompute: bool = False,
    zero_level: int = 0,
    sequence_parallel: bool = False,
    expert_parallel: bool = False,
    offload: Offload = ON_DEVICE,
    context_parallel: int = 1,
) -> StageConfiguration:
    """A pipeline rank on so many cores of one node."""
    devices = data_parallel * tensor_parallel
    return StageConfiguration(
        CORE,
        1,
        devices,
        data_parallel,
        tensor_parallel,
        recompute,
        zero_level,
        sequence_parallel,
        expert_parallel,
        offload,
        context_parallel,
    )


def by_hand(
    schedule: str,
    bounds: Sequence[int],
    ranks: Sequence[StageConfiguration],
    num_microbatches: int,
    *,
    disk_folder: str = "",
) -> Binding:
    """Stages between these cuts (0 and the number of layers included), devices in turn."""
    num_stages = len(bounds) - 1
    rank_of = named(SCHEDULES, schedule).rank_of
    stages = tuple(
        Stage(start, stop, ranks[rank_of(s, num_stages)]) for s, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    places = [
        (rank, device, configuration)
        for rank, configuration in enumerate(ranks)
        for device in range(configuration.num_devices)
    ]
    placements = tuple(
        Placement(
            rank,
            *divmod(device, configuration.tensor_parallel),
            Device(CORE, "here", "localhost", 0, index, disk_folder=disk_folder),
        )
        for index, (rank, device, configuration) in enumerate(places)
    )
    return Binding(Plan(stages, schedule, num_microbatches), placements, 0.0, 0.0)


def even_bounds(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As many layers in each stage as can be."""
    return tuple(num_layers * s // num_stages for s in range(num_stages + 1))


def job_of(workload: Workload, binding: Binding, num_steps: int, draw: Draw = Draw()) -> TrainingJob:  # noqa: B008
    """A training from fresh weights that keeps nothing."""
    plan = binding.plan
    fitting = workload.model_copy(update={"schedule": plan.schedule, "num_microbatches": plan.num_microbatches})
    return TrainingJob(fitting, binding, draw, None, 0, num_steps, "")
