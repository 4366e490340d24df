"""Searching between measurements: what training measures changes the next plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.search.generated import heterogeneous
from dejavu.errors import InputError
from dejavu.plan import Plan, Problem, check, price
from dejavu.search import Exact
from dejavu.search.bilevel import Bilevel

SEARCH = Bilevel(inner=Exact())


def as_it_is(problem: Problem, factor_T: np.ndarray) -> Problem:
    """The same problem on devices that are slower than predicted, each type by its factor."""
    types = list(problem.device_counts)
    factor_C = factor_T[[types.index(how.device_type) for how in problem.configurations]]
    return replace(problem, costs=replace(problem.costs, seconds_CL=problem.costs.seconds_CL * factor_C[:, None]))


def test_measured_stages_lead_to_a_better_plan() -> None:
    gains = []
    for seed in range(12):
        predicted = heterogeneous(seed, num_types=2, num_devices=8, num_layers=16)
        real = as_it_is(predicted, np.exp(np.random.default_rng(seed).uniform(-0.7, 0.7, 2)))

        def measure(plan: Plan, real: Problem = real) -> tuple[float, ...]:
            return price(real, plan).stage_seconds

        turns = SEARCH.turns(predicted, measure)
        for turn in turns:
            check(predicted, turn.plan)
            assert turn.step_seconds == pytest.approx(price(real, turn.plan).step_seconds, rel=1e-12)
        best = min(turn.step_seconds for turn in turns)
        one_shot, optimum = turns[0].step_seconds, Exact().run(real).step_seconds
        assert optimum <= best * (1 + 1e-9)
        gains.append((one_shot / optimum, best / optimum))
    first, last = np.array(gains).T
    assert first.mean() > 1.05
    assert (last <= first).all()
    assert last.mean() - 1 < 0.2 * (first.mean() - 1)


def test_right_predictions_end_after_one_turn() -> None:
    problem = heterogeneous(3, num_types=2, num_devices=8, num_layers=16)
    turns = SEARCH.turns(problem, lambda plan: price(problem, plan).stage_seconds)
    assert len(turns) == 1
    assert turns[0].step_seconds == pytest.approx(Exact().run(problem).step_seconds, rel=1e-12)


def test_costs_given_stage_by_stage_are_corrected_too() -> None:
    problem = heterogeneous(3, num_types=2, num_devices=8, num_layers=12)
    real = as_it_is(problem, np.array([2.0, 0.7]))
    dense = replace(problem, costs=problem.costs.dense())
    turns = [SEARCH.turns(p, lambda plan: price(real, plan).stage_seconds) for p in (problem, dense)]
    best = [min(turn.step_seconds for turn in each) for each in turns]
    assert best[0] == pytest.approx(best[1], rel=0.02)


@pytest.mark.parametrize("measured", [(), (float("nan"),), (0.0,), (1.0,) * 99])
def test_measurements_that_cannot_be_are_refused(measured: tuple[float, ...]) -> None:
    problem = heterogeneous(3, num_types=2, num_devices=8, num_layers=12)
    with pytest.raises(InputError, match="as many seconds"):
        SEARCH.turns(problem, lambda plan: measured)
