"""A cluster as pipeline ranks see it: pools of equal devices, and links that depend on nodes only.

A *pool* is the devices of one kind on one node. A pipeline rank with a mesh of n nodes × d devices takes n *blocks*,
each of d devices of one pool; which of the pool's devices does not matter, as they are equal and equally linked.
Shape suffixes: P = pools, G = groups of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejavu.binding.binding import Placement
from dejavu.cluster import Cluster, Device, pair
from dejavu.cluster.islands import Island, told_apart_in
from dejavu.plans import StageConfiguration
from dejavu.plans.stage_costs import Floats

Ints = NDArray[np.int64]
Place = tuple[int, ...]  # the pools of a rank's blocks, ascending; a pool twice: two blocks of it


@dataclass(frozen=True, eq=False)
class Site:
    """Pools in the order of the cluster file, and the links between them.

    Attributes:
        kinds: of devices that may be given in place of one another: a type's, or those of its islands.
        devices: of each pool.
        kind_P, group_P, node_P, size_P: of each pool: which kind, group of nodes and node, and how many devices.
        inside_latency_seconds_G, inside_seconds_per_byte_G: inside one node of the group.
        inside_assumed_G: where that is only a default, which a measurement may replace.
        between_latency_seconds_GG, between_seconds_per_byte_GG: between two nodes, by one card; inf where there
            are none.
        cards_per_device_G: of a node's network cards.
    """

    kinds: tuple[Island, ...]
    devices: tuple[tuple[Device, ...], ...]
    kind_P: Ints
    group_P: Ints
    node_P: Ints
    size_P: Ints
    inside_latency_seconds_G: Floats
    inside_seconds_per_byte_G: Floats
    inside_assumed_G: NDArray[np.bool_]
    between_latency_seconds_GG: Floats
    between_seconds_per_byte_GG: Floats
    cards_per_device_G: Floats

    @classmethod
    def of(cls, cluster: Cluster, configurations: Iterable[StageConfiguration] = ()) -> Site:
        """Return the site for stages of these configurations, which may name islands."""
        kinds = told_apart_in(cluster, (Island.of(one) for one in configurations))
        kind_of = {(one.device_type, group.name): k for k, one in enumerate(kinds) for group in one.groups_of(cluster)}
        groups = {group.name: g for g, group in enumerate(cluster.groups)}
        pools: dict[tuple[str, int, str], list[Device]] = {}
        for device in cluster.devices():
            pools.setdefault((device.group, device.node_index, device.type_name), []).append(device)
        nodes = {node: n for n, node in enumerate(dict.fromkeys((group, node) for group, node, _ in pools))}
        inside = [group.link for group in cluster.groups]
        latency, per_byte = (np.full((len(groups), len(groups)), np.inf) for _ in range(2))
        for a, b in ((a, b) for a in groups for b in groups):
            if link := cluster.links_between.get(pair(a, b)):
                latency[groups[a], groups[b]] = link.latency_seconds
                per_byte[groups[a], groups[b]] = 1.0 / link.bytes_per_second
        return cls(
            kinds=kinds,
            devices=tuple(map(tuple, pools.values())),
            kind_P=np.array([kind_of[name, group] for group, _, name in pools]),
            group_P=np.array([groups[group] for group, _, _ in pools]),
            node_P=np.array([nodes[group, node] for group, node, _ in pools]),
            size_P=np.array([len(devices) for devices in pools.values()]),
            inside_latency_seconds_G=np.array([link.latency_seconds for link in inside]),
            inside_seconds_per_byte_G=np.array([1.0 / link.bytes_per_second for link in inside]),
            inside_assumed_G=np.array([link.assumed for link in inside]),
            between_latency_seconds_GG=latency,
            between_seconds_per_byte_GG=per_byte,
            cards_per_device_G=np.array([group.cards_per_device for group in cluster.groups]),
        )

    def __len__(self) -> int:
        return len(self.devices)

    def places(self, placements: Sequence[Placement], width_R: Sequence[int]) -> list[Place]:
        """Return the pools of each pipeline rank's blocks, of so many devices each, from where its devices are."""
        pool_of = {(devices[0].host, devices[0].type_name): pool for pool, devices in enumerate(self.devices)}
        pools_R: list[list[int]] = [[] for _ in width_R]
        for placed in placements:
            pools_R[placed.pipeline_rank].append(pool_of[placed.device.host, placed.device.type_name])
        return [tuple(sorted(pools)[::width]) for pools, width in zip(pools_R, width_R, strict=True)]


def padded(places: Sequence[Place]) -> Ints:
    """Return places as (R, W): a rank of fewer blocks repeats its first."""
    most = max(map(len, places))
    return np.array([place + place[:1] * (most - len(place)) for place in places])
