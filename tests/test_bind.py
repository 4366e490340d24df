"""Binding: against brute force over all bindings of small clusters, and by properties on large ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, combinations_with_replacement, pairwise, permutations, product
from math import inf
from typing import Any

import numpy as np
import pytest

from dejavu.binding import (
    RANDOM_BINDINGS,
    BindError,
    Binding,
    bind,
    bind_in_order,
    exact_labels,
    link_prices,
    message_seconds,
)
from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.draws import random_places
from dejavu.binding.exact_labels import bounds
from dejavu.binding.local import EXCHANGE, MOVE, TURN, changed, changes, improved
from dejavu.binding.placing import bottleneck, computing_bound, in_order
from dejavu.binding.site import Site
from dejavu.cluster import Cluster, Device, DeviceType, Link, NodeGroup, pair
from dejavu.cluster.islands import Island
from dejavu.foundation.registry import named
from dejavu.plans import Plan, Problem, Stage, StageConfiguration, price
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import HAIR, AdditiveCosts

GIB = 2**30


def cluster_of(
    nodes: Sequence[tuple[int, Sequence[tuple[str, int]]]],
    rng: np.random.Generator,
    *,
    alike: bool = False,
    memory: dict[str, int] | None = None,
) -> Cluster:
    """Groups of (nodes, devices of each kind in a node), and random links; `alike`: one link for all."""

    def link() -> Link:
        return Link(1e9, 1e-5) if alike else Link(float(rng.uniform(0.5e9, 20e9)), float(rng.uniform(1e-6, 1e-4)))

    groups = tuple(
        NodeGroup(f"g{i}", count, (), tuple(held), link(), cards=1 if alike else int(rng.integers(1, 7)))
        for i, (count, held) in enumerate(nodes)
    )
    kinds = {name for _, held in nodes for name, _ in held}
    types = {
        name: DeviceType(name, "cuda", {"float32": 1e12}, (memory or {}).get(name, 8 * GIB), 1e11, None, None, "test")
        for name in sorted(kinds)
    }
    between = {
        pair(a.name, b.name): link() for i, a in enumerate(groups) for b in groups[i:] if a is not b or a.count > 1
    }
    return Cluster("random", groups, types, between)


def problem_of(
    cluster: Cluster,
    rng: np.random.Generator,
    *,
    shapes: Sequence[tuple[int, int, int]] = ((1, 1, 1),),
    num_layers: int = 8,
    num_microbatches: int = 8,
    schedule: str = "1f1b",
    cut_bytes: float = 2e6,
    room: float = inf,
) -> Problem:
    """Random layers; each kind has a speed of its own.

    Args:
        shapes: (nodes, devices in a node, tensor-parallel degree) of the configurations, for every kind.
        room: memory of a device, in layers.
    """
    kinds = list(cluster.device_counts)
    hows = tuple(way_of(kind, shape) for kind in kinds for shape in shapes)
    C, L = len(hows), num_layers
    speeds = dict(zip(kinds, rng.uniform(0.4, 3.0, len(kinds)), strict=True))
    work = rng.uniform(0.5e-3, 2e-3, L)
    seconds = np.array([work / speeds[configuration.device_type] / configuration.num_devices for configuration in hows])
    rooms = {kind: room * rng.uniform(0.7, 1.5) for kind in kinds}
    return Problem(
        layers=tuple(f"layer {i}" for i in range(L)),
        configurations=hows,
        device_counts=cluster.device_counts,
        costs=AdditiveCosts(
            seconds_CL=seconds,
            per_step_seconds_CL=seconds * rng.uniform(0, 1, (C, 1)),
            per_step_latency_seconds_C=np.zeros(C),
            fixed_bytes_CL=np.ones((C, L)),
            activation_bytes_CL=np.full((C, L), 0.01),
            temporary_bytes_CL=np.zeros((C, L)),
            capacity_bytes_C=np.array([min(rooms[configuration.device_type], 1e9) for configuration in hows]),
        ),
        cut_bytes_L1=rng.uniform(0.2, 1.0, L + 1) * cut_bytes,
        link_latency_seconds_CC=np.full((C, C), 1e-5),
        link_seconds_per_byte_CC=np.full((C, C), 1e-9),
        schedule=schedule,
        num_microbatches=num_microbatches,
    )


def way_of(kind: str, shape: tuple[int, int, int]) -> StageConfiguration:
    """Devices that split weights split the sequence, where they are two."""
    n, d, t = shape
    return StageConfiguration(kind, n, d, n * d // t, t, sequence_parallel=t == 2)


def plan_of(problem: Problem, hows: Sequence[StageConfiguration], rng: np.random.Generator, schedule: str = "") -> Plan:
    cuts = np.sort(rng.choice(np.arange(1, problem.num_layers), len(hows) - 1, replace=False))
    ends = [0, *map(int, cuts), problem.num_layers]
    stages = tuple(Stage(a, b, configuration) for (a, b), configuration in zip(pairwise(ends), hows, strict=True))
    return Plan(stages, schedule or problem.schedule, problem.num_microbatches)


def formula(problem: Problem, plan: Plan, cluster: Cluster, places: Sequence[Sequence[Device]]) -> float:
    """The step time, written down once more, device by device; inf where a rank cannot be."""
    schedule, S, B = named(SCHEDULES, plan.schedule), len(plan.stages), plan.num_microbatches
    total, loads, links = 0.0, [0.0] * len(places), dict[frozenset[int], float]()
    for s, stage in enumerate(plan.stages):
        rank = schedule.rank_of(s, S)
        configuration = replace(stage.configuration, device_type=places[rank][0].type_name)
        if configuration not in problem.configurations:
            return inf
        c = problem.index(configuration)
        if problem.costs.max_in_flight(stage.start, stage.stop, c) < schedule.in_flight(s, S, B):
            return inf
        seconds = problem.costs.stage_seconds(stage.start, stage.stop, c)
        total += seconds
        loads[rank] += (B - 1) * seconds + problem.costs.per_step_seconds(stage.start, stage.stop, c)
    for s, take_block in enumerate(plan.cuts):
        a, b = schedule.rank_of(s, S), schedule.rank_of(s + 1, S)
        if a == b:
            continue
        nodes = [{(device.group, device.node_index) for device in places[rank]} for rank in (a, b)]
        configuration, then = plan.rank_configuration(a), plan.rank_configuration(b)
        lanes = min(cards_used(cluster, own, places[rank]) for own, rank in ((configuration, a), (then, b)))
        if len(nodes[0] | nodes[1]) == 1:
            lanes = max(configuration.data_parallel, then.data_parallel)
            if configuration.sequence_parallel and then.sequence_parallel:
                lanes *= min(configuration.tensor_parallel, then.tensor_parallel)
        size = problem.cut_bytes_L1[take_block] / lanes
        worst = max(cluster.link(x, y).transfer_seconds(size) for x, y in product(places[a], places[b]))
        total += 2 * worst
        links[frozenset((a, b))] = links.get(frozenset((a, b)), 0.0) + 2 * worst
    return total + max(*loads, *((B - 1) * seconds for seconds in links.values()), 0.0)


def cards_used(cluster: Cluster, configuration: StageConfiguration, devices: Sequence[Device]) -> float:
    """Network cards through which the rank's messages go, if all carried as much as those that carry the most.

    Of a node those of its devices there, up to one for each that sends; one at least.
    """
    parts = configuration.tensor_parallel if configuration.sequence_parallel else 1
    share_sending, found = configuration.data_parallel * parts / configuration.num_devices, list[float]()
    for node, count in Counter((one.group, one.node_index) for one in devices).items():
        cards = max(1.0, count * min(cluster.group(node[0]).cards_per_device, share_sending))
        found.append(cards / (count / len(devices)))
    return min(found)


def devices_of(binding: Binding) -> list[list[Device]]:
    places: list[list[Device]] = [[] for _ in binding.plan.ranks]
    for placement in binding.placements:
        places[placement.pipeline_rank].append(placement.device)
    return places


def every_binding(plan: Plan, cluster: Cluster) -> Iterator[list[tuple[Device, ...]]]:
    """Every way to give ranks devices: d of each of n pools (a pool may serve twice); likes of a pool in one order."""
    pools: dict[tuple[str, int, str], list[Device]] = {}
    for device in cluster.devices():
        pools.setdefault((device.group, device.node_index, device.type_name), []).append(device)

    def extend(rank: int, free: dict[tuple[str, int, str], int]) -> Iterator[list[tuple[Device, ...]]]:
        if rank == len(plan.ranks):
            yield []
            return
        configuration = plan.rank_configuration(rank)
        blocks = [key for key, count in free.items() for _ in range(count // configuration.devices_per_node)]
        for chosen in set(combinations(blocks, configuration.num_nodes)):
            if len({kind for *_, kind in chosen}) > 1:
                continue
            left, taken = dict(free), []
            for key in chosen:
                at = len(pools[key]) - left[key]
                taken += pools[key][at : at + configuration.devices_per_node]
                left[key] -= configuration.devices_per_node
            for rest in extend(rank + 1, left):
                yield [tuple(taken), *rest]

    yield from extend(0, {key: len(devices) for key, devices in pools.items()})


def sound(binding: Binding, problem: Problem, plan: Plan, cluster: Cluster) -> None:
    """What holds of every binding."""
    places = devices_of(binding)
    used = [device for place in places for device in place]
    assert len(set(used)) == len(used) and set(used) <= set(cluster.devices())
    rows = iter(binding.placements)
    for rank, place in enumerate(places):
        configuration, said = binding.plan.rank_configuration(rank), plan.rank_configuration(rank)
        assert replace(configuration, device_type=said.device_type) == said
        assert {device.type_name for device in place} == {configuration.device_type}
        for replica, shard in product(range(configuration.data_parallel), range(configuration.tensor_parallel)):
            row = next(rows)
            assert (row.pipeline_rank, row.replica, row.shard) == (rank, replica, shard)
        width = configuration.devices_per_node
        for block in (place[at : at + width] for at in range(0, len(place), width)):
            assert len({(device.group, device.node_index) for device in block}) == 1
    assert binding.step_seconds == pytest.approx(formula(problem, plan, cluster, places), rel=1e-9)
    assert binding.step_seconds <= binding.order_step_seconds
    assert 0 < binding.lower_bound_seconds <= binding.step_seconds
    if binding.random_best_step_seconds is not None:
        assert binding.random_mean_step_seconds is not None
        assert binding.step_seconds <= binding.random_best_step_seconds * (1 + 1e-9)
        assert binding.random_best_step_seconds <= binding.random_mean_step_seconds * (1 + 1e-9)
    assert 0 <= binding.random_refused <= RANDOM_BINDINGS
    assert len(binding.reasons) == len(places)
    assert [(s.start, s.stop) for s in binding.plan.stages] == [(s.start, s.stop) for s in plan.stages]
    assert Binding.from_dict(json.loads(json.dumps(binding.to_dict()))) == binding
    sent = message_seconds(problem, binding.plan, binding.placements, cluster)
    assert by_messages(problem, binding.plan, sent) == pytest.approx(binding.step_seconds, rel=1e-9)


def by_messages(problem: Problem, plan: Plan, sent: Sequence[float]) -> float:
    """The step time from what the messages take one way, however that was found."""
    pairs, rank_of = dict[frozenset[int], float](), {s: rank for rank, own in enumerate(plan.ranks) for s in own}
    spans = [(stage.start, stage.stop, problem.index(stage.configuration)) for stage in plan.stages]
    for s, seconds in enumerate(sent):
        pair = frozenset((rank_of[s], rank_of[s + 1]))
        assert (seconds > 0) == (len(pair) > 1)
        pairs[pair] = pairs.get(pair, 0.0) + 2 * seconds
    loads = [
        sum(
            (plan.num_microbatches - 1) * problem.costs.stage_seconds(*spans[s])
            + problem.costs.per_step_seconds(*spans[s])
            for s in own
        )
        for own in plan.ranks
    ]
    busiest = max(*loads, *((plan.num_microbatches - 1) * seconds for seconds in pairs.values()))
    return sum(problem.costs.stage_seconds(*span) for span in spans) + 2 * sum(sent) + busiest


ONE = ((1, 1, 1),)
SOME = ((1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 2), (1, 3, 1))
# name -> groups of nodes, shapes of the problem, which shapes the ranks have (on the kinds that follow)
FAMILY = {
    "a chain of nodes": ([(1, [("a", 1)])] * 5, ONE, [(0, "a")] * 4),
    "two kinds": ([(1, [("a", 2)]), (2, [("b", 1)]), (1, [("a", 1)])], ONE, [(0, "a"), (0, "b"), (0, "a"), (0, "b")]),
    "a mixed node": ([(2, [("a", 1), ("b", 2)]), (1, [("b", 1)])], ONE, [(0, "b"), (0, "a"), (0, "b"), (0, "b")]),
    "idle devices": ([(2, [("a", 2)]), (1, [("b", 3)])], ONE, [(0, "a"), (0, "b"), (0, "a")]),
    "meshes": ([(2, [("a", 4)]), (1, [("b", 3)])], SOME, [(1, "a"), (2, "a"), (0, "b"), (1, "b")]),
    "meshes of two nodes": ([(3, [("a", 4)]), (2, [("b", 2)])], SOME, [(3, "a"), (2, "a"), (0, "b"), (0, "a")]),
    "3-1": ([(1, [("a", 3)]), (2, [("a", 2)]), (1, [("b", 1)])], SOME, [(4, "a"), (0, "a"), (1, "a"), (0, "b")]),
}


def case(name: str, seed: int, **options: object) -> tuple[Problem, Plan, Cluster]:
    nodes, shapes, ranks = FAMILY[name]
    rng = np.random.default_rng(seed)
    cluster = cluster_of(nodes, rng)
    problem = problem_of(cluster, rng, shapes=shapes, **options)  # type: ignore[arg-type]
    hows = [way_of(kind, shapes[shape]) for shape, kind in ranks]
    return problem, plan_of(problem, hows, rng), cluster


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", FAMILY)
def test_is_the_best_of_all_bindings(name: str, seed: int, moves: bool) -> None:
    """Or of those that leave each rank on its kind of devices, where it may not move to another."""
    problem, plan, cluster = case(name, seed, cut_bytes=[2e5, 2e6, 2e7][seed % 3])
    binding = bind(problem, plan, cluster, moves=moves)
    sound(binding, problem, plan, cluster)
    assert moves or binding.plan == plan
    own = [plan.rank_configuration(rank).device_type for rank in range(len(plan.ranks))]
    best = min(
        formula(problem, plan, cluster, places)
        for places in every_binding(plan, cluster)
        if moves or [place[0].type_name for place in places] == own
    )
    assert binding.step_seconds == pytest.approx(best, rel=1e-8)
    assert binding.lower_bound_seconds == binding.step_seconds


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs", "zbv"])
@pytest.mark.parametrize("seed", range(3))
def test_several_stages_a_rank(schedule: str, seed: int) -> None:
    """Stages of a rank stay together, and a looping schedule sends from the last rank to the first."""
    rng = np.random.default_rng(seed)
    cluster = cluster_of([(1, [("a", 1)]), (1, [("b", 2)]), (2, [("a", 1)])], rng)
    problem = problem_of(cluster, rng, schedule=named(SCHEDULES, schedule).searched_as, cut_bytes=1e7)
    kinds = [StageConfiguration(kind) for kind in ("a", "b", "b")]
    ranks = [named(SCHEDULES, schedule).rank_of(s, 6) for s in range(6)]
    plan = plan_of(problem, [kinds[rank] for rank in ranks], rng, schedule)
    binding = bind(problem, plan, cluster)
    sound(binding, problem, plan, cluster)
    best = min(formula(problem, plan, cluster, places) for places in every_binding(plan, cluster))
    assert binding.step_seconds == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("shapes", [[(2, 2, 1)], [(2, 1, 1)], [(2, 2, 1), (1, 2, 1)], [(1, 1, 1), (2, 1, 1)]], ids=str)
@pytest.mark.parametrize("nodes", [[(1, 4), (1, 2), (1, 2)], [(1, 4), (2, 2)], [(1, 3), (2, 1), (1, 2)]], ids=str)
def test_an_exchange_takes_no_less_than_its_bound(nodes: list[tuple[int, int]], shapes: Any) -> None:
    """Wherever two ranks are, also each on nodes of two groups, of which one has more network cards."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        cluster = cluster_of([(count, [("a", devices)]) for count, devices in nodes], rng)
        groups = tuple(replace(group, cards=int(rng.choice([1, 8]))) for group in cluster.groups)
        cluster = replace(cluster, groups=groups)
        problem = problem_of(cluster, rng, shapes=shapes, cut_bytes=2e9)
        plan = plan_of(problem, [way_of("a", shapes[0]), way_of("a", shapes[-1])], rng)
        pricing = BindingPrices(problem, plan, Site.of(cluster))
        first, second = pricing.configurations
        pools, least = range(len(pricing.site.size_P)), inf
        for a in combinations_with_replacement(pools, first.num_nodes):
            for b in combinations_with_replacement(pools, second.num_nodes):
                taken = Counter[int]()
                for one, place in ((first, a), (second, b)):
                    taken.update({pool: one.devices_per_node * place.count(pool) for pool in set(place)})
                if all(count <= pricing.site.size_P[pool] for pool, count in taken.items()):
                    least = min(least, pricing.transfer_seconds(0, a, b))
        assert pricing.least_seconds_Q(np.isfinite(pricing.seconds_RK))[0] <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_many_blocks_cost_by_groups_what_they_cost_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks of thousands of blocks not every pair of them is looked at."""
    rng, shapes = np.random.default_rng(seed), [(2, 2, 1), (1, 2, 1), (3, 1, 1), (2, 1, 1)]
    nodes = [(int(rng.integers(1, 4)), [("a", int(rng.integers(2, 5)))]) for _ in range(3)]
    cluster = cluster_of([(4, [("a", 4)]), *nodes], rng)
    cluster = replace(cluster, groups=tuple(replace(one, cards=int(rng.choice([1, 8]))) for one in cluster.groups))
    problem = problem_of(cluster, rng, shapes=shapes, cut_bytes=float(rng.choice([1e3, 2e9])))
    plan = plan_of(problem, [way_of("a", shapes[rng.integers(4)]) for _ in range(3)], rng)
    pricing = BindingPrices(problem, plan, Site.of(cluster), int(rng.integers(1, 4)))
    places = random_places(pricing, 50, seed)[0]
    one_by_one = pricing.transfer_seconds_NQ(places)
    monkeypatch.setattr(link_prices, "MOST_PAIRS", 0)
    np.testing.assert_allclose(pricing.transfer_seconds_NQ(places), one_by_one, rtol=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_a_message_waits_for_the_node_that_has_the_most_of_it_for_its_cards(seed: int) -> None:
    """Where blocks of a rank share a node with one card, and others have nodes or cards of their own."""
    rng, shapes = np.random.default_rng(seed), [(3, 1, 1), (2, 2, 1), (4, 1, 1)]
    cluster = cluster_of([(int(rng.integers(1, 3)), [("a", int(rng.integers(2, 7)))]) for _ in range(4)], rng)
    cluster = replace(cluster, groups=tuple(replace(one, cards=int(rng.choice([1, 8]))) for one in cluster.groups))
    problem = problem_of(cluster, rng, shapes=shapes, cut_bytes=2e9)
    plan = plan_of(problem, [way_of("a", shapes[rng.integers(3)]) for _ in range(2)], rng)
    pricing = BindingPrices(problem, plan, Site.of(cluster))
    for one in random_places(pricing, 50, seed)[0]:
        free = [list(devices) for devices in pricing.site.devices]
        devices = [
            [free[pool].pop(0) for pool in one[rank, : how.num_nodes] for _ in range(how.devices_per_node)]
            for rank, how in enumerate(pricing.configurations)
        ]
        expected = formula(problem, plan, cluster, devices)
        assert pricing.step_seconds_N(one[None])[0] == pytest.approx(expected, rel=1e-9)


def test_a_rank_may_have_thousands_of_nodes() -> None:
    """More blocks than Python calls functions in each other; and their pairs would be gigabytes."""
    rng = np.random.default_rng(0)
    cluster = cluster_of([(2500, [("a", 8)])], rng, alike=True)
    problem = problem_of(cluster, rng, shapes=[(1200, 8, 1)])
    plan = plan_of(problem, [way_of("a", (1200, 8, 1))] * 2, rng)
    binding = bind(problem, plan, cluster)
    assert binding.step_seconds == pytest.approx(binding.lower_bound_seconds)
    assert 0 < binding.random_drawn < RANDOM_BINDINGS
    assert len({placed.device for placed in binding.placements}) == 19_200


@pytest.mark.parametrize("seed", range(4))
def test_what_is_not_compared_is_bound_alike(seed: int) -> None:
    """Nothing is drawn where the order of the cluster file is proved to be the best; elsewhere all is as ever."""
    quick = 0
    for name, alike in product(FAMILY, (True, False)):
        nodes, shapes, ranks = FAMILY[name]
        rng = np.random.default_rng(seed)
        cluster = cluster_of(nodes, rng, alike=alike)
        problem = problem_of(cluster, rng, shapes=shapes, cut_bytes=2e5)
        plan = plan_of(problem, [way_of(kind, shapes[shape]) for shape, kind in ranks], rng)
        full, short = bind(problem, plan, cluster), bind(problem, plan, cluster, compares=False)
        assert (short.plan, short.placements, short.step_seconds) == (full.plan, full.placements, full.step_seconds)
        assert short.lower_bound_seconds == full.lower_bound_seconds
        assert short.reasons in ((), full.reasons)
        quick += not short.reasons
    assert 0 < quick < 2 * len(FAMILY)


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("name", FAMILY)
def test_what_a_run_of_the_schedule_repeats_is_counted_as_often(name: str, runs: int) -> None:
    """The problem's prices are of all runs in a step, and so are messages over the links of the cluster file."""
    problem, plan, cluster = case(name, 1, cut_bytes=2e6)
    binding = bind(problem, plan, cluster)
    once = message_seconds(problem, plan, bind_in_order(plan, cluster).placements, cluster)
    often = message_seconds(problem, plan, bind_in_order(plan, cluster).placements, cluster, runs)
    assert often == pytest.approx([runs * seconds for seconds in once])
    assert (bind(problem, plan, cluster, runs=runs).step_seconds > binding.step_seconds) == (runs > 1)


