"""Devices of one type with better links among themselves: what they cost, and that stages stay there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejavu.binding import BindError
from dejavu.binding.binder import _placements
from dejavu.binding.binding_prices import BindingPrices
from dejavu.binding.draws import random_places
from dejavu.binding.link_prices import message_seconds
from dejavu.binding.site import Site
from dejavu.cluster import Cluster, load_cluster
from dejavu.cluster.islands import MOST_ISLANDS, Island, between_links, told_apart, told_apart_in
from dejavu.cost.collectives.inside_stages import between_link, inside_link
from dejavu.foundation.errors import InputError
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest, Prices
from dejavu.planning.candidates import bind_by_steps, simulate_bound
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.stage_costs import PlanError
from dejavu.report.charts import convergence_chart
from dejavu.simulation import simulate_plan
from dejavu.simulation.bound import simulated_lower_bound
from dejavu.simulation.bound._prefix_sums import bound_problem
from dejavu.what_if.own_plan import OwnPlan, price_own_plan
from dejavu.workload import Workload
from dejavu.workload.models import layers_of

MINE = "{kind: cuda, memory: 24 GiB, bandwidth: 900 GB/s, float32: 20 TFLOP/s}"
FAST, SLOW = "100 Gbit/s", "1 Gbit/s"
SITES = {  # groups: nodes, devices of one, link inside; links between groups
    "two sites": ([(2, 2, "50 GB/s"), (2, 2, "50 GB/s")], {(0, 1): SLOW}),
    "a pair of groups and one far away": (
        [(1, 2, "50 GB/s"), (1, 2, "50 GB/s"), (2, 2, "50 GB/s")],
        {(0, 2): SLOW, (1, 2): SLOW},
    ),
    "nodes with and without NVLink": ([(2, 4, "300 GB/s"), (2, 4, "12 GB/s")], {}),
}
ISLANDS = {
    "two sites": [("g0",), ("g1",)],
    "a pair of groups and one far away": [("g0", "g1"), ("g2",)],
    "nodes with and without NVLink": [("g0",), ("g1",)],
}


def cluster_of(
    folder: Path, groups: Sequence[tuple[int, int, str]], slow: dict[tuple[int, int], str], *, types: Sequence[str] = ()
) -> Cluster:
    """One type of devices, or one of the same figures for each group."""
    names = types or ["Mine"] * len(groups)
    nodes = [
        f"- {{name: g{k}, count: {count}, devices: {{type: {name}, count: {width}}}, link: {{bandwidth: {link}}}}}"
        for k, ((count, width, link), name) in enumerate(zip(groups, names, strict=True))
    ]
    pairs = [f"  - {{between: [g{a}, g{b}], bandwidth: {speed}}}" for (a, b), speed in slow.items()]
    lines = ["nodes:", *nodes, "links:", f"  default: {{bandwidth: {FAST}, latency: 10 us}}"]
    lines += ["  pairs:", *pairs] if pairs else []
    lines += ["devices:", *(f"  {name}: {MINE}" for name in dict.fromkeys(names))]
    (folder / "cluster.yaml").write_text("\n".join(lines))
    return load_cluster(folder / "cluster.yaml")


def named_apart(folder: Path, name: str) -> tuple[Cluster, dict[str, Island]]:
    """The same cluster as if each island's devices were of a type of their own; the island of each such type."""
    groups, slow = SITES[name]
    islands = {f"Mine{k}": Island("Mine", own) for k, own in enumerate(ISLANDS[name])}
    types = [next(t for t, one in islands.items() if f"g{k}" in one.groups) for k in range(len(groups))]
    return cluster_of(folder, groups, slow, types=types), islands


@cache
def workload() -> Workload:
    return Workload(
        model="gpt",
        model_options={"num_blocks": 3, "width": 256, "num_heads": 4},
        data="synthetic",
        synthetic={"num_classes": 256},
        sequence_length=64,
        batch_size=16,
        num_microbatches=4,
    )


def prices_of(cluster: Cluster, folder: Path, **options: Any) -> Prices:
    request = PlanRequest(workload().model_copy(update=options), cluster, folder / "profiles_db", Parallelism())
    return Prices(request)


def told_of(prices: Prices) -> list[PricedProblem]:
    """The problems whose configurations name islands."""
    return [one for one in prices.problems(4) if any(how.groups for how in one.problem.configurations)]


