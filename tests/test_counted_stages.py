"""The bounds for thousands of layers against the best plan: stages counted in the state, and aside."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous, operators
from dejavu.plans import Plan, Problem, is_valid, price, step_seconds
from dejavu.plans.schedule import SCHEDULES
from dejavu.search import Coarse, Exact, Exhaustive
from dejavu.search._base import Incumbent
from dejavu.search.coarse import clusters, windowed
from dejavu.search.coarse.clusters import boundaries, clustered, unclustered
from dejavu.search.coarse.levels import counted
from dejavu.search.coarse.levels.beams import Beams
from dejavu.search.coarse.levels.leveled import Leveled
from dejavu.search.coarse.looking.survey import Survey
from dejavu.search.coarse.ranges import Range, Ranges, Sought
from dejavu.search.coarse.relaxation import Windowed
from dejavu.search.coarse.relaxed import Kept, Relaxed
from dejavu.search.coarse.undominated import Undominated
from dejavu.search.coarse.windowed import WindowedBound
from dejavu.search.exhaustive import all_plans
from tests.conftest import draws
from tests.test_search import answer, small

SEARCHED = [name for name, schedule in SCHEDULES.items() if schedule.stages_per_rank == 1]


def with_plan(problem: Problem, plan: Plan, above: float = 1.0) -> Incumbent:
    """A search that has this plan, and takes it for one that is so much dearer."""
    best = Incumbent(problem, "test", 60.0)
    best.offer(plan)
    best.step_seconds *= above
    return best


def parts(problem: Problem, plan: Plan) -> tuple[float, float]:
    """Σ and the bottleneck of a plan, in seconds."""
    cost = price(problem, plan)
    sum_seconds = sum(cost.stage_seconds) + sum(cost.transfer_seconds)
    return sum_seconds, cost.step_seconds - sum_seconds


@draws(range(10), range(10, 30))
@pytest.mark.parametrize("schedule", SEARCHED)
def test_no_bound_is_above_the_best_of_all_plans(schedule: str, seeds: tuple[int, ...]) -> None:
    """Every plan is tried: memory that binds, numbers of stages that bind, devices that must be used."""
    looked = 0
    for seed in seeds:
        problem = replace(small(seed), schedule=schedule)
        problem = replace(problem, max_stages=1 + seed % 3 if seed % 2 else problem.max_stages)
        result = answer(Exhaustive(), problem)
        if result is None or result.step_seconds == 0:
            continue
        for above in (1.0, 1.3):
            best = with_plan(problem, result.plan, above)
            bound = WindowedBound(problem, best, num_ranges=1 + 2 * (seed % 2)).prove(1e-3)
            assert bound <= result.step_seconds * (1 + 1e-9), (seed, above)
        looked += 1
    assert looked > len(seeds) / 7


@draws(range(2), range(2, 5))
@pytest.mark.parametrize("schedule", SEARCHED)
@pytest.mark.parametrize("use_all", [False, True])
def test_states_that_are_left_hold_the_best_plan(schedule: str, use_all: bool, seeds: tuple[int, ...]) -> None:
    """Σ, states and configurations under any limit and cutoff that the best plan keeps to; with a last level that is
    open, too, and as left under a higher limit."""
    looked = 0
    for seed in seeds:
        problem = heterogeneous(seed, num_types=2, num_devices=9, num_layers=14, schedule=schedule)
        problem = replace(problem, use_all_devices=use_all)
        result = answer(Exact(), problem)
        if result is None:
            continue
        sum_seconds, bottleneck = parts(problem, result.plan)
        relaxed = Relaxed(problem, with_plan(problem, result.plan))
        instead = Undominated.of(problem).plan(result.plan)
        kept = [problem.configurations[c] for c in relaxed.kept]
        fewer = Leveled(relaxed, 2, Leveled.stops_of(relaxed))
        for leveled in (Leveled(relaxed), Leveled(relaxed, num_levels=2), fewer):
            above = leveled.closer(leveled.everything(), bottleneck * 1.5, np.inf)
            assert above.through is not None
            for wider in (1.0001, 1.05, 1.3):
                known = leveled.everything()
                for begin in (known, replace(known, states=above.through.below(sum_seconds * wider))):
                    known = begin
                    for _ in range(2):  # from what is known more follows
                        known = leveled.tightened(known, bottleneck * wider, sum_seconds * wider)
                    assert known.sum_seconds <= sum_seconds * (1 + 1e-7), (seed, wider)
                    assert known.states is not None
                    for states in (known.states, known.states.deeper(leveled.num_levels + 3)):
                        for k, stage in enumerate(result.plan.stages):
                            level = min(len(result.plan.stages) - k, states.num_levels)
                            assert states.alive_NL1[level, stage.start], (seed, wider)
                            c = kept.index(instead.stages[k].configuration)
                            assert states.used_NC[level, c] or instead.stages[k] != stage, (seed, wider)
                    looked += 1
    assert looked > 8


@pytest.mark.parametrize("schedule", SEARCHED)
def test_where_less_is_enough_states_hold_all_plans_up_to_the_cutoff(schedule: str) -> None:
    """A proof of more goes on with what a proof of less left: plans that cost more than was proved are still there."""
    looked = 0
    for seed in range(6):
        problem = heterogeneous(seed, num_types=2, num_devices=9, num_layers=14, schedule=schedule)
        result = answer(Exact(), problem)
        if result is None:
            continue
        sum_seconds, bottleneck = parts(problem, result.plan)
        leveled = Leveled(Relaxed(problem, with_plan(problem, result.plan)))
        known = leveled.everything()
        for enough in (0.8, 0.9, 0.97, 1.1):
            for _ in range(2):
                known = leveled.closer(known, bottleneck * 1.02, sum_seconds * 1.1, enough * sum_seconds)
                assert known.sum_seconds <= sum_seconds * (1 + 1e-7), (seed, enough)
        assert known.states is not None
        for k, stage in enumerate(result.plan.stages):
            level = min(len(result.plan.stages) - k, leveled.num_levels)
            assert known.states.alive_NL1[level, stage.start], seed
        looked += 1
    assert looked > 3


@pytest.mark.parametrize("use_all", [False, True])
def test_what_a_survey_says_of_a_limit_is_a_bound_over_its_cuts(use_all: bool) -> None:
    """The best plan over some cuts is no cheaper under any limit that it keeps to; where it is least is told."""
    looked = 0
    for seed in range(8):
        problem = replace(heterogeneous(seed, num_types=2, num_devices=9, num_layers=16), use_all_devices=use_all)
        cuts = boundaries(problem, 8)
        few = clustered(problem, cuts)
        over_few = answer(Exact(), few)
        if over_few is None:
            continue
        sum_seconds, bottleneck = parts(few, over_few.plan)
        best, sought = with_plan(problem, unclustered(over_few.plan, cuts), 1.2), Sought()
        look = Leveled(Relaxed(problem, best).at_cuts(cuts))
        survey = Survey(look, best, sought, look.everything().prices_R, lambda: False)
        early, limit = survey.over(look.ending_early(0.2)), survey.least_near(bottleneck * 1.3)
        early.bound(limit)
        early.down(limit)
        early.beside().up(limit)
        early.between(limit)
        assert survey.bounds_seconds[limit] == min(survey.bounds_seconds.values())
        for one in (survey, early):  # where stages end early there are those plans, and more
            assert one.own_met and {met.limit for met in one.own_met} <= set(one.bounds_seconds)
            for at, bound_seconds in one.bounds_seconds.items():
                if at >= bottleneck * (1 + 1e-9):
                    assert bound_seconds <= (at + sum_seconds) * (1 + 1e-7), (seed, at)
        looked += 1
    assert looked > 3


@pytest.mark.parametrize("num_levels", [3, 30])
def test_of_several_blocks_of_cuts_both_directions_say_the_same(num_levels: int) -> None:
    """No state's plans are cheaper than the cheapest plan, and its own states have that one."""
    problem = operators(3, num_operators=2 * counted._BLOCK + 300, num_devices=24, num_types=2)
    best = Incumbent(problem, "test", 60.0)
    leveled = Leveled(Relaxed(problem, best), num_levels)
    known, looked = leveled.closer(leveled.everything(), np.inf, np.inf), 0
    known = leveled.closer(known, np.inf, np.inf)
    for limit in (np.inf, 40.0 * known.sum_seconds, 10.0 * known.sum_seconds):
        here = leveled.closer(leveled.everything_at(known.prices_R), limit, np.inf)
        plan = leveled.cheapest(replace(here, prices_R=known.prices_R), limit)
        if plan is None or here.through is None or plan.stages_3S is None:
            continue
        least = plan.sum_seconds + plan.use_T @ known.prices_R
        assert here.through.seconds_NL1.min() == pytest.approx(least, rel=1e-9)
        how, start, _ = plan.stages_3S
        level = np.minimum(np.arange(len(how), 0, -1), leveled.num_levels)
        assert here.through.seconds_NL1[level, start] == pytest.approx(least, rel=1e-9)
        assert here.through.seconds_NC[level, how] == pytest.approx(least, rel=1e-9)
        looked += 1
    assert looked > 1


