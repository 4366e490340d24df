"""The step time of bindings, thousands at once: the searches' cost model with the links that are really used.

Shape suffixes: N = bindings, R = pipeline ranks, W = the most blocks of a rank, K = kinds of devices, G = groups of
nodes, Q = pairs of pipeline ranks that exchange messages. `places_NRW` holds pools; a rank of fewer than W blocks
repeats its first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dejavu.binding.binding import BindError
from dejavu.binding.site import Ints, Place, Site
from dejavu.foundation.registry import named
from dejavu.plans import Plan, Problem, StageConfiguration
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import HAIR, AdditiveCosts, Floats


@dataclass(frozen=True)
class StageExchange:
    """What two pipeline ranks send each other for one microbatch, one way; the gradient back is as large."""

    a: int
    b: int
    messages: int
    size_bytes: float


class BindingPrices:
    """Prices a plan's step for any placement of its pipeline ranks.

    Attributes:
        configurations: of the R ranks, as the plan says.
        blocks_R, width_R: how many blocks a rank takes, each of how many devices.
        repeats: microbatches of a step but the first.
        seconds_RK, load_seconds_RK: one microbatch, and all but one of the step's plus the per-step work; inf where the
            rank cannot be on the kind: no such configuration in the problem, or too little memory.
        exchanges: the Q pairs.
        inside_seconds_QKKG: of the exchange of one microbatch, both ways, where both ranks are on one node.
    """

    def __init__(self, problem: Problem, plan: Plan, site: Site) -> None:
        self.problem, self.plan, self.site = problem, plan, site
        self.configurations = [plan.rank_configuration(rank) for rank in range(len(plan.ranks))]
        self.blocks_R = np.array([configuration.num_nodes for configuration in self.configurations])
        self.width_R = np.array([configuration.devices_per_node for configuration in self.configurations])
        self._senders_R = np.array([configuration.senders_per_node for configuration in self.configurations])
        self.repeats = problem.num_microbatches - 1
        shape = (len(plan.ranks), len(site.kinds))
        self.seconds_RK, self.load_seconds_RK = np.full(shape, np.inf), np.full(shape, np.inf)
        self._index_RK, known = np.full(shape, -1), set(problem.configurations)
        for rank, stages in enumerate(plan.ranks):
            for k in range(len(site.kinds)):
                configuration = self.configuration(rank, k)
                if configuration in known and self._fits(stages, configuration):
                    self._index_RK[rank, k] = c = problem.index(configuration)
                    spans = [(plan.stages[s].start, plan.stages[s].stop, c) for s in stages]
                    seconds = sum(problem.costs.stage_seconds(*span) for span in spans)
                    once = sum(problem.costs.per_step_seconds(*span) for span in spans)
                    if np.isfinite(seconds + once):
                        self.seconds_RK[rank, k] = seconds
                        self.load_seconds_RK[rank, k] = self.repeats * seconds + once
        self.exchanges = _exchanges(problem, plan)
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

    @property
    def num_ranks(self) -> int:
        return len(self.configurations)

    def configuration(self, rank: int, kind: int) -> StageConfiguration:
        """Return the rank's configuration on another kind of device."""
        return replace(self.configurations[rank], device_type=self.site.kinds[kind])

    def check_memory(self) -> None:
        """Check that every rank fits the kind of device that the plan gave it.

        Raises:
            BindError: one does not.
        """
        for rank, configuration in enumerate(self.configurations):
            if not np.isfinite(self.seconds_RK[rank, self.site.kinds.index(configuration.device_type)]):
                raise BindError(
                    f"pipeline rank {rank} does not fit {configuration}; wanted a plan that holds in its memory"
                )

    def _fits(self, stages: Sequence[int], configuration: StageConfiguration) -> bool:
        """Return whether the stages fit in memory.

        For several stages on a rank only an upper bound is known: a rank may not move to where the bound does not fit,
        but may stay where the plan has it.
        """
        costs, c, plan = self.problem.costs, self.problem.index(configuration), self.plan
        schedule, needed_bytes, host_share = named(SCHEDULES, plan.schedule), 0.0, 0.0
        is_same = configuration.device_type == plan.stages[stages[0]].configuration.device_type
        if plan.both_ways or (len(stages) > 1 and is_same):  # a stage of the other copy is there as well
            return is_same
        for s in stages:
            stage, held = plan.stages[s], schedule.in_flight(s, len(plan.stages), plan.num_microbatches)
            if costs.max_in_flight(stage.start, stage.stop, c) < held:
                return False
            needed_bytes += costs.peak_bytes(stage.start, stage.stop, c, held)
            host_share += costs.host_share(stage.start, stage.stop, c, held)
        if len(stages) == 1 or not isinstance(costs, AdditiveCosts):
            return True
        return bool(needed_bytes <= costs.room_bytes_C[c] and host_share <= 1 + HAIR)

    def _inside(self) -> Floats:
        """Price exchanges inside a node, where every pair of devices has its own link. A link that was only assumed
        has the problem's price, which includes measurements.
        """
        site, K = self.site, len(self.site.kinds)
        seconds = np.zeros((len(self.exchanges), K, K, len(site.inside_assumed_G)))
        for q, exchange in enumerate(self.exchanges):
            a, b = self.configurations[exchange.a], self.configurations[exchange.b]
            size = exchange.size_bytes / a.pairs_with(b)
            link = exchange.messages * site.inside_latency_seconds_G + size * site.inside_seconds_per_byte_G
            seconds[q] = 2.0 * link
            if a.num_nodes > 1 or b.num_nodes > 1:
                continue
            pairs = np.ix_(self._index_RK[exchange.a], self._index_RK[exchange.b])  # −1 where a rank cannot be anyway
            priced = exchange.messages * self.problem.link_latency_seconds_CC[pairs]
            priced = priced + exchange.size_bytes * self.problem.link_seconds_per_byte_CC[pairs]
            seconds[q][:, :, site.inside_assumed_G] = 2.0 * priced[:, :, None]
        return seconds

    def kinds_NR(self, places_NRW: Ints) -> Ints:
        return self.site.kind_P[places_NRW[:, :, 0]]

    def step_seconds_N(self, places_NRW: Ints) -> Floats:
        """Return the step seconds of N bindings; inf where a rank is on a kind that it cannot be on."""
        kinds, ranks = self.kinds_NR(places_NRW), np.arange(self.num_ranks)
        seconds, load = self.seconds_RK[ranks, kinds], self.load_seconds_RK[ranks, kinds]
        transfers = self.transfer_seconds_NQ(places_NRW)
        busiest = np.maximum(load.max(axis=1), self.repeats * transfers.max(axis=1, initial=0.0))
        return np.asarray(seconds.sum(axis=1) + transfers.sum(axis=1) + busiest)

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
        messages, sizes = self._messages_Q[q][:, None, None], self._size_bytes_Q[q][:, None, None]
        nodes, others = site.node_P[a_NQA], site.node_P[b_NQB]
        lanes = np.minimum(self._lanes(q, 0, a_NQA), self._lanes(q, 1, b_NQB))[:, :, None, None]
        same = nodes[:, :, :, None] == others[:, :, None, :]
        g, h = site.group_P[a_NQA][:, :, :, None], site.group_P[b_NQB][:, :, None, :]
        latency = np.where(same, site.inside_latency_seconds_G[g], site.between_latency_seconds_GG[g, h])
        per_byte = np.where(same, site.inside_seconds_per_byte_G[g], site.between_seconds_per_byte_GG[g, h])
        apart = 2.0 * (messages * latency + sizes / lanes * per_byte).max(axis=(2, 3))
        inside = self.inside_seconds_QKKG[
            q[None, :], site.kind_P[a_NQA[:, :, 0]], site.kind_P[b_NQB[:, :, 0]], site.group_P[a_NQA[:, :, 0]]
        ]
        together = same.all(axis=(2, 3))
        return np.asarray(np.where(together, inside, apart))

    def _lanes(self, q: Ints, end: int, places_NQA: Ints) -> Floats:
        """Return how many times one card's bandwidth one end of each exchange has; see `StageConfiguration.lanes`."""
        ranks, site = self._ends_Q2[q, end], self.site
        cards = site.cards_per_device_G[site.group_P[places_NQA]] * self.width_R[ranks][None, :, None]
        used = np.minimum(cards, self._senders_R[ranks][None, :, None]).sum(axis=-1)
        return np.asarray(np.maximum(_distinct(site.node_P[places_NQA]), used))

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
        return np.asarray(2.0 * link)

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


def _distinct(values_NQA: Ints) -> Ints:
    """Count the distinct values along the last axis."""
    rising = np.sort(values_NQA, axis=-1)
    return np.asarray(1 + (rising[..., 1:] != rising[..., :-1]).sum(axis=-1))


def _exchanges(problem: Problem, plan: Plan) -> tuple[StageExchange, ...]:
    schedule, S = named(SCHEDULES, plan.schedule), len(plan.stages)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for s, take_block in enumerate(plan.cuts):
        a, b = sorted((schedule.rank_of(s, S), schedule.rank_of(s + 1, S)))
        if a != b:  # stages on one rank pass tensors in memory
            found[a, b].append(float(problem.cut_bytes_L1[take_block]))
    return tuple(StageExchange(a, b, len(sizes), sum(sizes)) for (a, b), sizes in found.items())
