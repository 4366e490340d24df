"""What the walk, PipeDream's objective, the hybrid and the choice by size promise, each on its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous
from dejavu.plans import (
    Answer,
    DoesNotFitError,
    NoPlanError,
    NotFound,
    Obstacle,
    Plan,
    Problem,
    SearchResult,
    check,
    solved,
    step_seconds,
)
from dejavu.plans.stage_costs import PlanError
from dejavu.search import MCMC, SEARCHES, Auto, Exact, Exhaustive, Hybrid, PipeDream, Search
from dejavu.search._base import Incumbent, TooLargeError
from dejavu.search.exhaustive import all_plans, count_plans
from dejavu.search.hybrid import merged
from dejavu.search.mcmc.moves import CONFIGURATION, FITS, STOP
from dejavu.search.mcmc.walk import rows_for, value
from dejavu.search.shared.stage_table import StageTable, most_scratch, plan_of, stage_cost
from tests.test_search import random_problem, small

MEMBERS: list[Search] = [MCMC(), PipeDream(), Hybrid(), Auto()]
STRANGE = ["one microbatch", "one layer", "one device", "layers that cost nothing", "more devices than layers"]
every_member = pytest.mark.parametrize("search", MEMBERS, ids=[search.name for search in MEMBERS])


def mixed(seed: int, num_layers: int = 12, num_devices: int = 12, num_types: int = 3) -> Problem:
    return heterogeneous(seed, num_types=num_types, num_devices=num_devices, num_layers=num_layers)


def arrays(table: StageTable) -> tuple:
    return table.costs, table.links, table.kinds, table.rules


def busiest_seconds(problem: Problem, plan: Plan) -> float:
    """PipeDream's objective: of a step, without fill and drain."""
    B = problem.num_microbatches
    spans = [(stage.start, stage.stop, problem.index(stage.configuration)) for stage in plan.stages]
    stages = [B * problem.costs.stage_seconds(*span) + problem.costs.per_step_seconds(*span) for span in spans]
    return max(stages + [B * problem.transfer_seconds(b[0], a[2], b[2]) for a, b in pairwise(spans)])


@pytest.mark.parametrize("dense", [False, True])
def test_the_compiled_price_is_the_one_price(dense: bool) -> None:
    priced = 0
    for seed in range(300):
        problem = random_problem(seed, max_layers=9, max_devices=5) if seed % 10 else mixed(seed, num_layers=40)
        if dense:
            problem = replace(problem, costs=problem.costs.dense())
        table = StageTable.of(problem)
        rng, rows = np.random.default_rng(seed), rows_for(table)
        for _ in range(10):
            S = int(rng.integers(1, table.most_stages + 1))
            stops = np.append(np.sort(rng.choice(np.arange(1, problem.num_layers), S - 1, replace=False)), 0)
            stops[-1] = problem.num_layers
            chosen = rng.integers(0, len(problem.configurations), S)
            rows[0][:S, STOP], rows[0][:S, CONFIGURATION] = stops, chosen
            price, distance, _ = value(arrays(table), rows, S)
            starts = [0, *stops[:-1]]
            most = [problem.costs.max_in_flight(a, b, c) for a, b, c in zip(starts, stops, chosen, strict=True)]
            assert rows[0][:S, FITS].tolist() == most
            plan = plan_of(problem, stops, chosen)
            too_many = (rows[2] > table.kinds[1]).any()
            try:
                check(problem, plan)
            except (PlanError, DoesNotFitError):
                assert distance > 0 or too_many
                continue
            priced += 1
            assert distance == 0 and not too_many
            assert price == pytest.approx(step_seconds(problem, plan), rel=1e-13)
    assert priced > 300


def test_the_largest_scratch_of_any_span_is_found() -> None:
    rng = np.random.default_rng(0)
    for L in (1, 15, 16, 17, 100, 333):
        problem = mixed(0, num_layers=L, num_devices=4, num_types=2)
        scratch = rng.random(problem.costs.temporary_bytes_CL.shape)
        problem = replace(problem, costs=replace(problem.costs, temporary_bytes_CL=scratch))
        _, scratch_CL3, span_CKM, _ = StageTable.of(problem).costs
        for _ in range(200):
            start = int(rng.integers(0, L))
            stop = int(rng.integers(start + 1, L + 1))
            assert most_scratch(scratch_CL3, span_CKM, start, stop, 1) == scratch[1, start:stop].max()


def test_quotients_are_rounded_down_as_the_costs_do_it() -> None:
    rng = np.random.default_rng(0)
    for seed in range(40):
        problem = mixed(seed, num_layers=8, num_devices=4, num_types=2)
        held = rng.choice([0.1, 0.3, 0.7, 1.1], problem.costs.activation_bytes_CL.shape)
        costs = replace(
            problem.costs,
            activation_bytes_CL=held,
            fixed_bytes_CL=0.0 * held,
            temporary_bytes_CL=0.0 * held,
            capacity_bytes_C=np.round(rng.random(len(held)) * 9, 1),
        )
        table = StageTable.of(replace(problem, costs=costs))
        for c in range(len(held)):
            for start, stop in ((0, 1), (0, 3), (2, 8)):
                assert stage_cost(table.costs, start, stop, c)[2] == costs.max_in_flight(start, stop, c)