@pytest.mark.parametrize(("more", "fits"), [(-0.5, True), (0.0, True), (0.5, True), (2.0, False)])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs", "zbv"])
@pytest.mark.parametrize("seed", range(3))
def test_stages_of_a_rank_fit_with_the_tolerance_of_one(seed: int, schedule: str, more: float, fits: bool) -> None:
    """On devices of the other kind, which hold a hair less, or two hairs less, than the stages need together."""
    rng = np.random.default_rng(seed)
    cluster = cluster_of([(2, [("a", 1)]), (2, [("b", 1)])], rng)
    known = named(SCHEDULES, schedule)
    problem = problem_of(cluster, rng, schedule=known.searched_as, room=1e9)
    plan = plan_of(problem, [StageConfiguration("a")] * 4, rng, schedule)
    c, costs = problem.index(StageConfiguration("b")), problem.costs
    assert isinstance(costs, AdditiveCosts)
    needed = [
        sum(
            costs.peak_bytes(stage.start, stage.stop, c, known.in_flight(s, 4, plan.num_microbatches))
            for s, stage in enumerate(plan.stages)
            if s in own
        )
        for own in plan.ranks
    ]
    capacity = costs.capacity_bytes_C.copy()
    capacity[c] = needed[0] * (1 - more * HAIR)
    tight = replace(problem, costs=replace(costs, capacity_bytes_C=capacity))
    pricing = BindingPrices(tight, plan, Site.of(cluster))
    assert np.isfinite(pricing.seconds_RK[0, pricing.site.kinds.index(Island("b"))]) == fits


