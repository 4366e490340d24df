"""What plans take where messages have to leave nodes: told from their ranks' places, never more than on devices."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bound.every_plan import every_plan
from dejavu.binding import Binding, Placement
from dejavu.cluster import Cluster, Device, load_cluster
from dejavu.foundation.registry import named
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest
from dejavu.planning.candidates import simulate_bound
from dejavu.planning.prices import Prices
from dejavu.planning.ways import nodes as over_nodes
from dejavu.planning.ways.nodes import OverNodes, PlacedConfiguration, as_plain
from dejavu.plans import Plan, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.simulation import simulate_plan
from dejavu.simulation._action_table import action_table
from dejavu.simulation.bound import Proof, simulated_lower_bound
from dejavu.simulation.bound._chain import table, weights
from dejavu.simulation.bound._chain_walk import _fill_times
from dejavu.simulation.bound._dual import back_after, times_of
from dejavu.simulation.bound._paths import busy_lines, drained_lines, longest_path
from dejavu.simulation.bound._plan_family import Place
from dejavu.simulation.bound._prefix_sums import bound_problem
from dejavu.simulation.bound._vee import pairs, vee_table
from dejavu.simulation.bound.bounding import bounding
from dejavu.workload import Workload
from tests.conftest import some, spread

NODES = {
    "two nodes of two": "- {name: a, count: 2, devices: {type: T4, count: 2}, link: {bandwidth: 100 GB/s}}",
    "three nodes": "- {name: a, count: 2, devices: {type: T4, count: 1}}\n"
    "- {name: b, devices: {type: T4, count: 2}, link: {bandwidth: 100 GB/s}}",
    "two nodes of two types": "- name: a\n  count: 2\n  link: {bandwidth: 100 GB/s}\n"
    "  devices: [{type: T4, count: 1}, {type: V100-SXM2-16GB, count: 1}]",
    "a slow node": "- {name: a, devices: {type: T4, count: 2}, link: {bandwidth: 100 GB/s}}\n"
    "- {name: b, devices: {type: T4, count: 2}, link: {bandwidth: 20 MB/s, latency: 90 us}}",
}
SCHEDULES_OF_EACH_KIND = ("1f1b", "interleaved_1f1b", "zbv", "hanayo")


def posed(
    nodes: str, folder: Path, *, replicas: int = 4, speed: str = "200 Mbit/s", count: int = 4
) -> tuple[Prices, PricedProblem]:
    text = f"nodes:\n{NODES[nodes]}\nlinks: {{default: {{bandwidth: {speed}, latency: 25 us}}}}\n"
    (folder / "cluster.yaml").write_text(text)
    options = {"num_blocks": 4, "width": 256, "num_heads": 4}
    named_ = {"model": "gpt", "model_options": options, "data": "synthetic", "synthetic": {"num_classes": 256}}
    sizes = {"sequence_length": 64, "batch_size": 16, "num_microbatches": count, "trials": {"count": 0}}
    request = PlanRequest(
        Workload.model_validate(named_ | sizes),
        load_cluster(folder / "cluster.yaml"),
        folder / "profiles_db",
        Parallelism(max_data_parallel=replicas, max_tensor_parallel=1),
        schedules=SCHEDULES_OF_EACH_KIND,
        microbatches=(count,),
    )
    prices = Prices(request)
    return prices, prices.problems(count)[0]


def on_some_devices(plan: Plan, cluster: Cluster, rng: np.random.Generator) -> Binding | None:
    """The plan on devices drawn by lot; None where ranks that came first left no room."""
    free, placed = list(cluster.devices()), list[Placement]()
    for rank in range(len(plan.ranks)):
        one = plan.rank_configuration(rank)
        of_node = dict[str, list[Device]]()
        for device in free:
            if device.type_name == one.device_type:
                of_node.setdefault(device.host, []).append(device)
        roomy = [host for host, devices in of_node.items() if len(devices) >= one.devices_per_node]
        if len(roomy) < one.num_nodes:
            return None
        hosts = rng.permutation(roomy)[: one.num_nodes]
        taken = [device for host in hosts for device in of_node[host][: one.devices_per_node]]
        free = [device for device in free if device not in taken]
        placed += [Placement(rank, k, 0, device) for k, device in enumerate(taken)]
    return Binding(plan, tuple(placed), 0.0, 0.0)


def told_apart(binding: Binding, unit: int, *, returns: bool) -> Plan:
    """The plan with the places on their way that its ranks have."""
    plan, found, before, place = binding.plan, list[PlacedConfiguration](), None, 0
    for rank in range(len(plan.ranks)):
        one = plan.rank_configuration(rank)
        host = next(placed.device.host for placed in binding.placements if placed.pipeline_rank == rank)
        here = host if one.num_nodes == 1 else None
        place = one.devices_per_node // unit + (place if here is not None and here == before else 0)
        content = {field: getattr(one, field) for field in StageConfiguration.__dataclass_fields__}
        found.append(PlacedConfiguration(**content, place=place, is_first=returns and rank == 0))
        before = here
    rank_of = {s: rank for rank, stages in enumerate(plan.ranks) for s in stages}
    stages = [replace(stage, configuration=found[rank_of[s]]) for s, stage in enumerate(plan.stages)]
    return replace(plan, stages=tuple(stages))


def seconds_told_apart(told: OverNodes, plan: Plan) -> float:
    """Its step; inf where the problem does not let it in."""
    problem, ranks = told.priced.problem, range(len(plan.ranks))
    of_rank = [problem.index(plan.rank_configuration(rank)) for rank in ranks]
    if told.choices and not all(told.choices.of(rank, len(ranks))[of_rank[rank]] for rank in ranks):
        return float("inf")
    rank_of = {s: rank for rank, stages in enumerate(plan.ranks) for s in stages}
    messages = []
    for s, after in enumerate(plan.stages[1:]):
        a, b = rank_of[s], rank_of[s + 1]
        ends = (b, a) if a == b + 1 else (a, b)
        messages.append(problem.transfer_seconds(after.start, *(of_rank[rank] for rank in ends)) / 2)
    return simulate_plan(told.priced, plan, message_seconds=messages).step_seconds


@pytest.mark.parametrize("limit", ["", "MOST_CONFIGURATIONS", "MOST_MESSAGES"])
@pytest.mark.parametrize("schedule", some(SCHEDULES_OF_EACH_KIND, ["1f1b", "zbv"]))
@pytest.mark.parametrize("nodes", spread(NODES, 2))
def test_every_plan_on_any_devices_takes_no_less_than_told_apart(
    nodes: str, schedule: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where devices are counted two by two, as there were too many configurations or messages."""
    if limit:
        monkeypatch.setattr(over_nodes, limit, 1)
    prices, priced = posed(nodes, tmp_path)
    cluster, told, rng = prices.request.cluster, prices.over_nodes(priced, [schedule]), np.random.default_rng(7)
    assert told is not None
    unit = max(sum(dict(group.devices).values()) for group in cluster.groups) if limit else 1
    plans, seen = list(every_plan(priced, schedule)), Counter[str]()
    for k in rng.permutation(len(plans))[:300]:
        binding = on_some_devices(plans[k], cluster, rng)
        if binding is None:
            continue
        seconds = simulate_bound(priced, binding, cluster).step_seconds
        own = told_apart(binding, unit, returns=named(SCHEDULES, schedule).stages_per_rank > 1)
        assert as_plain(own) == plans[k]
        assert seconds_told_apart(told, own) <= seconds * (1 + 1e-9)
        seen["compared"] += 1
        seen["equal"] += seconds_told_apart(told, own) >= seconds * (1 - 1e-9)
        seen["slower than by types"] += simulate_plan(priced, plans[k]).step_seconds < seconds * (1 - 1e-9)
        seen["spans"] += any(plans[k].rank_configuration(r).num_nodes > 1 for r in range(len(plans[k].ranks)))
    assert seen["compared"] >= 50 and seen["slower than by types"] >= 3
    assert seen["equal"] >= seen["compared"] / 2 or unit > 1
    assert seen["spans"] or "two nodes" not in nodes


