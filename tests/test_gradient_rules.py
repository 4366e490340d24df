"""Rules of combining gradients: formulas, symmetry, and what faulty replicas can do to the result.

Shape suffixes: N = replicas, P = numbers.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dejavu.cost.gradients import NUMBERS_MOVED
from dejavu.runtime.gradients import rules
from dejavu.runtime.gradients.faults import FAULTS, FLIPPED_SHARE, STALE_STEPS, FaultyGradients, GradientFault
from dejavu.runtime.gradients.rules import RULES, Combined, Part, combine, rule_of
from dejavu.runtime.gradients.watching import CHANCE, FAR_STEPS, WINDOW_STEPS, Watch, chance_of
from dejavu.workload import GradientSettings

SIZE = 57
every_rule = pytest.mark.parametrize("name", RULES)
robust = pytest.mark.parametrize("name", [name for name in RULES if name != "mean"])
by_coordinate = pytest.mark.parametrize("name", ["median", "trimmed_mean"])
BAD = (0.0, 1e30, -1e30, 3e38, float("nan"), float("inf"), float("-inf"))


def settings_of(name: str, num_suspected: int = 1, **fields: object) -> GradientSettings:
    known = {"num_suspected": num_suspected} if name in ("suspicion", "trimmed_mean", "krum") else {}
    return GradientSettings.model_validate({"rule": name, **known, **fields})


def drawn(count: int, seed: int = 0, size: int = SIZE) -> torch.Tensor:
    """Estimates of one gradient, as replicas with examples of their own have them."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=chance) + 0.5 * torch.randn(count, size, generator=chance)


def combined(
    name: str, gradients_NP: torch.Tensor, num_suspected: int = 1, parts: list[Part] | None = None
) -> Combined:
    count, size = gradients_NP.shape
    cut = parts or [Part(0, size)]
    trust_SN = torch.full((1 + cut[-1].section, count), 1 / count, dtype=torch.float64)
    held_out_P = drawn(1, 0, size)[0] if name == "zeno" else None
    return combine(rule_of(settings_of(name, num_suspected)), gradients_NP, cut, trust_SN, held_out_P=held_out_P)


def test_the_settings_name_every_rule_and_each_is_priced() -> None:
    assert set(get_args(GradientSettings.model_fields["rule"].annotation)) == set(RULES) == set(NUMBERS_MOVED)


@every_rule
@pytest.mark.parametrize("count", [3, 4, 8])
def test_equal_gradients_are_their_mean(name: str, count: int) -> None:
    gradient_P = drawn(1)[0]
    found = combined(name, gradient_P.expand(count, -1).clone())
    assert torch.allclose(found.gradient_P, gradient_P, rtol=1e-6)


@every_rule
def test_the_order_of_replicas_does_not_matter(name: str) -> None:
    gradients_NP = drawn(6)
    whole = combined(name, gradients_NP)
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 97):
        found = combined(name, gradients_NP[list(order)])
        assert torch.allclose(found.gradient_P, whole.gradient_P, rtol=1e-5, atol=1e-6)
        assert torch.allclose(found.suspicion_SN, whole.suspicion_SN[:, list(order)], rtol=1e-5)


@every_rule
@pytest.mark.parametrize("count", [5, 6, 9])
def test_equals_what_numpy_says(name: str, count: int) -> None:
    gradients_NP = drawn(count)
    by_hand = {
        "mean": _mean,
        "suspicion": _suspicion,
        "median": lambda g: np.median(g, axis=0),
        "trimmed_mean": lambda g: np.sort(g, axis=0)[1:-1].mean(axis=0),
        "krum": _krum,
        "zeno": _zeno,
    }
    expected = by_hand[name](gradients_NP.double().numpy())
    assert np.allclose(combined(name, gradients_NP).gradient_P.numpy(), expected, rtol=1e-5, atol=1e-6)


def _mean(g: np.ndarray) -> np.ndarray:
    return g.mean(axis=0)


