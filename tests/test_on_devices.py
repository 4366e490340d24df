"""What is predicted of a plan is with the links of its devices, and no plan on any devices is below what is proved."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bound.every_plan import every_plan
from dejavu.binding import Binding, Placement
from dejavu.binding.link_prices import LinkPrices, StageExchange
from dejavu.binding.site import Site
from dejavu.cluster import Cluster, load_cluster
from dejavu.cost import TransferCosts
from dejavu.cost.collectives.transfer import EXCHANGE
from dejavu.cost.priced_problem import links_between
from dejavu.cost.trainings.remember import remember
from dejavu.cost.trainings.steps import Basis
from dejavu.migration import ClusterNow, RunningProblem
from dejavu.migration.replanning import best_on
from dejavu.parallelism import Parallelism
from dejavu.planning import Choice, Planner, PlanRequest, Prices
from dejavu.planning.candidates import messages_of, simulate_bound, sums_of
from dejavu.planning.choice import Considered
from dejavu.planning.schedules import fits
from dejavu.planning.sentences import what_is_proved
from dejavu.plans import Plan, Problem, Stage, StageConfiguration
from dejavu.profiles import ProfileDatabase
from dejavu.simulation import simulate_plan
from dejavu.timing.step_times import StepTimes
from dejavu.timing.training_times import TrainingTimes
from dejavu.what_if.own_plan import price_own_plan
from dejavu.workload import Workload
from tests import rows
from tests.conftest import some, spread

ALONE = Parallelism(max_data_parallel=1, max_tensor_parallel=1)
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")
NODES = {
    "two nodes": "- {name: a, count: 2, devices: {type: V100-SXM2-16GB, count: 2}, link: {bandwidth: FAST}}",
    "one node of two, two of one": "- {name: a, devices: {type: T4, count: 2}, link: {bandwidth: FAST}}\n"
    "- {name: b, count: 2, devices: {type: T4, count: 1}}",
    "mixed nodes": "- name: a\n  count: 2\n  link: {bandwidth: FAST}\n"
    "  devices: [{type: T4, count: 1}, {type: V100-SXM2-16GB, count: 1}]",
    "fast and slow nodes of one type": "- {name: a, devices: {type: T4, count: 2}, link: {bandwidth: FAST}}\n"
    "- {name: b, devices: {type: T4, count: 2}, link: {bandwidth: 1 GB/s, latency: 90 us}}",
}
SPEEDS = ["100 Mbit/s", "1 Gbit/s", "25 Gbit/s"]


@cache
def workload() -> Workload:
    options = {"num_blocks": 3, "width": 256, "num_heads": 4}
    named = {"model": "gpt", "model_options": options, "data": "synthetic", "synthetic": {"num_classes": 256}}
    sizes = {"sequence_length": 64, "batch_size": 16, "num_microbatches": 4, "trials": {"count": 0}}
    return Workload.model_validate(named | sizes)


def cluster_of(nodes: str, speed: str, folder: Path) -> Cluster:
    text = f"nodes:\n{NODES[nodes].replace('FAST', '100 GB/s, latency: 3 us')}\n"
    (folder / "cluster.yaml").write_text(f"{text}links: {{default: {{bandwidth: {speed}, latency: 25 us}}}}\n")
    return load_cluster(folder / "cluster.yaml")


def chosen(nodes: str, speed: str, folder: Path, **changes: object) -> Choice:
    asked = {"microbatches": (4,), "schedules": SCHEDULES, "parallelism": ALONE, "budget_seconds": 3.0}
    asked |= {"workload": workload(), "cluster": cluster_of(nodes, speed, folder), **changes}
    return Planner().plan(PlanRequest(database=folder / "profiles_db", **asked))  # type: ignore[arg-type]


def every_place(plan: Plan, cluster: Cluster) -> list[Binding]:
    """The plan on every choice of single devices of its types."""
    types = [plan.rank_configuration(rank).device_type for rank in range(len(plan.ranks))]
    found = []
    for devices in itertools.permutations(cluster.devices(), len(types)):
        if [device.type_name for device in devices] == types:
            found.append(Binding(plan, tuple(Placement(r, 0, 0, one) for r, one in enumerate(devices)), 0.0, 0.0))
    return found


@pytest.mark.parametrize("speed", some(SPEEDS, ["1 Gbit/s"]))
@pytest.mark.parametrize("nodes", NODES)
def test_no_plan_on_any_devices_is_simulated_below_what_is_proved(nodes: str, speed: str, tmp_path: Path) -> None:
    """And the chosen one is what it is said to be, close to the best of all."""
    choice = chosen(nodes, speed, tmp_path)
    cluster, (priced,), least = choice.request.cluster, choice.problems, np.inf
    for plan in (plan for name in SCHEDULES for plan in every_plan(priced, name)):
        if not fits(priced, plan, simulate_plan(priced, plan)):
            continue
        for bound in every_place(plan, cluster):
            seconds = simulate_bound(priced, bound, cluster).step_seconds
            assert choice.simulated_lower_bound_seconds <= seconds * (1 + 1e-9), bound
            least = min(least, seconds)
    assert least * (1 - 1e-9) <= choice.simulated_seconds <= 1.02 * least
    for row in choice.considered:
        for one in row.candidates:
            assert one.binding is not None and one.binding.plan == one.plan
            assert one.simulated_seconds == simulate_bound(priced, one.binding, cluster).step_seconds
            assert choice.simulated_seconds <= one.simulated_seconds * (1 + 1e-9)


@pytest.mark.parametrize("nodes", NODES)
def test_a_slow_network_is_in_the_predicted_step(nodes: str, tmp_path: Path) -> None:
    """Stages that could have been neighbours in one node were priced so, wherever they are."""
    steps = [chosen(nodes, speed, tmp_path, schedules=("1f1b",)).simulated_seconds for speed in SPEEDS]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("nodes", NODES)
def test_the_best_plan_after_a_change_waits_no_longer_for_links_than_a_planned_one(
    nodes: str, speed: str, tmp_path: Path
) -> None:
    choice = chosen(nodes, speed, tmp_path)
    running, now = RunningProblem.of(choice.prices, 4), ClusterNow(choice.request.cluster)
    assert best_on(running, now).step_seconds <= 1.1 * choice.simulated_seconds


def test_a_step_that_was_measured_over_other_links_corrects_nothing(tmp_path: Path) -> None:
    """Of a plan whose messages leave nodes; where the links are as they were it is what was measured."""
    cuts, one, nodes, speed = (0, 1, 2, 3, 5), StageConfiguration("T4"), "fast and slow nodes of one type", "2 Gbit/s"
    plan = Plan(tuple(Stage(a, b, one) for a, b in itertools.pairwise(cuts)), "1f1b", 4)
    before = chosen(nodes, speed, tmp_path, schedules=("1f1b",))
    trained = before.candidate(plan)
    assert trained.binding is not None and trained.factor.basis is Basis.NOTHING
    seconds, graph = 1.3 * trained.simulated_seconds, before.prices.graph_of(4)
    times = TrainingTimes(seconds, StepTimes(seconds, seconds, seconds, 9, 0.0, seconds, 9, 0), 10, (), ())
    database = ProfileDatabase(tmp_path / "profiles_db")
    assert remember(workload(), trained.binding, times, graph, database, before.request.cluster) == 1
    for now in SPEEDS:
        assert chosen(nodes, now, tmp_path, schedules=("1f1b",)).candidate(plan).factor.basis is Basis.NOTHING
    again = chosen(nodes, speed, tmp_path, schedules=("1f1b",)).candidate(plan)
    assert again.factor.basis is Basis.OWN
    assert again.step_seconds == pytest.approx(seconds, rel=0.1)


LEFT_OUT = "The bound may let more stages share a node than have room on one."


@pytest.mark.parametrize("nodes", NODES)
def test_where_links_are_slow_nodes_are_looked_at_for_plans_and_for_the_proof(
    nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are not, the gap is wide."""
    slow, fast = (chosen(nodes, speed, tmp_path, schedules=("1f1b",)) for speed in (SPEEDS[0], "4000 Gbit/s"))
    assert slow.gap is not None and slow.gap < 1e-3 and slow.has_slow_links
    assert {"slow links", "one node"} <= {row.search for row in slow.considered}
    assert "slow links" not in {row.search for row in fast.considered}
    monkeypatch.setattr(Prices, "over_nodes", lambda *_: None)
    wide = chosen(nodes, SPEEDS[0], tmp_path, schedules=("1f1b",))
    assert wide.gap is not None and wide.gap > 0.01
    assert LEFT_OUT in what_is_proved(wide)
    assert all(LEFT_OUT not in what_is_proved(one) for one in (slow, fast))


