"""Collectives inside one stage: tensor-parallel sums inside layers, gradients and weights of the replicas.

A stage's mesh is `num_nodes` × `devices_per_node`; a tensor-parallel group is a run of devices inside one node, the
replicas are strided over them, so that as many replica groups as there are tensor-parallel devices cross a node's
network cards at once. Where nodes differ, a stage may get the slowest: its links are the slowest of all devices that
it may have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
from scipy.optimize import nnls

from dejavu.cluster import Cluster, Link
from dejavu.cluster.islands import Island, between_links, told_apart
from dejavu.cost.collectives.alpha_beta import Links
from dejavu.cost.collectives.beside import StepLine
from dejavu.cost.collectives.costs import CollectiveCosts
from dejavu.cost.collectives.transfer import TransferCost, fastest, fit_one_node
from dejavu.cost.estimates import Estimate
from dejavu.plans import StageConfiguration
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.collective import Collective

# The replicas' per-step work on all of a stage's gradients, and for each layer in each microbatch: forward, backward
# (Rajbhandari et al., SC 2020, sections 5 and 7). Each is of the layer's weights on one device.
PER_STEP = {0: ("all_reduce",), 1: ("reduce_scatter", "all_gather"), 2: ("all_gather",), 3: ()}
FORWARD: dict[int, tuple[str, ...]] = {0: (), 1: (), 2: (), 3: ("all_gather",)}
BACKWARD: dict[int, tuple[str, ...]] = {0: (), 1: (), 2: ("reduce_scatter",), 3: ("all_gather", "reduce_scatter")}
SUMS = ("all_reduce", "reduce_scatter")  # of gradients; what is gathered are weights
# Where a rule compares the gradients: all to all replicas, or each replica's of a shard to the one that has it.
COMPARED = {0: ("all_gather",), 1: ("all_to_all", "all_gather"), 2: ("all_gather",), 3: ()}
COMPARED_BACKWARD = BACKWARD | {2: ("all_to_all",), 3: ("all_gather", "all_to_all")}
AGREEMENTS = 2  # sums of some numbers over those who have parts: which gradients are finite, and what rules measure
_SMALL_BYTES = 1.0  # of a message whose latency is all that counts
Groups = tuple[tuple[int, ...], ...]

_FITTED_SIZES = 6  # of messages, from one layer's to the whole model's


class StageCollectives:
    """Prices collectives inside stages, each computed once: measured where the database knows the device type."""

    def __init__(self, cluster: Cluster, database: ProfileDatabase | None, dtype: str) -> None:
        self._cluster, self._dtype = cluster, dtype
        self._costs = CollectiveCosts(cluster, database)
        self._links: dict[Island, Links] = {}
        self._known: dict[tuple[Island, str, Groups, int, int, float], Estimate] = {}
        self._lines: dict[tuple[object, ...], tuple[float, float]] = {}

    def tensor_seconds(
        self, configuration: StageConfiguration, sizes_bytes: Sequence[float], name: str = "all_reduce"
    ) -> float:
        """Price collectives of these sizes, one after another, in every tensor-parallel group of a node at once."""
        width = configuration.devices_per_node
        groups = _groups_of_neighbours(configuration.tensor_parallel, width)
        return sum(self._seconds(Island.of(configuration), name, groups, 1, width, size) for size in sizes_bytes)

    def context_seconds(self, configuration: StageConfiguration, sizes_bytes: Sequence[float], name: str) -> float:
        """Price collectives of these sizes, one after another, among replicas that share examples, all at once."""
        t, c = configuration.tensor_parallel, configuration.context_parallel
        groups = _strided_groups(t, c * t, configuration.num_devices)
        island, mesh = Island.of(configuration), (configuration.num_nodes, configuration.devices_per_node)
        return sum(self._seconds(island, name, groups, *mesh, size) for size in sizes_bytes)

    def data_seconds(
        self, configuration: StageConfiguration, names: Sequence[str], size_bytes: float, gradient_bytes: float = 1.0
    ) -> float:
        """Price these collectives among the replicas, one after another.

        Args:
            size_bytes: of the weights on one device.
            gradient_bytes: of a gradient, for each byte of its weight (`ForEachByte`).
        """
        groups = _strided_groups(configuration.tensor_parallel, configuration.num_devices, configuration.num_devices)
        island, mesh = Island.of(configuration), (configuration.num_nodes, configuration.devices_per_node)
        # Of what everybody sends to everybody, the size is that of all devices' together.
        times = dict.fromkeys(SUMS, gradient_bytes) | {"all_to_all": configuration.data_parallel * gradient_bytes}
        return sum(self._seconds(island, name, groups, *mesh, size_bytes * times.get(name, 1.0)) for name in names)

    def agreeing_seconds(self, configuration: StageConfiguration) -> float:
        """Price how replicas come to one judgement of gradients of which each device has parts, once a step."""
        over_shards = AGREEMENTS * self.tensor_seconds(configuration, [_SMALL_BYTES])
        if not configuration.zero_level:
            return over_shards
        return over_shards + AGREEMENTS * self.data_seconds(configuration, ("all_reduce",), _SMALL_BYTES)

    def tied_seconds(self, device_type: str, size_bytes: float) -> float:
        """Price what the ends of a tied weight tell each other once a step, over the slowest link of this type.

        Each tells its own gradient, one after the other. Where both ends are on one rank, nothing is told: there it is
        an upper bound.

        Args:
            size_bytes: of the gradient.
        """
        if not size_bytes:
            return 0.0
        link = between_link(self._cluster, Island(device_type))
        return 2 * (link.latency_seconds + size_bytes / link.bytes_per_second)

    def per_step_lines(
        self,
        configuration: StageConfiguration,
        sizes_bytes: Sequence[float],
        gradient_bytes: float = 1.0,
        *,
        gathers: bool = False,
    ) -> tuple[StepLine, ...]:
        """Fit seconds and seconds per byte of each collective of the replicas' per-step work over the range of sizes.

        The cost of a stage's gradients has to be a sum over layers and a constant. Least squares of relative
        errors, both parts ≥ 0.

        Args:
            sizes_bytes: of single layers on one device.
            gradient_bytes: as for `data_seconds`.
            gathers: a rule compares the replicas' gradients when all are there, in place of the sum.
        """
        level = configuration.zero_level
        names = (COMPARED if gathers else PER_STEP)[level] if configuration.data_parallel > 1 else ()
        if gathers and level == 0 and names:  # a gather's size is that of what each has in the end
            in_all = configuration.data_parallel * gradient_bytes
            latency, per_byte = self._line(configuration, names, [in_all * size for size in sizes_bytes], 1.0)
            return (StepLine(latency, per_byte * in_all, hides=False),)
        return tuple(
            StepLine(
                *self._line(configuration, (name,), sizes_bytes, gradient_bytes),
                is_before=name == "all_gather",
                hides=name != "all_to_all",
            )
            for name in names
        )

    def _line(
        self,
        configuration: StageConfiguration,
        names: Sequence[str],
        sizes_bytes: Sequence[float],
        gradient_bytes: float,
    ) -> tuple[float, float]:
        positive = [size for size in sizes_bytes if size > 0]
        if not names or not positive:
            return 0.0, 0.0
        mesh = (configuration.num_nodes, configuration.devices_per_node, configuration.tensor_parallel)
        key = (Island.of(configuration), mesh, names, min(positive), sum(positive), gradient_bytes)
        if key not in self._lines:
            self._lines[key] = self._fitted(configuration, names, (min(positive), sum(positive)), gradient_bytes)
        return self._lines[key]

    def _fitted(
        self,
        configuration: StageConfiguration,
        names: Sequence[str],
        range_bytes: tuple[float, float],
        gradient_bytes: float,
    ) -> tuple[float, float]:
        sizes = np.unique(np.geomspace(*range_bytes, _FITTED_SIZES))
        seconds = np.array([self.data_seconds(configuration, names, float(size), gradient_bytes) for size in sizes])
        scale = float(sizes[-1])  # so that both unknowns are of one order
        (latency, whole), _ = nnls(np.stack([1.0 / seconds, sizes / scale / seconds], axis=1), np.ones(len(sizes)))
        return float(latency), float(whole) / scale

    def spread(self, configuration: StageConfiguration) -> tuple[float, float]:
        """Return the 90 % interval of such a stage's collectives, all that were priced together, as factors."""
        asked = [
            found
            for (island, _, _, nodes, per_node, _), found in self._known.items()
            if island == Island.of(configuration)
            and (nodes, per_node)
            in ((1, configuration.devices_per_node), (configuration.num_nodes, configuration.devices_per_node))
        ]
        total = sum(one.seconds for one in asked)
        if total <= 0:
            return 1.0, 1.0
        return sum(one.low_seconds for one in asked) / total, sum(one.high_seconds for one in asked) / total

    def seconds(
        self,
        device_type: str,
        name: str,
        groups: tuple[tuple[int, ...], ...],
        mesh: tuple[int, int],
        size_bytes: float,
    ) -> float:
        """Price one collective in all of these groups at once, on a mesh of (nodes, devices of each)."""
        return self._seconds(Island(device_type), name, groups, *mesh, size_bytes)

    def _seconds(
        self, island: Island, name: str, groups: tuple[tuple[int, ...], ...], nodes: int, per_node: int, size: float
    ) -> float:
        if len(groups[0]) == 1 or size <= 0:
            return 0.0
        key = (island, name, groups, nodes, per_node, size)
        if key not in self._known:
            collective = Collective(name=name, replica_groups=groups, mesh_nodes=nodes, devices_per_node=per_node)
            if island not in self._links:
                inside, between = inside_link(self._cluster, island), between_link(self._cluster, island)
                cards = min(group.cards_per_device for group in island.groups_of(self._cluster))
                self._links[island] = Links(inside or between, between, cards)
            model = self._costs.model(name, island.device_type, self._links[island])
            self._known[key] = model.estimate(collective, size, self._dtype)
        return self._known[key].seconds


