"""What pipeline ranks' messages take over the links that are really used.

Shape suffixes: N = bindings, R = pipeline ranks, W = the most blocks of a rank, K = kinds of devices, G = groups of
nodes, Q = pairs of pipeline ranks that exchange messages, A, B = blocks of one of a pair. `places_NRW` holds pools; a
rank of fewer than W blocks repeats its first.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejavu.binding.binding import Placement
from dejavu.binding.site import Ints, Place, Site
from dejavu.cluster import Cluster
from dejavu.cluster.islands import Island
from dejavu.plans import Plan, Problem, StageConfiguration
from dejavu.plans.stage_costs import Floats

MOST_PAIRS = 1_024  # of blocks of two ranks that are looked at one by one


@dataclass(frozen=True)
class StageExchange:
    """What two pipeline ranks send each other for one microbatch, one way; the gradient back is as large."""

    a: int
    b: int
    messages: int
    size_bytes: float


class LinkPrices:
    """Prices what a plan's pipeline ranks send each other, for any placement of them.

    Args:
        exchanges: the Q pairs.
        runs: of the schedule in a step; the problem's prices count all of them.

    Attributes:
        configurations: of the R ranks, as the plan says.
        blocks_R, width_R: how many blocks a rank takes, each of how many devices.
        index_RK: of these, on each kind of device, in the problem; −1: it has none.
        is_own_RK: whether the kind is the plan's.
        inside_seconds_QKKG: of the exchange of one microbatch, both ways, where both ranks are on one node.
    """

    def __init__(self, problem: Problem, plan: Plan, site: Site, exchanges: Sequence[StageExchange], runs: int) -> None:
        self.problem, self.plan, self.site, self.runs = problem, plan, site, runs
        self.exchanges = tuple(exchanges)
        self.configurations = [plan.rank_configuration(rank) for rank in range(len(plan.ranks))]
        self.blocks_R = np.array([configuration.num_nodes for configuration in self.configurations])
        self.width_R = np.array([configuration.devices_per_node for configuration in self.configurations])
        self._senders_R = np.array([configuration.senders_per_node for configuration in self.configurations])
        known = {configuration: c for c, configuration in enumerate(problem.configurations)}
        self.index_RK = np.array(
            [
                [known.get(self.configuration(rank, k), -1) for k in range(len(site.kinds))]
                for rank in range(len(self.configurations))
            ]
        )
        self.is_own_RK = np.array([[Island.of(one) == kind for kind in site.kinds] for one in self.configurations])
        self.inside_seconds_QKKG = self._inside()
        shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for q, exchange in enumerate(self.exchanges):
            shapes[int(self.blocks_R[exchange.a]), int(self.blocks_R[exchange.b])].append(q)
        self._exchanges_of_shape = {shape: np.array(among) for shape, among in shapes.items()}
        self._ends_Q2 = np.array([(exchange.a, exchange.b) for exchange in self.exchanges]).reshape(-1, 2)
        self._messages_Q = np.array([float(exchange.messages) for exchange in self.exchanges])
        self._size_bytes_Q = np.array([exchange.size_bytes for exchange in self.exchanges])
        self._pools = np.column_stack([site.kind_P, site.group_P, site.node_P]).tolist()
        self._tables: dict[int, tuple[Any, Any]] = {}
        self._known: dict[tuple[int, Place, Place], float] = {}

    def configuration(self, rank: int, kind: int) -> StageConfiguration:
        """Return the rank's configuration on another kind of device."""
        on = self.site.kinds[kind]
        return replace(self.configurations[rank], device_type=on.device_type, groups=on.groups)

    def _inside(self) -> Floats:
        """Price exchanges inside a node, where every pair of devices has its own link. One that the cluster file only
        assumes has its measured price, if there is one.
        """
        site, K = self.site, len(self.site.kinds)
        links_KKG2 = np.zeros((K, K, len(site.inside_assumed_G), 2))
        links_KKG2[...] = np.stack([site.inside_latency_seconds_G, site.inside_seconds_per_byte_G], axis=1)
        for (k, kind), (o, other) in itertools.product(enumerate(site.kinds), repeat=2):
            types = kind.device_type, other.device_type
            if types in self.problem.measured_links:
                links_KKG2[k, o, site.inside_assumed_G] = self.problem.measured_links[types]
        seconds = np.zeros((len(self.exchanges), *links_KKG2.shape[:3]))
        for q, exchange in enumerate(self.exchanges):
            size = exchange.size_bytes / self.configurations[exchange.a].pairs_with(self.configurations[exchange.b])
            seconds[q] = 2.0 * self.runs * (links_KKG2 @ (exchange.messages, size))
        return seconds

    def transfer_seconds_NQ(self, places_NRW: Ints) -> Floats:
        """Return one microbatch's transfer seconds between each pair of ranks, both ways, over the slowest link used.

        Between nodes all parts that one node sends or receives share its network card, or cards: only the side with
        fewer of them counts.
        """
        transfers = np.zeros((len(places_NRW), len(self.exchanges)))
        for (blocks, others), among in self._exchanges_of_shape.items():
            a = places_NRW[:, self._ends_Q2[among, 0], :blocks]
            b = places_NRW[:, self._ends_Q2[among, 1], :others]
            transfers[:, among] = self._transfers(among, a, b)
        return transfers

    def _transfers(self, q: Ints, a_NQA: Ints, b_NQB: Ints) -> Floats:
        site = self.site
        inside = self.inside_seconds_QKKG[
            q[None, :], site.kind_P[a_NQA[:, :, 0]], site.kind_P[b_NQB[:, :, 0]], site.group_P[a_NQA[:, :, 0]]
        ]
        first = site.node_P[a_NQA[:, :, :1]]
        together = (site.node_P[a_NQA] == first).all(axis=2) & (site.node_P[b_NQB] == first).all(axis=2)
        lanes = np.minimum(self._lanes(q, 0, a_NQA), self._lanes(q, 1, b_NQB))[:, :, None, None]
        messages, sizes = self._messages_Q[q][:, None, None], self._size_bytes_Q[q][:, None, None] / lanes
        if a_NQA.shape[2] * b_NQB.shape[2] <= MOST_PAIRS:
            slowest = self._slowest_pair(messages, sizes, a_NQA, b_NQB)
        else:
            slowest = np.concatenate(
                [
                    self._slowest_groups(messages, sizes[n : n + 1], a_NQA[n : n + 1], b_NQB[n : n + 1])
                    for n in range(len(a_NQA))
                ]
            )
        return np.asarray(np.where(together, inside, 2.0 * self.runs * slowest))

    def _slowest_pair(self, messages: Floats, sizes: Floats, a_NQA: Ints, b_NQB: Ints) -> Floats:
        """Return the most seconds of any pair of blocks, one way."""
        site = self.site
        same = site.node_P[a_NQA][:, :, :, None] == site.node_P[b_NQB][:, :, None, :]
        g, h = site.group_P[a_NQA][:, :, :, None], site.group_P[b_NQB][:, :, None, :]
        latency = np.where(same, site.inside_latency_seconds_G[g], site.between_latency_seconds_GG[g, h])
        per_byte = np.where(same, site.inside_seconds_per_byte_G[g], site.between_seconds_per_byte_GG[g, h])
        return np.asarray((messages * latency + sizes * per_byte).max(axis=(2, 3)))

    def _slowest_groups(self, messages: Floats, sizes: Floats, a_NQA: Ints, b_NQB: Ints) -> Floats:
        """Return the same of many blocks, by the groups of nodes that they are on, whose links are all equal."""
        site, shape = self.site, (*a_NQA.shape[:2], int(self.site.node_P.max()) + 1)
        group_of_node = np.zeros(shape[2], dtype=int)
        group_of_node[site.node_P] = site.group_P
        on = [np.zeros(shape, dtype=bool) for _ in range(2)]
        for there, places in zip(on, (a_NQA, b_NQB), strict=True):
            np.put_along_axis(there, site.node_P[places], True, axis=2)
        of_group = group_of_node[:, None] == np.arange(len(site.inside_assumed_G))
        a_NQG, b_NQG, both_NQG = (there @ of_group.astype(int) for there in (*on, on[0] & on[1]))
        alone_NQG = (a_NQG == 1) & (b_NQG == 1) & (both_NQG == 1)  # one node, the same one
        apart = (a_NQG > 0)[:, :, :, None] & (b_NQG > 0)[:, :, None, :]
        apart &= ~(alone_NQG[:, :, :, None] & np.eye(alone_NQG.shape[2], dtype=bool))
        with np.errstate(invalid="ignore"):  # 0 × ∞ where groups have no link
            between = messages * site.between_latency_seconds_GG + sizes * site.between_seconds_per_byte_GG
        inside = messages[:, 0] * site.inside_latency_seconds_G + sizes[:, :, 0] * site.inside_seconds_per_byte_G
        found = np.where(apart, between, 0.0).max(axis=(2, 3))
        return np.asarray(np.maximum(found, np.where(both_NQG > 0, inside, 0.0).max(axis=2)))

    def _lanes(self, q: Ints, end: int, places_NQA: Ints) -> Floats:
        """Return how many times one card's bandwidth one end of each exchange has; see `StageConfiguration.lanes`.

        Every block has an equal part of the message, so the node counts whose cards have the most parts each.
        """
        ranks, site = self._ends_Q2[q, end], self.site
        cards = site.cards_per_device_G[site.group_P[places_NQA]] * self.width_R[ranks][None, :, None]
        used = np.minimum(cards, self._senders_R[ranks][None, :, None])
        of_block = np.maximum(1.0 / _alike(site.node_P[places_NQA]), used)
        return np.asarray(places_NQA.shape[-1] * of_block.min(axis=-1))

    def between_seconds_GG(self, q: int) -> Floats:
        """Return the seconds of a microbatch's exchange, both ways, between nodes of two groups; inf without two.

        A rank on several nodes may have some of a group with more cards: the most that it can have count, so that this
        is the least that the exchange takes.
        """
        exchange, site = self.exchanges[q], self.site
        cards = [float(one) for one in site.cards_per_device_G]
        a, b = (np.array([self.configurations[end].lanes(one) for one in cards]) for end in (exchange.a, exchange.b))
        a, b = (
            np.full_like(lanes, lanes.max()) if self.blocks_R[end] > 1 else lanes
            for end, lanes in ((exchange.a, a), (exchange.b, b))
        )
        lanes = np.minimum(a[:, None], b[None, :])
        per_byte = np.where(np.isfinite(site.between_seconds_per_byte_GG), site.between_seconds_per_byte_GG, 0.0)
        link = exchange.messages * site.between_latency_seconds_GG + exchange.size_bytes / lanes * per_byte
        return np.asarray(2.0 * self.runs * link)

    def least_seconds_Q(self, possible_RK: NDArray[np.bool_]) -> Floats:
        """Bound each exchange, one microbatch both ways: over the best link between any two places of its ranks.

        Args:
            possible_RK: whether the rank may be on the kind.
        """
        site, found = self.site, np.zeros(len(self.exchanges))
        K, G = len(site.kinds), len(site.inside_assumed_G)
        most_KG = np.zeros((K, G), dtype=np.int64)  # devices on one node
        most_KG[site.kind_P, site.group_P] = site.size_P
        for q, exchange in enumerate(self.exchanges):
            a, b = self.configurations[exchange.a], self.configurations[exchange.b]
            has_a, has_b = (
                possible_RK[rank][:, None] & (most_KG >= configuration.devices_per_node)
                for rank, configuration in ((exchange.a, a), (exchange.b, b))
            )
            reached_GG = has_a.any(axis=0)[:, None] & has_b.any(axis=0)[None, :]
            apart_GG = np.where(reached_GG, self.between_seconds_GG(q), np.inf)
            needed_KKG = np.where(np.eye(K, dtype=bool), a.num_devices + b.num_devices, b.num_devices)[:, :, None]
            has_room_KKG = (most_KG[None] >= needed_KKG) & (most_KG[:, None] >= a.num_devices)
            together_KKG = has_a[:, None] & has_b[None] & has_room_KKG
            found[q] = min(apart_GG.min(), np.where(together_KKG, self.inside_seconds_QKKG[q], np.inf).min())
        return found

    def transfer_seconds(self, q: int, a: Place, b: Place) -> float:
        """Return `transfer_seconds_NQ` of one pair of ranks at these places; cached, because many places are alike."""
        if len(a) == len(b) == 1:
            if q not in self._tables:
                self._tables[q] = self.inside_seconds_QKKG[q].tolist(), self.between_seconds_GG(q).tolist()
            inside, between = self._tables[q]
            (kind, group, node), (kind_b, group_b, node_b) = self._pools[a[0]], self._pools[b[0]]
            return float(inside[kind][kind_b][group] if node == node_b else between[group][group_b])
        if (q, a, b) not in self._known:
            self._known[q, a, b] = float(self._transfers(np.array([q]), np.array([[a]]), np.array([[b]]))[0, 0])
        return self._known[q, a, b]