@pytest.mark.parametrize("nodes", NODES)
def test_a_plan_has_one_price(nodes: str, tmp_path: Path) -> None:
    """The planner's, that of the plan by itself, and that of the plan once more, which is bound as it was."""
    choice = chosen(nodes, "1 Gbit/s", tmp_path)
    alone = price_own_plan(choice.request, choice.plan)
    assert alone.simulated_seconds == pytest.approx(choice.simulated_seconds)
    again = choice.candidate(choice.plan)
    assert (again.plan, again.simulated_seconds) == (choice.plan, pytest.approx(choice.simulated_seconds))
    assert choice.binding.plan == choice.plan
    low, high = choice.range_seconds
    assert low <= choice.step_seconds <= high


@pytest.mark.parametrize("types", ["TT", "VV", "TTV", "VTT", "VVT", "TTVV"])
def test_a_plan_of_ones_own_is_priced_on_the_best_devices_of_its_types(types: str, tmp_path: Path) -> None:
    """Also where others would be faster: not on the first that the cluster file has."""
    (tmp_path / "cluster.yaml").write_text(
        "nodes:\n- {name: a, devices: {type: T4, count: 1}}\n- {name: b, devices: {type: V100-SXM2-16GB, count: 1}}\n"
        "- {name: c, count: 2, devices: {type: T4, count: 2}}\n- {name: d, devices: {type: V100-SXM2-16GB, count: 2}}\n"
        "links: {default: {bandwidth: 100 Mbit/s, latency: 25 us}}\n"
    )
    cluster = load_cluster(tmp_path / "cluster.yaml")
    on = [StageConfiguration({"T": "T4", "V": "V100-SXM2-16GB"}[letter]) for letter in types]
    stops = [*range(1, len(types)), 5]
    plan = Plan(tuple(Stage(k, stop, one) for k, (stop, one) in enumerate(zip(stops, on, strict=True))), "1f1b", 4)
    request = PlanRequest(workload(), cluster, tmp_path / "profiles_db")
    priced = Prices(replace(request, parallelism=ALONE, microbatches=(4,))).priced(4)
    least = min(simulate_bound(priced, bound, cluster).step_seconds for bound in every_place(plan, cluster))
    assert price_own_plan(request, plan).simulated_seconds == pytest.approx(least)