@draws(range(1, 3), (0, 3))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_earlier_evaluations_left_behind_is_never_read(schedule: str, seeds: tuple[int, ...]) -> None:
    """Whatever the table held before, far from all states too: the same bounds, states and plans."""
    looked = 0
    for seed in seeds:
        problem = replace(operators(seed, num_operators=150, num_devices=16, num_types=2), schedule=schedule)
        result = answer(Coarse(num_clusters=40), problem)
        if result is None:
            continue
        sum_seconds, bottleneck = parts(problem, result.plan)
        found = []
        for held in (np.inf, -1e9, np.nan, 0.0):
            leveled = Leveled(Relaxed(problem, with_plan(problem, result.plan)), 3 if seed % 2 else None)

            known = leveled.everything()
            for _ in range(3):
                leveled._rest_NAL1[:] = held
                known = leveled.closer(known, bottleneck, 1.02 * sum_seconds)
            leveled._rest_NAL1[:] = held
            plan, least = leveled.plan_under(replace(known, states=known.near), bottleneck, 1.02 * sum_seconds, 16)
            assert known.states is not None
            found.append((known.sum_seconds, known.about_seconds, known.states, plan, least))
            looked += known.states.alive_NL1.sum() < 0.7 * leveled._rest_NAL1[:, 0].size
        for other in found[1:]:
            assert other[:2] == found[0][:2]
            assert (other[2].alive_NL1 == found[0][2].alive_NL1).all()
            assert (other[2].used_NC == found[0][2].used_NC).all()
            assert other[3:] == found[0][3:]
    assert looked > len(seeds)


