"""What the bounds for thousands of layers ask of levels: which stages fit, states over more cuts, the first prices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from threading import Event
from typing import Any

import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous, operators
from dejavu.plans import is_valid
from dejavu.plans.stage_costs import Floats
from dejavu.search import Exact, Exhaustive
from dejavu.search._base import Incumbent
from dejavu.search.coarse.busiest import least_bottleneck_seconds
from dejavu.search.coarse.clusters import boundaries
from dejavu.search.coarse.levels import counted
from dejavu.search.coarse.levels.leveled import Ints, Leveled
from dejavu.search.coarse.looking.deepening import CUTS_EACH
from dejavu.search.coarse.ranges import Range, Ranges, Sought
from dejavu.search.coarse.relaxed import Kept, Relaxed, States
from dejavu.search.coarse.windowed import WindowedBound
from dejavu.search.exhaustive import all_plans
from dejavu.search.pipedream import PipeDream
from dejavu.search.shared.stage_table import StageTable, stage_cost
from tests.test_counted_stages import SEARCHED, parts, with_plan
from tests.test_search import answer, small, solved


@pytest.mark.parametrize("schedule", SEARCHED)
def test_stages_that_fit_on_each_level_are_those_that_the_costs_let_fit(schedule: str) -> None:
    """Asked for level by level by several threads, as far as memory goes."""
    for seed in range(4):
        problem = heterogeneous(seed, num_types=2, num_devices=9, num_layers=24, schedule=schedule)
        relaxed = Relaxed(problem, with_plan(problem, solved(Exact().run(problem)).plan, above=1e6))
        stops = Leveled.stops_of(relaxed, 5)
        with ThreadPoolExecutor(max_workers=4) as pool:
            asked = [pool.submit(stops.upto, num) for num in (1, 3, 5, 2, 4)]
            found_N1CL = max((one.result() for one in asked), key=len)
        for n, place in np.ndindex(len(found_N1CL), len(relaxed.kept)):
            c, need = relaxed.kept[place], problem.in_flight(0, n + 1)
            free = replace(problem.costs, message_bytes_CL1=np.zeros((1, 1)))  # those at the cuts are taken as least
            for start in range(problem.num_layers):
                stop = int(found_N1CL[n, place, start])
                if stop < problem.num_layers:
                    assert problem.costs.max_in_flight(start, stop + 1, c) < need
                if stop > start:
                    assert free.max_in_flight(start, stop, c) >= need


def test_states_over_more_cuts_hold_every_state_next_to_those_that_were_there() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        L, levels = int(rng.integers(5, 40)), int(rng.integers(1, 8))
        cuts = np.union1d([0, L], rng.choice(np.arange(1, L), int(rng.integers(1, L - 1)), replace=False))
        few = States(rng.random((levels + 1, len(cuts))) < 0.4, rng.random((levels + 1, 3)) < 0.4)
        wanted = int(rng.integers(1, 10))
        many = few.over(cuts, np.arange(L + 1), wanted)
        assert many.num_levels == wanted
        for n, at in np.argwhere(few.alive_NL1):  # the last level stands for all from it on
            for level in range(int(n), max(int(n), wanted) + 1) if n == levels else (int(n),):
                near = np.arange(cuts[max(at - 1, 0)] + 1, cuts[min(at + 1, len(cuts) - 1)])
                assert many.alive_NL1[min(level, wanted), [*near, cuts[at]]].all()
        for n, c in np.argwhere(few.used_NC):
            assert many.used_NC[min(int(n), wanted), c]


def test_first_prices_of_few_cuts_are_a_bound_with_every_cut() -> None:
    """Now and then a nearer one than the prices of few cuts are, now and then not: they say nothing of other states."""
    nearer = 0
    for seed in range(5):
        problem = operators(seed, num_operators=600, num_devices=24, num_types=2)
        few_cuts = boundaries(problem, 60)
        plan = solved(PipeDream().run(problem)).plan
        relaxed = Relaxed(problem, with_plan(problem, plan))
        few, every = Leveled(relaxed.at_cuts(few_cuts)), Leveled(relaxed)
        _, bottleneck = parts(problem, plan)
        known = few.tightened(few.everything(), bottleneck, np.inf)
        met = [few.what_was_met(bottleneck, known)]
        prices_R = every.guessed(met, bottleneck, np.inf)
        assert prices_R is not None
        sums = [
            every.closer(every.everything_at(one), bottleneck, np.inf).sum_seconds for one in (known.prices_R, prices_R)
        ]
        assert max(sums) <= parts(problem, plan)[0] * (1 + 1e-9)
        nearer += sums[1] > sums[0]
    assert nearer > 0


@pytest.mark.parametrize("gap", [0.3, 0.9, 0.999])
def test_a_gap_that_leaves_no_range_is_proved_at_once(gap: float) -> None:
    problem = heterogeneous(1, num_types=2, num_devices=9, num_layers=14)
    result = solved(Exact().run(problem))
    bound = WindowedBound(problem, with_plan(problem, result.plan)).prove(gap)
    assert result.step_seconds * (1 - gap) * (1 - 1e-6) <= bound <= result.step_seconds * (1 + 1e-9)


def test_what_stages_of_some_configurations_cost_is_there_when_those_are_asked_for() -> None:
    problem = heterogeneous(2, num_types=2, num_devices=9, num_layers=40)
    some = replace(problem)  # a problem of its own, of which no table was made
    whole, half = StageTable.of(problem), StageTable.of(some, range(0, len(problem.configurations), 2))
    for c in range(0, len(problem.configurations), 2):
        for start, stop in ((0, 1), (3, 29), (0, 40)):
            assert stage_cost(half.costs, start, stop, c) == stage_cost(whole.costs, start, stop, c)
    whole = StageTable.of(some)
    assert stage_cost(whole.costs, 3, 29, 1) == stage_cost(StageTable.of(problem).costs, 3, 29, 1)


@pytest.mark.parametrize("schedule", SEARCHED)
def test_no_better_plan_has_a_bottleneck_below_the_least_one(schedule: str) -> None:
    """Every plan is tried."""
    looked = 0
    for seed in range(30):
        problem = replace(small(seed), schedule=schedule)
        result = answer(Exhaustive(), problem)
        if result is None or result.step_seconds == 0:
            continue
        for above in (1.01, 1.5, 1e6):
            best = with_plan(problem, result.plan, above)
            least = least_bottleneck_seconds(Relaxed(problem, best))
            for plan in all_plans(problem):
                if is_valid(problem, plan) and sum(parts(problem, plan)) < best.step_seconds:
                    assert parts(problem, plan)[1] >= least * (1 - 1e-9), (seed, above)
                    looked += least > 0
    assert looked > 100


def test_what_all_devices_together_need_is_their_share_of_all_layers() -> None:
    problem = operators(1, num_operators=40, num_devices=8, num_types=1)
    alone = tuple(one for one in range(len(problem.configurations)) if problem.configurations[one].num_devices == 1)[:1]
    relaxed = Relaxed(problem, with_plan(problem, solved(Exact().run(problem)).plan, 1e6), np.array(alone))
    busy_seconds = float(relaxed.costs.busy_CL1[0, -1])
    assert busy_seconds > 0
    assert least_bottleneck_seconds(relaxed) == pytest.approx(busy_seconds / 8, rel=1e-6)


def test_the_sum_under_one_limit_holds_of_all_ranges_below_it_also_of_those_that_are_looked_at() -> None:
    problem = heterogeneous(3, num_types=2, num_devices=9, num_layers=14)
    result = solved(Exact().run(problem))
    ranges = Ranges(with_plan(problem, result.plan))
    known, unit = Kept(np.arange(1), np.zeros(15, dtype=np.int64), np.zeros(1)), 0.1 * result.step_seconds
    parts_of_it = [Range(0.0, k, k * unit, (k + 1) * unit, known) for k in range(4)]

    def split(at: Range, target: float) -> list[Range]:
        if at.low == 0.0:  # it is not among those that are left while this becomes known
            ranges.know(3 * unit, 4 * unit)
        return [replace(at, is_done=True)]

    assert ranges.prove(parts_of_it, 0.0, split) == pytest.approx(3 * unit)  # of the uppermost no more is known
    assert {part.low: part.bound for part in ranges.left} == pytest.approx(
        {0.0: 4 * unit, unit: 5 * unit, 2 * unit: 6 * unit, 3 * unit: 3 * unit}
    )


def test_of_limits_in_any_order_the_most_is_known_that_any_of_them_says() -> None:
    problem = heterogeneous(3, num_types=2, num_devices=9, num_layers=14)
    best = with_plan(problem, solved(Exact().run(problem)).plan)
    known = Kept(np.arange(1), np.zeros(15, dtype=np.int64), np.zeros(1))
    for seed in range(50):
        rng = np.random.default_rng(seed)
        said = [(float(limit), float(sum_seconds)) for limit, sum_seconds in rng.integers(1, 9, (12, 2))]
        ranges = Ranges(best)
        ranges.left = [Range(float(bound), k, k, k + 1.0, known) for k, bound in enumerate(rng.integers(1, 9, 8))]
        at_first = [part.bound for part in ranges.left]
        for count, (limit, sum_seconds) in enumerate(said, 1):
            ranges.know(limit, sum_seconds)
            for part, bound in zip(ranges.left, at_first, strict=True):
                sums = [seconds for limit, seconds in said[:count] if limit >= part.high]
                assert part.bound == max([bound, *(part.low + seconds for seconds in sums)]), (seed, count)


@pytest.mark.parametrize("schedule", SEARCHED)
def test_a_proof_of_few_layers_looks_at_few_ranges(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slivers of a range, and beams that each prove a percent more, came to 1,647 of one problem."""
    looked = [0]

    def counted(search: WindowedBound, *asked: Any) -> list[Range]:
        looked[-1] += 1
        return split(search, *asked)

    split = WindowedBound.split
    monkeypatch.setattr(WindowedBound, "split", counted)
    for seed in (3, 13, 16, 22, 24, 54):
        problem = replace(small(seed), schedule=schedule)
        problem = replace(problem, max_stages=1 + seed % 3 if seed % 2 else problem.max_stages)
        result = answer(Exhaustive(), problem)
        if result is None:
            continue
        looked.append(0)
        bound = WindowedBound(problem, with_plan(problem, result.plan)).prove(1e-3)
        assert (1 - 2e-3) * result.step_seconds <= bound <= result.step_seconds * (1 + 1e-9), seed
    assert len(looked) > 4 and 10 < max(looked) < 400, looked


