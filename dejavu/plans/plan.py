"""A search's result: stages in order, each with its devices.

A stage holds layers `start` to `stop`, `stop` not included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from dejavu.foundation.registry import named
from dejavu.foundation.units import kind_of_devices
from dejavu.plans.schedule import CHIMERA, SCHEDULES
from dejavu.plans.stage_costs import PlanError

Place = Literal["host", "nvme"]


@dataclass(frozen=True)
class Offload:
    """Where a stage's devices keep what is not in their own memory; None: nothing of it is away.

    Attributes:
        activations: "host": what is kept for the backward pass waits in the memory of the devices' node, but for what
            the model's last layer keeps.
        optimizer: "host", "nvme": its moments and masters stay in the node's memory or on its disks, and the node's
            processors update the weights (ZeRO-Offload, Ren et al., USENIX ATC 2021; ZeRO-Infinity, Rajbhandari et
            al., SC 2021).
        parameters: "host": weights and their gradients stay in the node's memory, and the optimizer's state with them.
            A layer's weights are fetched before each of its passes, and its gradients go back and add up there.
    """

    activations: Literal["host"] | None = None
    optimizer: Place | None = None
    parameters: Literal["host"] | None = None

    def __post_init__(self) -> None:
        places = (None, "host")
        if self.activations not in places or self.optimizer not in (None, *get_args(Place)):
            raise PlanError(
                f"offload has activations {self.activations!r} and optimizer {self.optimizer!r}; wanted 'host' or "
                "nothing for activations, and 'host', 'nvme' or nothing for the optimizer"
            )
        if self.parameters not in places or (self.parameters and self.optimizer != "host"):
            raise PlanError(
                f"offload has parameters {self.parameters!r} and optimizer {self.optimizer!r}; wanted 'host' or "
                "nothing for parameters, and with them the optimizer's state on the 'host'"
            )

    def __bool__(self) -> bool:
        return self != Offload()

    def __str__(self) -> str:
        away = [(name, getattr(self, name)) for name in ("activations", "parameters", "optimizer")]
        if self.parameters:  # the optimizer goes with them
            away.pop()
        return ", ".join(f"{name} on {'NVMe' if place == 'nvme' else place}" for name, place in away if place)

    def to_json(self) -> bool | dict[str, str]:
        """Return it for JSON; as plans had it before more than activations could be away, where that says it all."""
        away = {name: place for name, place in asdict(self).items() if place}
        return bool(away) if away in ({}, {"activations": "host"}) else away

    @classmethod
    def from_json(cls, content: Any) -> Offload:
        """Read what `to_json` gave.

        Raises:
            PlanError: it is something else.
        """
        if isinstance(content, bool):
            return cls("host" if content else None)
        names = [one.name for one in fields(cls)]
        if not isinstance(content, Mapping) or not set(content) <= set(names):
            raise PlanError(f"offload is {content!r}; wanted true, false, or an object of {', '.join(names)}")
        with_weights = {"optimizer": "host"} if content.get("parameters") else {}
        return cls(**{**with_weights, **content})


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
        offload: what is kept elsewhere than on the devices.
        context_parallel: of the replicas, so many neighbours share their examples, and each has a part of the sequence
            through all layers; attention gathers keys and values (Llama 3, Dubey et al., 2024, section 3.3.2).
        groups: the names of the groups of nodes that it may be on; empty: all that have the type.
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
    offload: Offload = Offload()
    context_parallel: int = 1
    groups: tuple[str, ...] = ()

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
        if self.offload.parameters and not self.can_fetch_weights:
            raise PlanError(
                f"{self}: weights are fetched whole, from the memory of a device's own node; wanted tensor_parallel 1, "
                "and zero_level 0 where there are replicas"
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
    def kind(self) -> str:
        """The devices that it may have: their type, and the groups of nodes if named; a key of `device_counts`."""
        return kind_of_devices(self.device_type, self.groups)

    def uses(self, kind: str) -> int:
        """Return how many devices of a kind it takes; of a type's name, also where it names groups of nodes."""
        return self.num_devices if kind in (self.kind, self.device_type) else 0

    @property
    def shards_state(self) -> bool:
        """Whether replicas shard what the optimizer has of a weight, and perhaps more (ZeRO)."""
        return self.zero_level > 0 and self.data_parallel > 1

    @property
    def can_fetch_weights(self) -> bool:
        """Whether its weights may be in the node's memory: each replica has whole ones, which nobody else shares."""
        return self.tensor_parallel == 1 and not self.shards_state

    @property
    def comes_back_in_parts(self) -> bool:
        """Whether what is in the node's memory can come back for each of two parts of a backward pass.

        Weights can. Of activations what both parts want would be copied twice, and with recomputation each group of
        weights would have all of its layer's fetched again.
        """
        return not self.offload.activations and not (self.offload.parameters and self.recompute)

    @property
    def reduces_in_passes(self) -> bool:
        """Whether replicas reduce gradients in every microbatch (ZeRO 2 and 3): as soon as the input's is there."""
        return self.shards_state and self.zero_level >= 2

    @property
    def runs_in_parts(self) -> bool:
        """Whether its backward passes may run in two parts, of which the second computes the weights' gradients."""
        return self.comes_back_in_parts and not self.reduces_in_passes

    @property
    def example_parts(self) -> int:
        """Into how many parts the replicas split the examples of a microbatch."""
        return self.data_parallel // self.context_parallel

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the devices that share examples split the sequence, where it crosses a cut."""
        return self.context_parallel * (self.tensor_parallel if self.sequence_parallel else 1)

    @property
    def senders_per_node(self) -> float:
        """How many devices of a node have parts of their own of what crosses a cut, each for its own network card."""
        own = self.data_parallel * (self.tensor_parallel if self.sequence_parallel else 1)
        return own / self.num_nodes

    def pairs_with(self, other: StageConfiguration) -> int:
        """Return how many pairs of devices share what crosses a cut to or from another stage of the same node.

        Each of the more numerous replicas has a part of the examples; devices that split the sequence on both sides
        have parts of that.
        """
        both = self.sequence_parallel and other.sequence_parallel
        parts = min(self.tensor_parallel, other.tensor_parallel) if both else 1
        return max(self.data_parallel, other.data_parallel) * parts

    def lanes(self, cards_per_device: float) -> float:
        """Return how many times one card's bandwidth the stage's messages have; all parts share one on a node with one.

        Args:
            cards_per_device: of the nodes that it is on.
        """
        cards = min(cards_per_device * self.devices_per_node, self.senders_per_node)
        return self.num_nodes * max(1.0, cards)

    def __str__(self) -> str:
        parts = [f"{self.num_devices} × {self.kind}"]
        if self.num_nodes > 1:
            parts[0] += f" on {self.num_nodes} nodes"
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
            parts.append(str(self.offload))
        if self.zero_level:
            parts.append(f"ZeRO-{self.zero_level}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        known = asdict(self) | {"offload": self.offload.to_json()}
        groups = {"groups": list(self.groups)} if self.groups else {}  # else left out, as before they were
        return {name: value for name, value in known.items() if name != "groups"} | groups

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageConfiguration:
        """Read what `to_dict` gave; what is missing is as where nothing is said.

        Raises:
            PlanError: a field is unknown, missing or of another kind, or the fields do not go together.
        """
        known = {one.name: one.default for one in fields(cls)}
        if not isinstance(data, Mapping):
            raise PlanError(f"configuration is {data!r:.60}; wanted an object of {', '.join(known)}")
        for name, value in data.items():
            if name not in known:
                raise PlanError(f"unknown key {name!r:.60} in configuration; wanted some of {', '.join(known)}")
            if name not in ("offload", "groups") and (wanted := _wanted_instead(name, value, known[name])):
                raise PlanError(f"{name} is {value!r:.60}; wanted {wanted}")
        if "device_type" not in data:
            raise PlanError("configuration has no device_type; wanted the name of one of the cluster's")
        groups = data.get("groups", [])
        if not isinstance(groups, list | tuple) or not all(isinstance(name, str) for name in groups):
            raise PlanError(f"groups is {groups!r:.60}; wanted a list of names of groups of nodes")
        return cls(**{**data, "offload": Offload.from_json(data.get("offload", False)), "groups": tuple(groups)})


def _wanted_instead(name: str, value: Any, usual: Any) -> str:
    """Return what a stage's configuration wants in place of a value; empty: it is right."""
    if usual is MISSING:
        return "" if isinstance(value, str) else "the name of a device type"
    if isinstance(usual, bool):
        return "" if isinstance(value, bool) else "true or false"
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if name == "zero_level":
        return "" if is_count and 0 <= value <= 3 else "0, 1, 2 or 3"
    return "" if is_count and value >= 1 else "a whole number, 1 or more"


