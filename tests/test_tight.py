"""What searches say where memory is about the least that works: a check that no search shares decides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.search.feasibility import summary, table
from benchmarks.search.tight import Tight, has_a_plan, has_a_plan_by_listing, plan_fits, tight
from dejavu.plans import Infeasible, NotFound, Problem, SearchResult, StageConfiguration, solved
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.search import SEARCHES, Auto, Coarse, Feasible, Search
from tests.conftest import draws

FEW, MANY = 50, 150  # small problems for each search
# Searches that settle every problem of these sizes, one way or the other.
SETTLE = ("auto", "exact", "hybrid", "coarse", "feasible")

every_search = pytest.mark.parametrize("search", [kind() for kind in SEARCHES.values()], ids=list(SEARCHES))


def judge(search: Search, case: Tight, budget_seconds: float) -> None:
    """A proof holds, a plan fits, and some searches always have one of the two."""
    found = search.run(case.problem, budget_seconds=budget_seconds)
    if isinstance(found, Infeasible):
        assert not case.has_a_plan, (case.seed, found.proof)
    elif isinstance(found, SearchResult):
        assert case.has_a_plan and plan_fits(case.problem, found.plan), case.seed
    else:
        assert search.name not in SETTLE, (case.seed, found.reason)


def test_the_check_agrees_with_listing_every_plan() -> None:
    feasible = 0
    for seed in range(300):
        case = tight(seed, large=False)
        assert has_a_plan_by_listing(case.problem) == case.has_a_plan == has_a_plan(case.problem), seed
        feasible += case.has_a_plan
    assert 100 < feasible < 250


@every_search
@draws(range(FEW), range(FEW, MANY))
def test_no_search_is_wrong_about_small_tight_problems(search: Search, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        judge(search, tight(seed, large=False), 0.2)


@every_search
@draws(range(1000, 1001), range(1001, 1006))
def test_no_search_is_wrong_about_tight_problems_of_many_layers(search: Search, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        judge(search, tight(seed, large=True), 0.3)


@pytest.mark.slow
@every_search
def test_no_search_is_wrong_about_hundreds_of_tight_problems_of_many_layers(search: Search) -> None:
    for seed in range(2000, 2200):
        judge(search, tight(seed, large=True), 0.3)


def problem_of(fixed_bytes_L: np.ndarray, capacity_bytes: float, num_devices: int) -> Problem:
    """Layers that hold these bytes and take a second each, on devices of one type."""
    L = len(fixed_bytes_L)
    nothing = np.zeros((1, L))
    return Problem(
        layers=tuple(f"layer {i}" for i in range(L)),
        configurations=(StageConfiguration("a"),),
        device_counts={"a": num_devices},
        costs=AdditiveCosts(
            seconds_CL=nothing + 1.0,
            per_step_seconds_CL=nothing,
            per_step_latency_seconds_C=np.zeros(1),
            fixed_bytes_CL=fixed_bytes_L[None, :].astype(float),
            activation_bytes_CL=nothing,
            temporary_bytes_CL=nothing,
            capacity_bytes_C=np.array([float(capacity_bytes)]),
        ),
        cut_bytes_L1=np.zeros(L + 1),
        link_latency_seconds_CC=np.zeros((1, 1)),
        link_seconds_per_byte_CC=np.zeros((1, 1)),
        schedule="1f1b",
        num_microbatches=4,
    )


@pytest.mark.parametrize("search", [Auto(), Coarse(), Feasible()], ids=lambda search: search.name)
def test_the_one_cut_that_fits_is_found_and_one_byte_less_is_proved(search: Search) -> None:
    uneven = np.where(np.arange(300) < 100, 3.0, 1.5)
    found = solved(search.run(problem_of(uneven, 300, 2), budget_seconds=1.0))
    assert found.plan.cuts == (100,)
    none = search.run(problem_of(uneven, 299, 2), budget_seconds=1.0)
    assert isinstance(none, Infeasible)
    assert "301 bytes on every device would do" in none.proof or "300 bytes on every device would do" in none.proof


def test_a_message_that_only_some_cuts_have_decides() -> None:
    """The cut that leaves the fewest layers has a message that does not fit: a nearer one is needed."""
    base = problem_of(np.ones(10), 8.0, 2)
    messages = np.zeros((1, 11))
    messages[0, :] = 4.0
    messages[0, [0, 10]] = 0.0
    messages[0, 5] = 3.0  # 5 layers and 3 bytes: 8, on both devices
    costs = replace(base.costs, message_bytes_CL1=messages)
    problem = replace(base, costs=costs)
    assert has_a_plan(problem)
    assert solved(Feasible().run(problem)).plan.cuts == (5,)
    messages[0, 5] = 3.5
    problem = replace(base, costs=replace(base.costs, message_bytes_CL1=messages.copy()))
    assert not has_a_plan(problem)
    assert isinstance(Feasible().run(problem), Infeasible)


@draws(range(40), range(40, 150))
def test_messages_of_every_size_never_make_feasible_wrong(seeds: tuple[int, ...]) -> None:
    """Where messages are as large as many layers, of two ends with the same devices neither spares the other."""
    settled = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        L, D = int(rng.integers(3, 14)), int(rng.integers(2, 6))
        base = problem_of(rng.integers(0, 4, L), 1.0, D)
        messages = rng.integers(0, 12, (1, L + 1)).astype(float)
        held = rng.integers(0, 3, (1, L)).astype(float)
        costs = replace(base.costs, message_bytes_CL1=messages, activation_bytes_CL=held)
        for capacity in range(8, 40, 3):
            problem = replace(base, costs=replace(costs, capacity_bytes_C=np.array([float(capacity)])))
            found = Feasible().run(problem, budget_seconds=1.0)
            assert not isinstance(found, NotFound)
            assert isinstance(found, SearchResult) == has_a_plan(problem), (seed, capacity)
            settled += isinstance(found, SearchResult)
    assert 1.3 * len(seeds) < settled < 9.4 * len(seeds)


@pytest.mark.parametrize("search", [Auto(), Coarse()], ids=lambda search: search.name)
def test_configurations_that_are_never_better_do_not_end_the_search(search: Search) -> None:
    """One type, 8 devices, 300 layers: two replicas at ZeRO 0, 1 and 3 that take the same time."""
    base = problem_of(np.ones(300), 200.0, 8)
    configuration = [
        StageConfiguration("a"),
        *(StageConfiguration("a", 1, 2, data_parallel=2, zero_level=z) for z in (0, 1, 3)),
    ]
    parts = np.array([1.0, 1.0, 0.7, 0.5])[:, None]
    costs = AdditiveCosts(
        seconds_CL=np.ones((4, 300)) / np.array([1.0, 2.0, 2.0, 2.0])[:, None],
        per_step_seconds_CL=np.zeros((4, 300)),
        per_step_latency_seconds_C=np.zeros(4),
        fixed_bytes_CL=np.ones((4, 300)) * parts,
        activation_bytes_CL=np.zeros((4, 300)),
        temporary_bytes_CL=np.zeros((4, 300)),
        capacity_bytes_C=np.full(4, 200.0),
    )
    nothing = np.zeros((4, 4))
    problem = replace(
        base,
        configurations=tuple(configuration),
        costs=costs,
        link_latency_seconds_CC=nothing,
        link_seconds_per_byte_CC=nothing,
    )
    found = solved(search.run(problem, budget_seconds=2.0))
    assert 0 < found.lower_bound_seconds <= found.step_seconds


def test_the_table_counts_what_it_judges() -> None:
    title, rows, counts = table(searches="feasible,uniform", num_problems=6, seed=7, budget_seconds=0.2)
    assert "Tight" in title
    assert len(rows) == 12
    assert (counts["false_infeasible"], counts["false_feasible"], counts["crashes"]) == (0, 0, 0)
    assert counts["problems"] == 6 and counts["problems_of_many_layers"] == 3
    wrong = [{**row, "false_infeasible": True} for row in rows]
    assert summary(wrong, ["feasible", "uniform"], [])["false_infeasible"] == 12
