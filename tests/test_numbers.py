"""Numbers of any size: units of time, sums that cancel, times of nothing, and layers that cannot run."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous
from benchmarks.search.scales import SCALES, times
from dejavu.plans import Problem, SearchResult, check, solved, step_seconds
from dejavu.plans.stage_costs import AdditiveCosts, Sums
from dejavu.search import SEARCHES, Differentiable, Exact, Exhaustive, Search
from dejavu.search.shared.stage_table import StageTable, stage_cost
from dejavu.search.shared.unit import in_units, unit_seconds
from tests.conftest import draws
from tests.test_search import answer, every_search, random_problem, small

BY_PRICES = Exact(max_table_steps=0)


@draws(range(1), range(1, 3))
@pytest.mark.parametrize("search", [Exact(), BY_PRICES], ids=["table", "prices"])
def test_another_unit_of_time_changes_neither_plan_nor_proof(search: Search, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        problem = heterogeneous(seed, num_types=2, num_devices=10, num_layers=12)
        own = solved(search.run(problem))
        assert own.gap == 0.0
        for scale in SCALES:
            other = solved(search.run(times(problem, scale)))
            assert other.plan == own.plan, scale
            assert other.gap == 0.0
            assert other.step_seconds == pytest.approx(scale * own.step_seconds, rel=1e-12)


@every_search
@draws(range(5), range(5, 15))
def test_a_power_of_two_changes_nothing_at_all(search: Search, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        problem = small(seed)
        own, other = answer(search, problem), answer(search, times(problem, 2.0**-40))
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert other.plan == own.plan
            assert other.step_seconds == own.step_seconds * 2.0**-40
            assert other.lower_bound_seconds == own.lower_bound_seconds * 2.0**-40
            assert [price for _, price in other.history][-1] == other.step_seconds


def test_a_scaled_problem_has_the_unit_one() -> None:
    for seed in range(100):
        problem = small(seed)
        for asked in (problem, replace(problem, costs=problem.costs.dense())):
            unit = unit_seconds(asked)
            assert np.log2(unit) == round(np.log2(unit))
            assert unit_seconds(in_units(asked, unit)) == 1.0


def test_sums_of_numbers_of_any_size_are_right_to_the_last_bits() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        row = 10.0 ** rng.uniform(-8, 9, 60) * (rng.random(60) < 0.9)
        sums = Sums(row[None, :])
        exact = [Fraction(0)]
        for value in row:
            exact.append(exact[-1] + Fraction(float(value)))
        spans = sums.all_spans()[0]
        for start in range(60):
            found = [sums.between(start, stop, 0) for stop in range(start + 1, 61)]
            wanted = [float(exact[stop] - exact[start]) for stop in range(start + 1, 61)]
            assert found == pytest.approx(wanted, rel=1e-12, abs=0.0)
            assert found == sorted(found)
            assert spans[start, start + 1 :].tolist() == found


def far_apart(seed: int) -> Problem:
    """Layers of 1e-8 s beside some of 1e9 s, which each have another configuration where they are quick."""
    problem = random_problem(seed, max_layers=8, max_devices=5)
    rng = np.random.default_rng(seed)
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    slow = rng.random(costs.seconds_CL.shape) < 0.2
    return replace(problem, costs=replace(costs, seconds_CL=np.where(slow, 1e9, 1e-8 * costs.seconds_CL)))


def test_sums_that_would_cancel_are_priced_right_by_both_forms_and_by_compiled_loops() -> None:
    for seed in range(60):
        problem = far_apart(seed)
        costs, table = problem.costs, StageTable.of(problem)
        assert isinstance(costs, AdditiveCosts)
        dense = costs.dense()
        for c in range(costs.num_configurations):
            for start in range(costs.num_layers):
                for stop in range(start + 1, costs.num_layers + 1):
                    seconds = costs.stage_seconds(start, stop, c)
                    exact = float(sum((Fraction(float(s)) for s in costs.seconds_CL[c, start:stop]), Fraction(0)))
                    assert seconds == pytest.approx(exact, rel=1e-13, abs=0.0)
                    compiled = stage_cost(table.costs, start, stop, c)
                    assert (seconds, costs.per_step_seconds(start, stop, c)) == compiled[:2]
                    assert costs.max_in_flight(start, stop, c) == compiled[2] == dense.max_in_flight(start, stop, c)
                    assert (dense.stage_seconds(start, stop, c), dense.per_step_seconds(start, stop, c)) == compiled[:2]


def test_exact_is_the_best_where_sums_would_cancel() -> None:
    for seed in range(80):
        problem = far_apart(seed)
        if len(problem.layers) > 5:
            continue
        for search in (Exact(), BY_PRICES):
            found, best = answer(search, problem), answer(Exhaustive(), problem)
            assert (found is None) == (best is None), seed
            if found is not None and best is not None:
                assert found.step_seconds == pytest.approx(best.step_seconds, rel=1e-9, abs=0.0), seed


def with_impossible(seed: int, share: float = 0.15) -> Problem:
    """A problem some of whose layers cannot run under some configurations."""
    problem, rng = small(seed), np.random.default_rng(seed)
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    where = rng.random(costs.seconds_CL.shape) < share
    tables = {"seconds_CL": np.where(where, np.inf, costs.seconds_CL)}
    if seed % 3 == 0:
        tables["per_step_seconds_CL"] = np.where(rng.random(where.shape) < share / 3, np.inf, costs.per_step_seconds_CL)
    if seed % 7 == 0:
        never = rng.random(len(costs.per_step_latency_seconds_C)) < share
        tables["per_step_latency_seconds_C"] = np.where(never, np.inf, costs.per_step_latency_seconds_C)
    return replace(problem, costs=replace(costs, **tables))


@every_search
def test_a_layer_that_cannot_run_there_is_in_no_stage_there(search: Search) -> None:
    found = 0
    for seed in range(60):
        problem = with_impossible(seed)
        best, result = answer(Exhaustive(), problem), answer(search, problem)
        if result is None:
            continue
        assert best is not None
        found += 1
        check(problem, result.plan)
        for stage in result.plan.stages:
            seconds = problem.costs.seconds_CL[problem.index(stage.configuration), stage.start : stage.stop]
            assert np.isfinite(seconds).all()
        assert result.lower_bound_seconds <= best.step_seconds * (1 + 1e-9)
        assert best.step_seconds <= result.step_seconds * (1 + 1e-9)
    assert found > 3


@pytest.mark.parametrize("search", [Exact(), BY_PRICES], ids=["table", "prices"])
def test_exact_with_layers_that_cannot_run_is_as_good_as_trying_every_plan(search: Search) -> None:
    for seed in range(200):
        problem = with_impossible(seed)
        found, best = answer(search, problem), answer(Exhaustive(), problem)
        assert (found is None) == (best is None), seed
        if found is not None and best is not None:
            assert found.step_seconds == pytest.approx(best.step_seconds, rel=1e-9), seed


def test_a_plan_that_takes_nothing_has_no_gap() -> None:
    problem = heterogeneous(1, num_types=2, num_devices=6, num_layers=10)
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    free = times(problem, 0.0)
    for name, kind in SEARCHES.items():
        found = kind().run(free, budget_seconds=2.0)
        if isinstance(found, SearchResult):
            assert found.step_seconds == step_seconds(free, found.plan) == 0.0
            assert found.gap == 0.0
        else:
            assert name in ("uniform", "exhaustive")
    assert solved(Differentiable().run(free)).step_seconds == 0.0
