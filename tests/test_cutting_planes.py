"""Prices on devices: the bound against a linear program over all plans, with nearest prices."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from scipy.optimize import linprog

from dejavu.search.coarse.ranges import Sought
from dejavu.search.exact.cutting_planes import Bounded, CuttingPlanes, Enough, PlansMet, PricedPlan

SEEDS = range(12)
MOST_PRICE = 50.0
PRECISION = 1e-6


def _plans(rng: np.random.Generator, num_types: int, num_plans: int) -> list[PricedPlan]:
    """The more devices, the faster."""
    use_PT = rng.integers(0, 12, (num_plans, num_types))
    sums_P = 40.0 / (1.0 + use_PT @ rng.uniform(0.2, 1.0, num_types)) + rng.uniform(0.0, 1.0, num_plans)
    return [PricedPlan(float(seconds), 0.0, use) for seconds, use in zip(sums_P, use_PT, strict=True)]


def _dual(plans: list[PricedPlan], count_T: np.ndarray) -> float:
    """The most, over all prices, that the cheapest plan comes to."""
    T = len(count_T)
    rows = [np.append(count_T - plan.use_T, 1.0) for plan in plans]
    bounds = [*[(0.0, MOST_PRICE)] * T, (None, None)]
    answer = linprog(np.append(np.zeros(T), -1.0), rows, [plan.sum_seconds for plan in plans], bounds=bounds)
    return float(-answer.fun)


def _value(plans: list[PricedPlan], count_T: np.ndarray, prices_T: np.ndarray) -> float:
    return min(plan.sum_seconds + float((plan.use_T - count_T) @ prices_T) for plan in plans)


def _bound(
    planes: CuttingPlanes,
    found: list[PricedPlan],
    cutoff: float,
    most_rounds: int = 400,
) -> Bounded:
    count_T = planes.count_T

    def cheapest(prices_T: np.ndarray) -> PricedPlan | None:
        return min(found, key=lambda plan: plan.sum_seconds + plan.use_T @ prices_T, default=None)

    return planes.bound(
        cheapest,
        allows=lambda plan: True,
        cutoff=cutoff,
        most_price=MOST_PRICE,
        enough=Enough(PRECISION, most_rounds=most_rounds),
        prices_T=np.zeros(len(count_T)),
        is_late=lambda: False,
    )


@pytest.mark.parametrize("is_near", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.6])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_is_the_dual_of_all_plans(seed: int, smoothing: float, is_near: bool) -> None:
    rng = np.random.default_rng(seed)
    count_T = rng.integers(2, 8, 3)
    plans = _plans(rng, 3, 60)
    planes = CuttingPlanes(count_T, 0, smoothing=smoothing, is_near=is_near)
    bound, prices_T, most = _bound(planes, plans, np.inf)
    assert bound == pytest.approx(_value(plans, count_T, prices_T))
    assert bound == pytest.approx(_dual(plans, count_T), abs=1e-4)
    assert most >= _dual(plans, count_T) - 1e-4, "no prices prove more than this"


@pytest.mark.parametrize("is_near", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_cutoff_is_reached_where_prices_allow_it_and_not_elsewhere(seed: int, is_near: bool) -> None:
    rng = np.random.default_rng(100 + seed)
    count_T = rng.integers(2, 8, 3)
    plans = _plans(rng, 3, 60)
    dual = _dual(plans, count_T)
    for share, is_reached in ((0.9, True), (0.99, True), (1.05, False)):
        planes = CuttingPlanes(count_T, 0, smoothing=0.6, is_near=is_near)
        bound, prices_T, _ = _bound(planes, plans, share * dual)
        assert (bound >= share * dual) == is_reached
        assert bound == pytest.approx(_value(plans, count_T, prices_T))


def test_no_plan_at_all_has_no_bound() -> None:
    bound, _, _ = _bound(CuttingPlanes(np.array([3, 3]), 0), [], 1.0)
    assert bound == np.inf


@pytest.mark.parametrize("seed", SEEDS)
def test_nearest_prices_are_no_further_than_the_best(seed: int) -> None:
    """All devices cost no more at prices that just reach a cutoff than at those that the planes propose."""
    rng = np.random.default_rng(300 + seed)
    count_T = rng.integers(2, 8, 3)
    plans = _plans(rng, 3, 60)
    cutoff = 0.8 * _dual(plans, count_T)
    spent = {}
    for is_near in (False, True):
        bound, prices_T, _ = _bound(CuttingPlanes(count_T, 0, is_near=is_near), plans, cutoff)
        assert bound >= cutoff
        spent[is_near] = float(count_T @ prices_T)
    assert spent[True] <= spent[False] * (1 + 1e-6) + 1e-9


def test_a_plan_that_is_met_again_is_known_once_and_is_the_last_one() -> None:
    met, use_T = PlansMet(), np.array([1, 2])
    plans = [
        PricedPlan(1.0 + 1e-12 * turn, 2.0, use_T, np.array([[k], [0], [4]])) for turn in (0, 1) for k in (0, 1, 2)
    ]
    for plan in [
        *plans,
        plans[1],
        PricedPlan(3.0, 2.0, use_T),
        PricedPlan(3.0, 2.0, use_T),
        PricedPlan(4.0, 2.0, use_T),
    ]:
        met.add(plan)
    kept = met.latest(10)
    assert [plan.sum_seconds for plan in kept[:2]] == [4.0, 3.0]
    stages = [plan.stages_3S for plan in kept[2:]]
    assert [int(how_3S[0, 0]) for how_3S in stages if how_3S is not None] == [1, 2, 0]
    assert met.latest(2) == kept[:2]


def test_the_end_leaves_nobody_waiting() -> None:
    sought = Sought()
    waits = threading.Thread(target=sought.counted.wait)
    waits.start()
    sought.end()
    waits.join(timeout=30.0)
    assert not waits.is_alive()