@pytest.mark.parametrize("seed", range(8))
def test_memory_holds(seed: int) -> None:
    """A rank that fits one kind only stays there; random bindings that do not fit are counted, and left out."""
    nodes, _, ranks = FAMILY["two kinds"]
    rng = np.random.default_rng(seed)
    cluster = cluster_of(nodes, rng)
    problem = problem_of(cluster, rng, room=2.6)
    plan = plan_of(problem, [StageConfiguration(kind) for _, kind in ranks], rng)
    possible = [formula(problem, plan, cluster, places) for places in every_binding(plan, cluster)]
    pricing = BindingPrices(problem, plan, Site.of(cluster))
    kinds = [pricing.site.kinds.index(Island.of(configuration)) for configuration in pricing.configurations]
    if not np.isfinite(pricing.seconds_RK[range(len(kinds)), kinds]).all():
        with pytest.raises(BindError, match=r"rank \d does not fit"):
            bind(problem, plan, cluster)
        return
    binding = bind(problem, plan, cluster)
    sound(binding, problem, plan, cluster)
    assert binding.step_seconds == pytest.approx(min(possible), rel=1e-8)
    assert (binding.random_refused == 0) or inf in possible


def test_random_bindings_that_do_not_fit_are_counted() -> None:
    """The large rank fits "a" only; the small one, where it comes first, takes that every other time."""
    rng = np.random.default_rng(0)
    cluster = cluster_of([(1, [("a", 1)]), (1, [("b", 1)])], rng)
    problem = problem_of(cluster, rng)
    small, large = (StageConfiguration(kind) for kind in "ba")
    capacity = np.where([configuration.device_type == "a" for configuration in problem.configurations], 1e9, 3.0)
    problem = replace(problem, costs=replace(problem.costs, capacity_bytes_C=capacity))
    plan = Plan((Stage(0, 6, large), Stage(6, 8, small)), "1f1b", 8)
    binding = bind(problem, plan, cluster)
    sound(binding, problem, plan, cluster)
    assert RANDOM_BINDINGS / 5 < binding.random_refused < RANDOM_BINDINGS / 3
    assert binding.random_best_step_seconds == pytest.approx(binding.step_seconds)
    assert binding.random_mean_step_seconds == pytest.approx(binding.step_seconds)
    assert "of the cluster's kinds it can only be on a" in binding.reasons[0]
    assert " each way a microbatch with rank 1 between nodes" in binding.reasons[0]
    everywhere = BindingPrices(problem, plan, Site.of(cluster)).step_seconds_N(np.array([[[0], [1]], [[1], [0]]]))
    assert np.isfinite(everywhere).tolist() == [True, False]