@dataclass(frozen=True)
class Stage:
    """Layers `start` to `stop` (not included) under one configuration."""

    start: int
    stop: int
    configuration: StageConfiguration

    @property
    def numbers(self) -> str:
        """The numbers of its layers: `3`, `0–2`."""
        return f"{self.start}" if self.stop == self.start + 1 else f"{self.start}–{self.stop - 1}"

    @property
    def layers(self) -> str:
        """Its layers by number: `layer 3`, `layers 0–2`."""
        return f"layer{'s' if self.stop > self.start + 1 else ''} {self.numbers}"

    def __str__(self) -> str:
        return f"{self.layers} on {self.configuration}"


class LayerSplit(NamedTuple):
    """Which weights of a layer its stage's tensor-parallel devices split, found instead of declared.

    Attributes:
        layer: its name.
        degree: of the devices.
        weights: (name inside the layer, the dimension that is split).
        whole_sums: sums over the devices are made whole where they arise; see `sharding.propagation`.
        split_loss: of the last layer: its scores stay split by classes, and the loss is computed of them.
    """

    layer: str
    degree: int
    weights: tuple[tuple[str, int], ...]
    whole_sums: bool = False
    split_loss: bool = False


@dataclass(frozen=True)
class Plan:
    """Stages in order, the schedule that runs them, and the number of microbatches (gradient accumulation steps).

    Attributes:
        slices: positions of each slice in which sequences go through the stages, in order; empty: they go whole.
        both_ways: half of the microbatches go up the ranks, through a second copy of the model: rank r of P has stage
            P − 1 − r of that (Chimera).
        splits: of layers that declare none, for every degree of a stage, wherever the cuts will be moved to. They
            follow from the stages, so plans are compared without.
    """

    stages: tuple[Stage, ...]
    schedule: str
    num_microbatches: int
    splits: tuple[LayerSplit, ...] = field(default=(), compare=False)
    slices: tuple[int, ...] = ()
    both_ways: bool = False

    @property
    def num_slices(self) -> int:
        """Into how many slices a sequence is cut; 1: none."""
        return max(1, len(self.slices))

    @property
    def schedule_name(self) -> str:
        """The schedule as people are told it: `chimera`, or `1f1b, 4 slices`."""
        name = CHIMERA if self.both_ways else self.schedule
        return f"{name}, {self.num_slices} slices" if self.slices else name

    def split_of(self, layer: str, degree: int) -> LayerSplit | None:
        """Return how so many devices split a layer; None: nothing was found."""
        return next((one for one in self.splits if (one.layer, one.degree) == (layer, degree)), None)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The inner cut positions."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Which stages each pipeline rank runs; one each under most schedules."""
        return named(SCHEDULES, self.schedule).ranks(len(self.stages))

    @property
    def seats(self) -> tuple[Stage, ...]:
        """The stages with the devices that run them; those of the copy that goes up the ranks, if any, come after."""
        if not self.both_ways:
            return self.stages
        up = zip(self.stages, reversed(self.stages), strict=True)
        return *self.stages, *(Stage(one.start, one.stop, there.configuration) for one, there in up)

    @property
    def seats_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Which of the seats each pipeline rank runs."""
        last = 2 * len(self.stages) - 1
        return tuple((r, last - r) for r in range(len(self.stages))) if self.both_ways else self.ranks

    @property
    def device_counts(self) -> Counter[str]:
        """How many devices the pipeline ranks take, by `StageConfiguration.kind`."""
        counts = Counter[str]()
        for one in map(self.rank_configuration, range(len(self.ranks))):
            counts[one.kind] += one.num_devices
        return counts

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
        for row, stage in zip(known["stages"], self.stages, strict=True):
            row["configuration"] = stage.configuration.to_dict()
        usual = {name for name in ("splits", "slices", "both_ways") if not known[name]}  # left out, as before they were
        return {name: value for name, value in known.items() if name not in usual}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        stages = (
            Stage(row["start"], row["stop"], StageConfiguration.from_dict(row["configuration"]))
            for row in data["stages"]
        )
        splits = (
            LayerSplit(layer, degree, tuple((name, dim) for name, dim in weights), *rest)
            for layer, degree, weights, *rest in data.get("splits", ())
        )
        ways = tuple(data.get("slices", ())), bool(data.get("both_ways", False))
        return cls(tuple(stages), data["schedule"], data["num_microbatches"], tuple(splits), *ways)
