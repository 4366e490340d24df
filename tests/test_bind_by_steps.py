"""Of the devices of a plan's types those are taken on which its step is simulated shortest; against brute force."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejavu.binding import BindError, Binding, Placement, bind, by_steps
from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.link_prices import SeatLinks
from dejavu.binding.site import Site, padded
from dejavu.cluster import Cluster, Device, load_cluster
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest, Prices, candidates
from dejavu.planning.candidates import Simulator, bind_by_steps, messages_of, simulate_bound, sums_of
from dejavu.plans import Plan, Stage
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.simulation import simulate_plan, simulate_plan_blocking
from dejavu.what_if.own_plan import price_own_plan
from dejavu.workload import Workload
from tests.conftest import some

LAYERS, NUM_CLUSTERS, NUM_PLANS, MOST_COMPARED = 8, 20, 10, 100
LISTED = ("1f1b", "1f1b", "gpipe", "interleaved_1f1b", "zbv", "chimera")
TYPES = ("T4", "V100-SXM2-16GB")


def workload(count: int) -> Workload:
    options = {"num_blocks": LAYERS - 2, "width": 256, "num_heads": 4}
    named_ = {"model": "gpt", "model_options": options, "data": "synthetic", "synthetic": {"num_classes": 256}}
    sizes = {"sequence_length": 64, "batch_size": 32, "num_microbatches": count, "trials": {"count": 0}}
    return Workload.model_validate(named_ | sizes)


def cluster_of(rng: np.random.Generator, folder: Path) -> Cluster:
    """Two to four groups of one or two nodes, of up to nine devices; links in nodes and between them of any speed."""
    names = [f"g{k}" for k in range(rng.integers(2, 5))]
    nodes: list[Any] = []
    while sum(one["count"] for one in nodes) < 2 or sum(one["count"] * one["size"] for one in nodes) > 9:
        nodes = []
        for name in names:
            kinds = rng.permutation(TYPES)[: rng.integers(1, 3)]
            devices = [{"type": str(kind), "count": int(rng.integers(1, 4))} for kind in kinds]
            link = {"bandwidth": f"{rng.choice([1, 12, 100])} GB/s", "latency": "5 us"}
            nodes.append({"name": name, "count": int(rng.integers(1, 3)), "devices": devices, "link": link})
            nodes[-1] |= {"cards": int(rng.choice([1, 2])), "size": sum(one["count"] for one in devices)}
    nodes = [{key: value for key, value in one.items() if key != "size"} for one in nodes]
    links: dict[str, Any] = {"default": {"bandwidth": f"{rng.choice([0.1, 0.2, 1])} Gbit/s", "latency": "25 us"}}
    between = [list(ends) for ends in itertools.combinations(names, 2) if rng.random() < 0.5]
    speeds = [f"{rng.choice([0.1, 0.5, 2, 10])} Gbit/s" for _ in between]
    links["pairs"] = [
        {"between": ends, "bandwidth": speed, "latency": "25 us"} for ends, speed in zip(between, speeds, strict=True)
    ]
    (folder / "cluster.yaml").write_text(json.dumps({"nodes": nodes, "links": links}))
    return load_cluster(folder / "cluster.yaml")


@cache
def anywhere(count: int) -> Prices:
    """Prices of the model on some cluster, for its graph."""
    return Prices(PlanRequest(workload(count), load_cluster(Path("examples/clusters/4x8-v100.yaml"))))


def plan_of(rng: np.random.Generator, priced: PricedProblem, cluster: Cluster, count: int) -> Plan | None:
    """A plan that the cluster has single devices for, or pairs; None: the draw asked for what there is not."""
    name, free = str(rng.choice(LISTED)), dict(priced.problem.device_counts)
    schedule = SCHEDULES["1f1b"] if name == "chimera" else named(SCHEDULES, name)
    num_ranks, hows = int(rng.integers(2, min(6, count) + 1)), []
    for _ in range(num_ranks):
        size = 2 if name != "chimera" and rng.random() < 0.3 else 1
        among = [one for one in priced.problem.configurations if one.num_devices == size <= free[one.kind]]
        if not among:
            return None
        hows.append(among[rng.integers(len(among))])
        free[hows[-1].kind] -= hows[-1].num_devices
    S = num_ranks * schedule.stages_per_rank
    if S > LAYERS:
        return None
    cuts = [0, *sorted(rng.choice(range(1, LAYERS), S - 1, replace=False).tolist()), LAYERS]
    stages = (Stage(cuts[s], cuts[s + 1], hows[schedule.rank_of(s, S)]) for s in range(S))
    return Plan(tuple(stages), schedule.name, count, both_ways=name == "chimera")


def every_binding(plan: Plan, cluster: Cluster) -> Iterator[Binding]:
    """The plan on every choice of devices of its types, of those in one node the first ones."""
    nodes = dict[tuple[str, str], list[Device]]()
    for device in cluster.devices():
        nodes.setdefault((device.host, device.type_name), []).append(device)

    def after(rank: int, taken: dict[tuple[str, str], int]) -> Iterator[tuple[Placement, ...]]:
        if rank == len(plan.ranks):
            yield ()
            return
        how = plan.rank_configuration(rank)
        own = [at for at in nodes if at[1] == how.device_type and (not how.groups or nodes[at][0].group in how.groups)]
        for blocks in itertools.combinations_with_replacement(own, how.num_nodes):
            now, devices = dict(taken), list[Device]()
            for at in blocks:
                first, now[at] = now.get(at, 0), now.get(at, 0) + how.devices_per_node
                devices += nodes[at][first : now[at]]
            if len(devices) == how.num_devices:
                here = [Placement(rank, *divmod(k, how.tensor_parallel), one) for k, one in enumerate(devices)]
                yield from ((*here, *rest) for rest in after(rank + 1, now))

    yield from (Binding(plan, placements, 0.0, 0.0) for placements in after(0, {}))


def least_seconds(priced: PricedProblem, plan: Plan, cluster: Cluster) -> float | None:
    """The least simulated step on any devices of the plan's types; None: there are too many choices, or one."""
    bindings = list(itertools.islice(every_binding(plan, cluster), MOST_COMPARED + 1))
    if len(bindings) > MOST_COMPARED:
        return None
    links = {(messages_of(priced, one, cluster), sums_of(priced, one, cluster)) for one in bindings}
    found = [simulate_plan(priced, plan, message_seconds=a, sum_seconds=b).step_seconds for a, b in links]
    return min(found) if len(found) > 1 else None