def test_like_devices_and_links_cost_what_the_search_said() -> None:
    """One price: where every link is the problem's, the binding's step is the plan's, and the order stays."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        cluster = cluster_of([(4, [("a", 2)])], rng, alike=True)
        problem = problem_of(cluster, rng)
        plan = plan_of(problem, [StageConfiguration("a")] * 6, rng)
        binding = bind(problem, plan, cluster)
        assert binding.step_seconds == pytest.approx(price(problem, plan).step_seconds, rel=1e-12)
        assert binding.order_step_seconds == binding.step_seconds == binding.lower_bound_seconds
        assert [row.device for row in binding.placements] == list(cluster.devices()[:6])


def test_an_assumed_link_is_priced_as_it_was_measured_and_a_declared_one_as_the_file_says() -> None:
    rng = np.random.default_rng(0)
    cluster = cluster_of([(1, [("a", 3)])], rng)
    problem = problem_of(cluster, rng)
    c = problem.index(StageConfiguration("a"))
    links = float(problem.link_latency_seconds_CC[c, c]), float(problem.link_seconds_per_byte_CC[c, c])
    measured = replace(problem, measured_links={("a", "a"): links})
    plan = plan_of(problem, [StageConfiguration("a")] * 3, rng)
    (group,) = cluster.groups
    assumed = replace(cluster, groups=(replace(group, link=replace(group.link, assumed=True)),))
    declared_seconds = bind(problem, plan, cluster).step_seconds
    assert bind(measured, plan, assumed).step_seconds == pytest.approx(price(problem, plan).step_seconds, rel=1e-12)
    assert declared_seconds != pytest.approx(price(problem, plan).step_seconds, rel=1e-6)
    assert bind(measured, plan, cluster).step_seconds == declared_seconds  # what a person said
    assert bind(problem, plan, assumed).step_seconds == declared_seconds  # nothing was measured


def test_the_slow_device_gets_the_small_stage() -> None:
    """Nothing to send, speeds 1 : 3: the plan had it the wrong way round."""
    rng = np.random.default_rng(0)
    cluster = cluster_of([(1, [("slow", 1)]), (1, [("fast", 1)])], rng, alike=True)
    problem = problem_of(cluster, rng, cut_bytes=0.0)
    seconds = np.outer([3.0, 1.0], np.full(8, 1e-3))
    costs = replace(problem.costs, seconds_CL=seconds, per_step_seconds_CL=0 * seconds)
    problem = replace(problem, costs=costs)
    slow, fast = problem.configurations
    plan = Plan((Stage(0, 6, slow), Stage(6, 8, fast)), "1f1b", 8)
    binding = bind(problem, plan, cluster)
    assert [stage.configuration for stage in binding.plan.stages] == [fast, slow]
    assert binding.step_seconds == pytest.approx((6 + 6 + 7 * 6) * 1e-3 + 2 * 1e-5)
    assert binding.order_step_seconds == pytest.approx((18 + 2 + 7 * 18) * 1e-3 + 2 * 1e-5)
    assert binding.reasons[0].startswith("rank 0 is the busiest (its passes take 48 ms a step)")
    assert "the kind that is fastest for it, fast instead of the plan's slow" in binding.reasons[0]
    assert "slow instead of the plan's fast; fast would take 16 ms" in binding.reasons[1]


@pytest.mark.parametrize("size", [6, 30])
def test_a_chain_finds_the_line(size: int) -> None:
    """Nodes on a line, in a random order in the file: only neighbours on the line are well linked."""
    rng = np.random.default_rng(size)
    line = [int(n) for n in rng.permutation(size)]
    at = {f"g{n}": place for place, n in enumerate(line)}
    cluster = cluster_of([(1, [("a", 1)])] * size, rng)
    near, far = Link(10e9, 1e-5), Link(1e9, 1e-4)
    links = {names: near if abs(at[names[0]] - at[names[1]]) == 1 else far for names in cluster.links_between}
    cluster = replace(cluster, links_between=links)
    problem = problem_of(cluster, rng, num_layers=size, num_microbatches=32)
    binding = bind(problem, plan_of(problem, [StageConfiguration("a")] * size, rng), cluster)
    found = [at[row.device.group] for row in binding.placements]
    assert found in (sorted(found), sorted(found, reverse=True))
    sound(binding, problem, binding.plan, cluster)


def test_renaming_nodes_changes_nothing() -> None:
    for seed in range(4):
        problem, plan, cluster = case("meshes of two nodes", seed)
        names = {group.name: f"n{99 - i}" for i, group in enumerate(cluster.groups)}
        renamed = replace(
            cluster,
            groups=tuple(replace(group, name=names[group.name]) for group in cluster.groups),
            links_between={pair(names[a], names[b]): link for (a, b), link in cluster.links_between.items()},
        )
        one, other = bind(problem, plan, cluster), bind(problem, plan, renamed)
        numbers = ("step_seconds", "order_step_seconds", "random_mean_step_seconds", "random_refused", "plan")
        assert all(getattr(one, name) == getattr(other, name) for name in numbers)
        places = [
            [(names.get(d.group, d.group), d.node_index, d.index) for d in place]
            for binding in (one, other)
            for place in devices_of(binding)
        ]
        assert places[: len(plan.ranks)] == places[len(plan.ranks) :]


LARGE = {
    "64 on 8 × 8": ([(8, [("a", 8)])], ((1, 1, 1),), [(0, "a")] * 64),
    "40 of 64, four kinds": (
        [(2, [("a", 8)]), (2, [("b", 8)]), (4, [("c", 4)]), (4, [("d", 4)])],
        ((1, 1, 1),),
        [(0, "abcd"[i % 4]) for i in range(40)],
    ),
    "48 nodes, each with links of its own": ([(1, [("a", 1)])] * 48, ((1, 1, 1),), [(0, "a")] * 48),
    "meshes": (
        [(4, [("a", 8)]), (10, [("b", 4)])],
        ((1, 1, 1), (1, 2, 2), (1, 4, 2), (2, 4, 4)),
        [(2, "a"), (2, "a"), (3, "b"), (0, "a"), (0, "b"), (1, "b"), (2, "b")] * 2,
    ),
}


@cache
def large(name: str) -> tuple[Problem, Plan, Cluster]:
    nodes, shapes, ranks = LARGE[name]
    rng = np.random.default_rng(1)
    cluster = cluster_of(nodes, rng)
    problem = problem_of(cluster, rng, shapes=shapes, num_layers=2 * len(ranks), num_microbatches=64, room=12.0)
    hows = [way_of(kind, shapes[shape]) for shape, kind in ranks]
    return problem, plan_of(problem, hows, rng), cluster


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("4") else name for name in LARGE]
)
def test_large_bindings_are_close_to_their_bound(name: str) -> None:
    problem, plan, cluster = large(name)
    binding = bind(problem, plan, cluster)
    sound(binding, problem, plan, cluster)
    assert binding.step_seconds <= 1.1 * binding.lower_bound_seconds
    assert bind(problem, plan, cluster) == binding


@pytest.mark.parametrize("name", LARGE)
def test_a_plan_that_is_only_compared_is_bound_well_with_little_effort(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner binds a hundred plans; the whole search of one takes seconds, mostly to prove what was found before."""
    extended, sums = 0, exact_labels._sums

    def counted(*arguments: Any) -> tuple[float, float]:
        nonlocal extended
        extended += 1
        return sums(*arguments)

    monkeypatch.setattr(exact_labels, "_sums", counted)
    problem, plan, cluster = large(name)
    binding = bind(problem, plan, cluster, compares=False)
    assert extended <= 1.1 * exact_labels.FEW_EXTENSIONS
    assert 0 < binding.lower_bound_seconds <= binding.step_seconds <= 1.02 * binding.lower_bound_seconds


