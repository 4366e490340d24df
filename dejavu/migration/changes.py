"""What may happen to a cluster while it trains, and the cluster after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dejavu.cluster import Cluster

Seat = tuple[str, int]  # host, index of the device on it


@dataclass(frozen=True)
class ClusterNow:
    """A cluster as its file describes it, and what is different at the moment.

    Attributes:
        absent: devices that are lost, or have not come yet.
        slowness: of devices that take so many times as long as usual; the others take 1.
        link_slowness: of hosts all of whose links to others take so many times as long.
    """

    cluster: Cluster
    absent: frozenset[Seat] = frozenset()
    slowness: Mapping[Seat, float] = field(default_factory=dict)
    link_slowness: Mapping[str, float] = field(default_factory=dict)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that have a device left."""
        left = (device.host for device in self.cluster.devices() if (device.host, device.index) not in self.absent)
        return tuple(dict.fromkeys(left))

    def after(self, *changes: ClusterChange) -> ClusterNow:
        """Return the cluster after these changes."""
        now = self
        for change in changes:
            now = change.applied(now)
        return now

    def seats_of(self, host: str) -> frozenset[Seat]:
        """Return all devices of a host."""
        return frozenset((host, device.index) for device in self.cluster.devices() if device.host == host)


@dataclass(frozen=True)
class DeviceLost:
    """A device can run no rank any more."""

    host: str
    index: int

    def applied(self, now: ClusterNow) -> ClusterNow:
        return replace(now, absent=now.absent | {(self.host, self.index)})

    def __str__(self) -> str:
        return f"device {self.index} of {self.host} is lost"


@dataclass(frozen=True)
class HostLost:
    """A host has gone, with all its devices and its memory."""

    host: str

    def applied(self, now: ClusterNow) -> ClusterNow:
        slow_links = {host: factor for host, factor in now.link_slowness.items() if host != self.host}
        slow = {seat: factor for seat, factor in now.slowness.items() if seat[0] != self.host}
        absent = now.absent | now.seats_of(self.host)
        return replace(now, absent=absent, slowness=slow, link_slowness=slow_links)

    def __str__(self) -> str:
        return f"host {self.host} is lost"


@dataclass(frozen=True)
class HostAdded:
    """A host of the cluster has come, or come back."""

    host: str

    def applied(self, now: ClusterNow) -> ClusterNow:
        return replace(now, absent=now.absent - now.seats_of(self.host))

    def __str__(self) -> str:
        return f"host {self.host} has come"


@dataclass(frozen=True)
class DeviceSlowed:
    """A device takes `factor` times as long as usual; 1: it has recovered."""

    host: str
    index: int
    factor: float

    def applied(self, now: ClusterNow) -> ClusterNow:
        others = {seat: factor for seat, factor in now.slowness.items() if seat != (self.host, self.index)}
        return replace(now, slowness=others if self.factor == 1 else {**others, (self.host, self.index): self.factor})

    def __str__(self) -> str:
        return _slowness_of(f"device {self.index} of {self.host}", self.factor)


@dataclass(frozen=True)
class LinkSlowed:
    """Messages between a host and all others take `factor` times as long as usual; 1: it has recovered."""

    host: str
    factor: float

    def applied(self, now: ClusterNow) -> ClusterNow:
        others = {host: factor for host, factor in now.link_slowness.items() if host != self.host}
        return replace(now, link_slowness=others if self.factor == 1 else {**others, self.host: self.factor})

    def __str__(self) -> str:
        return _slowness_of(f"the link of {self.host}", self.factor)


def _slowness_of(name: str, factor: float) -> str:
    if factor == 1:
        return f"{name} is as fast as before"
    return f"{name} takes {factor:.2g} × as long" if factor < 99.5 else f"{name} takes {factor:.0f} × as long"


ClusterChange = DeviceLost | HostLost | HostAdded | DeviceSlowed | LinkSlowed