def test_counting_in_the_state_proves_no_less_than_counting_aside() -> None:
    gained = []
    for seed in range(10):
        problem = heterogeneous(seed, num_types=2, num_devices=10, num_layers=24)
        result = answer(Exact(), problem)
        if result is None:
            continue
        sum_seconds, bottleneck = parts(problem, result.plan)
        relaxed = Relaxed(problem, with_plan(problem, result.plan))
        aside, inside = Windowed(relaxed), Leveled(relaxed)
        limit, cutoff = bottleneck * (1 + 1e-6), sum_seconds * (1 + 1e-6)  # sums in another order: a hair above
        one = aside.tightened(aside.everything(), limit, cutoff)
        other = inside.tightened(one, limit, cutoff)
        assert one.sum_seconds <= other.sum_seconds <= sum_seconds * (1 + 2e-6), seed
        gained.append(other.sum_seconds / one.sum_seconds)
    assert len(gained) > 4
    assert min(gained) >= 1.0


@draws([257], [258, 530], "layers")
def test_two_hundred_and_fifty_seven_layers_and_more(layers: tuple[int, ...]) -> None:
    """Where the search over clusters begins: its bound and the exact search's plan, and few cuts beside all."""
    for num_layers in layers:
        problem = operators(num_layers, num_operators=num_layers, num_devices=12, num_types=2)
        result = answer(Coarse(num_clusters=48), problem)
        assert result is not None
        exact = answer(Exact(relative_gap=0.01, incumbent=result.plan), problem)
        assert exact is not None
        assert result.lower_bound_seconds <= exact.step_seconds * (1 + 1e-9), num_layers
        assert exact.lower_bound_seconds <= result.step_seconds * (1 + 1e-9), num_layers