@pytest.mark.parametrize("name", LARGE)
def test_random_bindings_are_bindings(name: str) -> None:
    """Nobody gets devices that another has, every rank gets one kind, and all places are drawn."""
    problem, plan, cluster = large(name)
    site = Site.of(cluster)
    pricing = BindingPrices(problem, plan, site)
    places, holds = random_places(pricing, 200, seed=3)
    drawn = set()
    for one, held in zip(places, holds, strict=True):
        used = np.zeros(len(site), dtype=int)
        for rank, configuration in enumerate(pricing.configurations):
            blocks = one[rank, : configuration.num_nodes]
            assert len(set(site.kind_P[blocks])) == 1
            np.add.at(used, blocks, configuration.devices_per_node)
            drawn |= set(blocks.tolist())
        assert (used <= site.size_P).all()
        assert held == np.isfinite(pricing.step_seconds_N(one[None])[0])
    assert holds.any()
    assert drawn == set(range(len(site)))


@pytest.mark.parametrize("name", LARGE)
def test_prices_of_one_and_of_many_agree(name: str) -> None:
    """Also with the formula, and with the bound that no binding is below."""
    problem, plan, cluster = large(name)
    site = Site.of(cluster)
    pricing = BindingPrices(problem, plan, site)
    places = random_places(pricing, 20, seed=5)[0]
    transfers = pricing.transfer_seconds_NQ(places)
    bound = bounds(pricing, *computing_bound(pricing))
    for n, one in enumerate(places):
        take_block = [
            tuple(one[rank, : configuration.num_nodes].tolist())
            for rank, configuration in enumerate(pricing.configurations)
        ]
        for q, exchange in enumerate(pricing.exchanges):
            assert pricing.transfer_seconds(q, take_block[exchange.a], take_block[exchange.b]) == pytest.approx(
                transfers[n, q]
            )
        free = [list(devices) for devices in site.devices]
        devices = [
            [free[pool].pop() for pool in place for _ in range(configuration.devices_per_node)]
            for place, configuration in zip(take_block, pricing.configurations, strict=True)
        ]
        seconds = float(pricing.step_seconds_N(one[None])[0])
        assert seconds == pytest.approx(formula(problem, plan, cluster, devices), rel=1e-9)
        assert seconds >= bound.step_seconds * (1 - 1e-9)


