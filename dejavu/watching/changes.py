"""What differs between two clusters, as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dejavu.cluster import Cluster, DeviceType, Link, pair
from dejavu.foundation import units
from dejavu.foundation.units import plural


def differences(old: Cluster, new: Cluster) -> tuple[str, ...]:
    """Say what a plan for `old` may not find in `new`; empty exactly where their fingerprints are equal."""
    if old.fingerprint == new.fingerprint:
        return ()
    found = [*_hosts(old, new), *_types(old, new), *_links(old, new)]
    return tuple(found) or ("groups of nodes have other names or another order",)


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


def _types(old: Cluster, new: Cluster) -> Iterator[str]:
    for name in sorted(old.device_types.keys() & new.device_types.keys()):
        before, after = old.device_types[name], new.device_types[name]
        for what, was, now in (
            ("memory", units.format_bytes(before.memory_bytes), units.format_bytes(after.memory_bytes)),
            ("memory bandwidth", *map(_bandwidth, (before, after))),
            ("peaks", *map(_peaks, (before, after))),
        ):
            if was != now:
                yield f"{what} of {name}: {was}, now {now}"
        rest = ("kind", "num_multiprocessors", "cache_bytes", "board_watts", "process_nanometres", "architecture")
        changed = [field for field in rest if getattr(before, field) != getattr(after, field)]
        if changed:
            yield f"{', '.join(changed)} of {name} changed"


def _bandwidth(device: DeviceType) -> str:
    return units.format_bytes_per_second(device.memory_bytes_per_second)


def _peaks(device: DeviceType) -> str:
    peaks = sorted(device.peak_flops_per_second.items())
    return ", ".join(f"{dtype} {units.format_flops_per_second(peak)}" for dtype, peak in peaks)


def _links(old: Cluster, new: Cluster) -> Iterator[str]:
    inside = {group.name: group.link for group in old.groups}
    for group in new.groups:
        link = inside.get(group.name)
        if link is not None and _speed(link) != _speed(group.link):
            yield f"link inside a node of {group.name}: {link.describe()}, now {group.link.describe()}"
    for names in sorted(new.links_between):
        was, now = _link_before(old, new, names), new.links_between[names]
        if was is not None and (was.bytes_per_second, was.latency_seconds) != (
            now.bytes_per_second,
            now.latency_seconds,
        ):
            between = f"two nodes of {names[0]}" if names[0] == names[1] else " and ".join(names)
            yield f"link between {between}: {was.describe()}, now {now.describe()}"
    if old.num_devices != new.num_devices:
        yield f"{plural(new.num_devices, 'device')} in all, and {old.num_devices} before"


def _speed(link: Link) -> tuple[float, float]:
    return link.bytes_per_second, link.latency_seconds


def _link_before(old: Cluster, new: Cluster, names: tuple[str, str]) -> Link | None:
    """Return the link that was there between hosts of these two groups; None: one of them was not there."""
    if names in old.links_between:
        return old.links_between[names]
    group_of = {group.host(node): group.name for group in old.groups for node in range(group.count)}
    first, second = ([g.host(node) for node in range(g.count)] for name in names for g in new.groups if g.name == name)
    ends = [next((host for host in hosts if host in group_of), "") for hosts in (first, second[::-1])]
    if not all(ends) or ends[0] == ends[1]:
        return None
    return old.links_between.get(pair(*(group_of[host] for host in ends)))