@pytest.mark.parametrize("speed", some(["200 Mbit/s", "100 Gbit/s"], ["200 Mbit/s"]))
@pytest.mark.parametrize("schedule", some(SCHEDULES_OF_EACH_KIND, ["1f1b", "zbv"]))
@pytest.mark.parametrize("nodes", NODES)
def test_more_is_proved_than_of_plans_by_their_types_and_nothing_false(
    nodes: str, schedule: str, speed: str, tmp_path: Path
) -> None:
    """Compared with every plan on every choice of single devices."""
    prices, priced = posed(nodes, tmp_path, replicas=1, speed=speed, count=8)
    cluster, least = prices.request.cluster, np.inf
    for plan in every_plan(priced, schedule):
        types = [plan.rank_configuration(rank).device_type for rank in range(len(plan.ranks))]
        for devices in itertools.permutations(cluster.devices(), len(types)):
            if [device.type_name for device in devices] == types:
                placed = tuple(Placement(rank, 0, 0, device) for rank, device in enumerate(devices))
                bound = Binding(plan, placed, 0.0, 0.0)
                least = min(least, simulate_bound(priced, bound, cluster).step_seconds)
    known = simulated_lower_bound(priced, schedules=(schedule,), best_seconds=least, budget_seconds=20.0)
    told = prices.over_nodes(priced, [schedule])
    assert told is not None
    above = bounding(told.priced, schedules=(schedule,), best_seconds=1.5 * least, choices=told.choices).go_on(20.0)
    assert above.seconds <= least * (1 + 1e-9)
    near = bounding(
        told.priced, schedules=(schedule,), best_seconds=least, choices=told.choices, known=known.by_ranks
    ).go_on(20.0)
    assert known.seconds <= near.seconds * (1 + 1e-9)
    assert 0.98 * least <= near.seconds <= least * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES_OF_EACH_KIND)
