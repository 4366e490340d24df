"""Costs of collectives on a cluster: which links a group uses, and whose measurements it may draw on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dejavu.cluster import Cluster, Device, Link
from dejavu.cost.collectives.alpha_beta import FITTED_LINKS, Links
from dejavu.cost.collectives.curves import NO_COMMUNICATION, CollectiveModel, check_size
from dejavu.cost.collectives.points import Points, points_of, screened
from dejavu.cost.estimates import CostError, Estimate
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.collective import COLLECTIVES, Collective


class CollectiveCosts:
    """All collectives of a cluster; models are fitted when first asked for, and kept."""

    def __init__(self, cluster: Cluster, database: ProfileDatabase | None) -> None:
        self.cluster = cluster
        self.database = database
        self._models: dict[tuple[str, str | None, Links], CollectiveModel] = {}
        self._points: dict[tuple[str, str], Points] = {}

    def estimate(
        self, name: str, size_bytes: float, groups: Sequence[Sequence[Device]], dtype: str = "float16"
    ) -> Estimate:
        """Estimate all groups running it concurrently, each on its own, as in `Collective`.

        Raises:
            CostError: no such collective, an invalid size, or invalid groups.
        """
        if name not in COLLECTIVES:
            raise CostError(f"unknown collective {name!r}; wanted one of {', '.join(COLLECTIVES)}")
        check_size(size_bytes)
        try:
            collective = on_mesh(self.cluster, name, groups)
        except ValueError as error:
            raise CostError(f"{name} cannot be priced: {error}") from None
        if collective.num_ranks == 1:
            return Estimate(0.0, 0.0, 0.0, NO_COMMUNICATION)
        types = {device.type_name for group in groups for device in group}
        device_type = types.pop() if len(types) == 1 else None  # mixed groups are never measured
        return self.model(name, device_type, slowest_links(self.cluster, groups)).estimate(
            collective, size_bytes, dtype
        )

    def model(self, name: str, device_type: str | None, links: Links) -> CollectiveModel:
        """Fit to the database's rows of this device type, assuming that they were measured on these links."""
        key = (name, device_type, links)
        if key not in self._models:
            self._models[key] = CollectiveModel.of(name, self._measured(name, device_type), links)
        return self._models[key]

    def _measured(self, name: str, device_type: str | None) -> Points:
        if self.database is None or device_type is None:
            return screened([], [], np.array([]), np.array([]))
        key = (name, device_type)
        if key not in self._points:
            rows = self.database.latest(kind="collective", name=name, device_type=device_type)
            self._points[key] = points_of(rows)
        return self._points[key]


def on_mesh(cluster: Cluster, name: str, groups: Sequence[Sequence[Device]]) -> Collective:
    """Map the groups to ranks of the smallest mesh that contains their nodes, in the cluster's order.

    Raises:
        ValueError: the groups are not of one size, empty, or share a device.
    """
    order = [group.name for group in cluster.groups]
    nodes = sorted(
        {(device.group, device.node_index) for group in groups for device in group},
        key=lambda node: (order.index(node[0]), node[1]),
    )
    width = max((cluster.group(name).devices_per_node for name, _ in nodes), default=1)
    place = {node: index for index, node in enumerate(nodes)}
    ranks = tuple(
        tuple(place[device.group, device.node_index] * width + device.index for device in group) for group in groups
    )
    return Collective(name=name, replica_groups=ranks, mesh_nodes=max(len(nodes), 1), devices_per_node=width)


def slowest_links(cluster: Cluster, groups: Sequence[Sequence[Device]]) -> Links:
    """Return the slowest link of any pair in a group, inside a node and between nodes: every ring waits for it.

    Where the groups use no link of a kind it is the slowest of the cluster, which their neighbours were measured on.
    """
    inside: set[Link] = set()
    between: set[Link] = set()
    for group in groups:
        # One device of each node suffices for all links between nodes.
        nodes: dict[tuple[str, int], list[Device]] = {}
        for device in group:
            nodes.setdefault((device.group, device.node_index), []).append(device)
        inside |= {cluster.link(*devices[:2]) for devices in nodes.values() if len(devices) > 1}
        firsts = [devices[0] for devices in nodes.values()]
        between |= {cluster.link(a, b) for index, a in enumerate(firsts) for b in firsts[:index]}
    inside = inside or {group.link for group in cluster.groups if group.devices_per_node > 1}
    between = between or set(cluster.links_between.values())
    used = {device.group for group in groups for device in group}
    return Links(
        _slowest(inside) if inside else FITTED_LINKS.inside,
        _slowest(between) if between else FITTED_LINKS.between,
        min((cluster.group(name).cards_per_device for name in used), default=0.0),
    )


def _slowest(links: set[Link]) -> Link:
    return Link(min(link.bytes_per_second for link in links), max(link.latency_seconds for link in links))