@dataclass(frozen=True, eq=False)
class Case:
    prices: Prices
    priced: PricedProblem
    plan: Plan
    least_seconds: float
    by_formula: Binding

    @property
    def cluster(self) -> Cluster:
        return self.prices.request.cluster

    def seconds(self, binding: Binding) -> float:
        return simulate_bound(self.priced, binding, self.cluster).step_seconds


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Plans whose step depends on the devices, with the least on any."""
    found = list[Case]()
    for seed in range(NUM_CLUSTERS):
        rng, count, folder = np.random.default_rng(seed), (4, 8)[seed % 2], tmp_path_factory.mktemp("cluster")
        cluster, some = cluster_of(rng, folder), Parallelism(max_data_parallel=2, max_tensor_parallel=2)
        request = PlanRequest(workload(count), cluster, folder / "profiles_db", some, microbatches=(count,))
        prices = Prices(request, graph_at=anywhere(count).graph)
        problems = prices.problems(count)
        for _ in range(NUM_PLANS):
            priced = problems[rng.integers(len(problems))]
            plan = plan_of(rng, priced, cluster, count)
            try:
                if plan is None or (least := least_seconds(priced, plan, cluster)) is None:
                    continue
                by_formula = bind(priced.problem, plan, cluster, moves=False, compares=False)
            except (BindError, InputError):  # too few devices together, or the schedule wants other microbatches
                continue
            found.append(Case(prices, priced, plan, least, by_formula))
    return found


@pytest.mark.parametrize("most_listed", some([by_steps.MOST_BINDINGS, 0], [by_steps.MOST_BINDINGS]))
def test_hardly_a_plan_has_better_devices_of_its_types(
    most_listed: int, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None where all choices are listed, hardly one where changes and random ones are; one of twelve by the formula."""
    monkeypatch.setattr(by_steps, "MOST_BINDINGS", most_listed)
    before, after = [], []
    for one in cases:
        found = bind_by_steps(one.priced, one.plan, one.cluster, moves=False)
        assert found == bind_by_steps(one.priced, one.plan, one.cluster, moves=False)
        assert found.plan == one.plan
        seconds = one.seconds(found)
        assert one.least_seconds * (1 - 1e-9) <= seconds <= one.seconds(one.by_formula) * (1 + 1e-9)
        before.append(one.seconds(one.by_formula) / one.least_seconds - 1)
        after.append(seconds / one.least_seconds - 1)
    assert len(cases) > 80 and np.mean(np.array(before) > 0.01) > 0.02
    assert max(after) <= (by_steps.CLOSE if most_listed else 0.05)
    assert np.mean(np.array(after) > 0.01) <= (0.0 if most_listed else 0.01)