def test_a_beam_that_has_no_more_time_proves_nothing() -> None:
    problem = operators(1, num_operators=60, num_devices=12, num_types=2)
    best = with_plan(problem, solved(Exact(relative_gap=0.05).run(problem)).plan, 1.2)
    leveled = Leveled(Relaxed(problem, best))
    known = leveled.tightened(leveled.everything(), np.inf, np.inf)
    cutoff = known.sum_seconds * 2
    plan, bound_seconds = leveled.plan_under(known, np.inf, cutoff, 64, proves=True)
    assert plan is not None and bound_seconds >= known.sum_seconds * (1 - 1e-9)
    assert leveled.plan_under(known, np.inf, cutoff, 64, until_seconds=-1.0) == (None, -np.inf)


def test_a_thread_with_nothing_to_do_looks_at_what_the_last_proof_wants() -> None:
    problem = heterogeneous(3, num_types=2, num_devices=9, num_layers=14)
    result = solved(Exact().run(problem))
    ranges, seconds = Ranges(with_plan(problem, result.plan)), result.step_seconds
    ranges.final_gap = 0.01
    known, ahead, targets = Kept(np.arange(1), np.zeros(15, dtype=np.int64), np.zeros(1)), Event(), {}

    def split(at: Range, target: float) -> list[Range]:
        targets[at.tie] = target
        if at.tie == 1:
            assert ahead.wait(60)  # the other thread looks at the other range meanwhile
        else:
            ahead.set()
        return [replace(at, bound=target)]

    with ThreadPoolExecutor(max_workers=1) as pool:
        helper = pool.submit(ranges.help, split)
        left = [Range(0.5 * seconds, 1, 0.0, 0.1 * seconds, known), Range(0.95 * seconds, 2, 0.1, seconds, known)]
        proved = ranges.prove(left, 0.1, split)
        ranges.close()
        helper.result()
    assert proved == pytest.approx(0.9 * seconds)
    assert targets == pytest.approx({1: 0.9 * seconds, 2: 0.99 * seconds})


