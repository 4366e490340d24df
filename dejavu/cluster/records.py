"""Records of a cluster: kinds of devices, groups of equal nodes, and the links inside and between them.

The records refer to no file and no catalogue, so that a planned run keeps its cluster: `Cluster.to_dict` goes into the
run's record, and `fingerprint` says whether two runs planned for the same hardware.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Literal, TypeVar

from dejavu.foundation import units
from dejavu.foundation.errors import InputError

Kind = Literal["cpu", "cuda", "rocm"]
Outside = TypeVar("Outside", "HostMemory", "Nvme")
_UNSAID = {"host_memory": None, "nvme": None, "cards": 1}  # of a group: what records do not say
_ALWAYS_SAID = object()
DTYPES = ("float32", "tfloat32", "float16", "bfloat16")
WEIGHT_DTYPES = ("float32", "bfloat16")  # that a workload's weights can have


@dataclass(frozen=True)
class DeviceType:
    """A kind of device.

    Attributes:
        peak_flops_per_second: by the torch dtype of the inputs, dense; a dtype that it does not support is absent.
            tfloat32 is float32 with TF32 allowed.
        memory_bytes: of one device, without what ECC takes.
        num_multiprocessors: SMs or CUs; None for CPUs or where unknown.
        cache_bytes: the last cache that belongs to one device; None where unknown.
        source: "catalogue", "cluster.yaml" or "this machine".
        board_watts: the most that the board draws; None where unknown.
        process_nanometres: by what the foundry calls its process; None where unknown.
        architecture: the maker's name of its generation, such as Hopper; None where unknown.
        like: the device of the catalogue that its number of multiprocessors is taken from; None: of no other.
    """

    name: str
    kind: Kind
    peak_flops_per_second: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    num_multiprocessors: int | None
    cache_bytes: int | None
    source: str
    board_watts: float | None = None
    process_nanometres: int | None = None
    architecture: str | None = None
    like: str | None = None

    def wanted_peak(self, dtype: str) -> str:
        """Say which peaks are known, and where one that is not would be written."""
        line, known = f"`{dtype}: … TFLOP/s`", ", ".join(self.peak_flops_per_second) or "none"
        if self.source == "cluster.yaml":
            wanted = f"{line} at {self.name!r} under `devices:`"
        else:  # what the catalogue has cannot be written anew
            wanted = f"a device of another name with {line} under `devices:`"
        others = " or ".join(one for one in WEIGHT_DTYPES if one in self.peak_flops_per_second and one != dtype)
        workload = f", or a workload in {others} (dtype, mixed_precision)" if others else ""
        return f"known are {known}; wanted {wanted} in the cluster file{workload}"


@dataclass(frozen=True)
class Link:
    """A link from one device to another, one way.

    Attributes:
        assumed: True where even the bandwidth is a default: a measurement may replace it.
    """

    bytes_per_second: float
    latency_seconds: float
    assumed: bool = False

    def transfer_seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second

    def describe(self) -> str:
        rate = units.format_bytes_per_second(self.bytes_per_second)
        return f"{rate} one way, {units.format_seconds(self.latency_seconds)}"


@dataclass(frozen=True)
class HostMemory:
    """What a node's devices may keep in the node's own memory.

    Attributes:
        size_bytes: of a node, for all its devices together.
        bytes_per_second: between one device and this memory, one way, while all devices of the node copy.
        update_bytes_per_second: what the node's processors read and write of this memory while they update weights, for
            all its devices together; None: as much as its devices copy, which the memory is known to bear.
    """

    size_bytes: int
    bytes_per_second: float
    update_bytes_per_second: float | None = None

    def share(self, devices: int) -> "HostMemory":
        """Return what each of a node's devices gets of it."""
        update = self.update_bytes_per_second
        each = self.bytes_per_second if update is None else update / devices
        return HostMemory(self.size_bytes // devices, self.bytes_per_second, each)


@dataclass(frozen=True)
class Nvme:
    """What a node's devices may keep on the node's own disks, for all its devices together.

    Attributes:
        folder: where; empty: it is not said, so nothing can be trained so. No plan depends on it.
    """

    size_bytes: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    folder: str = ""

    def share(self, devices: int) -> "Nvme":
        """Return what each of a node's devices gets of it."""
        return Nvme(
            self.size_bytes // devices, self.read_bytes_per_second / devices, self.write_bytes_per_second / devices
        )


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes.

    Attributes:
        count: nodes.
        hosts: their names; empty where only a count is given.
        devices: (type name, how many per node), in the order of the devices inside a node.
        link: between two devices inside one node; where a node has one device, that device's own memory.
        price: of one node: an amount an hour, and its currency; None where it is not said. No plan depends on it.
        host_memory, nvme: for what its devices keep in the node's own memory or on its disks; None: nothing.
        cards: network cards of a node, which its devices share equally; a link between nodes is one card's.
    """

    name: str
    count: int
    hosts: tuple[str, ...]
    devices: tuple[tuple[str, int], ...]
    link: Link
    price: tuple[float, str] | None = None
    host_memory: HostMemory | None = None
    nvme: Nvme | None = None
    cards: int = 1

    @property
    def devices_per_node(self) -> int:
        return sum(count for _, count in self.devices)

    @property
    def cards_per_device(self) -> float:
        return self.cards / self.devices_per_node

    def host(self, node_index: int) -> str:
        return self.hosts[node_index] if self.hosts else f"{self.name}-{node_index}"


@dataclass(frozen=True)
class Device:
    """One actual device: the `index`-th (from 0) of node `node_index` of its group.

    Attributes:
        disk_folder: on its node's disks, for the optimizer's state; empty: the cluster file says none.
        kind: of its type, which need not be in the catalogue; None: a record of an earlier version does not say.
    """

    type_name: str
    group: str
    host: str
    node_index: int
    index: int
    disk_folder: str = ""
    kind: Kind | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Cluster:
    """The hardware to plan for, resolved: nothing in it refers to a file or the catalogue.

    Attributes:
        device_types: by name, sorted; those in use only.
        links_between: by sorted pair of group names; a group with itself is between two of its nodes. Every pair
            that can occur is there.
        assumptions: a sentence for each default that was used.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    device_types: Mapping[str, DeviceType]
    links_between: Mapping[tuple[str, str], Link]
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_devices(self) -> int:
        return sum(group.count * group.devices_per_node for group in self.groups)

    @property
    def device_counts(self) -> dict[str, int]:
        """Number of devices by type name, in the order in which the groups name them."""
        counts: Counter[str] = Counter()
        for group in self.groups:
            for type_name, count in group.devices:
                counts[type_name] += count * group.count
        return dict(counts)

    @property
    def kind(self) -> Kind:
        """The kind of most devices, for which a model is captured."""
        counts: Counter[Kind] = Counter()
        for name, count in self.device_counts.items():
            counts[self.device_types[name].kind] += count
        return counts.most_common(1)[0][0]

    def devices(self) -> tuple[Device, ...]:
        """All devices: group by group, node by node, in the order inside the node."""
        return tuple(
            Device(
                type_name=type_name,
                group=group.name,
                host=group.host(node),
                node_index=node,
                index=index,
                disk_folder=group.nvme.folder if group.nvme else "",
                kind=self.device_types[type_name].kind,
            )
            for group in self.groups
            for node in range(group.count)
            for index, type_name in enumerate(name for name, count in group.devices for _ in range(count))
        )

    def host_memory_of(self, type_name: str) -> HostMemory | None:
        """Return what each device of the type may keep in its node's memory, and how fast; None: not every one may.

        A node's memory is shared equally; of groups that differ the least counts.
        """
        return _least(HostMemory, self._shares_of(type_name, "host_memory"))

    def nvme_of(self, type_name: str) -> Nvme | None:
        """Return what each device of the type may keep on its node's disks, likewise."""
        return _least(Nvme, self._shares_of(type_name, "nvme"))

    def _shares_of(self, type_name: str, what: str) -> list[Any]:
        groups = [group for group in self.groups if dict(group.devices).get(type_name)]
        found = [(getattr(group, what), group.devices_per_node) for group in groups]
        return [] if any(one is None for one, _ in found) else [one.share(devices) for one, devices in found]

    def group(self, name: str) -> NodeGroup:
        return next(group for group in self.groups if group.name == name)

    def link(self, a: Device, b: Device) -> Link:
        """Return the link between two devices of this cluster.

        Raises:
            ValueError: they are the same device.
        """
        if a == b:
            raise ValueError(f"no link from device {a.index} of {a.host!r} to itself")
        if a.group == b.group and a.node_index == b.node_index:
            return self.group(a.group).link
        return self.links_between[pair(a.group, b.group)]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything a plan can depend on: not the cluster's name, comments, or sources of numbers."""
        content = self.to_dict()
        del content["name"], content["assumptions"]
        for device_type in content["device_types"]:
            del device_type["source"], device_type["like"]
        for group in content["groups"]:
            del group["price"]
            if group.get("nvme"):
                del group["nvme"]["folder"]
        for link in [entry["link"] for entry in content["groups"] + content["links_between"]]:
            del link["assumed"]
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster for JSON; `from_dict` gives back an equal one."""
        return {
            "name": self.name,
            "groups": [
                {name: value for name, value in asdict(group).items() if value != _UNSAID.get(name, _ALWAYS_SAID)}
                | {"hosts": list(group.hosts), "devices": [list(entry) for entry in group.devices]}
                | {"price": list(group.price) if group.price else None}
                for group in self.groups
            ],
            "device_types": [
                asdict(device_type) | {"peak_flops_per_second": dict(sorted(device_type.peak_flops_per_second.items()))}
                for _, device_type in sorted(self.device_types.items())
            ],
            "links_between": [
                {"between": list(names), "link": asdict(link)} for names, link in sorted(self.links_between.items())
            ],
            "assumptions": list(self.assumptions),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Cluster":
        """Read what `to_dict` gave.

        Raises:
            InputError: `content` is something else.
        """
        try:
            return cls(
                name=content["name"],
                groups=tuple(
                    NodeGroup(
                        name=group["name"],
                        count=group["count"],
                        hosts=tuple(group["hosts"]),
                        devices=tuple((type_name, count) for type_name, count in group["devices"]),
                        link=Link(**group["link"]),
                        price=tuple(group["price"]) if group.get("price") else None,
                        host_memory=HostMemory(**group["host_memory"]) if group.get("host_memory") else None,
                        nvme=Nvme(**group["nvme"]) if group.get("nvme") else None,
                        cards=group.get("cards", 1),
                    )
                    for group in content["groups"]
                ),
                device_types={entry["name"]: DeviceType(**entry) for entry in content["device_types"]},
                links_between={pair(*entry["between"]): Link(**entry["link"]) for entry in content["links_between"]},
                assumptions=tuple(content["assumptions"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is no record of a cluster: {type(error).__name__}: {error}") from None


def _least(kind: type[Outside], shares: list[Outside]) -> Outside | None:
    """Return the least of each number; None where there are none."""
    return kind(*(min(column) for column in zip(*map(astuple, shares), strict=True))) if shares else None


def pair(a: str, b: str) -> tuple[str, str]:
    """Return the key of `Cluster.links_between` for two groups, in either order."""
    return (a, b) if a <= b else (b, a)
