"""Ways to divide a cluster's devices among virtual workers, and each worker's part as a cluster of its own.

HetPipe (Park et al., USENIX ATC 2020, section 8.1) has three: a node each (NP), equal parts of every kind of node (ED),
and fast nodes paired with slow ones (HD).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dejavu.cluster import Cluster, Device
from dejavu.cluster.records import HostMemory, NodeGroup

MOST_WORKERS = 8
MOST_EQUAL = 3  # numbers of equal workers that are tried, the smallest first


class Part(NamedTuple):
    """Devices of some nodes of a group.

    Attributes:
        nodes: their places in the group.
        devices: of each of them, the places in the node.
    """

    group: str
    nodes: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class WorkerDevices:
    """The devices of a virtual worker."""

    parts: tuple[Part, ...]

    def kind_in(self, cluster: Cluster) -> tuple[object, ...]:
        """Return what two workers have in common whose best plans cost the same."""
        return tuple((one.group, len(one.nodes), *_names(cluster.group(one.group), one.devices)) for one in self.parts)

    def cluster(self, whole: Cluster) -> Cluster:
        """Return them as a cluster of its own.

        A worker with some of a node's devices has as large a part of its network card, memory and disks.
        """
        shares = {one.group: min(1.0, _cards(whole.group(one.group), one)) for one in self.parts}
        groups = tuple(_group(whole.group(one.group), one) for one in self.parts)
        types = {name for group in groups for name, _ in group.devices}
        links = {
            (a, b): replace(link, bytes_per_second=link.bytes_per_second * min(shares[a], shares[b]))
            for (a, b), link in whole.links_between.items()
            if a in shares and b in shares
        }
        known = {name: one for name, one in whole.device_types.items() if name in types}
        return replace(whole, groups=groups, device_types=known, links_between=links)

    def actual(self, device: Device, whole: Cluster) -> Device:
        """Return which device of the whole cluster a device of such a worker is."""
        part = next(one for one in self.parts if one.group == device.group)
        node = part.nodes[device.node_index]
        host = whole.group(device.group).host(node)
        return replace(device, host=host, node_index=node, index=part.devices[device.index])

    def counts(self, cluster: Cluster) -> Counter[str]:
        """Count its devices by type."""
        return Counter(
            name for one in self.parts for name in _names(cluster.group(one.group), one.devices) for _ in one.nodes
        )


@dataclass(frozen=True)
class Division:
    """A cluster's devices, divided among virtual workers.

    Attributes:
        name: for people.
    """

    name: str
    workers: tuple[WorkerDevices, ...]


def divisions(cluster: Cluster) -> list[Division]:
    """Return the ways that are considered, each once: of 2 to `MOST_WORKERS` workers."""
    found = dict[tuple[object, ...], Division]()
    for one in _every(cluster):
        if 2 <= len(one.workers) <= MOST_WORKERS:
            found.setdefault(tuple(sorted(str(worker.kind_in(cluster)) for worker in one.workers)), one)
    return list(found.values())


def _every(cluster: Cluster) -> Iterator[Division]:
    nodes = [_whole(group, (k,)) for group in cluster.groups for k in range(group.count)]
    yield Division("a node each", tuple(WorkerDevices((one,)) for one in nodes))
    yield Division("a group of nodes each", tuple(WorkerDevices((_whole(one),)) for one in cluster.groups))
    if paired := _paired(cluster, nodes):
        yield Division("fast nodes paired with slow ones", paired)
    equal = [(n, found) for n in range(2, MOST_WORKERS + 1) if (found := _equal(cluster, n))]
    for n, found in equal[:MOST_EQUAL]:
        yield Division(f"{n} equal parts of all nodes", found)
    devices = [Part(one.group, one.nodes, (k,)) for one in nodes for k in one.devices]
    yield Division("a device each", tuple(WorkerDevices((one,)) for one in devices))


def _whole(group: NodeGroup, nodes: Sequence[int] | None = None) -> Part:
    own = range(group.count) if nodes is None else nodes
    return Part(group.name, tuple(own), tuple(range(group.devices_per_node)))


def _paired(cluster: Cluster, nodes: Sequence[Part]) -> tuple[WorkerDevices, ...]:
    """Pair the fastest node with the slowest, and so on; nothing where nodes are odd in number, or all alike."""
    peak = {part: _peak(cluster, part) for part in nodes}
    if len(nodes) < 4 or len(nodes) % 2 or len(set(peak.values())) == 1:
        return ()
    order = sorted(nodes, key=lambda part: -peak[part])
    return tuple(WorkerDevices(_merged((order[k], order[-1 - k]))) for k in range(len(order) // 2))


def _merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Make one part of two nodes of a group."""
    first, second = parts
    if first.group != second.group:
        return tuple(parts)
    return (Part(first.group, (*first.nodes, *second.nodes), first.devices),)


def _equal(cluster: Cluster, count: int) -> tuple[WorkerDevices, ...]:
    """Give each of so many workers an equal part of every group: whole nodes, or a part of one; nothing if none is."""
    columns = []
    for group in cluster.groups:
        each = group.devices_per_node
        if group.count % count == 0:
            width = group.count // count
            columns.append([_whole(group, range(k * width, (k + 1) * width)) for k in range(count)])
            continue
        beside = count // group.count
        if count % group.count or each % beside or len(group.devices) > 1:
            return ()
        width = each // beside
        places = [(k // beside, k % beside) for k in range(count)]
        columns.append([Part(group.name, (node,), tuple(range(k * width, (k + 1) * width))) for node, k in places])
    return tuple(WorkerDevices(parts) for parts in zip(*columns, strict=True))


def _peak(cluster: Cluster, part: Part) -> float:
    names = _names(cluster.group(part.group), part.devices)
    return sum(max(cluster.device_types[name].peak_flops_per_second.values()) for name in names)


def _names(group: NodeGroup, devices: Sequence[int]) -> list[str]:
    names = [name for name, count in group.devices for _ in range(count)]
    return [names[k] for k in devices]


def _cards(group: NodeGroup, part: Part) -> float:
    """Return how many of a node's network cards are the part's devices'."""
    return group.cards_per_device * len(part.devices)


def _group(group: NodeGroup, part: Part) -> NodeGroup:
    share, counts = len(part.devices) / group.devices_per_node, Counter(_names(group, part.devices))
    memory, disks = group.host_memory, group.nvme
    return replace(
        group,
        count=len(part.nodes),
        hosts=tuple(group.host(node) for node in part.nodes),
        devices=tuple(counts.items()),
        cards=max(1, int(_cards(group, part))),
        price=None,
        host_memory=memory
        and HostMemory(
            int(memory.size_bytes * share),
            memory.bytes_per_second,
            memory.update_bytes_per_second and memory.update_bytes_per_second * share,
        ),
        nvme=disks
        and replace(
            disks,
            size_bytes=int(disks.size_bytes * share),
            read_bytes_per_second=disks.read_bytes_per_second * share,
            write_bytes_per_second=disks.write_bytes_per_second * share,
        ),
    )
