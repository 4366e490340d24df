"""Virtual workers that were planned together, and what they are compared with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dejavu.binding import Binding, Placement, VirtualWorker
from dejavu.cluster import Cluster
from dejavu.planning import Choice
from dejavu.virtual_workers.divisions import Division, WorkerDevices
from dejavu.workload import Workload

SAME = 0.005  # of a step: a smaller difference is none


@dataclass(frozen=True, eq=False)
class TeamWorker:
    """A virtual worker and its plan.

    Attributes:
        choice: its pipeline, planned on its own devices for its own examples.
        seconds: from the step's begin until its last backward pass is done and its optimizer's time is over; without
            sums over replicas, which all workers make together.
    """

    devices: WorkerDevices
    choice: Choice
    seconds: float

    @property
    def num_examples(self) -> int:
        """Examples of each run of the schedule in a step."""
        return self.choice.request.workload.run_size


@dataclass(frozen=True)
class Tried:
    """One way to divide the devices, as far as it was planned.

    Attributes:
        examples: of each worker, of the whole batch; empty: one of them has no plan.
        step_seconds: of the cheapest plans that a few quick searches found; None: there are none.
    """

    division: str
    examples: tuple[int, ...]
    num_workers: int
    tensor_parallel: int
    step_seconds: float | None


@dataclass(frozen=True, eq=False)
class Team:
    """Virtual workers with the least predicted step of all divisions that were considered.

    Nothing is proved of a division: each worker's plan is the best for its devices and examples as far as its own
    choice proves it.

    Attributes:
        workload: of the whole training.
        tensor_parallel: the degree that all stages have.
        sum_seconds: from the last backward pass to the moment when all have the whole gradient.
        tried: every division that was considered.
        alone: one pipeline on the whole cluster.
    """

    workload: Workload
    cluster: Cluster
    division: Division
    workers: tuple[TeamWorker, ...]
    tensor_parallel: int
    sum_seconds: float
    tried: tuple[Tried, ...]
    alone: Choice

    @property
    def step_seconds(self) -> float:
        """The predicted step: the slowest worker's, and the sums."""
        return max(worker.seconds for worker in self.workers) + self.sum_seconds

    @property
    def speedup(self) -> float:
        """The simulated step of one pipeline over the team's."""
        return self.alone.simulated_seconds / self.step_seconds

    @property
    def is_faster(self) -> bool:
        """Whether the team is predicted to be faster than one pipeline, by more than `SAME`."""
        return self.speedup > 1 + SAME

    @cached_property
    def binding(self) -> Binding:
        """All workers on their devices.

        Raises:
            BindError: a worker's plan does not fit the devices.
        """
        bound = []
        for one in self.workers:
            bound.append((one.devices, one.choice.binding, one.num_examples))
        return together(self.cluster, bound, self.step_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return the team for JSON."""
        return {
            "division": self.division.name,
            "tensor_parallel": self.tensor_parallel,
            "predicted_step_seconds": self.step_seconds,
            "sum_seconds": self.sum_seconds,
            "one_pipeline_step_seconds": self.alone.simulated_seconds,
            "speedup": self.speedup,
            "workers": [
                {
                    "examples": one.choice.request.workload.batch_size,
                    "seconds": one.seconds,
                    "devices": dict(one.devices.counts(self.cluster)),
                    "plan": one.choice.plan.to_dict(),
                }
                for one in self.workers
            ],
            "tried": [
                {
                    "division": one.division,
                    "workers": one.num_workers,
                    "examples": list(one.examples),
                    "tensor_parallel": one.tensor_parallel,
                    "step_seconds": one.step_seconds,
                }
                for one in self.tried
            ],
        }


def together(
    cluster: Cluster, workers: Iterable[tuple[WorkerDevices, Binding, int]], step_seconds: float = 0.0
) -> Binding:
    """Make one binding of the pipelines of virtual workers, each bound to its own devices, with so many examples."""
    found, placements, seconds = list[VirtualWorker](), list[Placement](), list[float]()
    for number, (devices, own, num_examples) in enumerate(workers):
        found.append(VirtualWorker(own.plan, num_examples))
        placements += [
            replace(placed, device=devices.actual(placed.device, cluster), worker=number) for placed in own.placements
        ]
        seconds.append(own.step_seconds)
    step_seconds = step_seconds or max(seconds)
    return Binding(found[0].plan, tuple(placements), step_seconds, step_seconds, workers=tuple(found))
