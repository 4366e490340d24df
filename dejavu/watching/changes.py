"""What differs between two clusters, as sentences.

Links and nodes are compared where they are of the same hosts, whatever their groups are called, and else where groups
have the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

from dejavu.cluster import Cluster, Link, NodeGroup, pair
from dejavu.foundation import units
from dejavu.foundation.units import plural

Form = Callable[[Any, int], str]


def _as_typed(value: object, _digits: int) -> str:
    """Format a number without a unit, or a word."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


_OF_NODES: tuple[tuple[str, str, str, Form], ...] = (
    ("host memory", "host_memory", "size_bytes", units.format_bytes),
    ("bandwidth of host memory", "host_memory", "bytes_per_second", units.format_bytes_per_second),
    ("update bandwidth of host memory", "host_memory", "update_bytes_per_second", units.format_bytes_per_second),
    ("NVMe", "nvme", "size_bytes", units.format_bytes),
    ("reading bandwidth of NVMe", "nvme", "read_bytes_per_second", units.format_bytes_per_second),
    ("writing bandwidth of NVMe", "nvme", "write_bytes_per_second", units.format_bytes_per_second),
)
_OF_TYPES: tuple[tuple[str, str, Form], ...] = (  # by their keys in a cluster file
    ("kind", "kind", _as_typed),
    ("multiprocessors", "num_multiprocessors", _as_typed),
    ("cache", "cache_bytes", units.format_bytes),
    ("board_watts", "board_watts", _as_typed),
    ("process_nanometres", "process_nanometres", _as_typed),
    ("architecture", "architecture", _as_typed),
)


@dataclass(frozen=True)
class _Part:
    """Hosts that are in both clusters, of one group of each; none: the groups only have the same name.

    Attributes:
        name: the group's now, or before where several groups have become one.
    """

    old: NodeGroup
    new: NodeGroup
    hosts: int
    name: str

    @property
    def has_pairs(self) -> bool:
        """Whether links between two nodes of it were there and are."""
        return self.hosts > 1 or (self.old.name == self.new.name and min(self.old.count, self.new.count) > 1)


def differences(old: Cluster, new: Cluster) -> tuple[str, ...]:
    """Say what a plan for `old` may not find in `new`; empty exactly where their fingerprints are equal."""
    if old.fingerprint == new.fingerprint:
        return ()
    parts = _parts(old, new)
    found = [*_hosts(old, new), *_nodes(parts), *_types(old, new), *_links(old, new, parts)]
    return tuple(dict.fromkeys(found)) or (_of_writing(old, new),)


def _hosts(old: Cluster, new: Cluster) -> Iterator[str]:
    before, after = _devices_of_hosts(old), _devices_of_hosts(new)
    for host in sorted(before.keys() - after.keys()):
        yield f"host {host} is gone, with {_told(before[host])}"
    for host in sorted(after.keys() - before.keys()):
        yield f"host {host} is new, with {_told(after[host])}"
    for host in sorted(before.keys() & after.keys()):
        if before[host] != after[host]:
            yield f"host {host} has {_told(after[host])}, and had {_told(before[host])}"


def _devices_of_hosts(cluster: Cluster) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for device in cluster.devices():
        found.setdefault(device.host, Counter())[device.type_name] += 1
    return found