@cache
def _groups_of_neighbours(degree: int, width: int) -> Groups:
    """Return the runs of so many devices in a node."""
    return tuple(tuple(range(first, first + degree)) for first in range(0, width, degree))


@cache
def _strided_groups(stride: int, span: int, num_devices: int) -> Groups:
    """Return groups of every `stride`-th device inside each span of devices."""
    return tuple(
        tuple(range(first + shard, first + span, stride))
        for first in range(0, num_devices, span)
        for shard in range(stride)
    )


def inside_link(cluster: Cluster, island: Island) -> Link | None:
    """Return the slowest link inside a node that has several of these devices; None where no node has."""
    links = [group.link for group in cluster.groups if island.on(group) > 1]
    return slowest(links) if links else None


def between_link(cluster: Cluster, island: Island) -> Link:
    """Return the slowest link between two nodes that have some of these devices; inside a node if there is only one.

    With a single device nothing is ever sent.
    """
    links = between_links(cluster, island, island)
    return slowest(links or [group.link for group in island.groups_of(cluster)])


@dataclass(frozen=True)
class Neighbours:
    """Of two types of devices, or islands, by the best that stages on them may have as neighbours.

    Attributes:
        inside: between two single devices, in one node or in two.
        apart: the fastest link between two nodes; None: no two nodes have them.
        cards_per_device: of the nodes of either, those with the most.
    """

    inside: TransferCost
    apart: Link | None
    cards_per_device: tuple[float, float]

    @classmethod
    def of(
        cls, cluster: Cluster, transfers: Mapping[tuple[Island, Island], TransferCost], a: Island, b: Island
    ) -> Neighbours:
        apart = between_links(cluster, a, b)
        cards = (max(group.cards_per_device for group in island.groups_of(cluster)) for island in (a, b))
        return cls(transfers[a, b], fastest(apart) if apart else None, (next(cards), next(cards)))

    def of_several_islands(self, cluster: Cluster, a: Island, b: Island) -> Neighbours:
        """Return the same where a stage on the whole type has nodes of several of its islands.

        Of all pairs of nodes of two stages the slowest counts, and some pair is of two islands.
        """
        islands = [one for one in told_apart(cluster) if one.device_type == a.device_type]
        ends = [[one] if one.groups else islands for one in (a, b)]
        apart = [link for x, y in product(*ends) if x != y for link in between_links(cluster, x, y)]
        return replace(self, apart=fastest(apart)) if a.device_type == b.device_type and apart else self