@pytest.mark.parametrize("name", SITES)
def test_islands_are_groups_with_faster_links(name: str, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, *SITES[name])
    assert [island.groups for island in told_apart(cluster)] == ISLANDS[name]


def drawn_cluster(folder: Path, rng: np.random.Generator) -> Cluster:
    """Up to five groups of one or two nodes; links in nodes, and between them, of some speeds."""
    groups = [
        (int(rng.integers(1, 3)), int(rng.integers(1, 4)), f"{rng.choice([10, 50])} GB/s")
        for _ in range(rng.integers(1, 6))
    ]
    ends = itertools.combinations_with_replacement(range(len(groups)), 2)
    slow = {(a, b): f"{rng.choice([1, 10, 100])} Gbit/s" for a, b in ends if a != b or groups[a][0] > 1}
    return cluster_of(folder, groups, slow)


def test_a_type_falls_into_islands_of_whole_groups_whose_links_are_no_slower(tmp_path: Path) -> None:
    whole, num_told = Island("Mine"), 0
    for seed in range(20):
        cluster = drawn_cluster(tmp_path, np.random.default_rng(seed))
        islands = told_apart(cluster)
        if not islands:
            continue
        num_told += 1
        assert sorted(name for one in islands for name in one.groups) == sorted(one.name for one in cluster.groups)
        assert 1 < len(islands) <= MOST_ISLANDS
        better = False
        for island in islands:
            inside, everywhere = inside_link(cluster, island), inside_link(cluster, whole)
            if inside is not None and everywhere is not None:
                assert inside.bytes_per_second >= everywhere.bytes_per_second
                better |= inside.bytes_per_second > everywhere.bytes_per_second
            if between_links(cluster, island, island):
                own, slowest = (between_link(cluster, one).bytes_per_second for one in (island, whole))
                assert own >= slowest
                better |= own > slowest
        assert better, "telling them apart says nothing"
    assert num_told >= 8


def test_groups_with_equal_links_are_no_islands_and_too_many_are_not_told_apart(tmp_path: Path) -> None:
    alike = cluster_of(tmp_path, [(2, 2, "50 GB/s"), (1, 4, "50 GB/s"), (1, 1, "50 GB/s")], {})
    assert told_apart(alike) == ()
    for number in (MOST_ISLANDS, MOST_ISLANDS + 1):
        far = dict.fromkeys(itertools.combinations(range(number), 2), SLOW)
        islands = told_apart(cluster_of(tmp_path, [(2, 2, "50 GB/s")] * number, far))
        assert len(islands) == (number if number <= MOST_ISLANDS else 0)


def test_what_is_not_named_of_a_type_is_one_more(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, [(1, 2, "50 GB/s")] * 3, {(0, 1): SLOW})
    assert told_apart_in(cluster, [Island("Mine", ("g1",))]) == (Island("Mine", ("g1",)), Island("Mine", ("g0", "g2")))
    assert told_apart_in(cluster, []) == told_apart_in(cluster, [Island("Mine")]) == (Island("Mine"),)


@pytest.mark.parametrize("name", SITES)
def test_islands_are_priced_as_types_of_their_own(name: str, tmp_path: Path) -> None:
    """A cluster that names each island's devices as another type, with the same figures, has the same problems."""
    twin, islands = named_apart(tmp_path, name)
    wanted = list(prices_of(twin, tmp_path).problems(4))
    found = told_of(prices_of(cluster_of(tmp_path, *SITES[name]), tmp_path))
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        ours, theirs = one.problem, other.problem
        named = tuple(
            replace(how, device_type="Mine", groups=islands[how.device_type].groups) for how in theirs.configurations
        )
        assert ours.configurations == named
        assert list(ours.device_counts.values()) == list(theirs.device_counts.values())
        for field, value in vars(theirs.costs).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(ours.costs, field), value, err_msg=field)
        for field in ("link_latency_seconds_CC", "link_seconds_per_byte_CC"):
            np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field), err_msg=field)


def plans_of(priced: PricedProblem, rng: np.random.Generator, number: int) -> list[Plan]:
    """Drawn plans of up to four stages that the devices suffice for."""
    problem, found = priced.problem, list[Plan]()
    while len(found) < number:
        S = int(rng.integers(1, 1 + min(4, problem.num_microbatches)))
        cuts = [0, *sorted(map(int, rng.choice(np.arange(1, problem.num_layers), S - 1, replace=False)))]
        how = [problem.configurations[int(c)] for c in rng.integers(len(problem.configurations), size=S)]
        stages = tuple(Stage(a, b, one) for a, b, one in zip(cuts, [*cuts[1:], problem.num_layers], how, strict=True))
        made = Plan(stages, "1f1b", problem.num_microbatches)
        if all(count <= problem.device_counts[kind] for kind, count in made.device_counts.items()):
            found.append(made)
    return found


