"""Devices of one type that have better links among themselves than with all others of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from dejavu.cluster.records import Cluster, Link, NodeGroup, pair
from dejavu.foundation.units import kind_of_devices

MOST_ISLANDS = 8  # of all types: searches and proofs take longer the more there are


class OnDevices(Protocol):
    """What may have devices of a type, on groups of nodes that it names, or on any."""

    @property
    def device_type(self) -> str: ...
    @property
    def groups(self) -> tuple[str, ...]: ...


class Island(NamedTuple):
    """Devices of one type, on some groups of nodes.

    Attributes:
        groups: their names; empty: all that have the type.
    """

    device_type: str
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, one: OnDevices) -> Island:
        """Return the devices that it may have."""
        return cls(one.device_type, one.groups)

    def on(self, group: NodeGroup) -> int:
        """Return how many of its devices each node of a group has."""
        is_its = not self.groups or group.name in self.groups
        return dict(group.devices).get(self.device_type, 0) if is_its else 0

    def groups_of(self, cluster: Cluster) -> list[NodeGroup]:
        """Return the groups of nodes that have its devices."""
        return [group for group in cluster.groups if self.on(group)]

    def __str__(self) -> str:
        return kind_of_devices(self.device_type, self.groups)


def whole_types(cluster: Cluster) -> tuple[Island, ...]:
    """Return all devices of each type."""
    return tuple(map(Island, cluster.device_counts))


def told_apart(cluster: Cluster) -> tuple[Island, ...]:
    """Return what the types fall into: of each its islands, or all of its devices; empty: no type has several islands.

    What a stage sends among its devices is priced by the slowest link that any stage on its type may have, and inside
    an island that is a faster one. Two groups are on one island where their nodes have equal links inside and equal
    cards, and a faster link between them than the slowest that the type has, or all such links are equal.

    With more than `MOST_ISLANDS` in all none are told apart.
    """
    found = tuple(island for name in cluster.device_counts for island in _islands(cluster, name))
    has_several = any(island.groups for island in found)
    return found if has_several and len(found) <= MOST_ISLANDS else ()


def told_apart_in(cluster: Cluster, named: Iterable[Island]) -> tuple[Island, ...]:
    """Return each type's named islands and what is left of it; all of its devices where none is named."""
    islands, found = dict.fromkeys(one for one in named if one.groups), list[Island]()
    for name in cluster.device_counts:
        own = [one for one in islands if one.device_type == name]
        others = tuple(g.name for g in Island(name).groups_of(cluster) if not any(one.on(g) for one in own))
        found += [*own, Island(name, others)] if own and others else own or [Island(name)]
    return tuple(found)


def between_links(cluster: Cluster, a: Island, b: Island) -> list[Link]:
    """Return the links between two nodes, one with devices of the one and one with devices of the other."""
    ends = a.groups_of(cluster), b.groups_of(cluster)
    pairs = {pair(x.name, y.name) for x in ends[0] for y in ends[1] if x is not y or x.count > 1}
    return [link for names, link in cluster.links_between.items() if names in pairs]


def _islands(cluster: Cluster, device_type: str) -> Iterator[Island]:
    whole = Island(device_type)
    groups = whole.groups_of(cluster)
    rates = [link.bytes_per_second for link in between_links(cluster, whole, whole)]
    nearer_than = min(rates) if rates and min(rates) < max(rates) else 0.0
    found = list[list[NodeGroup]]()
    for group in groups:
        near = [one for one in found if any(_is_near(cluster, whole, group, other, nearer_than) for other in one)]
        found = [one for one in found if one not in near] + [[*(other for one in near for other in one), group]]
    islands = [Island(device_type, tuple(group.name for group in groups if group in one)) for one in found]
    islands.sort(key=lambda island: groups.index(cluster.group(island.groups[0])))
    is_worth_it = len(islands) > 1 and any(_has_better_links(cluster, whole, island) for island in islands)
    yield from islands if is_worth_it else [whole]


def _is_near(cluster: Cluster, whole: Island, one: NodeGroup, other: NodeGroup, nearer_than: float) -> bool:
    """Return whether two groups are alike, and their link has more bytes per second than that."""
    inside = [(group.link if whole.on(group) > 1 else None) for group in (one, other)]
    have_equal_cards = one.cards == other.cards or one.cards_per_device == other.cards_per_device
    are_alike = inside[0] == inside[1] and have_equal_cards
    return are_alike and cluster.links_between[pair(one.name, other.name)].bytes_per_second > nearer_than


def _has_better_links(cluster: Cluster, whole: Island, island: Island) -> bool:
    """Return whether a stage of several devices on the island has faster links than it may have elsewhere."""
    own, every = (one.groups_of(cluster) for one in (island, whole))
    inside, all_inside = ([g.link.bytes_per_second for g in groups if whole.on(g) > 1] for groups in (own, every))
    if inside and min(inside) > min(all_inside):
        return True
    between = [link.bytes_per_second for link in between_links(cluster, island, island)]
    slowest = min(link.bytes_per_second for link in between_links(cluster, whole, whole))
    has_more_cards = min(g.cards for g in own) > min(g.cards for g in every) and (
        min(g.cards_per_device for g in own) > min(g.cards_per_device for g in every)
    )
    return bool(between) and (min(between) > slowest or has_more_cards)