def _suspicion(g: np.ndarray) -> np.ndarray:
    """Algorithm 2, replacing row by row, with weights that sum to 1."""
    away = np.linalg.norm(g - g.mean(axis=0), axis=1)
    weights = 1 / (1 + away)
    weights /= weights.sum()
    least = weights.argmin()
    replaced = g.copy()
    replaced[least] = np.delete(g, least, axis=0).mean(axis=0)
    return weights @ replaced


def _krum(g: np.ndarray) -> np.ndarray:
    scores = []
    for own in g:
        squares = sorted(((own - other) ** 2).sum() for other in g)[1:]
        scores.append(sum(squares[: len(g) - 1 - 2]))
    return g[int(np.argmin(scores))]


def _zeno(g: np.ndarray) -> np.ndarray:
    v = drawn(1)[0].double().numpy()
    u = g * (np.linalg.norm(v) / np.linalg.norm(g, axis=1))[:, None]
    scores = u @ v - 0.002 * (u**2).sum(axis=1)
    assert (scores >= 0).any()
    return u[scores >= 0].mean(axis=0)


def test_suspicion_follows_the_algorithm_over_steps() -> None:
    """Weights of a step are those by which the next step's gradients are compared."""
    count, rule = 5, rule_of(settings_of("suspicion", 2, alpha=0.3))
    trust_SN, weights = torch.full((1, count), 1 / count, dtype=torch.float64), np.full(count, 1 / count)
    for step in range(6):
        gradients_NP = drawn(count, step)
        found = combine(rule, gradients_NP, [Part(0, SIZE)], trust_SN)
        trust_SN, g = found.trust_SN, gradients_NP.double().numpy()
        away = np.linalg.norm(g - weights @ g, axis=1)
        weights = 0.3 / (0.3 + away)
        weights /= weights.sum()
        least = np.argsort(weights)[:2]
        replaced = g.copy()
        replaced[least] = np.delete(g, least, axis=0).mean(axis=0)
        assert np.allclose(found.gradient_P.numpy(), weights @ replaced, rtol=1e-4, atol=1e-6)
        assert np.allclose(found.suspicion_SN[0].numpy(), away, rtol=1e-5)


@robust
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("count", "faulty"), [(5, 1), (8, 1), (8, 2)])
def test_faulty_replicas_do_not_make_garbage(name: str, bad: float, count: int, faulty: int) -> None:
    """A minority of anything: the result is finite, and no further from the honest mean than honest ones are apart."""
    gradients_NP = drawn(count)
    honest_NP = gradients_NP[faulty:]
    middle_P = honest_NP.mean(dim=0)
    apart = float((honest_NP - middle_P).norm(dim=1).max())
    gradients_NP[:faulty] = bad
    found = combined(name, gradients_NP, faulty).gradient_P
    assert found.isfinite().all()
    limit = float(drawn(1)[0].norm()) + float(middle_P.norm()) if name == "zeno" else 2 * apart
    assert float((found - middle_P).norm()) <= limit


@by_coordinate
@given(seed=st.integers(0, 2**30), count=st.integers(5, 9), faulty=st.integers(1, 2), bad=st.sampled_from(BAD))
def test_each_coordinate_lies_among_the_honest_ones(name: str, seed: int, count: int, faulty: int, bad: float) -> None:
    gradients_NP = drawn(count, seed, 12)
    honest_NP = gradients_NP[faulty:].clone()
    gradients_NP[:faulty] = bad
    gradients_NP[0, ::2] = 0.3  # not alike in all coordinates
    found = combined(name, gradients_NP, faulty).gradient_P
    hair = 1e-6 * honest_NP.abs().max()
    assert (found >= honest_NP.min(dim=0).values - hair).all()
    assert (found <= honest_NP.max(dim=0).values + hair).all()


def test_the_mean_is_made_garbage_by_one() -> None:
    gradients_NP = drawn(4)
    gradients_NP[2, 3] = torch.nan
    assert not combined("mean", gradients_NP).gradient_P.isfinite().any()


