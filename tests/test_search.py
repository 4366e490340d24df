"""Properties of every search, and that the exact one is exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, count, pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.foundation.units import plural
from dejavu.importers.alpa.cases import load_case
from dejavu.plans import (
    DoesNotFitError,
    Infeasible,
    NoPlanError,
    NotFound,
    Obstacle,
    Plan,
    Problem,
    solved,
    step_seconds,
)
from dejavu.plans.stage_costs import AdditiveCosts, DenseCosts, PlanError
from dejavu.search import SEARCHES, Balanced, Exact, Exhaustive, Proportional, Search, Uniform
from dejavu.search.balanced import _stage_seconds, balanced_cuts
from dejavu.search.exhaustive import all_plans, count_plans
from dejavu.search.feasible.fit import is_feasible
from dejavu.search.feasible.infeasible import why_infeasible
from dejavu.search.proportional import proportional_cuts
from dejavu.search.shared.rows import plan_of_row, rows_of_one_type, rows_of_several_types
from dejavu.search.uniform import even_cuts
from dejavu.testing.searches import CASES as EVERY_CASE
from dejavu.testing.searches import answer, random_problem
from dejavu.testing.searches import small_problem as small
from tests.conftest import draws

CASES = Path(__file__).parents[2] / "shared" / "data" / "dp_cases"
SOME_CASES = ["K8_8x8_all", "K16_4x8_all", "K32_8x8_all", "K64_4x8_power_of_two", "mem_K32_2x8_power_of_two"]
SOME_CASES += ["tol1mem_K32_2x8_power_of_two", "stage_costs_imputed_K6_B64"]
SEEDS = range(600)

every_search = pytest.mark.parametrize("search", [kind() for kind in SEARCHES.values()], ids=list(SEARCHES))


@every_search
@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.__name__)
def test_every_search_does_what_the_contract_says(search: Search, case: Callable[[Search], None]) -> None:
    case(search)


def test_exact_is_as_good_as_trying_every_plan() -> None:
    feasible = 0
    for seed in SEEDS:
        problem = small(seed)
        exact, best = answer(Exact(), problem), answer(Exhaustive(), problem)
        assert (exact is None) == (best is None), seed
        if exact is not None and best is not None:
            feasible += 1
            assert exact.step_seconds == pytest.approx(best.step_seconds, rel=1e-9), seed
            assert exact.lower_bound_seconds == exact.step_seconds
    assert len(SEEDS) / 4 < feasible < len(SEEDS)


def test_exact_with_costs_that_are_no_sums() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        problem = small(seed)
        shape = problem.costs.dense().seconds_CLL1.shape
        seconds, once = (np.where(rng.random(shape) < 0.15, np.inf, rng.random(shape)) for _ in range(2))
        costs = DenseCosts(seconds, once, rng.integers(0, 5, shape))
        problem = replace(problem, costs=costs)
        exact, best = answer(Exact(), problem), answer(Exhaustive(), problem)
        assert (exact is None) == (best is None), seed
        if exact is not None and best is not None:
            assert exact.step_seconds == pytest.approx(best.step_seconds, rel=1e-9), seed


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@draws(SEEDS[:200], SEEDS[200:])
def test_exact_with_few_stages_is_as_good_as_trying_every_plan(schedule: str, seeds: tuple[int, ...]) -> None:
    worse = refused = 0
    for seed in seeds:
        free = replace(small(seed), schedule=schedule, max_stages=None)
        if seed % 3 == 0:  # memory never binds
            roomy = np.full(len(free.configurations), 1e9)
            free = replace(free, costs=replace(free.costs, capacity_bytes_C=roomy))
        before = answer(Exact(), free)
        for max_stages in range(1, 4):
            problem = replace(free, max_stages=max_stages)
            exact, best = answer(Exact(), problem), answer(Exhaustive(), problem)
            assert (exact is None) == (best is None), (seed, max_stages)
            if exact is None or best is None:
                refused += before is not None
                continue
            assert before is not None
            assert exact.step_seconds == pytest.approx(best.step_seconds, rel=1e-9), (seed, max_stages)
            assert exact.lower_bound_seconds == exact.step_seconds
            assert len(exact.plan.stages) <= max_stages
            worse += exact.step_seconds > before.step_seconds * (1 + 1e-9)
            if len(before.plan.stages) <= max_stages:
                assert exact.step_seconds == pytest.approx(before.step_seconds, rel=1e-9)
    assert worse > len(seeds) / 6
    assert refused > len(seeds) / 12


def test_one_more_stage_allowed_never_makes_exact_worse_and_enough_change_nothing() -> None:
    for seed in range(30):
        free = replace(random_problem(seed, max_layers=12, max_devices=6), max_stages=None)
        before = np.inf
        for max_stages in range(1, free.num_layers + 1):
            result = answer(Exact(), replace(free, max_stages=max_stages))
            price = np.inf if result is None else result.step_seconds
            assert price <= before * (1 + 1e-9)
            before = price
        unbound = answer(Exact(), free)
        assert before == (np.inf if unbound is None else pytest.approx(unbound.step_seconds, rel=1e-9))


def test_exact_is_never_worse_than_what_a_person_does() -> None:
    for seed in range(150):
        problem = random_problem(seed, max_layers=12, max_devices=6)
        by_hand = answer(Uniform(), problem)
        if by_hand is not None:
            assert solved(Exact().run(problem)).step_seconds <= by_hand.step_seconds * (1 + 1e-9)


def test_one_more_device_never_makes_exact_worse() -> None:
    for seed in range(60):
        problem = replace(random_problem(seed, max_layers=8), use_all_devices=False)
        before = answer(Exact(), problem)
        for name in problem.device_counts:
            more = replace(problem, device_counts={**problem.device_counts, name: problem.device_counts[name] + 1})
            after = answer(Exact(), more)
            if before is not None:
                assert after is not None
                assert after.step_seconds <= before.step_seconds * (1 + 1e-9)


def test_a_plan_to_start_from_changes_nothing() -> None:
    for seed in range(60):
        problem = random_problem(seed, max_layers=8)
        best, by_hand = answer(Exact(), problem), answer(Uniform(), problem)
        if best is not None and by_hand is not None:
            again = solved(Exact(incumbent=by_hand.plan).run(problem))
            assert again.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
            assert again.history[0][1] == by_hand.step_seconds


def test_a_gap_that_was_allowed_is_kept() -> None:
    for seed in range(60):
        problem = small(seed)
        best = answer(Exact(), problem)
        if best is not None:
            near = solved(Exact(relative_gap=0.2).run(problem))
            assert near.lower_bound_seconds <= best.step_seconds * (1 + 1e-9)
            assert near.step_seconds * 0.8 <= near.lower_bound_seconds * (1 + 1e-9)


@pytest.mark.parametrize("calls", [0, 1, 2, 4])
def test_exact_out_of_budget_proves_what_it_says(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is replaced by one that runs out after so many dynamic programs."""
    import dejavu.search.exact as module

    solve: Callable = module._Table.solve
    for seed in range(40):
        problem, filled = small(seed), 0
        best = answer(Exact(), problem)
        if best is None:
            continue

        def stopped(table: module._Table, limit: float, cutoff: float):
            nonlocal filled
            if filled == calls:
                raise module._OutOfTimeError
            filled += 1
            return solve(table, limit, cutoff)

        with monkeypatch.context() as patch:
            patch.setattr(module._Table, "solve", stopped)
            if calls == 0:
                late = Exact().run(problem)
                assert isinstance(late, NotFound) and late.obstacle is Obstacle.OUT_OF_TIME
                assert 0 <= late.lower_bound_seconds <= best.step_seconds * (1 + 1e-9)
                result = solved(Exact(incumbent=best.plan).run(problem))
            else:
                result = solved(Exact().run(problem))
        assert result.lower_bound_seconds <= best.step_seconds * (1 + 1e-9)
        assert best.step_seconds <= result.step_seconds * (1 + 1e-9)