def test_a_plan_fits_where_its_stages_find_devices_together(tmp_path: Path) -> None:
    """As one that was made for other nodes with as many devices, which re-planning compares with the new one."""
    choice, placed = chosen("one node of two, two of one", "1 Gbit/s", tmp_path, parallelism=None), 0
    for wide, single in itertools.product(range(3), range(5)):
        if not 0 < 2 * wide + single <= 4:
            continue
        on = [StageConfiguration("T4", 1, 2, 2, 1)] * wide + [StageConfiguration("T4")] * single
        stops = [*range(1, len(on)), 5]
        plan = Plan(tuple(Stage(k, stop, one) for k, (stop, one) in enumerate(zip(stops, on, strict=True))), "1f1b", 4)
        one = choice.candidate(plan)
        assert one.fits == (one.binding is not None) == (wide < 2), (wide, single)
        assert ("find no devices" in Considered("bound", one.priced, None, (one,)).failure) == (wide == 2)
        placed += one.fits
    assert placed == 7


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("nodes", [name for name in NODES if name != "mixed nodes"])
def test_two_copies_sum_their_gradients_over_the_links_that_they_have(
    nodes: str, accumulate: int, tmp_path: Path
) -> None:
    """Once a step, however often the schedule runs in it: half of them each way, twice."""
    twice = workload().model_copy(update={"accumulate": accumulate, "batch_size": 16 * accumulate})
    choice = chosen(nodes, "100 Mbit/s", tmp_path, workload=twice, schedules=("chimera", "1f1b"))
    row = next(row for row in choice.considered if row.search == "both ways" and row.best is not None)
    best, cluster = row.best, choice.request.cluster
    assert best is not None and best.binding is not None
    plan, device_of = best.plan, {placed.pipeline_rank: placed.device for placed in best.binding.placements}
    rank_of = {seat: rank for rank, seats in enumerate(plan.seats_of_ranks) for seat in seats}
    found = sums_of(best.priced, best.binding, cluster)
    for seat, stage in enumerate(plan.seats):
        other = (seat + len(plan.stages)) % len(plan.seats)
        link = cluster.link(device_of[rank_of[seat]], device_of[rank_of[other]])
        size = best.priced.gradient_bytes_L[stage.start : stage.stop].sum()
        assert found[seat] == pytest.approx(2 * link.transfer_seconds(size / 2))
    assert best.simulated_seconds >= max(found)
    assert best.simulated_seconds >= simulate_plan(best.priced, plan).step_seconds * (1 - 1e-12)