@pytest.mark.parametrize("name", SITES)
def test_stages_stay_on_their_island_and_take_what_they_take_where_it_is_a_type(name: str, tmp_path: Path) -> None:
    twin, islands = named_apart(tmp_path, name)
    named = {island.groups: device_type for device_type, island in islands.items()}
    theirs = prices_of(twin, tmp_path).problems(4)[0]
    cluster = cluster_of(tmp_path, *SITES[name])
    ours = told_of(prices_of(cluster, tmp_path))[0]
    for plan in plans_of(ours, np.random.default_rng(1), 12):
        bound = bind_by_steps(ours, plan, cluster)
        for placed in bound.placements:
            assert placed.device.group in bound.plan.rank_configuration(placed.pipeline_rank).groups
        stages = (
            replace(
                one, configuration=replace(one.configuration, device_type=named[one.configuration.groups], groups=())
            )
            for one in plan.stages
        )
        other = bind_by_steps(theirs, replace(plan, stages=tuple(stages)), twin)
        assert bound.step_seconds == other.step_seconds
        assert simulate_bound(ours, bound, cluster).step_seconds == simulate_bound(theirs, other, twin).step_seconds


@pytest.mark.parametrize("name", SITES)
def test_a_plan_that_names_islands_is_read_and_priced_as_it_was_written(name: str, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, *SITES[name])
    priced = told_of(prices_of(cluster, tmp_path))[0]
    for plan in plans_of(priced, np.random.default_rng(2), 4):
        again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan
        own = price_own_plan(PlanRequest(workload(), cluster, tmp_path / "profiles_db", Parallelism()), again)
        bound = bind_by_steps(priced, plan, cluster, moves=False)
        assert own.simulated_seconds == pytest.approx(simulate_bound(priced, bound, cluster).step_seconds)
        assert "in g" in own.to_dict()["stages"][0]["configuration"]


def test_one_whole_type_says_nothing_of_groups_as_before() -> None:
    assert "groups" not in StageConfiguration("Mine").to_dict()
    assert str(StageConfiguration("Mine")) == "1 × Mine"


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([("nowhere",), ()], "'nowhere'; the cluster has g0, g1"),
        ([("g0",), ("g0", "g1")], "wanted groups that do not overlap"),
        ([("g0",), ()], "wanted groups that do not overlap"),
    ],
)
def test_groups_that_are_not_there_or_overlap_are_refused(
    groups: list[tuple[str, ...]], said: str, tmp_path: Path
) -> None:
    cluster = cluster_of(tmp_path, *SITES["two sites"])
    stages = [
        Stage(0, 2, StageConfiguration("Mine", groups=groups[0])),
        Stage(2, 5, StageConfiguration("Mine", groups=groups[1])),
    ]
    with pytest.raises(InputError, match=said):
        Parallelism(only=tuple(stage.configuration for stage in stages)).configurations(cluster, 4)


def test_a_plan_whose_groups_overlap_names_the_stage_and_equal_groups_are_equal(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, *SITES["two sites"])
    request = PlanRequest(workload(), cluster, tmp_path / "profiles_db", Parallelism())

    def priced(*groups: tuple[str, ...]) -> OwnPlan:
        ends = (0, 2), (2, len(layers_of(request.workload)))
        stages = [Stage(*end, StageConfiguration("Mine", groups=g)) for end, g in zip(ends, groups, strict=True)]
        return price_own_plan(request, Plan(tuple(stages), "1f1b", 4))

    with pytest.raises(PlanError, match=r"stage 1: on Mine in g1, another stage on Mine in g0 and g1; wanted groups"):
        priced(("g0", "g1"), ("g1",))
    found = priced(("g0", "g1"), ("g1", "g0", "g0"))
    assert [stage.configuration.groups for stage in found.plan.stages] == [("g0", "g1"), ("g0", "g1")]
    assert found.to_dict() == priced(("g0", "g1"), ("g0", "g1")).to_dict()