def _alike(values_NQA: Ints) -> Ints:
    """Return of each value how often it is there along the last axis."""
    order = values_NQA.argsort(axis=-1)
    rising, at = np.take_along_axis(values_NQA, order, axis=-1), np.arange(values_NQA.shape[-1])
    differs = rising[..., 1:] != rising[..., :-1]
    edge = np.ones((*rising.shape[:-1], 1), dtype=bool)
    first = np.maximum.accumulate(np.where(np.concatenate([edge, differs], axis=-1), at, 0), axis=-1)
    ends = np.where(np.concatenate([differs, edge], axis=-1), at, len(at))
    last = np.minimum.accumulate(ends[..., ::-1], axis=-1)[..., ::-1]
    found = np.empty_like(values_NQA)
    np.put_along_axis(found, order, last - first + 1, axis=-1)
    return found


class SeatLinks:
    """Prices each message of a plan, and each sum over two copies of the model, for any placement of its ranks.

    Q counts the messages between ranks, then the sums.

    Args:
        prices: of the plan.
        gradient_bytes_L: as of `sum_seconds`.
    """

    def __init__(self, prices: LinkPrices, gradient_bytes_L: Floats) -> None:
        problem, plan, site = prices.problem, prices.plan, prices.site
        sent, summed = _messages(problem, plan), _sums(plan, gradient_bytes_L)
        self._seats, self._num_cuts = list(sent), len(plan.seats) - 1
        self._prices = (
            LinkPrices(problem, plan, site, list(sent.values()), prices.runs),
            LinkPrices(problem, plan, site, list(summed.values()), 1),
        )

    def seconds_NQ(self, places_NRW: Ints) -> Floats:
        """Return what each takes in N placements, both ways."""
        return np.concatenate([one.transfer_seconds_NQ(places_NRW) for one in self._prices], axis=1)

    def longest_sum_N(self, seconds_NQ: Floats) -> Floats:
        """Return what the longest of the sums takes, of `seconds_NQ`; 0 where there is one copy of the model."""
        return np.asarray(seconds_NQ[:, len(self._seats) :].max(axis=1, initial=0.0))

    def least_seconds_Q(self) -> Floats:
        """Return the least that each may take with all ranks on the plan's types of devices."""
        return np.concatenate([one.least_seconds_Q(one.is_own_RK) for one in self._prices])

    def of_seats(self, seconds_Q: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return `message_seconds` and `sum_seconds`."""
        messages = np.zeros(self._num_cuts)
        messages[self._seats] = seconds_Q[: len(self._seats)] / 2
        return tuple(messages.tolist()), tuple((seconds_Q[len(self._seats) :] / 2).tolist())


def message_seconds(
    problem: Problem, plan: Plan, placements: Sequence[Placement], cluster: Cluster, runs: int = 1
) -> tuple[float, ...]:
    """Return what a microbatch's message takes one way from each of the plan's seats to the next, on these devices.

    0 between stages on one rank, and between two copies of the model.

    Args:
        runs: of the schedule in a step; all of them count.
    """
    found = _seconds(problem, plan, placements, cluster, _messages(problem, plan), runs)
    return tuple(found.get(seat, 0.0) / 2 for seat in range(len(plan.seats) - 1))


def sum_seconds(
    problem: Problem, plan: Plan, placements: Sequence[Placement], cluster: Cluster, gradient_bytes_L: Floats
) -> tuple[float, ...]:
    """Return what the sum of each seat's gradients with the other copy's takes once a step, on these devices.

    Each of the two holders sends the other half of them, and a half back. Empty where there is one copy of the model.
    """
    if not plan.both_ways:
        return ()
    found = _seconds(problem, plan, placements, cluster, _sums(plan, gradient_bytes_L), 1)
    return tuple(found[seat] / 2 for seat in range(len(plan.seats)))


def _messages(problem: Problem, plan: Plan) -> dict[int, StageExchange]:
    rank_of, sent = _rank_of_seats(plan), dict[int, StageExchange]()
    for seat, after in enumerate(plan.seats[1:]):
        a, b = sorted((rank_of[seat], rank_of[seat + 1]))
        if a != b and after.start:
            sent[seat] = StageExchange(a, b, 1, float(problem.cut_bytes_L1[after.start]))
    return sent


def _sums(plan: Plan, gradient_bytes_L: Floats) -> dict[int, StageExchange]:
    rank_of, sent = _rank_of_seats(plan), dict[int, StageExchange]()
    for seat, stage in enumerate(plan.seats if plan.both_ways else ()):
        a, b = sorted((rank_of[seat], rank_of[(seat + len(plan.stages)) % len(plan.seats)]))
        sent[seat] = StageExchange(a, b, 2, float(gradient_bytes_L[stage.start : stage.stop].sum()))
    return sent


def _rank_of_seats(plan: Plan) -> dict[int, int]:
    return {seat: rank for rank, seats in enumerate(plan.seats_of_ranks) for seat in seats}


def _seconds(
    problem: Problem,
    plan: Plan,
    placements: Sequence[Placement],
    cluster: Cluster,
    sent: Mapping[int, StageExchange],
    runs: int,
) -> dict[int, float]:
    """Return what each of these exchanges takes, both ways, on these devices."""
    prices = LinkPrices(problem, plan, Site.of(cluster, problem.configurations), list(sent.values()), runs)
    places = prices.site.places(placements, prices.width_R.tolist())
    return {
        seat: prices.transfer_seconds(q, places[exchange.a], places[exchange.b])
        for q, (seat, exchange) in enumerate(sent.items())
    }
