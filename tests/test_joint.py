"""Weights and strategy trained together: gradients, prices that are learnt, and when a plan changes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.joint import complexity, simulated
from benchmarks.joint.problems import Wrong, generated
from benchmarks.joint.simulated import JOINT, NO_GRADIENT, ONCE, SEARCH, reports, train, true_step_seconds
from dejavu.binding import Binding
from dejavu.migration import ClusterNow, Remaining
from dejavu.migration.changes import HostLost
from dejavu.migration.joint import Improvement
from dejavu.migration.joint.posterior import Posterior
from dejavu.migration.joint.relaxed import Objective, Variables, softmax
from dejavu.migration.joint.strategies import Strategies
from dejavu.migration.problem_now import problem_now
from dejavu.migration.replanning import best_on, held_now
from dejavu.plans import is_valid, price, solved, step_seconds
from dejavu.plans.priced_problem import OnDisk
from dejavu.runtime.job.migration import Gain, Migration
from dejavu.search import Exact
from dejavu.workload import ReplanSettings
from tests.changing import running_problem

CASES = [(6, 2, 0), (12, 3, 1), (17, 4, 2)]  # layers, devices, seed


def case(num_layers: int, num_hosts: int, seed: int, spread: float = 0.5, slowness: float = 2.0) -> Wrong:
    return generated(num_layers, num_hosts, spread, slowness, seed)


def first(wrong: Wrong) -> Binding:
    return best_on(wrong.planned, wrong.now).binding


def strategies_of(wrong: Wrong) -> Strategies:
    """At the true prices, from the plan of the wrong ones."""
    return Strategies.of(wrong.true, first(wrong), wrong.true_now)


def measured(wrong: Wrong, binding: Binding, how: str, num_reports: int, seed: int = 0) -> Improvement:
    """An improvement that has seen some reports of a plan."""
    rng, truth = np.random.default_rng(seed), problem_now(wrong.true, wrong.true_now)
    step = true_step_seconds(truth, binding)
    improvement = Improvement(wrong.planned, how, seed)  # type: ignore[arg-type]
    improvement.begin(binding)
    for k in range(num_reports):
        improvement.see(reports(truth, binding, k, k * step, rng), wrong.now)
    return improvement


@pytest.mark.parametrize(("num_layers", "num_hosts", "seed"), CASES)
def test_the_gradients_at_corrected_costs_are_those_of_finite_differences(
    num_layers: int, num_hosts: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    wrong = case(num_layers, num_hosts, seed)
    improvement = measured(wrong, first(wrong), "joint", 4)
    s = improvement.strategies(first(wrong), wrong.now)
    s = replace(s, share_LN=rng.uniform(0.0, 4.0 / num_layers, s.shape))  # memory binds on some slots
    objective = Objective.of(s, [s.running_L, *s.neighbours(s.running_L)])
    logits_LN = rng.normal(0.0, 1.5, s.shape)
    for loss in (lambda a: objective.relaxed(a, 0.7), objective.nearby):
        _, gradient_LN = loss(logits_LN)
        for _ in range(5):
            way_LN = rng.normal(size=s.shape)
            after, before = (loss(logits_LN + sign * 1e-6 * way_LN)[0] for sign in (1, -1))
            assert (after - before) / 2e-6 == pytest.approx((gradient_LN * way_LN).sum(), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("num_layers", "num_hosts", "seed"), CASES)
def test_a_sure_assignment_s_relaxed_step_is_the_price_of_its_plan(num_layers: int, num_hosts: int, seed: int) -> None:
    s = strategies_of(case(num_layers, num_hosts, seed))
    unit = s.price(s.running_L)
    objective = Objective.of(s, [s.running_L])
    for assigned_L in (s.running_L, *s.neighbours(s.running_L)):
        logits_LN = np.full(s.shape, -50.0)
        logits_LN[np.arange(num_layers), assigned_L] = 50.0
        found, _ = objective.relaxed(logits_LN, 2.0)
        assert found == pytest.approx(s.price(assigned_L) / unit, rel=0.05)  # the maximum is a smooth one


@pytest.mark.parametrize(("num_layers", "num_hosts", "seed"), CASES)
def test_assignments_are_priced_as_plans_are(num_layers: int, num_hosts: int, seed: int) -> None:
    wrong = case(num_layers, num_hosts, seed)
    s, current = strategies_of(wrong), problem_now(wrong.true, wrong.true_now)
    kinds = {seat: device.type_name for seat, device in current.devices.items()}
    compared = 0
    for assigned_L in (s.running_L, *s.neighbours(s.running_L)):
        plan, places = s.plan(assigned_L, "1f1b")
        types = [kinds[one.device.host, one.device.index] for one in places]
        stages = tuple(
            replace(stage, configuration=replace(stage.configuration, device_type=kind))
            for stage, kind in zip(plan.stages, types, strict=True)
        )
        plan = replace(plan, stages=stages)
        if is_valid(current.priced.problem, plan):
            compared += 1
            assert s.price(assigned_L) == pytest.approx(step_seconds(current.priced.problem, plan), rel=1e-9)
    assert compared > 2


def test_the_likeliest_assignment_is_that_of_all() -> None:
    """Against every assignment of which each slot has one run of layers, in order."""
    s = complexity.random_strategies(5, 3)
    variables = Variables(s, 0)
    for seed in range(30):
        variables.logits_LN = np.random.default_rng(seed).normal(0.0, 2.0, s.shape)
        log_LN = np.log(softmax(variables.logits_LN, 1))
        every = [np.array(one) for one in np.ndindex(*[3] * 5) if all(np.diff(one) >= 0)]
        best = max(every, key=lambda one: log_LN[np.arange(5), one].sum())
        assert (variables.likeliest(s) == best).all()


@pytest.mark.parametrize("seed", range(3))
def test_gradient_steps_find_cheaper_plans_and_the_exact_search_none_dearer(seed: int) -> None:
    wrong = case(24, 4, seed)
    s, truth = strategies_of(wrong), problem_now(wrong.true, wrong.true_now)
    variables = Variables(s, seed)
    for _ in range(10):
        variables.descend(s, 20)
    learnt = s.price(variables.likeliest(s))
    best = solved(Exact().run(truth.priced.problem))
    assert best.step_seconds <= learnt * (1 + 1e-9)
    assert learnt < s.price(s.running_L)


@pytest.mark.parametrize("seed", range(3))
def test_on_the_same_measurements_the_exact_search_s_plan_is_never_dearer(seed: int) -> None:
    wrong = case(12, 3, seed)
    binding, found = first(wrong), {}
    for how in ("search", "joint"):
        improvement = measured(wrong, binding, how, 11)
        decision = improvement.decide(wrong.now, Remaining(10_000))
        running, believed = improvement.prices(wrong.now)
        current = problem_now(running, believed)
        found[how] = price(current.priced.problem, _named(decision.chosen.binding, current)).step_seconds
    assert found["search"] <= found["joint"] * (1 + 1e-9)


def _named(binding: Binding, current: object) -> object:
    """The plan on the kinds of devices that a problem knows now."""
    kinds = {one.pipeline_rank: current.devices[one.device.host, one.device.index] for one in binding.placements}  # type: ignore[attr-defined]
    stages = tuple(
        replace(stage, configuration=replace(stage.configuration, device_type=kinds[s].type_name))
        for s, stage in enumerate(binding.plan.stages)
    )
    return replace(binding.plan, stages=stages)


def test_prices_and_slower_devices_are_learnt_from_stages() -> None:
    wrong = case(12, 3, 5, spread=0.0, slowness=2.0)
    improvement = measured(wrong, first(wrong), "search", 20)
    running, believed = improvement.prices(wrong.now)
    (slow,) = wrong.true_now.slowness
    others = [factor for seat, factor in believed.slowness.items() if seat != slow]
    assert believed.slowness[slow] / (min(others) if others else 1.0) == pytest.approx(2.0, rel=0.2)
    believed_now, true_now = problem_now(running, believed), problem_now(wrong.true, wrong.true_now)
    assert true_step_seconds(believed_now, first(wrong)) == pytest.approx(
        true_step_seconds(true_now, first(wrong)), rel=0.1
    )


def test_one_interrupted_step_says_little() -> None:
    running = running_problem([f"l{k}" for k in range(6)], ("h0", "h1"), 4)
    stage = best_on(running, ClusterNow(running.cluster)).binding.plan.stages[0]
    seconds = 0.004 * (stage.stop - stage.start)
    posterior = Posterior(running)
    for _ in range(20):
        posterior.see(stage, 0, ("h0", 0), seconds)
    posterior.see(stage, 0, ("h0", 0), 1000 * seconds)
    assert posterior.factors[1] < 1.5
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        posterior.see(stage, 0, ("h0", 0), nonsense)
    assert posterior.factors[1] < 1.5


@pytest.mark.parametrize("how", ["search", "joint"])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_changes_only_where_it_wins_back_what_the_change_costs(how: str, seed: int) -> None:
    wrong = case(12, 3, seed)
    binding, changed = first(wrong), 0
    for steps in (1, 2, 5, 20, 100, 1000):
        for margin in (0.0, 0.03, 0.5):
            improvement = measured(wrong, binding, how, 11)
            decision = improvement.decide(wrong.now, Remaining(steps, margin))
            stay = next(one for one in decision.considered if one.is_running)
            gain = stay.step_seconds - decision.chosen.step_seconds
            if not decision.stays:
                changed += 1
                assert steps * gain >= decision.move_seconds > 0
                assert gain >= margin * stay.step_seconds
            assert str(decision).startswith("measured: ")
    assert changed


def test_a_gain_that_did_not_come_is_believed_less_and_the_faster_plan_is_gone_back_to() -> None:
    wrong = case(12, 3, 1)
    binding, truth = first(wrong), problem_now(wrong.true, wrong.true_now)
    improvement = measured(wrong, binding, "search", 11)
    decision = improvement.decide(wrong.now, Remaining(10_000))
    assert not decision.stays
    worse, rng = decision.chosen.binding, np.random.default_rng(0)
    improvement.begin(worse)
    for k in range(12):  # the passes are as predicted, and yet steps take twice as long as under the first plan
        improvement.see(reports(truth, worse, k, k * 2 * true_step_seconds(truth, binding), rng), wrong.now)
    after = improvement.decide(wrong.now, Remaining(10_000))
    assert not after.stays and after.chosen.what == "a plan that ran before"
    assert after.chosen.binding.plan.cuts == binding.plan.cuts
    assert held_now(problem_now(*improvement.prices(wrong.now)), after.chosen.binding)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_plan_that_a_lost_host_ended_is_not_judged_by_the_next_one(seed: int) -> None:
    """What came of its gain is unknown; the slower plan on fewer hosts counted as a gain that did not come."""
    wrong = case(12, 3, seed)
    binding, truth = first(wrong), problem_now(wrong.true, wrong.true_now)
    improvement, rng = measured(wrong, binding, "search", 11), np.random.default_rng(0)
    chosen = improvement.decide(wrong.now, Remaining(10_000)).chosen.binding
    improvement.begin(chosen)
    improvement.begin(chosen)  # after a rank that failed: the same plan
    assert improvement._promised is not None and not improvement._kept
    now = wrong.now.after(HostLost(chosen.placements[0].device.host))
    running = best_on(wrong.planned, now).binding
    improvement.begin(running)
    for k in range(12):
        improvement.see(reports(truth, running, k, k * 10 * true_step_seconds(truth, binding), rng), now)
    improvement.decide(now, Remaining(10_000))
    assert improvement._kept == []


def test_simulated_trainings_are_faster_with_either_and_looks_become_rare() -> None:
    wrong = case(12, 2, 3, spread=0.5, slowness=2.0)
    found = {way: train(wrong, first(wrong), way, 0) for way in (ONCE, SEARCH, JOINT, NO_GRADIENT)}
    assert found[ONCE].changes == 0 == found[ONCE].decided_seconds
    for way in (SEARCH, JOINT):
        assert found[way].changes >= 1
        assert found[way].steps_per_second > found[ONCE].steps_per_second
        assert found[way].last_over_best < 1.15
    assert all(one.changes < simulated.NUM_STEPS / 20 for one in found.values())


def test_an_improved_plan_knows_what_is_lost() -> None:
    wrong = case(12, 3, 2)
    improvement = measured(wrong, first(wrong), "joint", 11)
    now = wrong.now.after(HostLost("h2"))
    _, believed = improvement.prices(now)
    assert not any(host == "h2" for host, _ in believed.slowness)


def test_what_stages_keep_in_their_node_is_told_of_every_kind_of_device() -> None:
    """A slower device is of a kind of its own, with a row of its own in every table."""
    wrong = case(6, 3, 0)
    priced = wrong.true.priced
    kept = OnDisk(np.zeros((1, 6)), np.full(1, 1e9))
    running = replace(wrong.true, priced=replace(priced, on_disk=kept))
    current = problem_now(running, wrong.true_now)
    assert current.every.on_disk is not None
    assert len(current.every.on_disk.capacity_bytes_C) == len(current.every.problem.configurations) == 2
    assert true_step_seconds(current, first(wrong)) > 0


def test_improving_is_a_choice_of_trainings_that_migrate() -> None:
    assert ReplanSettings().improve == "never"
    assert ReplanSettings.model_validate({"action": "migrate", "improve": "joint"}).improve == "joint"
    with pytest.raises(ValueError, match="improve: joint changes a running plan; wanted action: migrate, found notify"):
        ReplanSettings.model_validate({"improve": "joint"})


def test_a_migration_tells_its_gain() -> None:
    plan = first(case(6, 2, 0)).plan
    migration = Migration(3, "measured", plan, plan, 1.0, 0, Gain(0.2, 0.1, 0.12))
    assert Migration.from_dict(_json(migration)) == migration
    assert str(migration).endswith("a step took 200 ms, 100 ms were predicted, 120 ms measured")
    assert str(Gain(0.2, 0.1)).endswith("were not measured")
    assert Migration.from_dict(_json(replace(migration, gain=None))).gain is None


def _json(migration: Migration) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(asdict(migration)))
    return found


def test_the_time_of_a_step_is_fitted(tmp_path: Path) -> None:
    slope, start, r_squared = complexity._line(np.array([1.0, 2.0, 3.0]), np.array([3.0, 5.0, 7.0]))
    assert (slope, start, r_squared) == pytest.approx((2.0, 1.0, 1.0))
