"""The bound on the simulated step: never above a plan's, and near the least; every line below every plan."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.bound.every_plan import count, every_plan, least_by_schedule, small_priced
from dejavu.foundation.errors import InputError
from dejavu.plans import Plan
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.simulation import simulate_plan
from dejavu.simulation._action_table import action_table
from dejavu.simulation.bound import Proof, SimulatedBound, bounding, simulated_lower_bound
from dejavu.simulation.bound._chain import Spans, drop, spans_of, table, weights
from dejavu.simulation.bound._dual import times_of
from dejavu.simulation.bound._paths import busy_lines, drained_lines, longest_path, max_in_flight, most_together
from dejavu.simulation.bound._prefix_sums import bound_problem, memory_shares

EVERY = tuple(SCHEDULES)
MOST_PLANS = 700  # for every plan to be simulated in tenths of a second


def small(seeds: range, most: int = MOST_PLANS) -> list[PricedProblem]:
    return [priced for priced in map(small_priced, seeds) if count(priced, most + 1) <= most]


def additive(priced: PricedProblem) -> AdditiveCosts:
    assert isinstance(priced.problem.costs, AdditiveCosts)
    return priced.problem.costs


def bound(priced: PricedProblem, best_seconds: float, budget_seconds: float = 10.0) -> SimulatedBound:
    return simulated_lower_bound(priced, schedules=EVERY, best_seconds=best_seconds, budget_seconds=budget_seconds)


def some_plans(priced: PricedProblem, rng: np.random.Generator, most: int = 6) -> list[Plan]:
    """Some of each schedule."""
    found = []
    for name in EVERY:
        plans = [plan for _, plan in zip(range(300), every_plan(priced, name), strict=False)]
        found += [plans[i] for i in rng.permutation(len(plans))[:most]]
    return found


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (8, 16))])
def test_is_below_every_plan_of_every_schedule(first: int) -> None:
    for priced in small(range(first, first + 8)):
        least = least_by_schedule(priced)
        best = min(least.values())
        for loose in (1.0, 1.08, np.inf):
            found = bound(priced, best * loose)
            assert all(found.by_schedule[name] <= least[name] for name in EVERY)
            assert found.seconds <= best


@pytest.mark.parametrize("first", range(100, 116, 8))
def test_is_near_the_least(first: int) -> None:
    gaps = []
    for priced in small(range(first, first + 8)):
        best = min(least_by_schedule(priced).values())
        if np.isfinite(best):
            gaps.append(1.0 - bound(priced, best).seconds / best)
    assert np.median(gaps) < 0.01
    assert max(gaps) < 0.03


@pytest.mark.parametrize("seed", range(200, 210))
def test_holds_whatever_the_time_allows(seed: int) -> None:
    priced = small_priced(seed)
    if count(priced, MOST_PLANS + 1) > MOST_PLANS:
        return
    least = least_by_schedule(priced)
    for budget in (0.0, 0.01, 0.05):
        found = bound(priced, min(least.values()) * 1.05, budget_seconds=budget)
        assert all(found.by_schedule[name] <= least[name] for name in EVERY)


@pytest.mark.parametrize("seed", range(250, 258))
def test_time_may_be_given_bit_by_bit(seed: int) -> None:
    priced = small_priced(seed)
    if count(priced, MOST_PLANS + 1) > MOST_PLANS:
        return
    least = least_by_schedule(priced)
    best = min(least.values())
    on_its_way, seconds, spent = bounding(priced, schedules=EVERY, best_seconds=1.05 * best), 0.0, 0.0
    for more in (0.0, 0.002, 0.01, 0.05, 10.0):
        found = on_its_way.go_on(more)
        assert all(found.by_schedule[name] <= least[name] for name in EVERY)
        assert found.seconds <= best and found.spent_seconds >= spent
        if found.plan is None:  # a faster plan lowers what is worth proving
            assert found.seconds >= seconds
        seconds, spent = found.seconds, found.spent_seconds
    whole = bound(priced, 1.05 * best)
    assert found.seconds >= (1 - 2e-3) * min(whole.seconds, best) or found.can_rise


@pytest.mark.parametrize("seed", range(300, 306))
def test_a_faster_plan_that_was_met_is_one(seed: int) -> None:
    priced = small_priced(seed)
    if count(priced, MOST_PLANS + 1) > MOST_PLANS:
        return
    best = min(least_by_schedule(priced).values())
    if np.isfinite(best):
        found = bound(priced, 1.2 * best)
        assert best <= found.plan_seconds <= 1.2 * best
        assert found.seconds <= found.plan_seconds
        if found.plan is not None:
            assert simulate_plan(priced, found.plan).step_seconds == found.plan_seconds


@pytest.mark.parametrize("seed", range(400, 410))
def test_lines_are_below_every_simulated_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    priced = small_priced(seed)
    problem, paths = bound_problem(priced, np.inf), list[float]()
    for plan in some_plans(priced, rng):
        order = action_table(SCHEDULES[plan.schedule], len(plan.stages), plan.num_microbatches)
        stop_S = np.array([stage.stop for stage in plan.stages])
        how_S = np.array([priced.problem.index(stage.configuration) for stage in plan.stages])
        times = times_of(problem.prices, order, stop_S, how_S)
        simulated = simulate_plan(priced, plan)
        assert tuple(max_in_flight(order)) == simulated.in_flight
        seconds, line = longest_path(order, times)
        assert seconds == pytest.approx(line.seconds(times))
        assert seconds <= simulated.step_seconds * (1 + 1e-12)
        paths.append(seconds / simulated.step_seconds)
        if not priced.pass_costs:  # nothing shares a device
            assert seconds == pytest.approx(simulated.step_seconds)
        for other in (*busy_lines(order), *drained_lines(order)):
            assert other.seconds(times) <= simulated.step_seconds * (1 + 1e-12)
    assert not paths or np.median(paths) > 0.7


@pytest.mark.parametrize("name", [name for name in EVERY if SCHEDULES[name].stages_per_rank > 1])
def test_is_below_a_plan_whose_ranks_just_fit(name: str) -> None:
    rng, tried = np.random.default_rng(0), 0
    for seed in range(420, 600):
        priced = small_priced(seed)
        plans = [plan for plan in itertools.islice(every_plan(priced, name), 300) if len(plan.ranks) > 1]
        for plan in map(plans.__getitem__, rng.permutation(len(plans))[:1]):
            simulated = simulate_plan(priced, plan)
            of_ranks = [priced.problem.index(plan.rank_configuration(rank)) for rank in range(len(plan.ranks))]
            capacity_bytes_C = np.zeros(len(priced.problem.configurations))
            np.maximum.at(capacity_bytes_C, of_ranks, simulated.peak_bytes)
            costs = dataclasses.replace(additive(priced), capacity_bytes_C=capacity_bytes_C)
            tight = dataclasses.replace(priced, problem=dataclasses.replace(priced.problem, costs=costs))
            seconds = simulated.step_seconds
            found = simulated_lower_bound(tight, schedules=(name,), best_seconds=1.5 * seconds, budget_seconds=2.0)
            assert found.seconds <= seconds * (1 + 1e-9), (seed, plan)
            tried += 1
        if tried == 6:
            return
    pytest.fail(f"{tried} plans were tried; wanted 6")


@pytest.mark.parametrize("seed", range(410, 420))
def test_shares_of_memory_add_up_to_no_more_than_a_rank_holds(seed: int) -> None:
    """Of any two stages of a rank; and to nearly as much where they are all that it has, and passes need nothing."""
    rng = np.random.default_rng(seed)
    priced, near = small_priced(seed), list[float]()
    costs = additive(priced)
    passing_CL, stepping_CL = costs.temporary_bytes_CL, rng.uniform(0.0, 5.0, costs.temporary_bytes_CL.shape)
    for needs in ({"temporary_bytes_CL": 0.0 * passing_CL}, {"step_bytes_CL": stepping_CL}, {}):
        costed = dataclasses.replace(costs, **needs)
        changed = dataclasses.replace(priced, problem=dataclasses.replace(priced.problem, costs=costed))
        for plan in some_plans(changed, rng):
            order = action_table(SCHEDULES[plan.schedule], len(plan.stages), plan.num_microbatches)
            share_SCLL1 = memory_shares(changed, most_together(order))
            simulated = simulate_plan(changed, plan)
            for rank, own in enumerate(plan.ranks):
                c = changed.problem.index(plan.rank_configuration(rank))
                shares = [float(share_SCLL1[s, c, plan.stages[s].start, plan.stages[s].stop]) for s in own]
                held = simulated.peak_bytes[rank] / float(costed.capacity_bytes_C[c])
                assert sum(sorted(shares)[-2:]) <= held
                if len(own) == 2 and "temporary_bytes_CL" in needs:
                    near.append(sum(shares) / held)
    assert min(near, default=1.0) > 0.8 and max(near, default=1.0) > 0.999


def test_what_cannot_run_counts_as_infinitely_slow() -> None:
    for priced in small(range(500, 506)):
        C, L = priced.forward_seconds_CL.shape
        if C < 2:
            continue
        forward_CL = priced.forward_seconds_CL.copy()
        forward_CL[1, L // 2] = 1e30
        changed = dataclasses.replace(priced, forward_seconds_CL=forward_CL)
        least = least_by_schedule(changed)
        best = min(least.values())
        if np.isfinite(best):
            found = bound(changed, best)
            assert 0.97 * best < found.seconds <= best


def test_scales_with_the_unit_of_time() -> None:
    priced = small(range(600, 605))[0]
    best = min(least_by_schedule(priced).values())
    for unit in (1e-9, 1e-3, 1e6):
        problem = priced.problem
        scaled = PricedProblem(
            dataclasses.replace(
                problem,
                costs=dataclasses.replace(
                    additive(priced),
                    seconds_CL=additive(priced).seconds_CL * unit,
                    per_step_seconds_CL=additive(priced).per_step_seconds_CL * unit,
                    per_step_latency_seconds_C=additive(priced).per_step_latency_seconds_C * unit,
                ),
                link_latency_seconds_CC=problem.link_latency_seconds_CC * unit,
                link_seconds_per_byte_CC=problem.link_seconds_per_byte_CC * unit,
            ),
            priced.forward_seconds_CL * unit,
            priced.backward_seconds_CL * unit,
            {
                name: type(cost)(*(value * unit for value in vars(cost).values()))
                for name, cost in priced.pass_costs.items()
            },
            priced.backward_parts_L2,
        )
        assert bound(scaled, best * unit).seconds == pytest.approx(bound(priced, best).seconds * unit, rel=1e-3)


def test_no_plan_where_nothing_fits() -> None:
    priced = small_priced(0)
    costs = dataclasses.replace(additive(priced), capacity_bytes_C=additive(priced).capacity_bytes_C * 0)
    nothing = dataclasses.replace(priced, problem=dataclasses.replace(priced.problem, costs=costs))
    found = bound(nothing, np.inf)
    assert found.seconds == np.inf
    assert found.proved_by == Proof.NO_PLAN


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(InputError, match="gpipes"):
        simulated_lower_bound(small_priced(0), schedules=("gpipes",), best_seconds=1.0, budget_seconds=1.0)


@pytest.mark.parametrize("seed", range(6))
def test_stages_outside_of_their_span_are_none_that_are_considered(seed: int) -> None:
    """Dropping with spans that are kept narrow leaves what dropping with the widest ones leaves, to the bit."""
    priced = small_priced(seed)
    prices, rng = bound_problem(priced, np.inf).prices, np.random.default_rng(seed)
    order = action_table(SCHEDULES["gpipe"], 2, 4)
    C, L = len(prices.class_C), priced.problem.num_layers
    narrow_SCLL1 = rng.random((2, C, L, L + 1)) < 0.8
    wide_SCLL1 = narrow_SCLL1.copy()
    spans = spans_of(narrow_SCLL1)
    for line in (*busy_lines(order), *drained_lines(order)):
        weigh = weights(line.stage_S5, line.cut_S3, np.zeros(C))
        widest = Spans(np.ones((2, C), np.bool_), np.tile(np.array([0, L + 1], np.int16), (2, C, L, 1)))
        found, wanted = table(prices, weigh, narrow_SCLL1, spans), table(prices, weigh, wide_SCLL1, widest)
        assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
        limit = 1.3 * found.least if np.isfinite(found.least) else 1.0
        left = drop(prices, weigh, found.left_SL1G, narrow_SCLL1, spans, limit)
        assert left == drop(prices, weigh, wanted.left_SL1G, wide_SCLL1, widest, limit)
        assert np.array_equal(narrow_SCLL1, wide_SCLL1)
