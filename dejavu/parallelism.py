"""The ways in which a stage may be spread over devices: on which meshes, and what their devices do side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import gcd
from typing import Any

from dejavu.cluster import Cluster
from dejavu.cluster.islands import Island, whole_types
from dejavu.cluster.meshes import AnyShare, Share, meshes
from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural
from dejavu.plans import Offload, StageConfiguration

ZERO_LEVELS = (0, 1, 2, 3)
# Of replicas that share examples: level 0 sends as much as 1 and holds more of AdamW, and 2 sends gradients in every
# microbatch, of which single examples need many.
CONTEXT_PARALLEL_ZERO_LEVELS = (1, 3)
OFFLOADS = (
    *(Offload(), Offload("host"), Offload(None, "host"), Offload("host", "host")),
    *(Offload(None, "nvme"), Offload("host", "nvme")),
    *(Offload(None, "host", "host"), Offload("host", "host", "host")),
)


class NotPossibleError(InputError):
    """A configuration that was named is one that the cluster, the batch or the model does not allow."""

    def __init__(self, configuration: StageConfiguration, message: str) -> None:
        super().__init__(message)
        self.configuration = configuration


@dataclass(frozen=True)
class Parallelism:
    """What stages may do, within what the cluster, the batch and the model allow.

    Attributes:
        max_data_parallel, max_tensor_parallel: the highest degrees; None: as the devices allow. Replicas that share
            examples count, too.
        min_tensor_parallel: the lowest degree.
        recompute: which of False and True are considered.
        zero_levels: which levels are considered where there are replicas.
        sequence_parallel: which of False and True are considered where there are tensor-parallel devices.
        expert_parallel: which of False and True are considered there, if the model has experts.
        context_parallel: whether replicas are considered that share examples and split the sequence. They send each
            other keys and values, which replicas with examples of their own do not, so they are considered only where a
            microbatch has too few examples, as few of them share as then must, and they have ZeRO levels 1 and 3.
        also_unsplit: consider devices that do not split the sequence, or hold whole experts, also where they take
            hardly less time.
        offload: what is kept elsewhere; considered where the cluster file gives nodes `host_memory` and, for what goes
            there, `nvme`. Unless others than usual are named, weights are where no plan is found without.
        only: these configurations and no others, as of a plan that is there already.
    """

    max_data_parallel: int | None = None
    max_tensor_parallel: int | None = None
    recompute: tuple[bool, ...] = (False, True)
    zero_levels: tuple[int, ...] = ZERO_LEVELS
    sequence_parallel: tuple[bool, ...] = (False, True)
    expert_parallel: tuple[bool, ...] = (False, True)
    context_parallel: bool = True
    also_unsplit: bool = False
    offload: tuple[Offload, ...] = OFFLOADS
    only: tuple[StageConfiguration, ...] = ()
    min_tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("max_data_parallel", "max_tensor_parallel", "min_tensor_parallel"):
            most = getattr(self, name)
            if most is not None and most < 1:
                raise InputError(f"{name} is {most}; wanted 1 or more, or nothing for no bound")
        if not self.recompute or not self.zero_levels or not set(self.zero_levels) <= set(ZERO_LEVELS):
            raise InputError(
                f"recompute is {self.recompute} and zero_levels {self.zero_levels}; wanted some of (False, True) and "
                f"some of {ZERO_LEVELS}"
            )
        for name in ("sequence_parallel", "expert_parallel"):
            if not getattr(self, name):
                raise InputError(f"{name} is (); wanted some of (False, True)")
        if not self.offload:
            raise InputError("offload is (); wanted one or more, such as Offload(), under which nothing is away")

    @property
    def context_parallel_zero_levels(self) -> tuple[int, ...]:
        """The levels of replicas that share examples: those that pay, or all where none of these is considered."""
        return tuple(sorted(set(self.zero_levels) & set(CONTEXT_PARALLEL_ZERO_LEVELS))) or self.zero_levels

    @classmethod
    def one_device(cls) -> Parallelism:
        """A stage is one device that keeps its activations."""
        return cls(max_data_parallel=1, max_tensor_parallel=1, recompute=(False,), offload=(Offload(),))

    @classmethod
    def usual(cls, cluster: Cluster, *, replicas: bool = False) -> Parallelism:
        """What is considered where nobody says otherwise: everything, but on CPUs one core for a stage.

        Cores share one memory, and torch's tensor parallelism takes longer there to hand out an operator than small
        layers take to compute.

        Args:
            replicas: the training wants some of each stage, on CPUs too.
        """
        if cluster.kind != "cpu":
            return cls()
        return replace(cls.one_device(), max_data_parallel=None) if replicas else cls.one_device()

    def configurations(
        self,
        cluster: Cluster,
        microbatch_size: int = 1,
        most_tensor_parallel: int = 1,
        sequence_length: int = 0,
        num_experts: int = 0,
        context_length: int = 0,
        part: Mapping[Island, Share | AnyShare] | None = None,
    ) -> tuple[StageConfiguration, ...]:
        """Every way, device type by device type in the cluster's order, small meshes first.

        A replica gets an equal part of each microbatch; tensor-parallel groups stay inside a node.

        Args:
            most_tensor_parallel: the model's; every degree divides it.
            sequence_length: what devices may split into equal parts; 0: the model cannot be split so.
            num_experts: of which devices may hold equal numbers whole; 0: none can be.
            context_length: what replicas may split into equal parts through all layers; 0: the model cannot be run so.
            part: whose meshes are meant; None: those of whole types, in every part of the cluster.

        Raises:
            NotPossibleError: one of `only` is not possible.
        """
        for one in self.only:
            try:
                _check_possible(one, cluster, microbatch_size, most_tensor_parallel)
                _check_split(one, cluster, sequence_length, num_experts, context_length)
            except InputError as error:
                raise NotPossibleError(one, str(error)) from error
        _check_apart(self.only)
        if self.only:
            return self.only
        offloads = {name: self._offloads(cluster, name) for name in cluster.device_counts}
        return tuple(
            replace(configuration, offload=offload) if offload else configuration
            for island in (part or whole_types(cluster))
            for nodes, per_node in (part[island].meshes if part else meshes(cluster, island))
            for own in self._on_mesh(island, nodes, per_node, most_tensor_parallel)
            for plain in self._with_context_parallel(own, microbatch_size, sequence_length, context_length)
            for by_sequence in self._choices("sequence_parallel", plain, sequence_length // plain.context_parallel)
            for configuration in self._choices("expert_parallel", by_sequence, num_experts)
            for offload in offloads[island.device_type]
            if not offload.parameters or configuration.can_fetch_weights
        )

    def _offloads(self, cluster: Cluster, device_type: str) -> tuple[Offload, ...]:
        """Return those for which the nodes of the type have a place; nothing is away where they have none."""
        return tuple(one for one in self.offload if not _missing_place(one, cluster, device_type)) or (Offload(),)

    def _choices(self, name: str, plain: StageConfiguration, shared: int) -> Iterator[StageConfiguration]:
        """Yield it with and without the choice, where its devices can have equal numbers of what they would share."""
        if plain.tensor_parallel == 1 or shared <= 0 or shared % plain.tensor_parallel:
            yield plain
            return
        for chosen in getattr(self, name):
            choice: dict[str, Any] = {name: chosen}
            yield replace(plain, **choice)

    def _with_context_parallel(
        self, plain: StageConfiguration, microbatch_size: int, sequence_length: int, length: int
    ) -> Iterator[StageConfiguration]:
        """Yield it with the fewest replicas that share examples, at best none; nothing where there is no such way.

        Tensor-parallel devices share a part of a sequence as they share all of it, which layers have to declare.
        """
        can = self.context_parallel and length > 0 and (plain.tensor_parallel == 1 or sequence_length > 0)
        can = can and plain.zero_level in self.context_parallel_zero_levels
        degree = plain.data_parallel // gcd(plain.data_parallel, microbatch_size)
        if degree == 1 or (can and length % degree == 0):
            yield replace(plain, context_parallel=degree)

    def _on_mesh(
        self, island: Island, nodes: int, per_node: int, most_tensor_parallel: int
    ) -> Iterator[StageConfiguration]:
        for tensor in _divisors(gcd(per_node, most_tensor_parallel)):
            data = nodes * per_node // tensor
            if data > (self.max_data_parallel or data):
                continue
            if not self.min_tensor_parallel <= tensor <= (self.max_tensor_parallel or tensor):
                continue
            for recompute, zero in product(self.recompute, self.zero_levels if data > 1 else (0,)):
                yield StageConfiguration(
                    island.device_type, nodes, per_node, data, tensor, recompute, zero, groups=island.groups
                )


def _check_apart(only: Sequence[StageConfiguration]) -> None:
    """Raise NotPossibleError if groups of nodes that stages on one type name overlap, or only some name any."""
    first = dict[Island, StageConfiguration]()
    for configuration in only:
        first.setdefault(Island.of(configuration), configuration)
    for one, other in combinations(first, 2):
        are_apart = one.groups and other.groups and not set(one.groups) & set(other.groups)
        if one.device_type == other.device_type and not are_apart:
            said = f"on {other}, another stage on {one}; wanted groups that do not overlap, or the same"
            raise NotPossibleError(first[other], said)


def _check_possible(one: StageConfiguration, cluster: Cluster, microbatch_size: int, most_tensor_parallel: int) -> None:
    """Raise InputError if the cluster, the batch or the model does not allow the configuration."""
    if one.device_type not in cluster.device_counts:
        raise InputError(f"device type {one.device_type!r}; the cluster has {', '.join(cluster.device_counts)}")
    for name in one.groups:
        if not any(name == group.name for group in Island.of(one).groups_of(cluster)):
            having = ", ".join(group.name for group in Island(one.device_type).groups_of(cluster))
            raise InputError(f"groups of nodes with {one.device_type}: {name!r}; the cluster has {having}")
    known_meshes = meshes(cluster, Island.of(one))
    if (one.num_nodes, one.devices_per_node) not in known_meshes:
        known = ", ".join(f"{nodes} × {each}" for nodes, each in known_meshes)
        raise InputError(f"{one.num_nodes} nodes × {one.devices_per_node} of {one}; wanted nodes × devices of {known}")
    if one.devices_per_node % one.tensor_parallel:
        raise InputError(
            f"{one}: tensor_parallel {one.tensor_parallel} does not divide its {one.devices_per_node} devices in a node"
        )
    if most_tensor_parallel % one.tensor_parallel:
        raise InputError(
            f"{one}: tensor_parallel {one.tensor_parallel} does not divide {most_tensor_parallel}, the model's most"
        )
    if microbatch_size % one.example_parts:
        raise InputError(
            f"{one}: {one.example_parts} replicas do not divide a microbatch of {plural(microbatch_size, 'example')}"
        )


def _check_split(
    one: StageConfiguration, cluster: Cluster, sequence_length: int, num_experts: int, context_length: int
) -> None:
    """Raise InputError if the model cannot be split so, or nodes have no place for what is away."""
    if one.context_parallel > 1 and (not context_length or context_length % one.context_parallel):
        whole = f"do not divide the sequence of {context_length}" if context_length else "cannot split the sequence"
        raise InputError(f"{one}: its replicas that share examples {whole}")
    if one.context_parallel > 1 and one.tensor_parallel > 1 and not sequence_length:
        raise InputError(f"{one}: replicas of this model that share examples are one device each")
    if one.sequence_parallel and (not sequence_length or sequence_length % one.sequence_parts):
        raise InputError(f"{one}: its devices do not divide the sequence of {sequence_length}")
    if wanted := _missing_place(one.offload, cluster, one.device_type):
        raise InputError(f"{one}: the cluster file gives not every such node {wanted}")
    if one.expert_parallel and (not num_experts or num_experts % one.tensor_parallel):
        raise InputError(f"{one}: its devices do not divide {num_experts} experts")


def _missing_place(offload: Offload, cluster: Cluster, device_type: str) -> str:
    """Return what the cluster file does not say of the type's nodes, which the offload needs; empty: nothing."""
    if offload and cluster.host_memory_of(device_type) is None:
        return "host_memory: {size: …, bandwidth: …}"
    if offload.optimizer == "nvme" and cluster.nvme_of(device_type) is None:
        return "nvme: {size: …, read: …, write: …}"
    return ""


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