@pytest.mark.parametrize("measured", [None, (2e-6, 1e-12), (4e-4, 1e-9)])
@pytest.mark.parametrize("type_name", ["T4", "V100-SXM2-16GB", "P4"])
def test_a_link_that_the_file_leaves_out_is_the_one_that_is_assumed_or_was_measured(
    type_name: str, measured: tuple[float, float] | None, tmp_path: Path
) -> None:
    """Whatever the network: a message between two devices of a node never takes a faster link between nodes."""
    of = {"kind": "transfer", "subject": EXCHANGE, "device_type": type_name, "peer_device_type": type_name}
    timed = [rows.row(**of, size_bytes=n, seconds=measured[0] + n * measured[1]) for n in (4096, 2**22) if measured]
    ProfileDatabase(tmp_path / "profiles_db").append(timed)
    (tmp_path / "cluster.yaml").write_text(
        f"nodes: [{{name: a, devices: {{type: {type_name}, count: 4}}}}, "
        f"{{name: b, devices: {{type: {type_name}, count: 1}}}}]\n"
        "links: {default: {bandwidth: 4000 Gbit/s, latency: 1 us}}\n"
    )
    cluster, compared = load_cluster(tmp_path / "cluster.yaml"), 0
    group = cluster.groups[0]
    assert group.link.assumed
    inside = measured or (group.link.latency_seconds, 1 / group.link.bytes_per_second)
    choice = Planner().plan(PlanRequest(workload(), cluster, tmp_path / "profiles_db", ALONE, (), SCHEDULES, (4,), 2.0))
    for one in (one for row in choice.considered for one in row.candidates):
        assert one.binding is not None
        at = {placed.pipeline_rank: placed.device.host for placed in one.binding.placements}
        ranks = {seat: rank for rank, seats in enumerate(one.plan.seats_of_ranks) for seat in seats}
        for seat, seconds in enumerate(messages_of(one.priced, one.binding, cluster)):
            a, b = ranks[seat], ranks[seat + 1]
            if a != b and at[a] == at[b]:
                size = one.priced.problem.cut_bytes_L1[one.plan.seats[seat + 1].start]
                assert seconds == pytest.approx(inside[0] + size * inside[1])
                compared += 1
        assert one.simulated_seconds >= choice.simulated_lower_bound_seconds * (1 - 1e-9)
    assert compared


