"""The cluster as it is now: of the file's hosts those that have a Dask worker, and hosts that only a worker names."""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dejavu.cluster import Cluster, DeviceType, Link, NodeGroup, pair, this_machine
from dejavu.cluster.catalogue import NETWORK_LATENCY_SECONDS
from dejavu.foundation.dask_workers import workers_of
from dejavu.foundation.errors import InputError

UNKNOWN_BYTES_PER_SECOND = 1.25e8  # a link that nobody described: 1 Gbit/s, so that no plan relies on it


@dataclass(frozen=True)
class WorkerDevices:
    """A Dask worker, and the devices that it lends.

    Attributes:
        names: by which a cluster file may call its host: the worker's name, its address, its machine's name.
        devices: (type, how many); of CPUs no more than the worker has threads.
        address: of the worker.
    """

    names: tuple[str, ...]
    devices: tuple[tuple[DeviceType, int], ...]
    address: str = ""


def look_at_workers(client: Any) -> tuple[WorkerDevices, ...]:
    """Ask every worker what it has.

    Args:
        client: a synchronous `distributed.Client`.

    Raises:
        OSError: the scheduler does not answer.
    """
    workers = workers_of(client)
    if not workers:
        return ()
    found = client.run(_devices_here, on_error="return")
    return tuple(
        WorkerDevices(
            names=(str(about["name"]), about["host"], machine),
            devices=tuple(
                (kind, min(count, about["nthreads"]) if kind.kind == "cpu" else count) for kind, count in devices
            ),
            address=address,
        )
        for address, about in sorted(workers.items(), key=lambda one: str(one[1]["name"]))
        if isinstance(found.get(address), tuple)
        for machine, devices in [found[address]]
    )


def _devices_here() -> tuple[str, list[tuple[DeviceType, int]]]:
    machine = this_machine()
    return socket.gethostname(), [(machine.device_types[name], n) for name, n in machine.device_counts.items()]


def as_present(cluster: Cluster, workers: Iterable[WorkerDevices]) -> Cluster:
    """Return the part of the cluster whose hosts have a worker, with the devices that are there, and added hosts.

    A device of a file that this process cannot recognise (a CPU core, or a type that the file describes) counts as
    there while its host has as many devices of its kind; a GPU of the catalogue has to be of the type that is written.
    A host of the file has no more devices than the file gives it.

    Raises:
        InputError: no host of the cluster has a worker, and no other host either.
    """
    left = list(workers)
    groups: list[NodeGroup] = []
    like: dict[str, str] = {}  # a group made here -> the group of the file whose links it has
    types = dict(cluster.device_types)
    for group in cluster.groups:
        whole: list[str] = []
        for node in range(group.count):
            host = group.host(node)
            worker = _worker_of(host, left)
            if worker is None:
                continue
            left.remove(worker)
            found = _found_of(group, cluster.device_types, worker)
            if found == group.devices:
                whole.append(host)
            elif found:
                groups.append(replace(group, name=f"{group.name} ({host})", count=1, hosts=(host,), devices=found))
                like[groups[-1].name] = group.name
                types |= {kind.name: kind for kind, _ in worker.devices if kind.name not in types}
        if len(whole) == group.count:
            groups.append(group)
        elif whole:
            groups.append(replace(group, count=len(whole), hosts=tuple(whole)))
    for worker in left:
        _add(groups, types, worker)
    if not groups:
        raise InputError(f"no Dask worker is on a host of the cluster {cluster.name}; nothing is left to plan for")
    return _linked(cluster, groups, like, types)


def workers_by_host(present: Cluster, workers: Iterable[WorkerDevices]) -> dict[str, str]:
    """Return the address of each host's worker, for a cluster that `as_present` made of these workers."""
    left, found = list(workers), {}
    for host in dict.fromkeys(device.host for device in present.devices()):
        worker = _worker_of(host, left)
        if worker is not None:
            left.remove(worker)
            found[host] = worker.address
    return found


def _worker_of(host: str, workers: list[WorkerDevices]) -> WorkerDevices | None:
    for place in range(3):
        for worker in workers:
            if worker.names[place] == host:
                return worker
    return None


def _found_of(group: NodeGroup, types: Mapping[str, DeviceType], worker: WorkerDevices) -> tuple[tuple[str, int], ...]:
    """Return the devices of a node as its worker has them, in the group's order, and no more than the group has.

    GPUs of another type stand for those that are missing.
    """
    left = Counter({kind.name: count for kind, count in worker.devices})
    kinds = {kind.name: kind.kind for kind, _ in worker.devices}
    found: Counter[str] = Counter()
    missing = 0
    for name, count in group.devices:
        written = types[name]
        recognisable = written.kind != "cpu" and written.source == "catalogue"
        same = [other for other in left if (other == name if recognisable else kinds[other] == written.kind)]
        found[name] = _taken(left, same, count).total()
        missing += count - found[name] if written.kind != "cpu" else 0
    found += _taken(left, [other for other in left if kinds[other] != "cpu"], missing)
    return tuple(found.items())


def _taken(left: Counter[str], names: Iterable[str], most: int) -> Counter[str]:
    """Take devices of these types out of what is left, at most so many, and return how many of each."""
    taken: Counter[str] = Counter()
    for name in names:
        taken[name] = min(left[name], most - taken.total())
    left.subtract(taken)
    return taken


def _add(groups: list[NodeGroup], types: dict[str, DeviceType], worker: WorkerDevices) -> None:
    """Add a host that the file does not name: to a group of equal nodes, or as a group of its own."""
    devices = tuple((kind.name, count) for kind, count in worker.devices)
    for k, group in enumerate(groups):
        written = [(types[name].kind, count) for name, count in group.devices]
        if devices == group.devices or (
            all(kind == "cpu" for kind, _ in written)
            and [(kind.kind, count) for kind, count in worker.devices] == written
        ):
            hosts = (*(group.host(node) for node in range(group.count)), worker.names[0])
            groups[k] = replace(group, count=len(hosts), hosts=hosts)
            return
    types |= {kind.name: kind for kind, _ in worker.devices if kind.name not in types}
    link = groups[0].link if groups else Link(UNKNOWN_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS, assumed=True)
    name = next(name for k in itertools.count(1) if (name := f"added-{k}") not in {group.name for group in groups})
    groups.append(NodeGroup(name, 1, (worker.names[0],), devices, replace(link, assumed=True)))


def _linked(
    cluster: Cluster, groups: list[NodeGroup], like: Mapping[str, str], types: Mapping[str, DeviceType]
) -> Cluster:
    """Give each pair of groups the file's link, or else the slowest that it has."""
    unknown = Link(UNKNOWN_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS, assumed=True)
    slowest = min(cluster.links_between.values(), key=lambda link: link.bytes_per_second, default=unknown)
    links, assumptions = {}, list(cluster.assumptions)
    for k, a in enumerate(groups):
        for b in groups[k:]:
            if a is b and a.count == 1:
                continue
            known = cluster.links_between.get(pair(like.get(a.name, a.name), like.get(b.name, b.name)))
            links[pair(a.name, b.name)] = known or replace(slowest, assumed=True)
            if known is None:
                assumptions.append(f"Between {a.name} and {b.name}: {slowest.describe()}, the slowest that is known.")
    used = {name for group in groups for name, _ in group.devices}
    return Cluster(
        name=cluster.name,
        groups=tuple(groups),
        device_types={name: types[name] for name in sorted(used)},
        links_between=links,
        assumptions=tuple(assumptions),
    )
