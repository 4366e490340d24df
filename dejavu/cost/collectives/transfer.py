"""Cost of a transfer between two devices: a latency and a time per byte (the α–β model, Hockney 1994)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dejavu.cluster import Cluster, Link, pair
from dejavu.profiles import Measurement, ProfileDatabase

EXCHANGE = "exchange"  # subject of a link's rows that were measured alone


@dataclass(frozen=True)
class TransferCost:
    """Cost of one message: `latency_seconds` + size × `seconds_per_byte`; measured, declared or assumed."""

    latency_seconds: float
    seconds_per_byte: float
    source: str


def transfer_cost(cluster: Cluster, database: ProfileDatabase, sender: str, receiver: str) -> TransferCost:
    """Return the transfer cost between neighbouring stages on devices of these types.

    Where some node has both types, neighbours can sit in one node, and the link inside it counts; otherwise the
    link between nodes. `bind` then tells what the actual devices' links cost. A link that was measured on this
    machine overrides what the file assumed, but not what a person declared.
    """
    link = typical_link(cluster, sender, receiver)
    if link.assumed:
        rows = database.latest(kind="transfer", subject=EXCHANGE, device_type=sender, peer_device_type=receiver)
        if len(rows) >= 2:
            return fit(rows)
    return TransferCost(link.latency_seconds, 1.0 / link.bytes_per_second, "assumed" if link.assumed else "declared")


def transfer_costs(cluster: Cluster, database: ProfileDatabase) -> dict[tuple[str, str], TransferCost]:
    """Return the costs between any two of the cluster's device types: (sender, receiver) -> cost."""
    names = tuple(cluster.device_counts)
    return {(a, b): transfer_cost(cluster, database, a, b) for a in names for b in names}


def typical_link(cluster: Cluster, sender: str, receiver: str) -> Link:
    """Return the slowest link that neighbours of these types may have, in either direction; see `transfer_cost`."""
    links = [
        group.link
        for group in cluster.groups
        if all(dict(group.devices).get(name, 0) >= needed for name, needed in Counter((sender, receiver)).items())
    ]
    links = links or links_between_nodes(cluster, sender, receiver)
    if not links:  # one device in all: nothing is ever sent
        return Link(bytes_per_second=float("inf"), latency_seconds=0.0)
    return min(links, key=lambda link: (link.bytes_per_second, -link.latency_seconds))


def links_between_nodes(cluster: Cluster, a: str, b: str) -> list[Link]:
    """Return the links between two nodes, one with devices of the one type and one with devices of the other."""
    groups = [[group for group in cluster.groups if dict(group.devices).get(name, 0)] for name in (a, b)]
    pairs = {pair(x.name, y.name) for x in groups[0] for y in groups[1] if x is not y or x.count > 1}
    return [link for names, link in cluster.links_between.items() if names in pairs]


def fit(rows: Sequence[Measurement]) -> TransferCost:
    """Fit latency and time per byte by least squares of relative errors: small messages count as much as large ones."""
    sizes = np.array([float(row.size_bytes or 0) for row in rows])
    seconds = np.array([row.seconds for row in rows])
    design = np.stack([1.0 / seconds, sizes / seconds], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)
    return TransferCost(max(float(latency), 0.0), max(float(per_byte), 0.0), "measured")
