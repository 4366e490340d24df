"""What a step's time means for a training: samples and tokens a second, and the share of the devices' peak."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dejavu.cluster import Cluster
from dejavu.cluster.islands import Island
from dejavu.graphs.graph import Graph, Operator
from dejavu.graphs.kernels import family_of
from dejavu.plans import Plan
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of

_PRODUCTS, _PRODUCTS_ONCE = 5, 4  # of fused attention's backward pass


@dataclass(frozen=True)
class Rates:
    """Rates of a training under a plan.

    Attributes:
        tokens_per_second: None: the examples are no tokens.
        utilization: model FLOP/s over the peak of all devices of the plan (MFU: Chowdhery et al., PaLM, 2022,
            appendix B): of one forward and one backward pass of each example, whatever is computed again. None: a
            device's peak in this dtype is not known.
        masked_part: of the FLOPs of `utilization`, scores that causal attention masks; its kernels leave them out.
        dtype: that the products are computed in, and the peak is of.
        cost: an hour of all nodes that the plan uses a device of, and the currency; None: a price is not said.
        num_nodes: these nodes.
    """

    samples_per_second: float
    tokens_per_second: float | None
    utilization: float | None
    dtype: str
    cost: tuple[float, str] | None = None
    num_nodes: int = 0
    masked_part: float = 0.0

    @property
    def cost_of_1e9_tokens(self) -> float | None:
        """In the cost's currency; of samples, where the examples are no tokens."""
        a_second = self.samples_per_second if self.tokens_per_second is None else self.tokens_per_second
        return None if self.cost is None else self.cost[0] / 3600.0 * 1e9 / a_second


def rates(workload: Workload, graph: Graph, cluster: Cluster, plan: Plan, step_seconds: float) -> Rates:
    """Return the rates of a step that takes so long.

    Args:
        graph: of the plan's microbatch size.
    """
    samples = workload.batch_size / step_seconds if step_seconds > 0 else math.inf
    tokens = tokens_in_a_step(workload)
    dtype = workload.autocast or workload.dtype
    ranks = [plan.rank_configuration(rank) for rank in range(len(plan.ranks))]
    peaks = [cluster.device_types[one.device_type].peak_flops_per_second.get(dtype) for one in ranks]
    flops, masked_flops = _flops(graph)
    utilization = None
    if all(peaks) and step_seconds > 0:
        peak = sum((peak or 0.0) * one.num_devices for peak, one in zip(peaks, ranks, strict=True))
        utilization = flops * (workload.batch_size // graph.microbatch_size) / step_seconds / peak
    tokens_per_second = None if tokens is None else samples * tokens / workload.batch_size
    nodes = _nodes(cluster, plan)
    masked_part = masked_flops / flops if flops else 0.0
    return Rates(samples, tokens_per_second, utilization, dtype, _cost(cluster, nodes), nodes.total(), masked_part)


def tokens_in_a_step(workload: Workload) -> int | None:
    """Return how many tokens a step trains on; None: its examples are no tokens."""
    shape = dataset_of(workload).shape
    return None if shape.input_dtype.is_floating_point else workload.batch_size * math.prod(shape.input_shape)


def _nodes(cluster: Cluster, plan: Plan) -> Counter[str]:
    """Count the nodes that the plan uses a device of, by group; equal devices are those of the cheapest."""
    blocks: dict[Island, list[int]] = {}  # of how many devices of one node each
    for rank in range(len(plan.ranks)):
        one = plan.rank_configuration(rank)
        blocks.setdefault(Island.of(one), []).extend([one.devices_per_node] * one.num_nodes)
    nodes: Counter[str] = Counter()
    for island, widths in blocks.items():
        nodes |= _nodes_for(cluster, island, widths)  # of nodes with several types the most that one of these needs
    return nodes


def _cost(cluster: Cluster, nodes: Counter[str]) -> tuple[float, str] | None:
    """Return what these nodes cost in an hour, each counted whole; None: a price is not said."""
    prices = [(group.price, nodes[group.name]) for group in cluster.groups if nodes[group.name]]
    known = [(price, count) for price, count in prices if price is not None]
    if not known or len(known) < len(prices):
        return None
    return sum(price[0] * count for price, count in known), known[0][0][1]


def _nodes_for(cluster: Cluster, island: Island, widths: list[int]) -> Counter[str]:
    """Count the nodes of each group on which these blocks of devices fit, the widest first, each on one node.

    A block goes to the group with the cheapest devices that has room, there to the fullest node. What has no room in
    one piece, where widths do not divide one another, is counted device by device.
    """
    having = [(island.on(group), group) for group in island.groups_of(cluster)]
    having.sort(key=lambda one: one[1].price[0] / one[0] if one[1].price else math.inf)
    used, free = Counter[str](), {group.name: Counter[int]() for _, group in having}  # nodes by devices that are left
    left = sorted(widths)
    while left:
        width = left.pop()
        for each, group in having:
            rooms = free[group.name]
            room = min((size for size, count in rooms.items() if count and size >= width), default=0)
            if not room and width <= each and used[group.name] < group.count:
                room, used[group.name] = each, used[group.name] + 1
                rooms[each] += 1
            if room:
                rooms[room], rooms[room - width] = rooms[room] - 1, rooms[room - width] + 1
                break
        else:
            left = sorted([*left, *[1] * (width if width > 1 else 0)])
    return used


def _flops(graph: Graph) -> tuple[float, float]:
    """Return the FLOPs of all operators, and how many of them are of scores that causal attention masks: its half."""
    counted = [(_once(one), one.is_causal) for layer in graph.layers for one in layer.operators]
    return sum(flops for flops, _ in counted), sum(flops / 2 for flops, is_causal in counted if is_causal)


def _once(operator: Operator) -> float:
    """Return its FLOPs without what is computed again: fused attention's backward makes the scores anew."""
    again = operator.direction == "backward" and family_of(operator.kind) == "attention"
    return operator.flops * (_PRODUCTS_ONCE / _PRODUCTS if again else 1.0)
