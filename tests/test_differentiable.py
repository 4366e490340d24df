"""The relaxation is what it says, the beam is exact where it drops nothing, and their plans are near the best."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.search import restarts
from benchmarks.search.generated import heterogeneous
from dejavu.plans import DoesNotFitError, Infeasible, NoPlanError, Problem, check, price, solved, step_seconds
from dejavu.plans.stage_costs import AdditiveCosts, PlanError
from dejavu.search import Differentiable, Exact
from dejavu.search.differentiable.decode import Decoder
from dejavu.search.differentiable.relaxed import Point, Relaxation
from dejavu.search.exhaustive import all_plans
from dejavu.search.shared.options import Options
from tests.test_search import answer, random_problem, small

QUICK = Differentiable(num_restarts=16, num_steps=10, num_decoded=6, num_rounds=1)
STEP, TEMPERATURE = 1e3, 0.3  # seconds: more than any plan takes; of the same size as differences between plans


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait by spinning: beside other work on the machine that takes minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mixed(seed: int, num_layers: int = 20, num_devices: int = 14, num_types: int = 3) -> Problem:
    return heterogeneous(seed, num_types=num_types, num_devices=num_devices, num_layers=num_layers)


def relaxation_of(problem: Problem, step: float, max_blocks: int = 24) -> tuple[Decoder, Relaxation]:
    decoder = Decoder(problem, Options.of(problem))
    sizes = decoder.counts_T, decoder.type_G, decoder.taken_G
    return decoder, Relaxation(decoder.options, *sizes, step, max_blocks)


def all_chains(options: Options) -> list[list[int]]:
    """Every way to cut the layers and to give each stage a group, its fastest option in each: devices uncounted."""
    first = {}
    starts = np.repeat(np.arange(len(options.first_L1) - 1), np.diff(options.first_L1))
    for i in range(len(options.stop_N)):
        first.setdefault((int(starts[i]), int(options.stop_N[i]), int(options.group_N[i])), i)
    chains: list[list[list[int]]] = [[] for _ in options.first_L1]
    chains[0] = [[]]
    for (start, stop, _), i in sorted(first.items()):
        chains[stop] += [[*chain, i] for chain in chains[start]]
    return chains[-1]


def sum_of(options: Options, chain: list[int]) -> float:
    seconds = float(options.seconds_N[chain].sum())
    classes = options.class_G[options.group_N[chain]]
    for i, a, b in zip(chain, classes, classes[1:], strict=False):
        seconds += float(options.transfer_L1AA[options.stop_N[i], a, b])
    return seconds


def test_the_smoothed_program_expects_what_the_gibbs_distribution_over_all_plans_does() -> None:
    compared = 0
    for seed in range(80):
        problem = random_problem(seed)  # GPipe and much memory: what is downstream of a stage does not matter
        capacity = np.full(len(problem.configurations), 1e9)
        costs = replace(problem.costs, capacity_bytes_C=capacity)
        problem = replace(problem, costs=costs, schedule="gpipe", max_stages=None)
        decoder, relaxation = relaxation_of(problem, STEP)
        chains = all_chains(decoder.options)
        if not 2 <= len(chains) <= 2000:
            continue
        compared += 1
        o, counts = decoder.options, np.maximum(decoder.counts_T, 1)
        prices = np.random.default_rng(seed).uniform(0.1, 0.4, len(counts))
        drawn = relaxation.start(1, seed, np.ones(len(counts)))
        point = Point(
            logits_RKG=torch.zeros_like(drawn.logits_RKG),
            log_limit_R=torch.full_like(drawn.log_limit_R, np.log(STEP)),
            bill_RT=torch.as_tensor(prices * counts / STEP, dtype=torch.float32)[None],
            shortage_price_R=drawn.shortage_price_R,
        )
        found = relaxation.expectations(point, TEMPERATURE / STEP, norm=2.0)[0].numpy()
        taken_GT = np.eye(len(counts))[decoder.type_G] * decoder.taken_G[:, None]
        taken = np.array([taken_GT[o.group_N[chain]].sum(0) for chain in chains])
        sums = np.array([sum_of(o, chain) for chain in chains])
        energy = sums + taken @ prices
        weight = np.exp((energy.min() - energy) / TEMPERATURE)
        weight /= weight.sum()
        assert found[0] * STEP == pytest.approx(weight @ sums, rel=2e-3, abs=1e-3)
        assert found[2] == 0.0
        assert found[3] == pytest.approx(weight @ [len(chain) for chain in chains], rel=2e-3)
        assert found[4:] == pytest.approx(weight @ taken, rel=2e-3, abs=1e-3)
    assert compared > 30


def test_gradient_steps_lower_the_relaxed_loss_and_keep_to_the_devices() -> None:
    better, kept = 0, 0
    for seed in range(3):
        problem = mixed(seed)
        best = solved(Exact().run(problem))
        decoder, relaxation = relaxation_of(problem, 1.2 * best.step_seconds)
        value_T = np.ones(3) / decoder.counts_T.sum()
        before, after = (
            relaxation.descend(relaxation.start(16, seed, value_T), steps, lambda: False) for steps in (0, 20)
        )
        better += float(np.median(after.loss_R)) < float(np.median(before.loss_R))
        kept += float(after.loss_R.min()) < 1.5 * best.step_seconds
        assert (after.price_RT >= 0).all()
        assert np.isfinite(after.prior_RLG).all()
    assert better == 3
    assert kept >= 2


def test_messages_that_take_far_longer_than_the_known_plan_leave_numbers() -> None:
    problem = mixed(0)
    decoder, _ = relaxation_of(problem, best := solved(Exact().run(problem)).step_seconds)
    options = replace(decoder.options, transfer_L1AA=decoder.options.transfer_L1AA + 1e3 * best)
    relaxation = Relaxation(options, decoder.counts_T, decoder.type_G, decoder.taken_G, best, 24)
    found = relaxation.descend(relaxation.start(4, 0, np.ones(3) / decoder.counts_T.sum()), 3, lambda: False)
    assert all(np.isfinite(values).all() for values in (found.price_RT, found.limit_R, found.prior_RLG, found.loss_R))


def test_more_stages_than_the_relaxation_has_cuts_are_no_error() -> None:
    problem = mixed(0, num_layers=12)
    best = solved(Exact().run(problem)).step_seconds
    decoder, relaxation = relaxation_of(problem, 0.5 * best, max_blocks=2)  # each half is busier than that
    found = relaxation.descend(relaxation.start(4, 0, np.ones(3) / decoder.counts_T.sum()), 3, lambda: False)
    assert all(np.isfinite(values).all() for values in (found.price_RT, found.limit_R, found.prior_RLG, found.loss_R))


def test_a_beam_that_drops_nothing_finds_the_cheapest_sum_under_the_limit() -> None:
    compared = 0
    for seed in range(200):
        problem = small(seed)
        decoder, rng = Decoder(problem, Options.of(problem)), np.random.default_rng(seed)
        plans = []
        for plan in all_plans(problem):
            try:
                parts = price(problem, plan)
            except (PlanError, DoesNotFitError):
                continue
            fill = sum(parts.stage_seconds) + sum(parts.transfer_seconds)
            plans.append((fill, parts.step_seconds - fill))
        limit = float(np.median([b for _, b in plans])) * (1 + 1e-9) if plans else np.inf
        wanted = min((fill for fill, b in plans if b <= limit), default=np.inf)
        found = decoder.whole(rng.uniform(0, 2, len(decoder.counts_T)), limit, 1e9, 2000)
        assert found.is_complete
        assert bool(len(found.chosen)) == bool(plans)
        if plans:
            compared += 1
            plan = decoder.plan(found.chosen)
            check(problem, plan)
            parts = price(problem, plan)
            assert sum(parts.stage_seconds) + sum(parts.transfer_seconds) == pytest.approx(wanted, rel=1e-9, abs=1e-9)
            assert decoder.busy(found.chosen).max() <= limit
    assert compared > 50


def test_a_narrow_beam_with_any_prices_and_priors_gives_plans_of_the_problem() -> None:
    found = 0
    for seed in range(12):
        problem = replace(mixed(seed), use_all_devices=seed % 3 == 0)
        decoder, rng = Decoder(problem, Options.of(problem)), np.random.default_rng(seed)
        prior_LG = rng.random((problem.num_layers, len(decoder.taken_G)))
        for prior in (None, prior_LG):
            decoded = decoder.whole(rng.random(3) * 0.1, np.inf, 1e9, 5, prior)
            if len(decoded.chosen):
                found += 1
                check(problem, decoder.plan(decoded.chosen))
    assert found > 12


def test_windows_decoded_anew_keep_the_rest_feasible_and_never_cost_more() -> None:
    gained = 0
    for seed in range(12):
        problem = replace(mixed(seed, num_layers=30), use_all_devices=seed % 4 == 0)
        decoder = Decoder(problem, Options.of(problem))
        price_T = np.full(3, 0.02)
        chosen = decoder.whole(price_T, np.inf, 1e9, 30).chosen
        for size in (1, 2, 3):
            if not len(chosen):
                continue
            after = decoder.improve(chosen, price_T, 50, size, lambda: False)
            check(problem, decoder.plan(after))
            now, before = (step_seconds(problem, decoder.plan(each)) for each in (after, chosen))
            assert now <= before * (1 + 1e-9)
            gained += now < before * 0.999
            chosen = after
    assert gained > 5


def test_tiny_problems_are_solved_to_the_end_and_proved() -> None:
    proved = 0
    for seed in range(150):
        problem = small(seed)
        found, best = answer(Differentiable(), problem), answer(Exact(), problem)
        assert (found is None) == (best is None)
        if found is not None and best is not None and found.lower_bound_seconds > 0:
            proved += 1
            assert found.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
    assert proved > 50


@pytest.mark.parametrize("layer", [0, 1, 10, 19])
def test_a_layer_that_fits_nowhere_is_proved_without_a_warning(layer: int) -> None:
    """Also where no stage from the first layer on fits, so that no device has a speed to be priced by."""
    for seed in range(3):
        problem = mixed(seed)
        assert isinstance(problem.costs, AdditiveCosts)
        fixed_bytes_CL = problem.costs.fixed_bytes_CL.copy()
        fixed_bytes_CL[:, layer] = 2 * problem.costs.capacity_bytes_C.max()
        tight = replace(problem, costs=replace(problem.costs, fixed_bytes_CL=fixed_bytes_CL))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert isinstance(Differentiable().run(tight, budget_seconds=60.0), Infeasible)


def test_mixed_devices_are_planned_within_a_percent() -> None:
    gaps = []
    for seed in range(6):
        problem = mixed(seed + 50)
        best = solved(Exact().run(problem)).step_seconds
        found = solved(QUICK.run(problem, seed=seed))
        check(problem, found.plan)
        gaps.append(found.step_seconds / best - 1)
    assert np.mean(np.array(gaps) < 0.01) >= 0.75
    assert max(gaps) < 0.1


def test_the_gradient_beats_random_parameters() -> None:
    """Same restarts, same decoding of few of them, prices and parameters learnt or not."""
    learnt, drawn = [], []
    for seed in range(6):
        problem = mixed(seed + 80)
        best = solved(Exact(relative_gap=1e-3).run(problem)).step_seconds
        for steps, gaps in ((20, learnt), (0, drawn)):
            few = Differentiable(num_steps=steps, num_restarts=8, num_decoded=2, num_rounds=1, beam_width=20)
            gaps.append(solved(few.run(problem)).step_seconds / best - 1)
    assert np.mean(learnt) < np.mean(drawn)


def test_every_device_is_used_where_that_is_asked_for() -> None:
    for seed in range(3):
        problem = replace(mixed(seed + 20), use_all_devices=True)
        try:
            found = solved(QUICK.run(problem))
        except NoPlanError:
            continue
        check(problem, found.plan)
        assert found.step_seconds >= solved(Exact().run(problem)).step_seconds * (1 - 1e-9)


def test_costs_that_are_no_sums_are_taken() -> None:
    for seed in range(3):
        problem = mixed(seed + 30)
        rng = np.random.default_rng(seed)
        dense = problem.costs.dense()
        noise = rng.uniform(1.0, 1.3, dense.seconds_CLL1.shape)
        dense = replace(dense, seconds_CLL1=np.where(rng.random(noise.shape) < 0.1, np.inf, dense.seconds_CLL1 * noise))
        problem = replace(problem, costs=dense)
        found, best = solved(QUICK.run(problem)), solved(Exact().run(problem))
        check(problem, found.plan)
        assert best.step_seconds * (1 - 1e-9) <= found.step_seconds <= 1.1 * best.step_seconds


def test_the_same_seed_gives_the_same_plan_after_gradients() -> None:
    problem = mixed(5)
    first, second = (solved(QUICK.run(problem, seed=3)) for _ in range(2))
    assert first.plan == second.plan


@pytest.mark.parametrize("budget_seconds", [0.0, 0.1, 0.5])
def test_any_budget_gives_a_plan(budget_seconds: float) -> None:
    problem = mixed(7, num_layers=40, num_devices=24)
    found = solved(Differentiable().run(problem, budget_seconds=budget_seconds))
    check(problem, found.plan)


def test_a_plan_to_start_from_is_never_lost() -> None:
    problem = mixed(9)
    best = solved(Exact().run(problem))
    found = solved(replace(QUICK, incumbent=best.plan).run(problem))
    assert found.step_seconds <= best.step_seconds
    assert found.history[0][1] == best.step_seconds


def test_too_many_layers_are_refused_with_what_takes_them() -> None:
    with pytest.raises(NoPlanError, match="coarse search"):
        solved(Differentiable(max_options_bytes=1e4).run(mixed(1)))


def test_the_table_of_restarts_has_every_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "COUNTS", (2, 4))
    monkeypatch.setattr(restarts, "SIZES", ((2, 8, 12),))
    _, rows, summary = restarts.table(num_problems=1, budget_seconds=1.0)
    assert {row["restarts"] for row in rows} == {2, 4}
    assert all(row["descent_seconds"] > 0 for row in rows)
    assert min(row["over_best_percent"] for row in rows if row["over_best_percent"] is not None) == 0.0
    assert {"cpu_2_descent_seconds", "cpu_4_descent_seconds"} <= set(summary)


def test_the_table_of_restarts_ends_in_its_time_without_what_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "COUNTS", (2, 4))
    monkeypatch.setattr(restarts, "SIZES", ((2, 8, 12),))
    _, rows, summary = restarts.table(num_problems=1, budget_seconds=60.0, most_seconds=30.0)
    assert rows and all("step_seconds" not in row and row["over_best_percent"] is None for row in rows)
    _, rows, summary = restarts.table(num_problems=1, budget_seconds=1.0, most_seconds=0.0)
    assert not rows and set(summary) == {"devices"}