def test_the_walk_finds_a_plan_near_the_best_where_memory_binds() -> None:
    gaps = []
    for seed in range(5):
        problem = mixed(seed, num_layers=20)
        best, found = solved(Exact().run(problem)), solved(MCMC().run(problem))
        assert best.step_seconds <= found.step_seconds * (1 + 1e-9)
        gaps.append(found.step_seconds / best.step_seconds - 1)
    assert float(np.median(gaps)) < 0.02 and max(gaps) < 0.25


def test_a_walk_from_a_plan_is_never_worse_than_it_and_leaves_the_other_chains_as_they_are() -> None:
    for seed in range(4):
        problem = mixed(seed)
        start, alone = solved(PipeDream().run(problem)), solved(MCMC(num_steps=4000).run(problem))
        found = solved(MCMC(num_steps=4000, incumbent=start.plan).run(problem))
        assert found.step_seconds <= min(start.step_seconds, alone.step_seconds)
        assert found.history[0][1] == start.step_seconds


def test_hundreds_of_layers_take_no_longer_to_price() -> None:
    problem = mixed(1, num_layers=600, num_devices=48, num_types=4)
    result = solved(MCMC(num_steps=4000).run(problem))
    check(problem, result.plan)
    assert solved(PipeDream().run(problem)).step_seconds > 0


def test_pipedreams_bottleneck_is_the_least_of_all_plans_on_one_type() -> None:
    one = several = 0
    for seed in range(300):
        problem = random_problem(seed)
        if count_plans(problem) > 1500:
            continue
        least = np.inf
        for plan in all_plans(problem):
            try:
                check(problem, plan)
            except (PlanError, DoesNotFitError):
                continue
            least = min(least, busiest_seconds(problem, plan))
        used = {configuration.device_type for configuration in problem.configurations}
        alone = len(used) == 1 and (not problem.use_all_devices or sum(map(bool, problem.device_counts.values())) == 1)
        try:
            found = busiest_seconds(problem, solved(PipeDream().run(problem)).plan)
        except NoPlanError:
            assert not alone or least == np.inf
            continue
        assert found >= least * (1 - 1e-9)
        several += not alone
        if alone:
            one += 1
            assert found <= least * (1 + 1e-5)
    assert one > 30 and several > 30


def test_pipedream_considers_some_cuts_of_many_layers_and_some_orders_of_many_types() -> None:
    problem = mixed(2, num_layers=60, num_devices=20, num_types=4)
    every, some = solved(PipeDream().run(problem)), solved(PipeDream(max_cuts=20, max_orders=3).run(problem, seed=1))
    assert busiest_seconds(problem, every.plan) <= busiest_seconds(problem, some.plan) * (1 + 1e-6)


@every_member
def test_names_and_orders_of_layers_and_types_change_nothing(search: Search) -> None:
    for seed in range(4):
        problem = mixed(seed) if seed % 2 else small(seed)
        new = {name: f"renamed {9 - i}" for i, name in enumerate(problem.device_counts)}
        renamed = replace(
            problem,
            layers=tuple(reversed(problem.layers)),
            configurations=tuple(replace(c, device_type=new[c.device_type]) for c in problem.configurations),
            device_counts={new[name]: count for name, count in problem.device_counts.items()},
        )
        assert price_of(search, problem) == price_of(search, renamed)


def price_of(search: Search, problem: Problem) -> float | None:
    found = search.run(problem, budget_seconds=60.0)
    return found.step_seconds if isinstance(found, SearchResult) else None


@every_member
def test_a_tenth_of_a_second_is_enough_for_a_plan(search: Search) -> None:
    for seed in range(3):
        problem = mixed(seed, num_layers=24, num_devices=16)
        result = solved(search.run(problem, budget_seconds=0.1))
        check(problem, result.plan)
        assert 0 <= result.lower_bound_seconds <= result.step_seconds == step_seconds(problem, result.plan)


@every_member
@pytest.mark.parametrize(
    "case", ["one microbatch", "one layer", "one device", "layers that cost nothing", "few layers"]
)
def test_small_and_strange_problems(search: Search, case: str) -> None:
    problem = mixed(3)
    if case == "one microbatch":
        problem = replace(problem, num_microbatches=1, max_stages=None)
    elif case == "layers that cost nothing":
        nothing = 0.0 * problem.costs.seconds_CL
        latency = 0.0 * problem.costs.per_step_latency_seconds_C
        free = replace(
            problem.costs, seconds_CL=nothing, per_step_seconds_CL=nothing, per_step_latency_seconds_C=latency
        )
        problem = replace(problem, costs=free, cut_bytes_L1=0.0 * problem.cut_bytes_L1)
    else:
        problem = mixed(3, num_layers={"one layer": 1, "more devices than layers": 3}.get(case, 12))
        roomy = replace(problem.costs, capacity_bytes_C=1e15 * np.ones(len(problem.configurations)))
        problem = replace(problem, costs=roomy)
        if case == "one device":
            problem = replace(problem, device_counts={n: int(i == 0) for i, n in enumerate(problem.device_counts)})
    result = solved(search.run(problem, budget_seconds=60.0))
    best = solved(Exact().run(problem))
    check(problem, result.plan)
    assert best.step_seconds <= result.step_seconds * (1 + 1e-9)
    assert result.lower_bound_seconds <= best.step_seconds * (1 + 1e-9)