def test_what_does_not_fit_is_named_with_the_memory_that_would_do() -> None:
    for seed in range(300):
        problem = random_problem(seed)
        if answer(Exact(), problem) is not None:
            continue
        none = Exact().run(problem)
        assert isinstance(none, Infeasible)
        said = none.proof
        if "on every device would do" in said:
            (least,) = (float(number.replace(",", "")) for number in re.findall(r"([0-9,]+) bytes\)? on every", said))

            def with_memory(num_bytes: float, problem: Problem = problem) -> Problem:
                capacity = np.maximum(problem.costs.capacity_bytes_C, num_bytes)
                return replace(problem, costs=replace(problem.costs, capacity_bytes_C=capacity))

            assert answer(Exact(), with_memory(least)) is not None
            assert answer(Exact(), with_memory(0.99 * least - 2)) is None
        else:
            kinds = ("fits in no stage", "whatever the memory", "whatever the devices' memory", "takes more devices")
            assert any(kind in said for kind in kinds)


def test_no_memory_is_said_to_do_where_that_was_not_settled() -> None:
    """Whichever question has no answer in time; with the nodes' memory as it is, devices' alone may not be enough."""
    said = 0
    for seed in range(150):
        problem = random_problem(seed)
        if is_feasible(problem, 60.0) is not False:
            continue
        for unsettled in range(5):
            asked = count()

            def in_time(problem: Problem, _: float, asked: Iterator[int] = asked, none: int = unsettled) -> bool | None:
                return None if next(asked) == none else is_feasible(problem, 60.0)

            sentence = why_infeasible(problem, in_time, 60.0)
            for number in re.findall(r"([0-9,]+) bytes\)? on every device would do", sentence):
                assert isinstance(problem.costs, AdditiveCosts)
                capacity = np.maximum(problem.costs.capacity_bytes_C, float(number.replace(",", "")))
                assert is_feasible(replace(problem, costs=replace(problem.costs, capacity_bytes_C=capacity)), 60.0)
                said += 1
    assert said > 20