def test_a_beam_over_levels_gives_plans_that_keep_to_what_was_asked() -> None:
    found = 0
    for seed in range(5):
        problem = operators(seed, num_operators=120, num_devices=12, num_types=2)
        problem = replace(problem, use_all_devices=seed % 3 == 0)
        result = answer(Coarse(num_clusters=40), problem)
        if result is None:
            continue
        relaxed = Relaxed(problem, with_plan(problem, result.plan))
        cuts = np.union1d(np.arange(0, 121, 3), [0, 120])
        for leveled in (Leveled(relaxed), Leveled(relaxed.at_cuts(cuts))):
            for limit in np.array([0.9, 0.8, 0.7]) * result.step_seconds:
                cutoff = 1.3 * result.step_seconds - limit
                known = leveled.tightened(leveled.everything(), limit, cutoff)
                plan, _ = leveled.plan_under(known, limit, cutoff, 64) if known.sum_seconds < cutoff else (None, 0.0)
                if plan is not None and is_valid(problem, plan):
                    assert step_seconds(problem, plan) <= (limit + cutoff) * (1 + 1e-9)
                    found += 1
    assert found > 2


@draws(range(6), range(6, 24))
@pytest.mark.parametrize("schedule", SEARCHED)
@pytest.mark.parametrize("use_all", [False, True])
def test_no_plan_is_below_what_a_beam_says(schedule: str, use_all: bool, seeds: tuple[int, ...]) -> None:
    """Every plan is tried, under limits that some keep to: no bound is above the best one, of narrow beams neither.

    A beam with room for all has the best plan, or knows that none is below the cutoff, where the relaxed problem's
    plans are plans of the problem.
    """
    exact = looked = 0
    for seed in seeds:
        problem = replace(small(seed), schedule=schedule, use_all_devices=use_all)
        every = [parts(problem, plan) for plan in all_plans(problem) if is_valid(problem, plan)]
        result = answer(Exhaustive(), problem)
        if result is None or result.step_seconds == 0:
            continue
        relaxed = Relaxed(problem, with_plan(problem, result.plan))
        for leveled, share in product((Leveled(relaxed), Leveled(relaxed, num_levels=1)), (0.02, 0.3, 1.0)):
            limit = sorted(bottleneck for _, bottleneck in every)[int(share * (len(every) - 1))] * (1 + 1e-9)
            least = min(sum_seconds for sum_seconds, bottleneck in every if bottleneck <= limit)
            for width, times, varied in product((1, 8, 4096), (0.9, 1.001, 1.5), ((), (0.7, 1.4))):
                known = leveled.closer(leveled.everything(), limit, times * least)
                if known.states is None or known.sum_seconds >= times * least:
                    continue
                plan, bound = leveled.plan_under(known, limit, times * least, width, proves=True, varied=varied)
                assert bound <= min(least, times * least) * (1 + 1e-7), (seed, share, width, times)
                if plan is not None and is_valid(problem, plan):
                    assert least * (1 - 1e-7) <= parts(problem, plan)[0] <= times * least * (1 + 1e-7)
                    assert bound <= parts(problem, plan)[0] * (1 + 1e-7)
                looked += 1
                exact += width == 4096 and bound >= min(1.0, times) * least * (1 - 1e-7)
    assert looked > 2.5 * len(seeds)
    assert exact > looked / 5


@draws(range(12), range(12, 40))
@pytest.mark.parametrize("use_all", [False, True])
def test_plans_that_are_met_hold_no_more_than_fits(use_all: bool, seeds: tuple[int, ...]) -> None:
    """With fewer levels than plans have stages the last level stands for more, which hold more than it says."""
    met = too_full = 0
    for seed in seeds:
        problem = replace(heterogeneous(seed, num_types=2, num_devices=9, num_layers=12), use_all_devices=use_all)
        result = answer(Exact(), problem)
        if result is None:
            continue
        relaxed = Relaxed(problem, with_plan(problem, result.plan, 1.5))
        limit = 1.5 * result.step_seconds
        for num_levels in (1, 2, 3):
            leveled = Leveled(relaxed, num_levels)
            known = leveled.tightened(leveled.everything(), limit, np.inf)
            for proves in (True, False):
                plan, _ = leveled.plan_under(known, limit, limit, 256, proves=proves)
                if plan is not None:
                    assert proves or is_valid(problem, plan)
                    met, too_full = met + (not proves), too_full + (proves and not is_valid(problem, plan))
    assert met > len(seeds) / 2
    assert too_full > 0, "no problem here is one where this matters"


