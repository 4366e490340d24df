"""What it takes virtual workers to sum the gradients of the layers that all of them hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from dejavu.cluster import Cluster, Device
from dejavu.cost.collectives.costs import CollectiveCosts
from dejavu.cost.kernels.sharding import weight_bytes
from dejavu.cost.memory.layers import ForEachByte
from dejavu.graphs.graph import Graph
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.layout import World


class SharedSums:
    """Prices all-reduces among devices of several kinds and nodes; nothing is assumed to overlap with computing."""

    def __init__(self, cluster: Cluster, rows: ProfileDatabase, graph: Graph) -> None:
        self._cluster, self._costs, self._graph = cluster, CollectiveCosts(cluster, rows), graph

    def seconds(self, world: World) -> float:
        """Return the seconds between the last backward pass and the moment when everybody has the whole gradient.

        A rank sums its layers one run after another, and all that leaves or enters a node shares its network cards.
        """
        busy: defaultdict[object, float] = defaultdict(float)
        workload = world.workload
        each_byte = ForEachByte.of(workload.optimizer).gradient_bytes
        for held in world.holders:
            weights = sum(weight_bytes(layer, len(held.ranks)) for layer in self._graph.layers[held.start : held.stop])
            groups = [[_device(world, rank) for rank in ranks] for ranks in held.ranks]
            if len(groups[0]) == 1 or not weights:
                continue
            seconds = self._costs.estimate("all_reduce", each_byte * weights, groups, workload.dtype).seconds
            for place, share in self._busy(groups):
                busy[place] += share * seconds
        return max(busy.values(), default=0.0)

    def _busy(self, groups: Sequence[Sequence[Device]]) -> Iterator[tuple[object, float]]:
        """Yield the devices that a collective keeps busy, and the nodes of whose cards it uses some, or all (1)."""
        for device in (device for group in groups for device in group):
            yield (device.group, device.node_index, device.index), 1.0
        nodes = Counter((device.group, device.node_index) for group in groups for device in group)
        if len({(device.group, device.node_index) for device in groups[0]}) > 1:
            for (name, index), count in nodes.items():
                group = self._cluster.group(name)
                yield (name, index), max(1.0, group.cards_per_device * count) / group.cards


def _device(world: World, rank: int) -> Device:
    layout = next(one for one, ranks in zip(world.layouts, world.ranks, strict=True) if rank in ranks)
    return layout.placed(rank).device