@every_member
def test_where_nothing_fits_it_is_said(search: Search) -> None:
    problem = mixed(3)
    tight = replace(problem.costs, capacity_bytes_C=np.full(len(problem.configurations), 1e6))
    with pytest.raises(NoPlanError, match="fit"):
        solved(search.run(replace(problem, costs=tight), budget_seconds=60.0))


def test_the_hybrid_is_never_worse_than_a_parent_and_proves_what_exact_proves() -> None:
    for seed in range(4):
        problem = mixed(seed, num_layers=16)
        exact, walk, hybrid = solved(Exact().run(problem)), solved(MCMC().run(problem)), solved(Hybrid().run(problem))
        assert hybrid.step_seconds <= min(exact.step_seconds, walk.step_seconds) * (1 + 1e-9)
        assert hybrid.lower_bound_seconds == pytest.approx(exact.lower_bound_seconds, rel=1e-9)


def test_the_hybrids_history_is_below_both_parents_where_they_are_much_earlier() -> None:
    """Four times as late and a second more: what a loaded machine and one core may cost."""
    problem = mixed(5, num_layers=24, num_devices=20, num_types=4)
    hybrid = solved(Hybrid().run(problem, budget_seconds=20.0)).history
    for parent in (MCMC(), Exact()):
        for seconds, price in solved(parent.run(problem, budget_seconds=4.0)).history:
            assert min(p for t, p in hybrid if t <= 4 * seconds + 1.0) <= price * (1 + 1e-9)


def test_merged_histories_are_the_better_of_all_at_any_time() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        histories = []
        for _ in range(3):
            n = int(rng.integers(0, 6))
            rows = zip(np.sort(rng.random(n)), -np.sort(-rng.random(n)), strict=True)
            histories.append(tuple((float(t), float(p)) for t, p in rows))
        one = merged(histories)
        assert all(a[0] <= b[0] and a[1] > b[1] for a, b in pairwise(one))
        for at in rng.random(10) * 2:
            so_far = [price for rows in histories for t, price in rows if t <= at]
            assert min((p for t, p in one if t <= at), default=np.inf) == min(so_far, default=np.inf)


@dataclass(frozen=True)
class _Waits(Search):
    """Offers a plan and waits until no time remains."""

    name: ClassVar[str] = "waits"
    incumbent: Plan | None = None

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        assert self.incumbent is not None
        best.offer(self.incumbent)
        while best.remaining_seconds > 0:
            pass
        return best.result(0.0)


@dataclass(frozen=True)
class _Refuses(Search):
    name: ClassVar[str] = "refuses"

    def _answer(self, problem: Problem, best: Incumbent, seed: int) -> Answer:
        raise TooLargeError("too large")


def test_the_hybrid_stops_the_other_parent_when_the_answer_is_proved() -> None:
    result = solved(
        Hybrid(searching=(_Waits(),), alone_seconds=0.0).run(mixed(1), budget_seconds=1e6)
    )  # waiting for the budget would take days
    assert result.lower_bound_seconds == result.step_seconds


def test_the_hybrid_without_a_proof_has_the_other_parents_plan_and_no_bound() -> None:
    problem = mixed(1)
    result = solved(Hybrid(proving=_Refuses()).run(problem))
    assert result.step_seconds <= solved(MCMC().run(problem)).step_seconds
    assert result.lower_bound_seconds == 0.0
    refusing = Hybrid(quick=_Refuses(), fitting=_Refuses(), searching=(_Refuses(),), proving=_Refuses())
    none = refusing.run(problem)
    assert isinstance(none, NotFound) and none.obstacle is Obstacle.TOO_LARGE and "refuses: too large" in none.reason
    alone = solved(Hybrid(quick=_Refuses(), searching=(_Refuses(),)).run(problem))
    assert alone.lower_bound_seconds == alone.step_seconds


def test_auto_picks_by_size_and_budget_and_says_what() -> None:
    tiny, large, long = small(3), mixed(1, 48, 64, 4), mixed(1, 300, 8, 2)
    auto = Auto()
    assert auto.pick(tiny, 1.0) is auto.small
    assert auto.pick(large, 1.0) is auto.mixed
    assert auto.pick(long, 1.0) is auto.long
    assert auto.pick(mixed(1), 1e-6) is auto.mixed
    assert Auto(long_layers=2).pick(replace(mixed(1), costs=mixed(1).costs.dense()), 1.0) is not auto.long
    assert solved(auto.run(mixed(1))).search == "auto: exact"
    assert replace(auto, small=Exhaustive()).run(tiny).search == "auto: exhaustive"


def test_every_member_is_in_the_registry() -> None:
    for search in MEMBERS:
        assert SEARCHES[search.name] is type(search)