@draws(range(8), range(8, 30))
def test_plans_are_put_together_of_those_that_prices_brought_forth(seeds: tuple[int, ...]) -> None:
    """Each of them that devices suffice for, or a better one; and others, where none of them is such a plan."""
    none_fits = better = 0
    for seed in seeds:
        problem = operators(seed, num_operators=60, num_devices=16, num_types=2)
        result = answer(Exact(relative_gap=0.05), problem)
        if result is None:
            continue
        best = with_plan(problem, result.plan, 3.0)
        leveled = Leveled(Relaxed(problem, best))
        for limit in np.array([0.5, 0.7, 0.9]) * result.step_seconds:
            known = leveled.tightened(leveled.everything(), limit, np.inf)
            if known.sum_seconds == np.inf:
                continue
            here, count_R = leveled.of_plans_met(known, limit), leveled._relaxed.devices.count_R
            left = leveled._states(known)
            assert not (here.alive_NL1 & ~left.alive_NL1).any() and not (here.used_NC & ~left.used_NC).any()
            allowed = [one for one in leveled._planes.known.latest(1000) if leveled._allows(one, left, limit)]
            fitting = [one.sum_seconds for one in allowed if (one.use_T <= count_R).all()]
            for varied in ((), (0.7, 1.4)):
                plan, _ = leveled.plan_under(replace(known, states=here), limit, 1e3, 4096, varied=varied)
                if fitting:
                    assert plan is not None and parts(problem, plan)[0] <= min(fitting) * (1 + 1e-7)
                better += plan is not None and parts(problem, plan)[0] < min(fitting, default=np.inf) * (1 - 1e-7)
                none_fits += plan is not None and not fitting
    assert none_fits > len(seeds) / 6 and better > len(seeds) / 3, (none_fits, better)


