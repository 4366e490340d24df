"""The bound by the fewest devices: no plan is faster, whatever its schedule and number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bound.every_plan import count, every_plan, small_priced
from dejavu.plans import Plan, Problem, Stage, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.simulation import simulate_plan
from dejavu.simulation.bound import RankChoices, bounding
from dejavu.simulation.bound._prefix_sums import bound_problem
from dejavu.simulation.bound.first.balance import balance_seconds
from dejavu.simulation.bound.first.fewest_devices import FewestDevices
from tests.conftest import draws, some
from tests.test_plans_by_nodes import posed, seconds_told_apart

MOST_PLANS = 3_000


def least_by_ranks(priced: PricedProblem, name: str) -> dict[int, float]:
    """The least simulated step of the plans of a schedule that fit, by the number of ranks."""
    costs, least = priced.problem.costs, dict[int, float]()
    assert isinstance(costs, AdditiveCosts)
    for plan in every_plan(priced, name):
        simulated, ranks = simulate_plan(priced, plan), len(plan.ranks)
        of_rank = [priced.problem.index(plan.rank_configuration(rank)) for rank in range(ranks)]
        if all(held <= costs.capacity_bytes_C[c] for held, c in zip(simulated.peak_bytes, of_rank, strict=True)):
            least[ranks] = min(least.get(ranks, np.inf), simulated.step_seconds)
    return dict(sorted(least.items()))


def with_slow_links(priced: PricedProblem, seconds: float) -> PricedProblem:
    """Links that are as slow in either direction, and so much slower."""
    problem = priced.problem
    latency_CC = np.maximum(problem.link_latency_seconds_CC, problem.link_latency_seconds_CC.T) + seconds
    per_byte_CC = np.maximum(problem.link_seconds_per_byte_CC, problem.link_seconds_per_byte_CC.T)
    slow = replace(problem, link_latency_seconds_CC=latency_CC, link_seconds_per_byte_CC=per_byte_CC)
    return replace(priced, problem=slow)


def with_long_ends(priced: PricedProblem, factor: float) -> PricedProblem:
    """What is done once a step takes so much longer."""
    costs = priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    longer = replace(costs, per_step_seconds_CL=factor * costs.per_step_seconds_CL)
    return replace(priced, problem=replace(priced.problem, costs=longer))


def bounds(priced: PricedProblem, name: str, num_ranks: int, best_seconds: float) -> np.ndarray:
    """Where the order of ranks turns, as of plans whose ranks may have some configurations alone: any, here."""
    every = np.ones(len(priced.problem.configurations), np.bool_)
    turns = SCHEDULES[name].placement != "loop"
    problem = bound_problem(priced, best_seconds, RankChoices(*[every] * 4) if turns else None)
    return asked_out(FewestDevices(problem, name, np.zeros(num_ranks), best_seconds))


def asked_out(fewest: FewestDevices) -> np.ndarray:
    while fewest.is_open_P.any():
        fewest.ask(int(np.where(fewest.is_open_P, fewest.bound_P, np.inf).argmin()))
    return fewest.bound_P


@pytest.mark.parametrize("name", SCHEDULES)
@draws(range(700, 712), range(712, 730))
def test_no_plan_with_so_many_ranks_is_faster(seeds: Iterable[int], name: str) -> None:
    near, raised, tried = list[float](), 0, 0
    for seed in seeds:
        priced = small_priced(seed)
        if count(priced, MOST_PLANS + 1) > MOST_PLANS:
            continue
        rng = np.random.default_rng(seed)
        priced = with_slow_links(priced, float(rng.choice([0.0, 0.5, 5.0])))
        priced = with_long_ends(priced, float(rng.choice([1.0, 30.0])))
        if not (least := least_by_ranks(priced, name)):
            continue
        for loose in (1.0, 1.5):
            best_seconds = min(least.values()) * loose
            found_P = bounds(priced, name, max(least), best_seconds)
            assert all(found_P[ranks - 1] <= seconds * (1 + 1e-9) for ranks, seconds in least.items()), seed
            assert found_P.max() <= best_seconds
        balance_P = balance_seconds(bound_problem(priced, best_seconds), max(least))
        for ranks, seconds in least.items():
            if seconds <= best_seconds:
                near.append(found_P[ranks - 1] / seconds)
                raised += found_P[ranks - 1] > balance_P[ranks - 1]
                tried += 1
    assert tried >= 5
    if SCHEDULES[name].stages_per_rank == 1:
        assert raised > 0.6 * tried and np.median(near) > 0.9
    elif SCHEDULES[name].stages_per_rank == 2:
        assert raised


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(800, 804))
def test_one_stage_on_one_device_is_known_as_well_as_is_tried(name: str, seed: int) -> None:
    priced = small_priced(seed).of([0])
    costs = priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    roomy = replace(costs, capacity_bytes_C=np.full(1, 1e9))
    only = replace(priced, problem=replace(priced.problem, max_stages=1, costs=roomy))
    (seconds,) = least_by_ranks(only, name).values()
    for loose in (1.0, 1.5, 10.0):
        assert bounds(only, name, 1, loose * seconds)[0] == pytest.approx(seconds, rel=0.011)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zbv", "hanayo"])
def test_every_microbatch_has_to_cross_the_link(name: str) -> None:
    """Of two ranks' plans, where a message takes longer than all that is computed."""
    tried = 0
    for seed in range(900, 1000):
        priced = small_priced(seed)
        costs, problem = priced.problem.costs, priced.problem
        assert isinstance(costs, AdditiveCosts)
        if count(priced, MOST_PLANS + 1) > MOST_PLANS or 2 not in (least := least_by_ranks(priced, name)):
            continue
        seconds = 100.0 * float(problem.num_microbatches * costs.seconds_CL.sum())
        slow = with_slow_links(priced, seconds)
        crossing, least = problem.num_microbatches * seconds, least_by_ranks(slow, name)
        found_P = bounds(slow, name, 2, 4.0 * crossing)
        assert 0.99 * crossing <= found_P[1] <= least[2] * (1 + 1e-9)
        tried += 1
        if tried == 6:
            return
    pytest.fail(f"{tried} problems were tried; wanted 6")


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_two_types_with_a_slow_link_between_are_two_clusters(name: str) -> None:
    """Of plans within what a message takes over it: devices' prices alone allow half a plan on each."""
    tried, once_less = 0, 0
    for seed in range(700, 740):
        priced = small_priced(seed)
        problem, kinds = priced.problem, [one.device_type for one in priced.problem.configurations]
        if len(set(kinds)) == 1 or count(priced, MOST_PLANS + 1) > MOST_PLANS:
            continue
        is_between_CC = np.array(kinds)[:, None] != np.array(kinds)
        slow_CC = np.where(is_between_CC, 1e9, problem.link_latency_seconds_CC)
        slow = replace(priced, problem=replace(problem, link_latency_seconds_CC=slow_CC))
        if not (least := least_by_ranks(slow, name)) or min(least.values()) > 1e8:  # too little memory on each
            continue
        best_seconds = 1.5 * min(least.values())
        found_P = bounds(slow, name, max(least), best_seconds)
        assert all(found_P[ranks - 1] <= seconds * (1 + 1e-9) for ranks, seconds in least.items()), seed
        of_each = [slow.of([c for c, one in enumerate(kinds) if one == kind]) for kind in sorted(set(kinds))]
        alone_P = np.min([bounds(one, name, max(least), best_seconds) for one in of_each], axis=0)
        np.testing.assert_allclose(found_P, alone_P, rtol=0.03)
        once_less += bounds(priced, name, max(least), best_seconds).min() < 0.9 * found_P.min()
        tried += 1
    assert tried >= 5 and once_less >= 3