def test_a_training_that_moves_between_clusters_does_not_name_groups(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, *SITES["two sites"])
    options = {"replan": {"action": "migrate"}, "trials": {"count": 0}}
    following = Workload.model_validate({**workload().model_dump(), **options})
    prices = Prices(PlanRequest(following, cluster, tmp_path / "profiles_db", Parallelism()))
    assert prices.problems(4) and not told_of(prices) and not prices.islands and prices.of_all_parts(4) is None


def test_where_stages_are_named_nothing_else_is_considered(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, *SITES["two sites"])
    only = Parallelism(only=(StageConfiguration("Mine", groups=("g0",)), StageConfiguration("Mine", groups=("g1",))))
    prices = Prices(PlanRequest(workload(), cluster, tmp_path / "profiles_db", only))
    (problem,) = (one.problem for one in prices.problems(4))
    assert problem.configurations == only.only and problem.device_counts == {"Mine in g0": 4, "Mine in g1": 4}
    assert not prices.islands and prices.of_all_parts(4) is None


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("count", [2, 4])
def test_no_plan_of_any_part_is_simulated_below_what_is_proved_of_all_together(
    name: str, count: int, tmp_path: Path
) -> None:
    """Of drawn plans on whole types and on islands, on their devices; and more is proved than of the parts alone."""
    cluster = cluster_of(tmp_path, *SITES[name])
    prices = prices_of(cluster, tmp_path)
    joint = prices.of_all_parts(count)
    assert joint is not None
    rng, steps = np.random.default_rng(count), list[float]()
    for priced in prices.problems(count):
        for plan in plans_of(priced, rng, 25):
            with suppress(BindError):
                bound = bind_by_steps(priced, plan, cluster)
                steps.append(simulate_bound(priced, bound, cluster).step_seconds)
    asked: dict[str, Any] = {"schedules": ("1f1b",), "best_seconds": 2 * min(steps), "budget_seconds": 5.0}
    proved = simulated_lower_bound(joint, **asked).seconds
    assert proved <= min(steps)
    of_parts = [simulated_lower_bound(priced, **asked) for priced in prices.problems(count)]
    if all(not one.can_rise for one in of_parts):
        assert proved >= min(one.seconds for one in of_parts) * (1 - 1e-6)


@pytest.mark.parametrize("name", SITES)
def test_messages_of_a_stage_on_several_islands_are_proved_to_take_no_longer_than_they_do(
    name: str, tmp_path: Path
) -> None:
    """On their devices, of all pairs of nodes the slowest counts; and no less where a stage must be on several."""
    cluster = cluster_of(tmp_path, *SITES[name])
    prices, raised = prices_of(cluster, tmp_path), 0
    joint, whole = prices.of_all_parts(4), prices.problems(4)[0]
    assert joint is not None
    drawn = plans_of(whole, np.random.default_rng(6), 200)
    for plan in (one for one in drawn if one.cuts and any(stage.configuration.num_nodes > 1 for stage in one.stages)):
        pricing = BindingPrices(whole.problem, plan, Site.of(cluster, whole.problem.configurations))
        places_NRW, holds_N = random_places(pricing, 10, seed=1)
        for places in places_NRW[holds_N]:
            placements = _placements(pricing.configurations, pricing.site, places)
            ends, is_spread = list[int](), list[bool]()
            for rank, stage in enumerate(plan.stages):
                groups = {one.device.group for one in placements if one.pipeline_rank == rank}
                on = [island for island in told_apart(cluster) if groups & set(island.groups)]
                how = replace(stage.configuration, groups=on[0].groups if len(on) == 1 else ())
                ends.append(joint.problem.index(how))
                is_spread.append(len(on) > 1)
            found = message_seconds(whole.problem, plan, placements, cluster)
            for cut, seconds, a, b, spread in zip(
                plan.cuts, found, ends, ends[1:], map(any, itertools.pairwise(is_spread)), strict=False
            ):
                least = joint.problem.transfer_seconds(cut, a, b) / 2
                assert least <= seconds * (1 + 1e-9)
                here = [whole.problem.index(replace(joint.problem.configurations[c], groups=())) for c in (a, b)]
                raised += spread and least > 1.5 * whole.problem.transfer_seconds(cut, *here) / 2
    assert raised or not SITES[name][1]


