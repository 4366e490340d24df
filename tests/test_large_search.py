"""The ways to large problems: prices on devices, labels, clusters of layers, and bounds over windows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous, operators
from dejavu.plans import (
    Infeasible,
    NotFound,
    Obstacle,
    Plan,
    Problem,
    SearchResult,
    check,
    is_valid,
    price,
    solved,
    step_seconds,
)
from dejavu.search import Coarse, Exact, Exhaustive, Feasible, PipeDream, Uniform
from dejavu.search._base import Incumbent
from dejavu.search.coarse import clusters, windowed
from dejavu.search.coarse.clusters import boundaries, clustered, reclustered, refined, unclustered
from dejavu.search.coarse.levels import fitting
from dejavu.search.coarse.relaxation import Windowed
from dejavu.search.coarse.relaxed import Relaxed
from dejavu.search.coarse.undominated import Undominated
from dejavu.search.coarse.windowed import WindowedBound
from dejavu.search.feasible.fit import fit
from dejavu.search.shared.stage_table import StageTable
from tests.conftest import draws, some
from tests.test_search import answer, random_problem, small

BY_PRICES = Exact(max_table_steps=0)


@pytest.mark.parametrize("dense", [False, True], ids=["sums", "dense"])
def test_prices_and_labels_are_as_good_as_trying_every_plan(dense: bool) -> None:
    feasible = 0
    for seed in range(200):
        problem = small(seed)
        best = answer(Exhaustive(), problem)
        result = answer(BY_PRICES, replace(problem, costs=problem.costs.dense()) if dense else problem)
        assert (result is None) == (best is None), seed
        if result is not None and best is not None:
            feasible += 1
            assert result.step_seconds == pytest.approx(best.step_seconds, rel=1e-9), seed
            assert result.lower_bound_seconds == result.step_seconds
    assert feasible > 50


def test_prices_and_labels_agree_with_the_table_over_devices() -> None:
    for seed in range(60):
        problem = random_problem(seed, max_layers=14, max_devices=6)
        by_table, by_prices = answer(Exact(max_table_steps=np.inf), problem), answer(BY_PRICES, problem)
        assert (by_table is None) == (by_prices is None), seed
        if by_table is not None and by_prices is not None:
            assert by_prices.step_seconds == pytest.approx(by_table.step_seconds, rel=1e-9), seed
            assert by_prices.lower_bound_seconds == by_prices.step_seconds


@pytest.mark.parametrize("num_types", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_both_ways_agree_on_mixed_clusters(num_types: int, schedule: str) -> None:
    for seed in range(2):
        problem = heterogeneous(seed, num_types=num_types, num_devices=12, num_layers=18, schedule=schedule)
        by_table, by_prices = answer(Exact(max_table_steps=np.inf), problem), answer(BY_PRICES, problem)
        assert (by_table is None) == (by_prices is None)
        if by_table is not None and by_prices is not None:
            assert by_prices.step_seconds == pytest.approx(by_table.step_seconds, rel=1e-9)


def test_a_budget_of_nothing_still_gives_a_plan_and_an_honest_bound() -> None:
    problem = heterogeneous(9, num_types=3, num_devices=24, num_layers=48)
    best = solved(BY_PRICES.run(problem))
    assert best.gap == 0.0
    hurried = solved(BY_PRICES.run(problem, budget_seconds=0.0))
    check(problem, hurried.plan)
    assert 0 < hurried.lower_bound_seconds <= best.step_seconds <= hurried.step_seconds


def test_an_allowed_gap_is_kept_by_prices() -> None:
    problem = heterogeneous(4, num_types=3, num_devices=24, num_layers=48)
    best = solved(BY_PRICES.run(problem))
    near = solved(replace(BY_PRICES, relative_gap=0.05).run(problem))
    assert near.gap <= 0.05 + 1e-9
    assert near.lower_bound_seconds <= best.step_seconds <= near.step_seconds


def test_renamed_types_and_types_in_another_order_change_nothing() -> None:
    problem = heterogeneous(2, num_types=3, num_devices=16, num_layers=24)
    names = {name: f"z-{len(problem.device_counts) - k}" for k, name in enumerate(problem.device_counts)}
    renamed = replace(
        problem,
        device_counts={names[name]: problem.device_counts[name] for name in reversed(problem.device_counts)},
        configurations=tuple(
            replace(configuration, device_type=names[configuration.device_type])
            for configuration in problem.configurations
        ),
    )
    for search in (Exact(), BY_PRICES):
        assert solved(search.run(renamed)).step_seconds == pytest.approx(
            solved(search.run(problem)).step_seconds, rel=1e-12
        )


def test_a_start_from_a_plan_by_hand_is_no_worse() -> None:
    problem = heterogeneous(1, num_types=2, num_devices=16, num_layers=24)
    by_hand = solved(Uniform().run(problem))
    result = solved(replace(BY_PRICES, incumbent=by_hand.plan).run(problem))
    assert result.history[0][1] == by_hand.step_seconds
    assert result.step_seconds == pytest.approx(solved(Exact().run(problem)).step_seconds, rel=1e-9)


def test_clusters_cover_the_layers_and_keep_the_price() -> None:
    problem = operators(3, num_operators=120, num_devices=12, num_types=2)
    for num_clusters in (1, 7, 40, 120, 500):
        cuts = boundaries(problem, num_clusters)
        assert cuts[0] == 0
        assert cuts[-1] == 120
        assert (np.diff(cuts) > 0).all()
        assert len(cuts) <= min(num_clusters, 120) + 1
        few = clustered(problem, cuts)
        result = answer(Exact(relative_gap=0.05), few)
        if result is not None:
            plan = unclustered(result.plan, cuts)
            assert step_seconds(problem, plan) == pytest.approx(result.step_seconds, rel=1e-9)
            assert reclustered(plan, cuts) == result.plan


def test_cuts_move_to_the_best_place() -> None:
    problem = operators(1, num_operators=60, num_devices=8, num_types=2)
    cuts = boundaries(problem, 10)
    coarse = unclustered(solved(Exact().run(clustered(problem, cuts))).plan, cuts)
    best = min(_prices(problem, refined(problem, coarse, 60, StageTable.of(problem))))
    kept = [stage.configuration for stage in coarse.stages]
    assert best <= step_seconds(problem, coarse) * (1 + 1e-9)
    assert best <= min(_prices(problem, _random_cuts(problem, coarse, 500))) * (1 + 1e-3)
    for plan in refined(problem, coarse, 3, StageTable.of(problem)):
        assert [stage.configuration for stage in plan.stages] == kept
        assert all(abs(a - b) <= 3 for a, b in zip(plan.cuts, coarse.cuts, strict=True))


def test_the_bound_over_windows_is_one() -> None:
    near = []
    for seed in range(40):
        problem = random_problem(seed, max_layers=10, max_devices=6)
        result = answer(Exact(), problem)
        if result is None or result.step_seconds == 0:
            continue
        for above in (1.0, 1.2):  # the best plan, or one that is worse: more plans are of interest then
            best = Incumbent(problem, "test", 20.0)
            best.offer(result.plan)
            best.step_seconds *= above
            bound = WindowedBound(problem, best).prove(1e-3)
            assert bound <= result.step_seconds * (1 + 1e-9), (seed, above)
            near.append(bound / result.step_seconds)
    assert np.median(near) > 0.98


@pytest.mark.parametrize("use_all", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_is_known_of_plans_holds_for_the_best_one(use_all: bool, schedule: str) -> None:
    """Stages counted from each cut, configurations left out, Σ: whatever cutoff the best plan is just below."""
    looked = binding = 0
    for seed in range(12):
        problem = replace(heterogeneous(seed, num_types=2, num_devices=9, num_layers=14, schedule=schedule))
        problem = replace(problem, use_all_devices=use_all)
        result = answer(Exact(), problem)
        if result is None:
            continue
        cost = price(problem, result.plan)
        sum_seconds = sum(cost.stage_seconds) + sum(cost.transfer_seconds)
        bottleneck = cost.step_seconds - sum_seconds
        for wider in (1.0001, 1.02, 1.2):
            best = Incumbent(problem, "test", 20.0)
            best.offer(result.plan)
            windowed = Windowed(Relaxed(problem, best))
            instead = Undominated.of(problem).plan(result.plan)
            known = windowed.tightened(windowed.everything(), bottleneck * wider, sum_seconds * wider)
            assert known.sum_seconds <= sum_seconds * (1 + 1e-7), (seed, wider)
            for k, stage in enumerate(instead.stages):
                num_left = len(instead.stages) - k
                assert known.after_L1[stage.start] <= num_left, (seed, wider)
                if known.most_L1 is not None:
                    assert num_left <= known.most_L1[stage.start], (seed, wider)
                    binding += known.most_L1[stage.start] < problem.num_layers - stage.start
            looked += 1
    assert looked > 20 and binding > 0


def test_what_is_left_out_as_dominated_changes_nothing() -> None:
    for seed in range(40):
        problem = random_problem(seed, max_layers=8, max_devices=5)
        fewer = Undominated.of(problem)
        result = answer(Exact(), problem)
        if result is None:
            continue
        assert solved(Exact().run(fewer.problem)).step_seconds == pytest.approx(result.step_seconds, rel=1e-9), seed
        instead = fewer.plan(result.plan)
        assert {stage.configuration for stage in instead.stages} <= set(fewer.problem.configurations)
        assert step_seconds(problem, instead) == pytest.approx(result.step_seconds, rel=1e-9), seed


def test_coarse_finds_a_plan_near_the_exact_one_and_never_proves_too_much() -> None:
    problem = operators(5, num_operators=150, num_devices=12, num_types=2)
    exact = solved(Exact(relative_gap=0.002).run(problem))
    result = solved(Coarse(num_clusters=40).run(problem, budget_seconds=10.0))
    check(problem, result.plan)
    assert result.step_seconds == step_seconds(problem, result.plan)
    assert result.lower_bound_seconds <= exact.step_seconds
    assert result.step_seconds <= 1.05 * exact.step_seconds
    assert result.lower_bound_seconds >= 0.7 * exact.step_seconds


@draws((0,), (1, 2))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_microbatches", some([1, 2, 5], [2]))
def test_coarse_finds_plans_of_more_stages_than_there_are_levels(
    schedule: str, num_microbatches: int, seeds: tuple[int, ...]
) -> None:
    """Where all stages hold the same from the last one on, or from one before, levels end there; plans do not."""
    for seed in seeds:
        problem = operators(seed, num_operators=120, num_devices=16, num_types=4, schedule=schedule)
        problem = replace(problem, num_microbatches=num_microbatches)
        exact = solved(Exact(relative_gap=0.002).run(problem))
        found = solved(Coarse(num_clusters=20, relative_gap=0.04).run(problem, budget_seconds=10.0))
        check(problem, found.plan)
        assert found.step_seconds <= 1.05 * exact.step_seconds, seed
        assert 0.93 * exact.step_seconds <= found.lower_bound_seconds <= exact.step_seconds * (1 + 1e-9), seed


def test_coarse_finds_its_way_from_plans_that_are_many_times_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few stages where good ones have many, as first plans are where memory is tight; looked at over few cuts."""
    monkeypatch.setattr(windowed, "_FEW_FROM_STEPS", 0)
    monkeypatch.setattr(clusters, "FEWEST_CUTS", 40)
    for seed in (2, 4, 5):
        problem = operators(seed, num_operators=150, num_devices=24, num_types=2)
        slow = solved(Feasible().run(problem, budget_seconds=5.0))
        search = Coarse(num_clusters=30, relative_gap=0.02)
        found = solved(search.run(problem, budget_seconds=10.0))
        from_slow = solved(replace(search, incumbent=slow.plan).run(problem, budget_seconds=10.0))
        assert slow.step_seconds > 3.0 * found.step_seconds
        assert from_slow.step_seconds < 1.1 * found.step_seconds, seed