def test_where_too_few_stages_are_allowed_the_number_that_would_do_is_named() -> None:
    named = 0
    for seed in range(300):
        free = replace(random_problem(seed), max_stages=None)
        if answer(Exact(), free) is None:
            continue
        for max_stages in (1, 2):
            problem = replace(free, max_stages=max_stages)
            if answer(Exact(), problem) is not None:
                continue
            with pytest.raises(NoPlanError) as error:
                solved(Exact().run(problem))
            said = re.search(r"at most (\d+ stages?) \(max_stages(.*); (\d+) or more would do\)", str(error.value))
            assert said is not None and said[1] == plural(max_stages, "stage")
            assert ("--microbatches" in said[2]) == (max_stages == problem.num_microbatches)
            enough = int(said[3])
            assert enough > max_stages
            assert all(answer(Exact(), replace(free, max_stages=enough + more)) is not None for more in (0, 1))
            assert answer(Exact(), replace(free, max_stages=enough - 1)) is None
            named += 1
    assert named > 20


def test_a_layer_that_fits_nowhere_is_named() -> None:
    problem = next(p for p in map(random_problem, SEEDS) if p.num_layers == 4 and answer(Exact(), p) is not None)
    fixed = problem.costs.fixed_bytes_CL.copy()
    fixed[:, 2] = 5e9
    with pytest.raises(NoPlanError, match=r"fits in no stage; alone it needs at least 4\.66 GiB \(5,000,"):
        solved(Exact().run(replace(problem, costs=replace(problem.costs, fixed_bytes_CL=fixed))))


@every_search
def test_a_cluster_without_devices_is_refused(search: Search) -> None:
    problem = random_problem(3)
    with pytest.raises(NoPlanError, match="devices"):
        solved(search.run(replace(problem, device_counts=dict.fromkeys(problem.device_counts, 0))))


BASELINES = {"uniform": Uniform(), "proportional": Proportional(), "balanced": Balanced()}


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_are_the_best_of_their_kind_on_any_subset(name: str) -> None:
    """Every plan of the kind is priced here one by one, fitting or not; the baseline's is the cheapest that fits."""
    compared = 0
    mixed = {seed: heterogeneous(seed, num_types=2, num_devices=4, num_layers=6) for seed in range(36, 48)}
    drawn = {seed: random_problem(seed, max_layers=8) for seed in range(120)}
    uneven = [with_free_and_impossible_layers(problem, seed) for seed, problem in (drawn | mixed).items()]
    for problem in [*drawn.values(), *uneven]:
        fitting = []
        for plan in plans_of_kind(name, problem):
            with suppress(PlanError, DoesNotFitError):
                fitting.append(step_seconds(problem, plan))
        found = answer(BASELINES[name], problem)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.step_seconds == pytest.approx(min(fitting), rel=1e-9)
            compared += 1
    assert compared > 40