def stage_transfer(
    cluster: Cluster, types: Neighbours, a: StageConfiguration, b: StageConfiguration, *, apart: bool = False
) -> tuple[float, float]:
    """Return latency and seconds per byte of a microbatch that stage `a` sends to `b`, each way: the least they may be.

    Each of the more numerous replicas sends or receives its own part. Inside a node every pair of devices has its own
    link; between nodes all parts of one node share its network card, or each of its cards has some of them, so that
    only the side with fewer cards counts. Which of the two it is, and which nodes, is for `bind` to say.

    Args:
        apart: never in one node, where two nodes have these types.
    """
    apart = apart and types.apart is not None
    if a.num_devices == b.num_devices == 1 and not apart:
        return types.inside.latency_seconds, types.inside.seconds_per_byte
    found = []
    if types.apart is not None:
        shared = min(one.lanes(cards) for one, cards in zip((a, b), types.cards_per_device, strict=True))
        found.append((types.apart.latency_seconds, 1.0 / (types.apart.bytes_per_second * shared)))
    both = Counter({Island.of(a): a.num_devices}) + Counter({Island.of(b): b.num_devices})
    if not apart and fit_one_node(cluster, both):
        found.append((types.inside.latency_seconds, types.inside.seconds_per_byte / a.pairs_with(b)))
    if not found:  # they are never neighbours
        return 0.0, 0.0
    latencies, per_byte = zip(*found, strict=True)
    return min(latencies), min(per_byte)


def slowest(links: Sequence[Link]) -> Link:
    """Return the least bandwidth and the greatest latency among them."""
    return Link(min(link.bytes_per_second for link in links), max(link.latency_seconds for link in links))