@robust
def test_where_no_gradient_is_finite_the_step_has_none(name: str) -> None:
    found = combined(name, torch.full((5, SIZE), torch.nan))
    assert (found.gradient_P == 0).all() if name == "zeno" else found.gradient_P.isnan().all()
    assert (found.trust_SN == 1 / 5).all(), "the next step begins anew"


@every_rule
def test_parts_of_a_section_are_judged_together_and_sections_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients_NP = drawn(5)
    gradients_NP[0, 20:] *= -3
    whole, parts = combined(name, gradients_NP), [Part(0, 20), Part(20, 33), Part(33, SIZE)]
    assert torch.allclose(combined(name, gradients_NP, parts=parts).gradient_P, whole.gradient_P, atol=1e-6)
    monkeypatch.setattr(rules, "COLUMNS", 7)
    assert torch.allclose(combined(name, gradients_NP).gradient_P, whole.gradient_P, atol=1e-6)
    apart = combined(name, gradients_NP, parts=[Part(0, 20, 0), Part(20, SIZE, 1)])
    if name != "zeno":  # its held-out gradient is cut, too
        for section, columns in enumerate((slice(0, 20), slice(20, SIZE))):
            alone = combined(name, gradients_NP[:, columns])
            assert torch.allclose(apart.gradient_P[columns], alone.gradient_P, atol=1e-6)
            assert torch.allclose(apart.suspicion_SN[section], alone.suspicion_SN[0])
    assert apart.suspicion_SN[1].argmax() == 0


@pytest.mark.parametrize("garbage", [50.0, torch.nan], ids=["far off", "not finite"])
@robust
def test_devices_that_hold_parts_judge_alike(name: str, garbage: float) -> None:
    """Two shards add up what they measured; a part that both hold counts half on each. Garbage is on one alone."""
    gradients_NP = drawn(5)
    gradients_NP[3, 40:] = garbage
    rule, trust_SN = rule_of(settings_of(name)), torch.full((1, 5), 0.2, dtype=torch.float64)
    held_out_P = drawn(1)[0] if name == "zeno" else None
    whole = combine(rule, gradients_NP, [Part(0, SIZE)], trust_SN, held_out_P=held_out_P)
    columns = (slice(0, 30), slice(10, SIZE))  # 10 to 30 are on both
    parts = ([Part(0, 10), Part(10, 30, 0, 0.5)], [Part(0, 20, 0, 0.5), Part(20, SIZE - 10)])
    said, both = [torch.empty(0)] * 2, threading.Barrier(2, timeout=60)

    def of(own: int) -> Combined:
        def add_up(found: torch.Tensor) -> torch.Tensor:
            said[own] = found
            both.wait()
            total = said[0] + said[1]
            both.wait()
            return total

        v = None if held_out_P is None else held_out_P[columns[own]]
        return combine(rule, gradients_NP[:, columns[own]], parts[own], trust_SN, add_up=add_up, held_out_P=v)

    with ThreadPoolExecutor(2) as pool:
        for own, found in enumerate(pool.map(of, range(2))):
            assert torch.allclose(found.gradient_P, whole.gradient_P[columns[own]], atol=1e-6)
            assert torch.allclose(found.suspicion_SN, whole.suspicion_SN, rtol=1e-6)


def test_faults_are_what_they_are_called() -> None:
    gradient_P = drawn(1, size=4000)[0]
    columns = {"first": slice(0, 1000), "second": slice(1000, 4000)}
    struck = {kind: FaultyGradients(GradientFault(kind, 0)).spoil(3, gradient_P, columns) for kind in FAULTS}
    assert torch.equal(struck["sign_flip"], -gradient_P) and not struck["zeros"].any()
    assert struck["nan"].isnan().all() and struck["inf"].isinf().all()
    assert 9 < struck["noise"].norm() / gradient_P.norm() < 11
    changed = struck["bit_flip"].view(torch.int32) ^ gradient_P.view(torch.int32)
    bits = [bin(number & 0xFFFFFFFF).count("1") for number in changed.tolist() if number]
    assert set(bits) <= {1, 2} and 0 < len(bits) <= FLIPPED_SHARE * 4000
    layer = FaultyGradients(GradientFault("sign_flip", 0, "second", first_step=2))
    assert torch.equal(layer.spoil(1, gradient_P, columns), gradient_P)
    assert torch.equal(layer.spoil(2, gradient_P, columns)[:1000], gradient_P[:1000])
    assert torch.equal(layer.spoil(2, gradient_P, columns)[1000:], -gradient_P[1000:])
    assert torch.equal(layer.spoil(2, gradient_P, {"third": slice(0, 4000)}), gradient_P), "of another stage"