def with_free_and_impossible_layers(problem: Problem, seed: int) -> Problem:
    """The same where some configurations take no time, and the first layers can end no step under some others."""
    rng, costs = np.random.default_rng(seed), problem.costs
    assert isinstance(costs, AdditiveCosts)
    C, L = costs.seconds_CL.shape
    free_C1, late_C1 = rng.random((2, C, 1)) < 0.3
    impossible_CL = late_C1 & ~free_C1 & (np.arange(L) < rng.integers(L))
    seconds_CL = np.where(free_C1, 0.0, costs.seconds_CL)
    once_CL = np.where(impossible_CL, np.inf, costs.per_step_seconds_CL)
    return replace(problem, costs=replace(costs, seconds_CL=seconds_CL, per_step_seconds_CL=once_CL))


def plans_of_kind(name: str, problem: Problem) -> list[Plan]:
    if name == "balanced":
        return balanced_plans(problem)
    rows = [*rows_of_one_type(problem), *rows_of_several_types(problem)]
    cuts = {"uniform": even_cuts, "proportional": proportional_cuts}[name]
    return [plan_of_row(problem, row, found) for row in rows if (found := cuts(problem, row))]


def balanced_plans(problem: Problem) -> list[Plan]:
    """For each configuration and number of stages, one of the cuts whose slowest stage is fastest, by trying all."""
    plans = []
    for c, configuration in enumerate(problem.configurations):
        room = problem.device_counts[configuration.device_type] // configuration.num_devices
        for S in range(1, min(room, problem.most_stages) + 1):
            slowest = {
                (0, *inner, problem.num_layers): max(
                    problem.costs.stage_seconds(a, b, c) for a, b in pairwise((0, *inner, problem.num_layers))
                )
                for inner in combinations(range(1, problem.num_layers), S - 1)
            }
            least = min(slowest.values())
            cuts = [cut for cut in balanced_cuts(_stage_seconds(problem, c), S) if len(cut) == S + 1]
            if np.isfinite(least):
                assert slowest[tuple(cuts[0])] == pytest.approx(least, rel=1e-12)
                plans.append(plan_of_row(problem, [configuration] * S, cuts[0]))
    return plans


def test_the_referee_counts_what_it_enumerates_and_refuses_the_rest() -> None:
    for seed in range(30):
        problem = small(seed)
        assert count_plans(problem) == sum(1 for _ in all_plans(problem))
    with pytest.raises(NoPlanError, match="at most 1 plans; this one has"):
        solved(Exhaustive(max_plans=1).run(next(p for p in map(small, SEEDS) if count_plans(p) > 1)))


def test_exact_refuses_more_stages_than_it_may_list() -> None:
    with pytest.raises(NoPlanError, match=r"it may take 1e\+02"):
        solved(Exact(max_options_bytes=100).run(random_problem(3, max_layers=12)))


def test_a_wrong_name_gets_a_suggestion() -> None:
    assert named(SEARCHES, "exact") is Exact
    with pytest.raises(InputError, match="did you mean 'exact'"):
        named(SEARCHES, "exakt")


@pytest.mark.skipif(not CASES.exists(), reason="the shared data are absent")
@pytest.mark.parametrize("case", SOME_CASES)
def test_shared_cases_give_the_stored_optimum(case: str) -> None:
    rows = json.loads((CASES / f"{case}.json").read_text())
    for row in rows if isinstance(rows, list) else [rows]:
        problem = load_case(CASES / f"{case}.npz", row["B"])
        result = solved(Exact().run(problem))
        assert result.step_seconds == pytest.approx(row["opt"], rel=1e-6)
        assert result.lower_bound_seconds == result.step_seconds


def test_a_case_in_alpas_form_keeps_what_can_be_best(tmp_path: Path) -> None:
    seconds = np.full((2, 2, 1, 3), np.inf)
    seconds[0, 1, 0] = [3.0, 1.0, 2.0]  # the slowest holds less than the second: dominated
    successors = np.full((2, 2, 1, 3), -1)
    successors[0, 1, 0] = [2, 0, 5]
    path = tmp_path / "case.npz"
    np.savez(path, compute_cost=seconds, max_n_succ_stages=successors, submesh_choices=[[1, 2]], num_devices=2)
    problem = load_case(path, 4)
    assert problem.costs.dense().seconds_CLL1[:, 0, 2].tolist() == [1.0, 2.0]
    assert problem.costs.dense().max_in_flight_CLL1[:, 0, 2].tolist() == [1, 6]
    assert solved(Exact().run(problem)).step_seconds == 1.0 + 3 * 1.0
    np.savez(path, compute_cost=seconds)
    with pytest.raises(InputError, match="has no max_n_succ_stages"):
        load_case(path, 4)