def test_changes_are_bindings_too() -> None:
    """Each change, on its own: sound, different, and never the devices of another rank."""
    problem, plan, cluster = large("meshes")
    site = Site.of(cluster)
    pricing = BindingPrices(problem, plan, site)
    start = random_places(pricing, 1, seed=0)[0][0]
    rows = changes(pricing, start)
    assert set(rows[:, 0].tolist()) == {EXCHANGE, TURN, MOVE}
    for one in changed(pricing, start, rows):
        used = np.zeros(len(site), dtype=int)
        for rank, configuration in enumerate(pricing.configurations):
            np.add.at(used, one[rank, : configuration.num_nodes], configuration.devices_per_node)
            assert (one[rank, configuration.num_nodes :] == one[rank, 0]).all()
            assert len(set(site.kind_P[one[rank]])) == 1
        assert (used <= site.size_P).all()
        assert (one != start).any()
    better = improved(pricing, start, seed=0)
    seconds = pricing.step_seconds_N(np.stack([start, better]))
    assert seconds[1] < seconds[0]
    assert not (
        pricing.step_seconds_N(changed(pricing, better, changes(pricing, better))) < seconds[1] * (1 - 1e-8)
    ).any()


def test_the_bottleneck_is_the_least_that_a_permutation_has() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        loads = rng.integers(1, 9, (4, 5)).astype(float)
        loads[rng.random(loads.shape) < 0.3] = inf
        loads[np.arange(4), np.arange(4)] = 9.0
        best = min(max(loads[r, s] for r, s in enumerate(order)) for order in permutations(range(5), 4))
        assert bottleneck(loads) == best


