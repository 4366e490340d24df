"""Which trials a rung promotes: rules of successive halving, on curves alone."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejavu.trials.halving import (
    EXPLODING_GRADIENT_NORM,
    FLAT_FALL,
    LEAST_RUNG_STEPS,
    ahead,
    rungs,
    running_loss,
    survivors,
    unsafe,
)
from dejavu.workload import COMPARED_PART, HALVED_PART, TRIED_PART, TrialSettings, Workload

reductions = st.integers(2, 5)
L = LEAST_RUNG_STEPS


@st.composite
def rungs_of_curves(draw: st.DrawFn) -> list[list[float]]:
    """Noisy curves of one length that fall, rise or stay; some failed."""
    length, count = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    noise = random.Random(draw(st.integers(0, 2**32)))
    curves = []
    for _ in range(count):
        start, rate = noise.uniform(0.5, 10.0), noise.choice([0.0, 0.0, 0.1, 1.0, -0.5])
        curve = [start - rate * math.log1p(k) + noise.gauss(0.0, 0.05) for k in range(length)]
        curves.append([] if noise.random() < 0.1 else curve)
    return curves


@pytest.mark.parametrize(
    ("count", "last", "reduction", "expected"),
    [
        (40, 9 * L, 3, (L, 3 * L, 9 * L)),
        (40, 27 * L, 3, (L, 3 * L, 9 * L, 27 * L)),
        (40, 81 * L, 3, (3 * L, 9 * L, 27 * L, 81 * L)),  # a 27th of 40 is more than one, an 81st is not
        (8, 9 * L, 3, (3 * L, 9 * L)),
        (2, 9 * L, 3, (9 * L,)),
        (1, 9 * L, 3, (9 * L,)),
        (0, 9 * L, 3, (9 * L,)),
        (40, 2, 3, (2,)),
        (16, 9 * L, 2, (round(1.125 * L), round(2.25 * L), round(4.5 * L), 9 * L)),  # the next were too short
    ],
)
def test_rungs(count: int, last: int, reduction: int, expected: tuple[int, ...]) -> None:
    assert rungs(count, last, reduction) == expected


def test_the_default_workload_is_halved() -> None:
    workload = Workload()
    assert (workload.num_steps, workload.trials.count) == (160, 8)
    assert rungs(workload.trials.count, workload.trial_steps, workload.trials.reduction) == (L, 3 * L)


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [(2, (1,)), (8, (4,)), (20, (L,)), (119, (L,)), (120, (L, 3 * L)), (600, (L, 3 * L)), (1800, (L, 3 * L, 9 * L))],
)
def test_rungs_of_a_training_of_any_length(num_steps: int, expected: tuple[int, ...]) -> None:
    settings = Workload(num_steps=num_steps, trials=TrialSettings(count=9)).trials
    assert rungs(settings.count, settings.longest(num_steps), settings.reduction) == expected


@given(st.integers(2, 100_000), st.integers(1, 100), reductions)
def test_trials_are_halved_or_compared_where_the_training_allows_it(num_steps: int, count: int, reduction: int) -> None:
    workload = Workload(num_steps=num_steps, trials=TrialSettings(count=count, reduction=reduction))
    last = workload.trial_steps
    found = rungs(count, last, reduction)
    assert 1 <= last <= num_steps // COMPARED_PART
    assert last <= max(num_steps // TRIED_PART, reduction * L)
    assert found[0] >= L or num_steps < COMPARED_PART * L
    if count >= reduction and num_steps >= HALVED_PART * reduction * L:
        assert len(found) >= 2
    if count < reduction:
        assert last == max(num_steps // TRIED_PART, min(L, num_steps // COMPARED_PART))  # nothing to halve


@pytest.mark.parametrize(
    ("num_steps", "settings", "message"),
    [
        (1, {}, r"num_steps 1 is too short for trials.*wanted num_steps of at least 2, or trials: \{count: 0\}"),
        (1, {"steps": 1}, r"trials: steps 1 leaves nothing of num_steps 1 .*, or trials: \{count: 0\}"),
        (20, {"steps": 20}, "trials: steps 20 leaves nothing of num_steps 20 .* wanted steps of at most 19"),
        (20, {"steps": 99}, "wanted steps of at most 19"),
    ],
)
def test_trials_that_leave_nothing_to_train_are_refused(num_steps: int, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(num_steps=num_steps, trials=TrialSettings(**settings))
    assert Workload(num_steps=num_steps, trials=TrialSettings(count=0, **settings)).num_steps == num_steps


@given(st.integers(0, 10_000), st.integers(1, 100_000), reductions)
def test_rungs_ascend_to_the_last_and_none_is_noise(count: int, last: int, reduction: int) -> None:
    found = rungs(count, last, reduction)
    assert found[-1] == last and list(found) == sorted(set(found))
    assert all(steps >= LEAST_RUNG_STEPS for steps in found[:-1])
    assert count < 2 or count // reduction ** (len(found) - 1) >= 1


def test_the_running_loss_is_of_the_last_quarter_and_of_three_at_least() -> None:
    assert running_loss([9.0, 3.0, 2.0, 1.0]) == 2.0
    assert running_loss([float(k) for k in range(40)]) == sum(range(30, 40)) / 10
    assert running_loss([4.0]) == 4.0
    assert running_loss([]) == math.inf


@given(rungs_of_curves(), reductions)
def test_the_best_survive_and_as_many_more_at_most(curves: list[list[float]], reduction: int) -> None:
    scores = [running_loss(curve) for curve in curves]
    sound = sorted(score for score in scores if score < math.inf)
    kept = survivors(curves, reduction)
    wanted = min(math.ceil(len(curves) / reduction), len(sound))
    assert sorted(scores[k] for k in kept[:wanted]) == sound[:wanted]
    assert wanted <= len(kept) <= 2 * wanted and len(set(kept)) == len(kept)
    assert all(scores[k] < math.inf for k in kept)


@given(rungs_of_curves(), reductions)
def test_a_flat_run_above_the_median_never_survives(curves: list[list[float]], reduction: int) -> None:
    median = statistics.median_low(running_loss(curve) for curve in curves)
    for k in survivors(curves, reduction):
        if running_loss(curves[k]) > median:
            half = curves[k][: max(1, len(curves[k]) // 2)][-max(3, len(curves[k]) // 4) :]
            fall = sum(half) / len(half) - running_loss(curves[k])
            assert fall > FLAT_FALL * abs(running_loss(curves[k]))


@given(rungs_of_curves(), reductions, st.randoms())
def test_the_order_of_the_trials_does_not_matter(
    curves: list[list[float]], reduction: int, shuffler: random.Random
) -> None:
    order = list(range(len(curves)))
    shuffler.shuffle(order)
    found = survivors([curves[k] for k in order], reduction)
    assert [order[k] for k in found] == survivors(curves, reduction)  # noise: no two are equal


def test_of_equal_trials_the_earlier_go_on() -> None:
    assert survivors([[2.0] * 9] * 7, 3) == [0, 1, 2]
    assert ahead([1.0] * 7, 3) == [0, 1]


def test_what_still_falls_steeply_is_not_dropped() -> None:
    """Behind after nine steps, and ahead after 27: what a plateau of the others would hide."""
    flat = [[2.0 + 0.01 * k] * 9 for k in range(5)]
    steep = [5.0 - 0.3 * k for k in range(9)]
    slow = [3.0 - 0.02 * k for k in range(9)]
    assert survivors([*flat, steep, slow], 3) == [0, 1, 2, 5]
    assert survivors([*flat, [5.0] * 9, slow], 3) == [0, 1, 2]
    assert survivors([*flat, *[[5.0 - 0.1 * n - 0.3 * k for k in range(9)] for n in range(9)]], 5)[3:] == [13, 12, 11]


@given(st.lists(st.floats(0, 10) | st.just(math.inf), max_size=30), reductions)
def test_ahead_go_the_best_of_those_done(scores: list[float], reduction: int) -> None:
    going = ahead(scores, reduction)
    assert len(going) <= len(scores) // reduction
    assert all(scores[k] < math.inf for k in going)
    others = [score for k, score in enumerate(scores) if k not in going]
    assert not going or max(scores[k] for k in going) <= min(others, default=math.inf)


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [
        (math.nan, 1.0, "the loss was nan"),
        (math.inf, 1.0, "the loss was inf"),
        (2.0, math.nan, "the gradient norm was nan"),
        (2.0, 0.0, "nothing can be learned"),
        (2.0, 2 * EXPLODING_GRADIENT_NORM, "wanted at most"),
        (2.0, 100.0, ""),
        (1e4, 1e-9, ""),
    ],
)
def test_the_filter_refuses_only_what_cannot_train(loss: float, norm: float, why: str) -> None:
    assert why in unsafe(loss, norm) and bool(why) == bool(unsafe(loss, norm))