@pytest.mark.parametrize("early", [0.2, 0.5])
def test_stages_that_end_early_are_those_that_reach_so_far_and_a_part_of_what_comes_next(early: float) -> None:
    """Every configuration, start and stop over few cuts, by hand: time and memory of what is left of the last part."""
    further = 0
    for seed in range(6):
        problem = heterogeneous(seed, num_types=2, num_devices=9, num_layers=40)
        relaxed = Relaxed(problem, Incumbent(problem, "test", 60.0)).at_cuts(boundaries(problem, 12))
        roomy, need = relaxed.ending_early(early), np.array([1, 3, 7])
        limit = 0.2 * float(relaxed.costs.busy_CL1[:, -1].min())
        costs, among = roomy.costs, np.arange(len(relaxed.kept))
        busy_CL = counted.busy_stops(limit, costs, among)
        fitting_NCL = np.empty((len(need), *costs.scratch_CL.shape), np.int32)
        counted.fitting_stops(need, costs, fitting_NCL)
        assert (busy_CL >= counted.busy_stops(limit, relaxed.costs, among)).all(), seed
        for c, start in product(among, range(costs.scratch_CL.shape[1])):
            stops = np.arange(start + 1, costs.end_CL[c, start] + 1)

            def taken(table_CL1: Floats, c: int = c, start: int = start, stops: Ints = stops) -> Floats:
                last = table_CL1[c, stops] - table_CL1[c, stops - 1]
                return np.asarray(table_CL1[c, stops] - early * last - table_CL1[c, start])

            is_quick = taken(costs.busy_CL1) + costs.per_step_C[c] <= limit
            assert busy_CL[c, start] == stops[is_quick].max(initial=start), (seed, c, start)
            scratch = np.maximum.accumulate(costs.scratch_CL[c, start : costs.end_CL[c, start]])
            for n, held in enumerate(need):
                free = costs.capacity_C[c] - taken(costs.fixed_CL1)
                fits = (scratch + held * taken(costs.active_CL1) <= free) & (taken(costs.step_CL1) <= free)
                assert fitting_NCL[n, c, start] == stops[fits].max(initial=start), (seed, c, start, n)
        further += int((busy_CL > counted.busy_stops(limit, relaxed.costs, among)).sum())
    assert further > 20


