"""The integer program of stages: branch and cut finds what listing and the dynamic program find, and proves as much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous
from benchmarks.search.growth import table
from dejavu.plans import NotFound, Obstacle, SearchResult, solved
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.search import Exact, Exhaustive, IntegerProgram, PipeDream
from dejavu.testing.searches import answer, random_problem

CLOSE = 1e-5  # relative; HiGHS works to a millionth


@pytest.mark.parametrize("seed", range(60))
def test_it_is_as_good_as_trying_every_plan(seed: int) -> None:
    problem = random_problem(seed, max_layers=6, max_devices=4)
    problem = replace(problem, use_all_devices=seed % 3 == 0, max_stages=None if seed % 4 else 2)
    wanted, found = Exhaustive().run(problem), IntegerProgram().run(problem)
    assert type(found) is type(wanted)
    if isinstance(wanted, SearchResult) and isinstance(found, SearchResult):
        assert found.step_seconds == pytest.approx(wanted.step_seconds, rel=1e-12)
        assert (1 - CLOSE) * wanted.step_seconds <= found.lower_bound_seconds <= wanted.step_seconds


def test_times_of_eighteen_magnitudes_are_no_matter() -> None:
    proved = 0
    for seed in range(60):
        rng, problem = np.random.default_rng(seed), random_problem(seed, max_layers=6, max_devices=4)
        assert isinstance(problem.costs, AdditiveCosts)
        shape = problem.costs.seconds_CL.shape
        seconds_CL, once_CL = 10.0 ** rng.uniform(-12, 6, (2, *shape))
        costs = replace(problem.costs, seconds_CL=seconds_CL, per_step_seconds_CL=once_CL * (seed % 2))
        wide = replace(problem, costs=costs, num_microbatches=int(rng.choice([1, 8, 100_000])))
        wanted, found = Exhaustive().run(wide), IntegerProgram().run(wide)
        assert type(found) is type(wanted), seed
        if isinstance(wanted, SearchResult) and isinstance(found, SearchResult):
            proved += 1
            assert found.lower_bound_seconds <= wanted.step_seconds <= found.step_seconds * (1 + 1e-12), seed
            assert found.step_seconds <= wanted.step_seconds * (1 + CLOSE), seed
    assert proved > 20


@pytest.mark.parametrize(("seed", "layers", "devices"), [(0, 6, 6), (1, 8, 4), (2, 5, 8), (3, 10, 4)])
def test_it_proves_what_the_dynamic_program_proves(seed: int, layers: int, devices: int) -> None:
    problem = heterogeneous(seed, num_types=2, num_devices=devices, num_layers=layers)
    exact, found = answer(Exact(), problem), answer(IntegerProgram(), problem)
    assert exact is not None and found is not None
    assert found.step_seconds == pytest.approx(exact.step_seconds, rel=1e-12)
    assert found.lower_bound_seconds == pytest.approx(exact.step_seconds, rel=CLOSE)


@pytest.mark.parametrize("budget_seconds", [0.0, 0.05, 0.5])
def test_stopped_early_its_bound_is_true_and_a_plan_to_start_from_is_kept(budget_seconds: float) -> None:
    problem = heterogeneous(0, num_types=2, num_devices=8, num_layers=12)
    best = solved(Exact().run(problem))
    start = solved(PipeDream().run(problem)).plan
    found = IntegerProgram(incumbent=start).run(problem, budget_seconds=budget_seconds)
    assert isinstance(found, SearchResult)
    assert found.lower_bound_seconds <= best.step_seconds <= found.step_seconds


def test_it_refuses_more_than_it_takes() -> None:
    problem = heterogeneous(0, num_types=2, num_devices=8, num_layers=12)
    for small in (IntegerProgram(max_variables=100), IntegerProgram(max_options_bytes=1000)):
        said = small.run(problem)
        assert isinstance(said, NotFound) and said.obstacle is Obstacle.TOO_LARGE


def test_its_growth_is_measured_beside_the_dynamic_program() -> None:
    _, rows, summary = table(num_problems=1, budget_seconds=0.2)
    found = summary["integer_program"]
    assert set(found) == {"ilp", "exact", "worst_disagreement_percent"}
    assert found["worst_disagreement_percent"] <= 100 * CLOSE
    assert len(found["exact"]) > len(found["ilp"])  # which stops at the first size that it does not end on
    assert all(row["ended"] for row in rows if row["search"] == "exact")