SHAPES = [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 2, 2), (3, 1, 1)]


@pytest.mark.parametrize("seed", spread(range(30), 8))
def test_stages_pay_no_less_anywhere_than_what_is_searched_with(seed: int, tmp_path: Path) -> None:
    """Of any shape, on nodes of any links and cards; on one node each, and where nodes are alike, no more somewhere."""
    rng = np.random.default_rng(seed)
    groups, alike = [], seed % 3 == 0
    for k in range(1 if alike else int(rng.integers(1, 4))):
        count, devices = 3 if alike else int(rng.integers(1, 4)), int(rng.integers(1, 5))
        slow = f"{{bandwidth: {rng.choice([2, 20, 200])} GB/s, latency: {rng.choice([2, 200])} us}}"
        link = "{bandwidth: 900 GB/s, latency: 1 us}" if alike else slow
        cards = int(rng.choice([1, devices]))
        groups.append({"name": f"g{k}", "count": count, "devices": {"type": "T4", "count": devices}, "cards": cards})
        groups[-1]["link"] = dict(pair.split(": ") for pair in link.strip("{}").split(", "))
    links = {"default": {"bandwidth": f"{rng.choice([1, 50, 4000])} Gbit/s", "latency": f"{rng.choice([1, 50])} us"}}
    (tmp_path / "cluster.yaml").write_text(json.dumps({"nodes": groups, "links": links}))
    cluster = load_cluster(tmp_path / "cluster.yaml")
    configurations = [StageConfiguration("T4", *shape[:2], shape[0] * shape[1], 1) for shape in SHAPES]
    transfers = TransferCosts(cluster, ProfileDatabase(tmp_path / "profiles_db"))
    priced = links_between(cluster, transfers, configurations)
    pools, compared = range(len(Site.of(cluster))), 0
    for size in (0.0, 1e7):
        for a, b in rng.permutation(list(itertools.product(range(len(SHAPES)), repeat=2)))[:9]:
            said = priced[a, b, 0] + size * priced[a, b, 1]
            found = seconds_anywhere(cluster, (configurations[a], configurations[b]), pools, size)
            compared += len(found)
            assert all(said <= seconds * (1 + 1e-9) for seconds in found), (SHAPES[a], SHAPES[b], size)
            if alike and found and SHAPES[a][0] == SHAPES[b][0] == 1:
                assert said == pytest.approx(min(found)), (SHAPES[a], SHAPES[b], size)
    assert compared or cluster.num_devices == 1


def seconds_anywhere(
    cluster: Cluster, pair: tuple[StageConfiguration, StageConfiguration], pools: range, size: float
) -> list[float]:
    """What a message takes one way between two stages, wherever they have room."""
    site = Site.of(cluster)
    plan = Plan.from_dict(
        {
            "schedule": "1f1b",
            "num_microbatches": 2,
            "stages": [{"start": k, "stop": k + 1, "configuration": one.to_dict()} for k, one in enumerate(pair)],
        }
    )
    problem = Problem.__new__(Problem)  # what its links take is not asked for
    object.__setattr__(problem, "configurations", pair)
    object.__setattr__(problem, "measured_links", {})
    prices, found = LinkPrices(problem, plan, site, [StageExchange(0, 1, 1, size)], 1), []
    for a in itertools.combinations_with_replacement(pools, pair[0].num_nodes):
        for b in itertools.combinations_with_replacement(pools, pair[1].num_nodes):
            taken = np.zeros(len(site), dtype=int)
            np.add.at(taken, list(a), pair[0].devices_per_node)
            np.add.at(taken, list(b), pair[1].devices_per_node)
            if (taken <= site.size_P).all():
                found.append(prices.transfer_seconds(0, a, b) / 2)
    return found
