"""What every search owes, on small random problems that can be settled by listing every plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dejavu.plans import Infeasible, Problem, SearchResult, StageConfiguration, check, step_seconds
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.search import Exhaustive, Search
from dejavu.search.exhaustive import count_plans
from dejavu.testing.expect import expect

BUDGET_SECONDS = 60.0  # more than any search takes here: what stops by the clock is no case for a test
MOST_LISTED = 400  # plans of a problem that the referee prices in milliseconds
ROUNDING = 1e-9  # relative; two ways to add up the same seconds


def check_search(search: Search) -> None:
    """Hold a search to every case of this file.

        check_search(MySearch(num_steps=100))

    Raises:
        AssertionError: it breaks one of them.
    """
    for case in CASES:
        case(search)


def random_problem(seed: int, *, max_layers: int = 5, max_devices: int = 4) -> Problem:
    """What a problem can have: degrees, links, once seconds, tight memory, free layers, idle devices, few stages."""
    rng = np.random.default_rng(seed)
    L = int(rng.integers(1, max_layers + 1))
    counts = {name: int(rng.integers(0, max_devices)) for name in ("a", "b", "c")[: rng.integers(1, 4)]}
    counts["a"] += 1
    shapes = [(name, n, r) for name in counts for n in (1, 2, 3) for r in (False, True)]
    picked = rng.choice(len(shapes), size=min(len(shapes), int(rng.integers(1, 5))), replace=False)
    configurations = tuple(
        StageConfiguration(name, 1, n, data_parallel=n, recompute=r) for name, n, r in (shapes[i] for i in picked)
    )
    C = len(configurations)
    whole = rng.random() < 0.5  # whole numbers make ties

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(0, 5, shape).astype(float) if whole else rng.random(shape) * 4 * (rng.random(shape) < 0.9)

    one_link = rng.random() < 0.3
    latency, per_byte = (np.full((C, C), rng.random()) if one_link else draw(C, C) / 2 for _ in range(2))
    fixed, activations = draw(C, L), draw(C, L)
    host_rng = np.random.default_rng((seed, 1))
    away_C1 = (host_rng.random((C, 1)) < 0.5) & (host_rng.random() < 0.3)  # some keep something in their nodes
    host_2CL = host_rng.integers(0, 5, (2, C, L)) * away_C1 * (host_rng.random((2, 1, 1)) < 0.7)
    return Problem(
        layers=tuple(f"layer {i}" for i in range(L)),
        configurations=configurations,
        device_counts=counts,
        costs=AdditiveCosts(
            seconds_CL=draw(C, L),
            per_step_seconds_CL=draw(C, L) * (rng.random() < 0.5),
            per_step_latency_seconds_C=draw(C) * (rng.random() < 0.5),
            fixed_bytes_CL=fixed,
            activation_bytes_CL=activations,
            temporary_bytes_CL=draw(C, L),
            capacity_bytes_C=np.full(C, rng.choice([8.0, 12.0, 20.0, 40.0, 1e6])),
            host_fixed_bytes_CL=host_2CL[0].astype(float),
            host_activation_bytes_CL=host_2CL[1].astype(float),
            host_capacity_bytes_C=np.full(C, host_rng.choice([4.0, 8.0, 20.0, 1e6])),
        ),
        cut_bytes_L1=draw(L + 1) * (rng.random() < 0.6),
        link_latency_seconds_CC=latency * (rng.random() < 0.6),
        link_seconds_per_byte_CC=per_byte,
        schedule=str(rng.choice(["1f1b", "gpipe"])),
        num_microbatches=int(rng.choice([1, 2, 3, 8])),
        use_all_devices=bool(rng.random() < 0.3),
        max_stages=int(rng.integers(1, 5)) if rng.random() < 0.4 else None,
    )


def small_problem(seed: int) -> Problem:
    """A problem that the referee prices in milliseconds."""
    problem = random_problem(seed)
    count = count_plans(problem)
    few = count is not None and count <= MOST_LISTED
    return problem if few else random_problem(seed, max_layers=3, max_devices=2)


def answer(search: Search, problem: Problem) -> SearchResult | None:
    """None where it has no plan."""
    found = search.run(problem, budget_seconds=BUDGET_SECONDS)
    expect(str(found), f"{search}: its answer prints as nothing")
    return found if isinstance(found, SearchResult) else None


def its_plan_is_the_problems_and_priced_by_the_one_price(search: Search) -> None:
    """The history falls to the price; the bound is no higher; the search signs with its name."""
    found = 0
    for seed in range(80):
        problem = small_problem(seed)
        result = answer(search, problem)
        if result is None:
            continue
        found += 1
        told = f"{search} on small_problem({seed})"
        check(problem, result.plan)
        price, prices = step_seconds(problem, result.plan), [seconds for _, seconds in result.history]
        expect(result.step_seconds == price, f"{told}: it says {result.step_seconds!r} s of a plan of {price!r} s")
        bound = result.lower_bound_seconds
        expect(0 <= bound <= price, f"{told}: its bound is {bound!r}; wanted one from 0 to its price {price!r}")
        signed = result.search.split(":")[0]  # a search that picks one of several names it after a colon
        expect(signed == search.name, f"{told}: it signs as {signed!r}; wanted its name {search.name!r}")
        expect(prices == sorted(prices, reverse=True), f"{told}: its history {prices} rises")
        expect(prices[-1:] == [price], f"{told}: its history ends at {prices[-1:]}; wanted its price {price!r}")
    expect(found > 10, f"{search}: it has a plan for {found} of 80 problems; wanted more than 10")


def no_bound_of_it_is_above_the_best(search: Search) -> None:
    """Nor any plan below it, nor a plan where there is none, nor a proof that there is none where there is one."""
    for seed in range(80):
        problem = small_problem(seed)
        found, best = search.run(problem, budget_seconds=BUDGET_SECONDS), answer(Exhaustive(), problem)
        told = f"{search} on small_problem({seed})"
        if best is None:
            expect(not isinstance(found, SearchResult), f"{told}: it has a plan; of all plans none fits")
            continue
        if isinstance(found, Infeasible):
            raise AssertionError(f"{told}: it proves that there is no plan ({found.proof}); there is {best.plan}")
        bound, least = found.lower_bound_seconds, best.step_seconds
        expect(bound <= least * (1 + ROUNDING), f"{told}: its bound {bound!r} is above the best plan's {least!r}")
        if isinstance(found, SearchResult):
            price = found.step_seconds
            expect(least <= price * (1 + ROUNDING), f"{told}: its price {price!r} is below the best plan's {least!r}")


def it_has_no_plan_where_no_device_holds_a_byte(search: Search) -> None:
    """And says why."""
    for seed in range(20):
        problem = small_problem(seed)
        assert isinstance(problem.costs, AdditiveCosts)
        fixed = problem.costs.fixed_bytes_CL + 1.0
        none = replace(problem.costs, fixed_bytes_CL=fixed, capacity_bytes_C=np.zeros(len(fixed)))
        found = search.run(replace(problem, costs=none), budget_seconds=BUDGET_SECONDS)
        told = f"{search} on small_problem({seed}) without memory"
        expect(not isinstance(found, SearchResult), f"{told}: it has a plan, {found}")
        expect(len(str(found)) > 10, f"{told}: it says {str(found)!r}; wanted why there is no plan")


def the_same_seed_repeats_it(search: Search) -> None:
    """Randomness comes from `seed` alone."""
    for seed in range(20):
        problem = small_problem(seed)
        first, second = (answer(search, problem) for _ in range(2))
        plans = [None if one is None else one.plan for one in (first, second)]
        expect(plans[0] == plans[1], f"{search} on small_problem({seed}): {plans[0]} at first, then {plans[1]}")


def both_forms_of_costs_give_it_the_same_price(search: Search) -> None:
    """Sums of layers, and a table of all stages."""
    for seed in range(60):
        problem = small_problem(seed)
        result, dense = answer(search, problem), answer(search, replace(problem, costs=problem.costs.dense()))
        prices = [None if one is None else one.step_seconds for one in (result, dense)]
        expect(
            prices[0] == prices[1],
            f"{search} on small_problem({seed}): {prices[0]} s of additive costs, {prices[1]} s of the same ones dense",
        )


def no_plan_of_it_has_more_stages_than_allowed(search: Search) -> None:
    """`max_stages` holds."""
    for seed in range(60):
        free = small_problem(seed)
        for most in (1, 2, 3):
            result = answer(search, replace(free, max_stages=most))
            stages = 0 if result is None else len(result.plan.stages)
            expect(stages <= most, f"{search} on small_problem({seed}): {stages} stages; wanted at most {most}")


CASES: tuple[Callable[[Search], None], ...] = (
    its_plan_is_the_problems_and_priced_by_the_one_price,
    no_bound_of_it_is_above_the_best,
    it_has_no_plan_where_no_device_holds_a_byte,
    the_same_seed_repeats_it,
    both_forms_of_costs_give_it_the_same_price,
    no_plan_of_it_has_more_stages_than_allowed,
)