@pytest.mark.parametrize("nodes", NODES)
def test_what_bounds_count_of_a_plan_is_no_more_than_it_takes(nodes: str, schedule: str, tmp_path: Path) -> None:
    """Its longest path, every line, and what a walk over plans counts; messages that go back over the ranks, too."""
    prices, priced = posed(nodes, tmp_path, replicas=1, count=8)
    cluster, told, rng = prices.request.cluster, prices.over_nodes(priced, [schedule]), np.random.default_rng(3)
    assert told is not None
    problem, turned = bound_problem(told.priced, np.inf, told.choices), 0
    plans = list(every_plan(priced, schedule))
    for k in rng.permutation(len(plans))[:60]:
        binding = on_some_devices(plans[k], cluster, rng)
        if binding is None:
            continue
        plan = told_apart(binding, 1, returns=named(SCHEDULES, schedule).stages_per_rank > 1)
        stop_S = np.array([stage.stop for stage in plan.stages])
        how_S = np.array([told.priced.problem.index(stage.configuration) for stage in plan.stages])
        order = action_table(named(SCHEDULES, schedule), len(stop_S), 8)
        times = times_of(problem.prices, order, stop_S, how_S)
        walked = np.zeros((len(stop_S), 5)), np.zeros((len(stop_S), 3))
        _fill_times(problem.prices, order, stop_S, how_S, *walked)
        assert all(np.allclose(found, known) for found, known in zip(walked, times, strict=True))
        seconds = seconds_told_apart(told, plan) * (1 + 1e-9)
        longest, path = longest_path(order, times)
        assert longest <= seconds
        place = Place(problem, schedule, len(stop_S), 0.0, Proof.BALANCE)
        back_S, alive = back_after(order, problem.prices), place._fitting(order)
        alone = np.zeros_like(alive)
        alone[range(len(stop_S)), how_S, np.append(0, stop_S[:-1]), stop_S] = True
        for line in (path, *busy_lines(order), *drained_lines(order)):
            weigh = weights(line.stage_S5, line.cut_S3, np.zeros(len(problem.prices.class_C)), back_S)
            counted = line.seconds(times)
            assert table(problem.prices, weigh, alone).least == pytest.approx(counted)
            assert table(problem.prices, weigh, alive).least <= counted * (1 + 1e-9) <= seconds * (1 + 1e-9)
            if schedule == "zbv":
                of_ranks, no_shares = [weigh] * len(plan.ranks), np.empty((0, 0, 0, 0), np.float32)
                allowed = pairs(problem.prices, of_ranks, alone, np.inf, no_shares)
                assert vee_table(problem.prices, weigh, alone, allowed).least == pytest.approx(counted)
        turned += back_S is not None and bool(back_S.any())
    assert turned or schedule == "1f1b"
