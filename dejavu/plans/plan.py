"""A search's result: stages in order, each with its devices.

A stage holds layers `start` to `stop`, `stop` not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from dejavu.foundation.registry import named
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import PlanError


@dataclass(frozen=True)
class StageConfiguration:
    """How one stage is spread over devices.

    Attributes:
        device_type: the kind of device; a stage never mixes kinds.
        num_nodes, devices_per_node: the mesh; their product is what the stage takes from the cluster.
        data_parallel, tensor_parallel: degrees; their product is the number of devices. Data-parallel replicas hold the
            same weights.
        recompute: activations inside the stage are recomputed in the backward pass instead of kept.
        zero_level: 0 to 3, what the data-parallel replicas shard (Rajbhandari et al., SC 2020).
        sequence_parallel: what tensor-parallel devices would all compute and keep whole (norms, residuals, what crosses
            the cuts inside the model) is split among them along the sequence (Korthikanti et al., MLSys 2023).
        expert_parallel: of layers with experts, tensor-parallel devices hold whole experts in place of a part of each.
        offload: what is kept for the backward pass waits in the memory of the devices' node, but for what the model's
            last layer keeps.
        context_parallel: of the replicas, so many neighbours share their examples, and each has a part of the sequence
            through all layers; attention gathers keys and values (Llama 3, Dubey et al., 2024, section 3.3.2).
    """

    device_type: str
    num_nodes: int = 1
    devices_per_node: int = 1
    data_parallel: int = 1
    tensor_parallel: int = 1
    recompute: bool = False
    zero_level: int = 0
    sequence_parallel: bool = False
    expert_parallel: bool = False
    offload: bool = False
    context_parallel: int = 1

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise PlanError(f"{self}: sequence parallelism is among tensor-parallel devices; wanted more than one")
        if self.expert_parallel and self.tensor_parallel == 1:
            raise PlanError(f"{self}: expert parallelism is among tensor-parallel devices; wanted more than one")
        if self.context_parallel < 1 or self.data_parallel % self.context_parallel:
            raise PlanError(
                f"{self}: runs of {self.context_parallel} of {self.data_parallel} replicas share examples; wanted a "
                "number that divides the replicas"
            )
        if self.data_parallel * self.tensor_parallel != self.num_devices:
            raise PlanError(
                f"{self}: data parallel {self.data_parallel} × tensor parallel {self.tensor_parallel} "
                f"must equal its {self.num_devices} devices"
            )

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def example_parts(self) -> int:
        """Into how many parts the replicas split the examples of a microbatch."""
        return self.data_parallel // self.context_parallel

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the devices that share examples split the sequence, where it crosses a cut."""
        return self.context_parallel * (self.tensor_parallel if self.sequence_parallel else 1)

    def __str__(self) -> str:
        parts = [f"{self.num_devices} × {self.device_type}"]
        if self.data_parallel > self.context_parallel:
            parts.append(f"dp {self.data_parallel // self.context_parallel}")
        if self.context_parallel > 1:
            parts.append(f"cp {self.context_parallel}")
        if self.tensor_parallel > 1:
            parts.append(f"tp {self.tensor_parallel}")
        if self.sequence_parallel:
            parts.append("sp")
        if self.expert_parallel:
            parts.append("ep")
        if self.recompute:
            parts.append("recompute")
        if self.offload:
            parts.append("offload")
        if self.zero_level:
            parts.append(f"ZeRO-{self.zero_level}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Stage:
    """Layers `start` to `stop` (not included) under one configuration."""

    start: int
    stop: int
    configuration: StageConfiguration

    def __str__(self) -> str:
        return f"layers {self.start}–{self.stop - 1} on {self.configuration}"


class LayerSplit(NamedTuple):
    """Which weights of a layer its stage's tensor-parallel devices split, found instead of declared.

    Attributes:
        layer: its name.
        degree: of the devices.
        weights: (name inside the layer, the dimension that is split).
    """

    layer: str
    degree: int
    weights: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """Stages in order, the schedule that runs them, and the number of microbatches (gradient accumulation steps).

    Attributes:
        splits: of layers that declare none, for every degree of a stage, wherever the cuts will be moved to. They
            follow from the stages, so plans are compared without.
    """

    stages: tuple[Stage, ...]
    schedule: str
    num_microbatches: int
    splits: tuple[LayerSplit, ...] = field(default=(), compare=False)

    def split_of(self, layer: str, degree: int) -> Mapping[str, int]:
        """Return which weights of a layer so many devices split, and by which dimension; empty: none was found."""
        found = (dict(one.weights) for one in self.splits if (one.layer, one.degree) == (layer, degree))
        return next(found, {})

    @property
    def cuts(self) -> tuple[int, ...]:
        """The inner cut positions."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Which stages each pipeline rank runs; one each under most schedules."""
        schedule, S = named(SCHEDULES, self.schedule), len(self.stages)
        return tuple(schedule.stages_of(rank, S) for rank in range(schedule.num_ranks(S)))

    def rank_configuration(self, rank: int) -> StageConfiguration:
        """Return how a pipeline rank is spread over devices, which is the same for all its stages.

        Raises:
            PlanError: its stages differ.
        """
        stages = named(SCHEDULES, self.schedule).stages_of(rank, len(self.stages))
        found = {self.stages[s].configuration for s in stages}
        if len(found) != 1:
            raise PlanError(
                f"stages {list(stages)} share the devices of pipeline rank {rank} under {self.schedule}; "
                f"wanted one configuration, found {'; '.join(sorted(map(str, found)))}"
            )
        return found.pop()

    def to_dict(self) -> dict[str, Any]:
        known = asdict(self)
        return known if self.splits else {name: value for name, value in known.items() if name != "splits"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        stages = (
            Stage(row["start"], row["stop"], StageConfiguration(**row["configuration"])) for row in data["stages"]
        )
        splits = (
            LayerSplit(layer, degree, tuple((name, dim) for name, dim in weights))
            for layer, degree, weights in data.get("splits", ())
        )
        return cls(tuple(stages), data["schedule"], data["num_microbatches"], tuple(splits))
