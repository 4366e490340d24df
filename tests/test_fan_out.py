"""Searches as tasks: the same answer in this process, on one worker process and on two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import distributed
import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous
from dejavu.foundation.errors import InputError
from dejavu.plans import Infeasible, NotFound, Obstacle, Problem, SearchResult, check, solved
from dejavu.search import MCMC, Exact, Exhaustive, Uniform
from dejavu.search.fan_out import ranges, restarts, variants
from dejavu.testing.searches import small_problem
from dejavu.trials import local_client

QUICK = MCMC(num_steps=2000)  # ends by steps, not by the clock, so that it repeats


def mixed(seed: int) -> Problem:
    return heterogeneous(seed, num_types=2, num_devices=8, num_layers=10)


def too_tight() -> Problem:
    problem = mixed(1)
    return replace(problem, costs=replace(problem.costs, capacity_bytes_C=np.ones(len(problem.configurations))))


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[distributed.Client]:
    with local_client(request.param, tmp_path_factory.mktemp("dask")) as client:
        yield client


def test_restarts_take_the_cheapest_plan_and_the_first_of_equal_ones() -> None:
    problem = mixed(0)
    alone = [solved(QUICK.run(problem, seed=seed)) for seed in range(4)]
    together = solved(restarts(QUICK, problem, range(4), budget_seconds=60.0))
    cheapest = min(alone, key=lambda result: result.step_seconds)
    assert together.plan == cheapest.plan and together.step_seconds == cheapest.step_seconds
    check(problem, together.plan)


@pytest.mark.parametrize("max_table_steps", [np.inf, 0.0], ids=["table", "prices"])
def test_parts_of_an_exact_search_prove_what_the_whole_does(max_table_steps: float) -> None:
    search = Exact(max_table_steps=max_table_steps)
    for seed in range(4):
        problem = mixed(seed)
        whole = solved(search.run(problem))
        for num_ranges in (1, 2, 5):
            together = solved(ranges(search, problem, num_ranges, budget_seconds=60.0))
            assert together.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
            assert together.lower_bound_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
            check(problem, together.plan)


@pytest.mark.parametrize("max_table_steps", [np.inf, 0.0], ids=["table", "prices"])
def test_any_gap_allowed_and_parts_have_a_plan_where_there_is_one(max_table_steps: float) -> None:
    search, found = Exact(max_table_steps=max_table_steps), 0
    for seed in range(24, 40):
        problem = small_problem(seed)
        best = Exhaustive().run(problem)
        parts = ranges(search, problem, 3, budget_seconds=60.0)
        for gap in (1.0, 2.0):
            assert type(replace(search, relative_gap=gap).run(problem)) is type(best), (seed, gap)
        assert type(parts) is type(best), seed
        if isinstance(parts, SearchResult) and isinstance(best, SearchResult):
            found += 1
            assert parts.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
            assert parts.lower_bound_seconds == parts.step_seconds
    assert found > 3


def test_parts_say_when_nothing_fits() -> None:
    assert isinstance(ranges(Exact(), too_tight(), 2, budget_seconds=10.0), Infeasible)
    with pytest.raises(InputError, match="num_ranges is 0"):
        ranges(Exact(), mixed(0), 0, budget_seconds=10.0)


def test_restarts_keep_the_highest_bound() -> None:
    problem = mixed(0)
    proved = solved(restarts(Exact(), problem, [1, 2], budget_seconds=60.0))
    assert proved.lower_bound_seconds == proved.step_seconds


def test_refusals_are_outcomes() -> None:
    fits, tight = variants(Exact(), [mixed(0), too_tight()], budget_seconds=60.0)
    assert isinstance(fits, SearchResult)
    assert isinstance(tight, Infeasible) and "fit" in tight.proof
    (large,) = variants(Exhaustive(max_plans=1), [mixed(0)], budget_seconds=60.0)
    assert isinstance(large, NotFound) and large.obstacle is Obstacle.TOO_LARGE and "at most 1 plans" in large.reason
    assert variants(Exact(), [], budget_seconds=1.0) == []
    uneven = restarts(Uniform(), too_tight(), [0, 1], budget_seconds=60.0)
    assert isinstance(uneven, NotFound) and "none of 2 restarts found a plan; the first: " in uneven.reason
    assert isinstance(restarts(Exact(), too_tight(), [0, 1], budget_seconds=60.0), Infeasible)
    with pytest.raises(InputError, match="at least one seed"):
        restarts(QUICK, mixed(0), [], budget_seconds=1.0)


@pytest.mark.integration
def test_workers_change_nothing(client: distributed.Client) -> None:
    problem = mixed(0)
    here = solved(restarts(QUICK, problem, range(4), budget_seconds=60.0))
    for _ in range(2):  # the second call's tasks are its own
        there = solved(restarts(QUICK, problem, range(4), budget_seconds=60.0, client=client))
        assert there.plan == here.plan and there.step_seconds == here.step_seconds
    whole = solved(ranges(Exact(), problem, 3, budget_seconds=60.0, client=client))
    assert whole.step_seconds == whole.lower_bound_seconds == solved(Exact().run(problem)).step_seconds
    problems = [mixed(0), too_tight(), mixed(2)]
    pairs = zip(
        variants(Exact(), problems, budget_seconds=60.0),
        variants(Exact(), problems, budget_seconds=60.0, client=client),
        strict=True,
    )
    for one, other in pairs:
        assert type(one) is type(other)
        if isinstance(one, SearchResult) and isinstance(other, SearchResult):
            assert one.plan == other.plan
        else:
            assert str(one) == str(other)