def test_too_few_devices_are_refused() -> None:
    rng = np.random.default_rng(0)
    cluster = cluster_of([(2, [("a", 3)]), (1, [("b", 2)])], rng)
    shapes = ((1, 1, 1), (1, 2, 1))
    problem = problem_of(cluster, rng, shapes=shapes)

    def refuse(match: str, *ranks: tuple[int, str]) -> None:
        hows = [way_of(kind, shapes[shape]) for shape, kind in ranks]
        with pytest.raises(BindError, match=match):
            bind(problem, plan_of(problem, hows, rng), cluster)

    refuse("rank 2 wants 1 more × b .*; 0 are left", (0, "b"), (0, "b"), (0, "b"))
    refuse("rank 2 wants 2 more × a .*; 2 are left, but not so many together", (1, "a"), (1, "a"), (1, "a"))
    missing = Plan((Stage(0, 8, StageConfiguration("c")),), "1f1b", 8)
    with pytest.raises(BindError, match=r"wants 1 more × c .*; 0 are left"):
        bind(problem, missing, cluster)


def test_a_single_rank_takes_the_best_device() -> None:
    rng = np.random.default_rng(4)
    cluster = cluster_of([(1, [("a", 1)]), (1, [("b", 1)])], rng)
    problem = problem_of(cluster, rng)
    for kind in "ab":
        binding = bind(problem, plan_of(problem, [StageConfiguration(kind)], rng), cluster)
        best = min(
            price(problem, plan_of(problem, [configuration], rng)).step_seconds
            for configuration in problem.configurations
        )
        assert binding.step_seconds == pytest.approx(best)


def test_the_order_is_that_of_the_file() -> None:
    site = Site.of(cluster_of([(2, [("a", 2), ("b", 1)]), (1, [("b", 4)])], np.random.default_rng(0)))
    hows = [StageConfiguration("b"), StageConfiguration("a", 1, 2, 2), StageConfiguration("b", 1, 4, 4)]
    assert in_order([*hows, StageConfiguration("a")], site) == [(1,), (0,), (4,), (2,)]