def _told(devices: Counter[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(devices.items()))


def _group_of_hosts(cluster: Cluster) -> dict[str, NodeGroup]:
    return {group.host(node): group for group in cluster.groups for node in range(group.count)}


def _parts(old: Cluster, new: Cluster) -> list[_Part]:
    before, after = _group_of_hosts(old), _group_of_hosts(new)
    hosts = Counter((before[host].name, group.name) for host, group in after.items() if host in before)
    old_groups = {group.name: group for group in old.groups}
    stayed = {name for _, name in hosts}
    hosts.update({(g.name, g.name): 0 for g in new.groups if g.name in old_groups and g.name not in stayed})
    of_new = Counter(name for _, name in hosts)
    return [
        _Part(old_groups[was], new.group(now), count, now if of_new[now] == 1 else was)
        for (was, now), count in hosts.items()
    ]


def _nodes(parts: list[_Part]) -> Iterator[str]:
    for part in parts:
        old, new = part.old, part.new
        for what, record, field, form in _OF_NODES:
            was, now = (getattr(getattr(group, record), field, None) for group in (old, new))
            yield from _changed(f"{what} of a node of {part.name}", was, now, form)
        if old.cards != new.cards:
            yield f"network cards of a node of {part.name}: {old.cards}, now {new.cards}"
        if old.devices != new.devices and dict(old.devices) == dict(new.devices):
            yield f"devices of a node of {part.name} are in another order"


def _changed(what: str, was: Any, now: Any, form: Form) -> Iterator[str]:
    """Say what a number, or a word, was and is; None: it was not given."""
    if was != now:
        if was is None or now is None:
            shown = tuple("not given" if value is None else form(value, 3) for value in (was, now))
        else:
            shown = units.told_apart(was, now, form)
        yield f"{what}: {shown[0]}, now {shown[1]}"


def _types(old: Cluster, new: Cluster) -> Iterator[str]:
    for name in sorted(old.device_types.keys() & new.device_types.keys()):
        before, after = old.device_types[name], new.device_types[name]
        yield from _changed(f"memory of {name}", before.memory_bytes, after.memory_bytes, units.format_bytes)
        bandwidths = before.memory_bytes_per_second, after.memory_bytes_per_second
        yield from _changed(f"memory bandwidth of {name}", *bandwidths, units.format_bytes_per_second)
        was, now = before.peak_flops_per_second, after.peak_flops_per_second
        for dtype in sorted(was.keys() | now.keys()):
            peaks = was.get(dtype), now.get(dtype)
            yield from _changed(f"peak {dtype} of {name}", *peaks, units.format_flops_per_second)
        for key, field, form in _OF_TYPES:
            yield from _changed(f"{key} of {name}", getattr(before, field), getattr(after, field), form)


def _links(old: Cluster, new: Cluster, parts: list[_Part]) -> Iterator[str]:
    for part in parts:
        yield from _link_changed(f"inside a node of {part.name}", part.old.link, part.new.link)
    for a, b in combinations_with_replacement(parts, 2):
        was, now = _link_of(old, a.old, b.old), _link_of(new, a.new, b.new)
        if was is not None and now is not None and (a is not b or a.has_pairs):
            names = pair(a.name, b.name)
            between = f"two nodes of {a.name}" if a.name == b.name else " and ".join(names)
            yield from _link_changed(f"between {between}", was, now)
    if old.num_devices != new.num_devices:
        yield f"{plural(new.num_devices, 'device')} in all, and {old.num_devices} before"


def _link_of(cluster: Cluster, a: NodeGroup, b: NodeGroup) -> Link | None:
    """Return the link between nodes of two groups; None: there is none in a group of one node."""
    return None if a is b and a.count == 1 else cluster.links_between.get(pair(a.name, b.name))


def _link_changed(where: str, was: Link, now: Link) -> Iterator[str]:
    rates = was.bytes_per_second, now.bytes_per_second
    latencies = was.latency_seconds, now.latency_seconds
    if rates[0] != rates[1] or latencies[0] != latencies[1]:
        shown = (
            units.told_apart(*rates, units.format_bytes_per_second),
            units.told_apart(*latencies, units.format_seconds),
        )
        before, after = (f"{rate} one way, {latency}" for rate, latency in zip(*shown, strict=True))
        yield f"link {where}: {before}, now {after}"


def _of_writing(old: Cluster, new: Cluster) -> str:
    """Say what differs where hosts, devices and links are the same."""
    before, after = ([(host, group.name) for host, group in _group_of_hosts(c).items()] for c in (old, new))
    if before != after:
        return "groups of nodes have other names or another order"
    return "the same nodes and links are written in another way"
