"""Which steps of a training count, over families of synthetic ones, and what they come to."""

from __future__ import annotations

import math
import re
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejavu.runtime.job.migration import Gain
from dejavu.timing.interference import DISTURBED, TimedWork, counted
from dejavu.timing.repeats import OWN_WAIT_SECONDS, stretch_of
from dejavu.timing.step_times import LEAST_STEPS, RankStep, StepTimes, StepWatch, count_steps

RATIOS = st.sampled_from([1.0, 1.1, DISTURBED, 1.3, 2.0, 8.0])
UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
TIMINGS = st.lists(st.builds(TimedWork, st.floats(1e-6, 1.0), RATIOS, RATIOS), min_size=1, max_size=40)


@given(TIMINGS, st.integers(1, 8))
def test_all_undisturbed_timings_count_or_the_least_disturbed(timings: list[TimedWork], least: int) -> None:
    found = counted(timings, least)
    clean = [k for k, one in enumerate(timings) if not one.is_disturbed]
    if len(clean) >= least:
        assert (list(found.places), found.disturbed_share) == (clean, 0.0)
        return
    assert list(found.places) == sorted(set(found.places)) and set(clean) <= set(found.places)
    assert len(found.places) == min(len(timings), max(least, len(timings) // 2))
    assert found.disturbed_share == pytest.approx(1 - len(clean) / len(found.places))
    left_out = [one for k, one in enumerate(timings) if k not in found.places]
    for one in (timings[k] for k in found.places):  # none beside a slow core before one that only waited, none slower
        steady = [other for other in left_out if other.slowdown <= DISTURBED]
        assert not one.is_disturbed or all(one.slowdown <= DISTURBED and one.seconds <= o.seconds for o in steady)


@given(st.floats(0, 10), st.floats(0, 10))
def test_a_stretch_grows_with_the_wait(seconds: float, waited: float) -> None:
    found = stretch_of(seconds, waited)
    assert 1.0 <= found < math.inf and found <= stretch_of(seconds, waited + 0.1)
    assert waited > OWN_WAIT_SECONDS or found == 1.0


def ranks_of(seconds: np.ndarray, disturbed_RK: np.ndarray, *, by_wait: bool) -> list[list[RankStep]]:
    """Suffixes: R = ranks, K = steps. A disturbed rank keeps all waiting; the first step sets things up."""
    factor_RK = np.where(disturbed_RK, 2.0, 1.0)
    everyone_K = seconds * factor_RK.max(axis=0)
    return [
        [
            RankStep(everyone_K[k], 1e-4, own[k] if by_wait else 1.0, 1.0 if by_wait else own[k], k > 0)
            for k in range(len(seconds))
        ]
        for own in factor_RK
    ]


@pytest.mark.parametrize("by_wait", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_steps_that_any_rank_was_disturbed_in_do_not_count(seed: int, by_wait: bool) -> None:
    draws = np.random.default_rng(seed)
    R, K = int(draws.integers(1, 5)), int(draws.integers(LEAST_STEPS + 2, 60))
    seconds = 0.1 * np.exp(0.01 * draws.standard_normal(K))
    seconds[0] *= 7
    disturbed = draws.random((R, K)) < draws.uniform(0, 0.4)
    ranks = ranks_of(seconds, disturbed, by_wait=by_wait)
    found = count_steps(ranks, is_cpu=True)
    clean = [k for k in range(1, K) if not disturbed[:, k].any()]
    assert found.times is not None and 0 not in found.places
    assert (found.times.num_steps, found.times.num_disturbed) == (K - 1, K - 1 - len(clean))
    if len(clean) >= LEAST_STEPS:
        assert list(found.places) == clean
        assert found.times.seconds == pytest.approx(median(seconds[clean])) and not found.times.beside_other_work
    elif not clean:
        assert found.times.beside_other_work and found.times.disturbed_share == 1.0
        assert str(found.times).startswith("measured beside other work: ")
    assert found.times.low_seconds <= found.times.seconds <= found.times.high_seconds
    assert StepTimes(**found.times.__dict__) == found.times


@pytest.mark.parametrize("slower", [1.0, 1.2, 1.4, 2.0])
def test_a_core_that_is_slow_throughout_shows_beside_an_earlier_look(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dejavu.timing.interference.sample_seconds", lambda: slower * 1e-4)
    for known, expected in ((1e-4, slower), (math.inf, 1.0)):
        watch = StepWatch(is_cpu=True, is_alone=False, least_sample_seconds=known)
        for _ in range(LEAST_STEPS):
            watch.begin()
            watch.end(0.1, 0.0, counts=True)
        times = count_steps([watch.steps()], is_cpu=True).times
        assert [step.slowdown for step in watch.steps()] == pytest.approx([expected] * LEAST_STEPS)
        assert times is not None and times.beside_other_work == (expected > DISTURBED)


def test_nothing_is_known_of_gpus_and_of_no_steps() -> None:
    times = count_steps([[RankStep(0.1, 0.0, 1.0, 1.0, True)]], is_cpu=False).times
    assert times is not None and times.disturbed_share is None and not times.beside_other_work
    assert (times.seconds, times.low_seconds, times.high_seconds) == (0.1, 0.1, 0.1)
    assert count_steps([[]], is_cpu=True) == ((), None)
    assert count_steps([[RankStep(0.1, 0.0, 1.0, 1.0, False)]], is_cpu=True) == ((), None)


@given(st.floats(1e-6, 1e5), st.floats(1e-6, 1e5), st.floats(1e-6, 1e5))
def test_seconds_in_sentences_are_read_back_and_never_in_powers_of_ten(
    before: float, after: float, told: float
) -> None:
    times = StepTimes(before, before, before, 5, 0.0, all_seconds=told, num_steps=9, num_disturbed=4)
    for sentence, seconds in ((str(times), [told]), (str(Gain(before, told, after)), [before, told, after])):
        assert "e+" not in sentence and "e-" not in sentence
        found = re.findall(r"([\d.]+) (ns|µs|ms|s|min|h)\b", sentence)
        assert [float(number) * UNITS[unit] for number, unit in found] == pytest.approx(seconds, rel=6e-3)