@pytest.mark.parametrize("schedule", some(("1f1b", "interleaved_1f1b", "zbv", "hanayo"), ["1f1b", "zbv"]))
def test_no_plan_told_apart_by_nodes_is_faster(schedule: str, tmp_path: Path) -> None:
    prices, priced = posed("two nodes of two", tmp_path, replicas=2)
    told = prices.over_nodes(priced, [schedule])
    assert told is not None
    least, rng = dict[int, float](), np.random.default_rng(3)
    plans = list(every_plan(told.priced, schedule))
    for k in rng.permutation(len(plans))[:4000]:
        seconds = seconds_told_apart(told, plans[k])
        least[len(plans[k].ranks)] = min(least.get(len(plans[k].ranks), np.inf), seconds)
    best_seconds = 1.5 * min(least.values())
    problem = bound_problem(told.priced, best_seconds, told.choices)
    found_P = asked_out(FewestDevices(problem, schedule, np.zeros(max(least)), best_seconds))
    assert all(found_P[ranks - 1] <= seconds * (1 + 1e-9) for ranks, seconds in least.items())
    assert found_P.max() > 0.3 * min(least.values())


def many_alike(num_layers: int, num_devices: int, num_microbatches: int, kept: float) -> PricedProblem:
    """Layers alike on one type's devices, where a stage on twice as many keeps so much of each one's speed."""
    widths = [2**k for k in range(num_devices.bit_length())]
    configurations = [StageConfiguration("gpu", devices_per_node=n, data_parallel=n) for n in widths]
    C, L = len(widths), num_layers
    seconds_C = np.array([1.0 / (n * kept**k) for k, n in enumerate(widths)])
    forward_CL = np.repeat(seconds_C[:, None], L, axis=1)
    nothing_CL, nothing_CC = np.zeros((C, L)), np.zeros((C, C))
    costs = AdditiveCosts(
        3.0 * forward_CL, nothing_CL, np.zeros(C), nothing_CL, nothing_CL, nothing_CL, np.full(C, 1e9)
    )
    counts, names = {"gpu": num_devices}, tuple(f"layer{k}" for k in range(L))
    problem = Problem(
        names, tuple(configurations), counts, costs, np.zeros(L + 1), nothing_CC, nothing_CC, "1f1b", num_microbatches
    )
    return PricedProblem(problem, forward_CL, 2.0 * forward_CL)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("num_layers", "num_devices", "num_microbatches", "kept"),
    [(24, 32, 16, 0.9), (24, 32, 64, 0.9), (48, 128, 16, 0.8), (48, 128, 32, 0.95), (96, 1024, 64, 0.85)],
)
def test_a_plan_on_many_devices_alike_is_near_what_is_proved(
    name: str, num_layers: int, num_devices: int, num_microbatches: int, kept: float
) -> None:
    """The shortest way through the model is on wide stages and the fewest devices are narrow ones: no plan has both."""
    priced = many_alike(num_layers, num_devices, num_microbatches, kept)
    steps = list[float]()
    for configuration in priced.problem.configurations:
        S = num_devices // configuration.num_devices
        if min(num_layers, num_microbatches) >= S and num_layers % S == 0:
            size = num_layers // S
            stages = tuple(Stage(s * size, (s + 1) * size, configuration) for s in range(S))
            steps.append(simulate_plan(priced, Plan(stages, name, num_microbatches)).step_seconds)
    assert len(steps) >= 3
    found_P = bounds(priced, name, min(num_layers, num_microbatches), min(steps))
    assert (0.9 if name == "1f1b" else 0.8) * min(steps) < found_P.min() <= min(steps)


def test_every_step_of_a_bound_is_proved() -> None:
    """Limits and tables take turns, of which the first is a limit's; without time it goes on by one of them."""
    raised = 0
    for seed in range(700, 712):
        priced = with_slow_links(small_priced(seed), 1.0)
        least = least_by_ranks(priced, "1f1b") if count(priced, 701) <= 700 else {}
        if least:
            best_seconds = min(least.values())
            bound = bounding(priced, schedules=("1f1b",), best_seconds=best_seconds * 1.05)
            before = {place.num_stages: place.bound_seconds for place in bound.places}
            steps = [bound.go_on(0.0) for _ in range(8)]
            raised += any(steps[0].by_ranks["1f1b", S] > seconds for S, seconds in before.items())
            assert all(a.seconds <= b.seconds <= best_seconds for a, b in itertools.pairwise(steps)), seed
    assert raised >= 2