@draws((6, 8, 11), (*range(6), 7, *range(9, 11), *range(12, 20)))
def test_beams_with_few_starts_meet_plans_among_many_states(
    seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid ones, below the price that was asked for; and they look at no more states than they have time for."""
    met = 0
    for seed in seeds:
        problem = operators(seed, num_operators=400, num_devices=48, num_types=2)
        result = answer(Coarse(num_clusters=40), problem)
        if result is None:
            continue
        for share in (0.75, 0.9):
            best, offered = with_plan(problem, result.plan, 1.05), list[Plan]()
            leveled, limit, before = Leveled(Relaxed(problem, best)), share * result.step_seconds, best.step_seconds
            known = leveled.tightened(leveled.everything(), limit, before - limit)
            if known.near is None:
                continue

            beams = Beams(best, offered.append)
            monkeypatch.setattr("dejavu.search.coarse.levels.beams._MANY_STATES", 0)
            assert not beams._from_few_starts(known, limit, leveled) and not offered
            monkeypatch.undo()
            beams._from_few_starts(known, limit, leveled)
            assert all(is_valid(problem, plan) and step_seconds(problem, plan) < before for plan in offered)
            met += bool(offered)
    assert met > len(seeds) / 3


@draws((5, 6), (*range(5), *range(7, 12)))
def test_a_beam_proves_what_no_prices_can(seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mixed devices of which plans use few whole ones: as much at least, more of some, and never too much."""
    gained = []
    for seed in seeds:
        problem = heterogeneous(seed, num_types=2, num_devices=9, num_layers=14)
        result = answer(Exact(), problem)
        if result is None:
            continue
        found = []
        for are_few in (lambda *_: False, Beams.are_few):
            monkeypatch.setattr(Beams, "are_few", are_few)
            found.append(WindowedBound(problem, with_plan(problem, result.plan)).prove(1e-3))
            assert found[-1] <= result.step_seconds * (1 + 1e-9), seed
            monkeypatch.undo()
        gained.append(found[1] / found[0])
    assert len(gained) > len(seeds) / 3
    assert min(gained) > 1 - 1e-3
    assert max(gained) > 1.005


def test_what_few_cuts_say_is_never_taken_for_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same problems with prices from few cuts, and ranges that two threads look at."""
    monkeypatch.setattr(clusters, "FEWEST_CUTS", 6)
    monkeypatch.setattr(windowed, "_FEW_FROM_STEPS", 0)
    looked = 0
    slower = {0: 1.05, 3: 1.2, 6: 1.05, 9: 1.2}  # of some problems also from a plan that isn't the best one
    for seed in range(12):
        problem = heterogeneous(seed, num_types=2, num_devices=9, num_layers=14)
        problem = replace(problem, use_all_devices=seed % 5 == 4)
        result = answer(Exact(), problem)
        if result is None:
            continue
        for above in [1.0, *([slower[seed]] if seed in slower else [])]:
            proof = WindowedBound(problem, with_plan(problem, result.plan, above))
            assert proof.num_cuts < problem.num_layers
            with ThreadPoolExecutor(max_workers=1) as pool:
                helper = pool.submit(proof.help)
                bound = proof.prove(1e-3)
                helper.result(timeout=60)
            assert bound <= result.step_seconds * (1 + 1e-9), (seed, above)
            looked += 1
    assert looked > 12


def test_a_look_that_fails_ends_the_proof_and_is_told() -> None:
    """The bound is that of what was looked at; the failure is raised where it came to be."""
    problem = heterogeneous(3, num_types=2, num_devices=9, num_layers=14)
    result = answer(Exact(), problem)
    assert result is not None
    ranges = Ranges(with_plan(problem, result.plan))
    known = Kept(np.arange(1), np.zeros(15, dtype=np.int64), np.zeros(1))
    parts = [Range(0.25 * k * result.step_seconds, k, 0.0, 1.0, known) for k in (1, 2, 3)]

    def split(at: Range, target: float) -> list[Range]:
        if at.tie == 1 and at.bound > 0.26 * result.step_seconds:
            raise ArithmeticError("a number that is none")
        return [replace(at, bound=at.bound + 0.1 * result.step_seconds)]

    with pytest.raises(ArithmeticError, match="none"):
        ranges.prove(parts, 0.0, split)
    assert ranges.prove([replace(parts[2], tie=2)], 0.0, split) == pytest.approx(result.step_seconds)


COMPILED = """
import sys
from numba.core.registry import CPUDispatcher
from benchmarks.search.generated import operators
from dejavu.search import Coarse
from dejavu.search.coarse.loops import load_compiled_loops

def compiled():
    return {
        f"{module.__name__}.{name}": len(loop.signatures)
        for module in list(sys.modules.values()) if module.__name__.startswith("dejavu.search.coarse")
        for name, loop in vars(module).items() if isinstance(loop, CPUDispatcher)
    }

load_compiled_loops()
before = compiled()
for microbatches in (4, 64):
    for few in (0, 1e9):
        sys.modules["dejavu.search.coarse.windowed"]._FEW_FROM_STEPS = few
        sys.modules["dejavu.search.coarse.clusters"].FEWEST_CUTS = 30
        problem = operators(1, num_operators=120, num_devices=12, num_types=2, num_microbatches=microbatches)
        Coarse(num_clusters=40).run(problem, budget_seconds=5.0, seed=0)
print({name: count for name, count in compiled().items() if count > before.get(name, 0)}, len(before))
"""


def test_no_loop_is_compiled_while_the_clock_runs() -> None:
    """What is compiled in advance is all that a search over thousands of operators calls, with the types it has."""
    asked = [sys.executable, "-c", COMPILED]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]).stdout
    assert re.fullmatch(r"\{\} (\d+)\n", said) and not said.endswith(" 0\n"), said


def test_the_plan_with_configurations_that_are_kept_is_the_best_one_too() -> None:
    problem = heterogeneous(1, num_types=2, num_devices=9, num_layers=14)
    result = answer(Exact(), problem)
    assert result is not None
    instead = Undominated.of(problem).plan(result.plan)
    assert step_seconds(problem, instead) == pytest.approx(result.step_seconds, rel=1e-12)