def test_a_stale_gradient_is_that_of_some_steps_ago() -> None:
    device = FaultyGradients(GradientFault("stale", 0))
    seen: deque[torch.Tensor] = deque(maxlen=STALE_STEPS + 1)
    for step in range(2 * STALE_STEPS):
        seen.append(drawn(1, step)[0])
        assert torch.equal(device.spoil(step, seen[-1], {}), seen[0])


def test_chance_is_a_binomial_s() -> None:
    assert chance_of(0, 10, 0.3) == pytest.approx(1.0)
    assert chance_of(10, 10, 0.25) == pytest.approx(0.25**10)
    draws = np.random.default_rng(0).binomial(20, 0.3, 200_000)
    assert chance_of(9, 20, 0.3) == pytest.approx(float((draws >= 9).mean()), rel=0.05)


def test_a_replica_that_is_always_suspected_is_named_and_others_are_not() -> None:
    chance = np.random.default_rng(1)
    watch = Watch(2, 5, 1)
    for step in range(200):
        suspicion_SN = torch.tensor(1 + 0.1 * chance.random((2, 5)))
        if step >= 120:
            suspicion_SN[1, 3] = 4.0 if step % 10 else float("inf")
        watch.look(step, suspicion_SN)
    assert watch.named() == {3: [1]}
    tally = watch.tallies[1][3]
    assert tally.last_step == 199 and tally.num_not_finite == 8 and tally.num_steps >= 80
    assert np.median(tally.ratios) == pytest.approx(4 / 1.05, rel=0.1)


def test_a_replica_that_is_far_off_now_and_then_is_named() -> None:
    chance = np.random.default_rng(3)
    for times, named in ((2, {}), (3, {2: [0]})):
        watch = Watch(1, 5, 1)
        for step in range(100):
            suspicion_SN = torch.tensor(1 + 0.1 * chance.random((1, 5)))
            if step % 30 == 0 and step < 30 * times:
                suspicion_SN[0, 2] = 1e20
            watch.look(step, suspicion_SN)
        assert watch.named() == named


@pytest.mark.parametrize("spread", [1.0, 0.0], ids=["others differ", "others are alike"])
def test_whoever_is_not_finite_three_times_is_named_however_many_they_are(spread: float) -> None:
    chance = np.random.default_rng(4)
    for count in range(2, 9):
        for bad in range(1, count):
            watch, faulty = Watch(1, count, 1), {int(n) for n in chance.permutation(count)[:bad]}
            for step in range(FAR_STEPS):
                suspicion_SN = torch.tensor(spread * chance.random((1, count)))
                suspicion_SN[0, list(faulty)] = torch.inf
                watch.look(step, suspicion_SN)
            assert set(watch.named()) == faulty, (count, bad)
            for n, tally in enumerate(watch.tallies[0]):
                assert tally.num_not_finite == (FAR_STEPS if n in faulty else 0)
                assert all(map(math.isfinite, tally.ratios))


def test_equal_replicas_are_never_named() -> None:
    """Those with equal gradients, and of those that are drawn alike none in many windows."""
    watch = Watch(1, 4, 1)
    for step in range(100):
        watch.look(step, torch.zeros(1, 4))
    assert not watch.named()
    chance, watch = np.random.default_rng(2), Watch(8, 4, 1)
    for step in range(40 * WINDOW_STEPS):
        watch.look(step, torch.tensor(chance.random((8, 4))))
    assert not watch.named() and CHANCE < 1e-6