@pytest.mark.parametrize("most_listed", some([by_steps.MOST_BINDINGS, 0], [0]))
def test_a_plan_is_on_the_same_devices_whoever_asks(
    most_listed: int, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner, which moves ranks to other types; the page, which compares with more; `dejavu price` of the plan."""
    monkeypatch.setattr(by_steps, "MOST_BINDINGS", most_listed)
    asked = 0
    for one in cases[:: len(cases) // 25]:
        simulator = Simulator(one.prices)
        bound = simulator.bound(simulator.candidate(one.priced, one.plan))
        if bound.binding is None or not bound.fits:
            continue
        told = simulator.bind(one.priced, one.plan, compares=True)
        assert (told.plan, told.placements) == (bound.plan, bound.binding.placements)
        alone = price_own_plan(one.prices.request, bound.plan)
        assert alone.simulated_seconds == pytest.approx(bound.simulated_seconds, rel=1e-9)
        asked += 1
    assert asked > 15


def test_so_are_plans_whose_messages_block(cases: list[Case]) -> None:
    """By their own simulation, as `dejavu price --blocking`."""
    longer, asked = 0, 0
    for one in (one for one in cases if one.plan.schedule == "1f1b" and not one.plan.both_ways):
        links = {messages_of(one.priced, each, one.cluster) for each in every_binding(one.plan, one.cluster)}
        least = min(simulate_plan_blocking(one.priced, one.plan, None, row).step_seconds for row in links)
        by_formula = messages_of(one.priced, one.by_formula, one.cluster)
        is_longer = simulate_plan_blocking(one.priced, one.plan, None, by_formula).step_seconds > 1.01 * least
        if is_longer or asked < 3:
            found = price_own_plan(one.prices.request, one.plan, is_blocking=True).simulated_seconds
            assert least * (1 - 1e-9) <= found <= least * (1 + by_steps.CLOSE)
            longer, asked = longer + is_longer, asked + 1
    assert longer


@pytest.mark.parametrize("most", [0, 2, 3, 6])
@pytest.mark.parametrize("limit", ["MOST_SIMULATIONS", "MOST_ACTIONS"])
def test_simulations_are_counted(limit: str, most: int, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """And more of them never make a step longer."""
    counted, simulate = [0], simulate_plan

    def counting(*args: Any, **options: Any) -> Any:
        counted[0] += 1
        return simulate(*args, **options)

    monkeypatch.setattr(candidates, "simulate_plan", counting)
    monkeypatch.setattr(by_steps, "MOST_BINDINGS", 0)
    for one in cases[::5]:
        actions = 2 * len(one.plan.stages) * one.plan.num_microbatches
        steps = [one.seconds(one.by_formula)]
        for allowed in (most, most + 1):
            monkeypatch.setattr(by_steps, limit, allowed * (actions if limit == "MOST_ACTIONS" else 1))
            counted[0] = 0
            found = bind_by_steps(one.priced, one.plan, one.cluster, moves=False)
            assert counted[0] <= allowed
            steps.append(one.seconds(found))
        assert steps == sorted(steps, reverse=True)


ALIKE = {
    "one node": [{"name": "a", "devices": {"type": "T4", "count": 6}}],
    "a device on each node": [{"name": "a", "count": 6, "devices": {"type": "T4"}}],
    "nodes of two types": [{"name": kind, "count": 3, "devices": {"type": kind, "count": 1}} for kind in TYPES],
}


@pytest.mark.parametrize("nodes", ALIKE)
def test_nothing_is_simulated_where_devices_are_alike(
    nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {"default": {"bandwidth": "1 Gbit/s", "latency": "25 us"}}
    (tmp_path / "cluster.yaml").write_text(json.dumps({"nodes": ALIKE[nodes], "links": links}))
    cluster, rng, bound = load_cluster(tmp_path / "cluster.yaml"), np.random.default_rng(0), 0
    request = PlanRequest(workload(4), cluster, tmp_path / "profiles_db", Parallelism(max_tensor_parallel=1))
    priced = Prices(request, graph_at=anywhere(4).graph).priced(4)
    monkeypatch.setattr(candidates, "simulate_plan", None)
    for plan in (plan_of(rng, priced, cluster, 4) for _ in range(40)):
        if plan is not None and all(stage.configuration.num_devices == 1 for stage in plan.stages):
            bound += bool(bind_by_steps(priced, plan, cluster))
    assert bound > 10


def test_messages_and_sums_are_those_of_the_devices(cases: list[Case]) -> None:
    spans, sums = 0, 0
    for one in cases:
        pricing = BindingPrices(
            one.priced.problem, one.plan, Site.of(one.cluster, one.priced.problem.configurations), one.priced.accumulate
        )
        links = SeatLinks(pricing, one.priced.gradient_bytes_L)
        bindings = list(itertools.islice(every_binding(one.plan, one.cluster), 20))
        places = [padded(pricing.site.places(each.placements, pricing.width_R.tolist())) for each in bindings]
        for binding, row in zip(bindings, links.seconds_NQ(np.stack(places)), strict=True):
            found = links.of_seats(row)
            assert found[0] == pytest.approx(messages_of(one.priced, binding, one.cluster))
            assert found[1] == pytest.approx(sums_of(one.priced, binding, one.cluster))
            assert (links.least_seconds_Q() <= row * (1 + 1e-9)).all()
        spans += int(pricing.blocks_R.max()) > 1
        sums += bool(found[1])
    assert spans and sums