def test_where_no_cut_is_missing_no_stage_ends_early() -> None:
    problem = heterogeneous(0, num_types=2, num_devices=9, num_layers=12)
    relaxed = Relaxed(problem, Incumbent(problem, "test", 60.0))
    every, few = Leveled(relaxed), Leveled(relaxed.at_cuts(boundaries(problem, 6)))
    assert every.ending_early(0.2) is every
    assert few.ending_early(0.2) is not few


def test_a_proof_counts_as_many_stages_as_plans_have_where_the_best_one_has_few() -> None:
    """A first plan of few stages, and a count of many: else the last level would stand for most of them."""
    problem = operators(1, num_operators=300, num_devices=48, num_types=2)
    best = Incumbent(problem, "test", 60.0)
    found = solved(PipeDream().run(problem, budget_seconds=10))
    best.offer(found.plan)
    bound, sought = WindowedBound(problem, best), Sought()
    many = min(3 * bound._wanted_levels, bound._stops.most_levels)
    assert many > max(1.5 * bound._wanted_levels, problem.num_layers / CUTS_EACH)
    sought.count(many)
    sought.end()
    bound.prove(0.2, sought)
    assert bound._looks.leveled is not None
    assert bound._looks.leveled.num_levels == many


def test_prices_that_proved_most_are_told_with_what_they_prove() -> None:
    """Passes may prove less than one before; the most is that of the prices that are kept, among all states or more."""
    looked, less = 0, 0
    for seed in range(12):
        problem = heterogeneous(seed, num_types=2, num_devices=9, num_layers=16)
        best = with_plan(problem, solved(Exact().run(problem)).plan, above=1.2)
        assert best.plan is not None
        sum_seconds, bottleneck = parts(problem, best.plan)
        leveled, before = Leveled(Relaxed(problem, best)), -np.inf
        known, limit = leveled.everything(), 1.05 * bottleneck
        for _ in range(4):
            known = leveled.closer(known, limit, 2.0 * sum_seconds)
            assert known.proved_R is not None
            assert before <= known.proved_seconds <= min(known.sum_seconds, sum_seconds) * (1 + 1e-7), seed
            plan = leveled.cheapest(leveled.everything_at(known.proved_R), limit)
            assert plan is not None
            alone = plan.bound_seconds(known.proved_R, leveled._relaxed.devices.count_R)
            assert alone <= known.proved_seconds + 1e-7 * sum_seconds, seed
            less += bool(known.proved_seconds == before)
            before, looked = known.proved_seconds, looked + 1
    assert looked == 48
    assert less > 0, "no pass proved less than one before"