@draws((1,), (0, 2, 3))
@pytest.mark.parametrize("use_all", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_prices_settle_whether_any_plan_fits(schedule: str, use_all: bool, seeds: tuple[int, ...]) -> None:
    settled = {True: 0, False: 0}
    for seed, share in product(seeds, (0.2, 0.3, 0.5)):
        problem = operators(seed, num_operators=60, num_devices=12, num_types=2 + seed % 3, schedule=schedule)
        costs = replace(problem.costs, capacity_bytes_C=share * problem.costs.capacity_bytes_C)
        tight = replace(problem, costs=costs, use_all_devices=use_all)
        fits, by_prices = fit(tight, 10.0), fitting.is_feasible(tight, 10.0)
        assert fits.is_settled
        assert by_prices is (fits.plan is not None), (seed, share)
        settled[by_prices] += 1
    assert min(settled.values()) >= len(seeds) / 2


@draws([120], [160], "microbatches")
def test_where_quick_searches_meet_no_plan_one_is_met_at_prices_or_there_is_none(microbatches: tuple[int, ...]) -> None:
    """Memory is tight, so types have to take turns; there are too many vectors of them for `feasible`."""
    for num_microbatches in microbatches:
        ends_as = {120: SearchResult, 160: Infeasible}[num_microbatches]
        problem = operators(1, num_operators=1000, num_devices=64, num_types=4, schedule="gpipe")
        problem = replace(problem, num_microbatches=num_microbatches)
        assert isinstance(PipeDream().run(problem), NotFound)
        answer = Coarse(relative_gap=0.2, fitting=Uniform()).run(problem, budget_seconds=10.0)
        assert isinstance(answer, ends_as), answer
        if isinstance(answer, SearchResult):
            check(problem, answer.plan)


def test_coarse_refuses_stage_by_stage_costs_of_many_layers() -> None:
    problem = operators(5, num_operators=60, num_devices=8, num_types=2)
    refused = Coarse(num_clusters=20).run(replace(problem, costs=problem.costs.dense()))
    assert isinstance(refused, NotFound) and refused.obstacle is Obstacle.TOO_LARGE
    assert "stage by stage" in refused.reason


def _prices(problem: Problem, plans: object) -> list[float]:
    found = []
    for plan in plans:  # type: ignore[attr-defined]
        if is_valid(problem, plan):
            found.append(step_seconds(problem, plan))
    return found


def _random_cuts(problem: Problem, plan: Plan, count: int) -> list[Plan]:
    rng = np.random.default_rng(0)
    plans = [plan]
    for _ in range(count):
        inner = np.sort(rng.choice(np.arange(1, problem.num_layers), len(plan.stages) - 1, replace=False))
        cuts = [0, *(int(cut) for cut in inner), problem.num_layers]
        stages = (replace(s, start=a, stop=b) for s, a, b in zip(plan.stages, cuts, cuts[1:], strict=False))
        plans.append(replace(plan, stages=tuple(stages)))
    return plans