def test_of_two_sites_that_hardly_reach_each_other_as_much_is_proved_as_of_one(tmp_path: Path) -> None:
    """Before any time is given: devices' counts alone allow half of a plan here and half of one there."""
    groups, _ = SITES["two sites"]
    larger = workload().model_copy(update={"sequence_length": 256, "batch_size": 64})
    asked: dict[str, Any] = {"schedules": ("1f1b",), "budget_seconds": 0.0}
    alone = Prices(PlanRequest(larger, cluster_of(tmp_path, groups[:1], {}), tmp_path / "db", Parallelism())).problems(
        8
    )
    steps = [simulate_plan(alone[0], plan).step_seconds for plan in plans_of(alone[0], np.random.default_rng(2), 200)]
    of_one = simulated_lower_bound(alone[0], best_seconds=min(steps), **asked).seconds
    for speed, is_slow in (("1 Mbit/s", True), (FAST, False)):
        both = Prices(
            PlanRequest(larger, cluster_of(tmp_path, groups, {(0, 1): speed}), tmp_path / "db", Parallelism())
        )
        posed = both.of_all_parts(8) or both.problems(8)[0]
        proved = simulated_lower_bound(posed, best_seconds=min(steps), **asked).seconds
        assert (proved > 0.98 * of_one) == is_slow


def test_devices_of_a_type_are_counted_for_its_islands_too(tmp_path: Path) -> None:
    """Two islands of four and stages on both: not eight on islands and eight more on the whole type."""
    joint = prices_of(cluster_of(tmp_path, *SITES["two sites"]), tmp_path).of_all_parts(4)
    assert joint is not None
    assert dict(joint.problem.device_counts) == {"Mine": 8, "Mine in g0": 4, "Mine in g1": 4}
    prices = bound_problem(joint, 1.0).prices
    for how, use_T in zip(joint.problem.configurations, prices.use_CT, strict=True):
        assert use_T[0] == how.num_devices, "whichever island it is on"
        assert use_T[1:].sum() == (how.num_devices if how.groups else 0)
        assert how.groups or how.num_nodes > 1


def test_plans_on_islands_are_found_and_proved(tmp_path: Path) -> None:
    """Two sites with a slow link between: most of the certificate's gap was messages over the fast ones."""
    cluster = cluster_of(tmp_path, *SITES["two sites"])
    folder, options = tmp_path / "profiles_db", {"schedules": ("1f1b",), "microbatches": (4,)}
    sizes = {"num_blocks": 6, "width": 512, "num_heads": 8}
    larger = workload().model_copy(update={"model_options": sizes, "sequence_length": 256, "batch_size": 32})
    request = PlanRequest(larger, cluster, folder, Parallelism(), budget_seconds=20.0, **options)
    choice = Planner().plan(request)
    assert choice.gap is not None and choice.gap < 0.01
    names = [curve.name for curve in convergence_chart(choice).data]
    assert len(set(names)) == len(names) and not any(", as 1f1b" in name for name in names)
    assert {"even split, 8 × Mine", "even split, 4 × Mine in g0, 4 × Mine in g1"} <= set(names)
    whole = Prices(choice.request).problems(4)[0]
    assert not any(how.groups for how in whole.problem.configurations)
    best = simulated_lower_bound(whole, schedules=("1f1b",), best_seconds=1.0, budget_seconds=5.0)
    assert best.plan is not None and best.seconds < 0.99 * choice.simulated_seconds
    on_devices = simulate_bound(whole, bind_by_steps(whole, best.plan, cluster), cluster)
    assert on_devices.step_seconds >= choice.simulated_seconds * (1 - 1e-6)


def test_a_plan_on_islands_has_a_step_where_links_have_become_equal_and_is_refused_without_its_nodes(
    tmp_path: Path,
) -> None:
    """As when the cluster has changed since, and a re-plan compares the plan that is there."""
    groups, slow = SITES["two sites"]
    cluster = cluster_of(tmp_path, groups, slow)
    told = told_of(prices_of(cluster, tmp_path))[0]
    on_both = next(one for one in plans_of(told, np.random.default_rng(5), 40) if len(one.device_counts) == 2)
    mended = PlanRequest(workload(), cluster_of(tmp_path, groups, {}), tmp_path / "profiles_db", budget_seconds=1.0)
    found = Planner().plan(mended).candidate(on_both)
    before = simulate_bound(told, bind_by_steps(told, on_both, cluster), cluster)
    assert found.fits and found.simulated_seconds < before.step_seconds
    alone = PlanRequest(workload(), cluster_of(tmp_path, groups[:1], {}), tmp_path / "profiles_db", budget_seconds=1.0)
    with pytest.raises(InputError, match="'g1'; the cluster has g0"):
        Planner().plan(alone).candidate(on_both)
