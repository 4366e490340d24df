"""Cost of a transfer between two devices: a latency and a time per byte (the α–β model, Hockney 1994)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dejavu.cluster import Cluster, Link, NodeGroup
from dejavu.cluster.islands import Island, between_links, whole_types
from dejavu.profiles import Measurement, ProfileDatabase

EXCHANGE = "exchange"  # subject of a link's rows that were measured alone


@dataclass(frozen=True)
class TransferCost:
    """Cost of one message: `latency_seconds` + size × `seconds_per_byte`; measured, declared or assumed.

    Attributes:
        measured_inside: latency and seconds per byte between two devices of a node, where the cluster file only assumes
            a link there and it was measured; None elsewhere.
    """

    latency_seconds: float
    seconds_per_byte: float
    source: str
    measured_inside: tuple[float, float] | None = None


def transfer_cost(cluster: Cluster, database: ProfileDatabase, sender: Island, receiver: Island) -> TransferCost:
    """Return the least that a message between neighbouring stages on these devices may cost.

    Latency and time per byte are each the least of all links that the two may have: what is proved of plans at these
    prices holds wherever their stages are. `bind` then tells what the actual devices' links cost. A link that was
    measured on this machine overrides what the file assumed inside a node, but not what a person declared.
    """
    inside, between = links_inside_nodes(cluster, sender, receiver), between_links(cluster, sender, receiver)
    if not inside and not between:  # one device in all: nothing is ever sent
        return TransferCost(0.0, 0.0, "declared")
    costs, measured = list(map(_as_in_the_file, inside)), None
    if any(link.assumed for link in inside):
        ends = {"device_type": sender.device_type, "peer_device_type": receiver.device_type}
        rows = database.latest(kind="transfer", subject=EXCHANGE, **ends)
        measured = fit(rows) if len(rows) >= 2 else None
    if measured:
        costs = [measured if cost.source == "assumed" else cost for cost in costs]
    costs += map(_as_in_the_file, between)
    least = min(costs, key=lambda cost: cost.seconds_per_byte)
    return TransferCost(
        latency_seconds=min(cost.latency_seconds for cost in costs),
        seconds_per_byte=least.seconds_per_byte,
        source=least.source,
        measured_inside=(measured.latency_seconds, measured.seconds_per_byte) if measured else None,
    )


def _as_in_the_file(link: Link) -> TransferCost:
    return TransferCost(link.latency_seconds, 1.0 / link.bytes_per_second, "assumed" if link.assumed else "declared")


class TransferCosts(dict[tuple[Island, Island], TransferCost]):
    """(sender's devices, receiver's) -> the cost of a message; of islands, it is computed when it is asked for.

    Example:
        >>> import dejavu
        >>> from dejavu.profiles import ProfileDatabase
        >>> cluster = dejavu.load_cluster("examples/clusters/4x8-v100.yaml")
        >>> (v100,) = whole_types(cluster)
        >>> TransferCosts(cluster, ProfileDatabase("profiles_db"))[v100, v100].source
        'declared'
    """

    def __init__(self, cluster: Cluster, database: ProfileDatabase) -> None:
        types = whole_types(cluster)
        super().__init__({(a, b): transfer_cost(cluster, database, a, b) for a in types for b in types})
        self._cluster, self._database = cluster, database

    def __missing__(self, ends: tuple[Island, Island]) -> TransferCost:
        self[ends] = transfer_cost(self._cluster, self._database, *ends)
        return self[ends]


def links_of_neighbours(cluster: Cluster, a: Island, b: Island) -> list[Link]:
    """Return every link that two of these devices may have: inside a node that has both, and between nodes."""
    return links_inside_nodes(cluster, a, b) + between_links(cluster, a, b)


def links_inside_nodes(cluster: Cluster, a: Island, b: Island) -> list[Link]:
    """Return the links inside nodes that have two of these devices."""
    needed = Counter((a, b))
    return [group.link for group in cluster.groups if _has(group, needed)]


def fastest_link(cluster: Cluster, a: Island, b: Island) -> Link:
    """Return the greatest bandwidth and the least latency that two of these devices may have."""
    return fastest(links_of_neighbours(cluster, a, b))


def fastest(links: Sequence[Link]) -> Link:
    """Return the greatest bandwidth and the least latency among them; infinite and 0 where there is none."""
    if not links:  # nothing is ever sent
        return Link(bytes_per_second=float("inf"), latency_seconds=0.0)
    widest = max(links, key=lambda link: link.bytes_per_second)
    return replace(widest, latency_seconds=min(link.latency_seconds for link in links))


def fit_one_node(cluster: Cluster, needed: Mapping[Island, int]) -> bool:
    """Return whether some node has so many of each of these devices."""
    return any(_has(group, needed) for group in cluster.groups)


def _has(group: NodeGroup, needed: Mapping[Island, int]) -> bool:
    return all(island.on(group) >= count for island, count in needed.items())


def fit(rows: Sequence[Measurement]) -> TransferCost:
    """Fit latency and time per byte by least squares of relative errors: small messages count as much as large ones."""
    sizes = np.array([float(row.size_bytes or 0) for row in rows])
    seconds = np.array([row.seconds for row in rows])
    design = np.stack([1.0 / seconds, sizes / seconds], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)
    return TransferCost(max(float(latency), 0.0), max(float(per_byte), 0.0), "measured")
