"""Plans that are looked for near others, by their simulated step."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bound.every_plan import every_plan
from dejavu.cluster import load_cluster
from dejavu.planning import Planner, PlanRequest, annealing
from dejavu.planning.annealing import annealed
from dejavu.planning.planner import ANNEALED
from dejavu.planning.questions import Posed
from dejavu.planning.schedules import fits
from dejavu.plans import Plan
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.schedule import SCHEDULES
from dejavu.simulation import simulate_plan
from dejavu.workload import Workload
from tests.conftest import spread
from tests.test_planning import WORKLOAD
from tests.test_simulated_bound import small

FEWEST_PLANS = 12  # of as many ranks: among fewer there is nothing to look for
LONG_SECONDS = 60.0  # it ends by itself before


def steps_by_kind(priced: PricedProblem) -> dict[tuple[str, int], dict[Plan, float]]:
    """The simulated steps of all plans that fit, by schedule and number of ranks, where there are enough."""
    found = dict[tuple[str, int], dict[Plan, float]]()
    for plan in itertools.chain.from_iterable(every_plan(priced, name) for name in SCHEDULES):
        simulation = simulate_plan(priced, plan)
        if fits(priced, plan, simulation):
            found.setdefault((plan.schedule, len(plan.ranks)), {})[plan] = simulation.step_seconds
    return {kind: steps for kind, steps in found.items() if len(steps) >= FEWEST_PLANS}


@pytest.mark.parametrize("first", spread(range(0, 64, 8), 1))
def test_from_the_slowest_plan_of_a_schedule_it_comes_to_about_the_fastest(first: int) -> None:
    reached = []
    with_plans = ((priced, kinds) for priced in small(range(first, first + 8)) if (kinds := steps_by_kind(priced)))
    for priced, kinds in itertools.islice(with_plans, 3):
        for steps in kinds.values():
            slowest = max(steps, key=steps.__getitem__)
            found = annealed(Posed(priced), slowest, LONG_SECONDS, first)
            assert set(found) <= set(steps), "of the same schedule and ranks, within devices and memory"
            assert [steps[plan] for plan in found] == sorted(steps[plan] for plan in found)
            reached.append(min(map(steps.__getitem__, found), default=steps[slowest]) / min(steps.values()))
    assert len(reached) >= 2
    assert np.median(reached) == 1.0 and np.mean(reached) < 1.05, reached


def test_no_time_brings_none_and_the_same_seed_the_same() -> None:
    for priced in small(range(2)):
        for steps in steps_by_kind(priced).values():
            start = next(iter(steps))
            assert annealed(Posed(priced), start, 0.0, 0) == []
            once, again = (annealed(Posed(priced), start, LONG_SECONDS, 1) for _ in range(2))
            assert set(once) <= set(steps) and len(once) <= annealing.NUM_MET and once == again


CLUSTER = """
nodes:
  - {name: a, count: 3, devices: {type: GH200-96GB, count: 1}}
  - {name: b, count: 2, devices: {type: A10, count: 4}}
links:
  default: {bandwidth: 100 Gbit/s, latency: 10 us}
  pairs: [{between: [a, a], bandwidth: 1 Gbit/s, latency: 200 us}]
"""
SIZES = {
    "model_options": {"num_blocks": 10, "width": 512, "num_heads": 8},
    "synthetic": {"num_classes": 32000},
    "sequence_length": 512,
    "batch_size": 24,
    "num_microbatches": 4,
}


@pytest.mark.parametrize("searches", [(), ("pipedream",)])
def test_it_is_done_where_the_proof_leaves_a_gap_and_no_search_was_named(
    searches: tuple[str, ...], tmp_path: Path
) -> None:
    """Under a V whose ranks differ what the searches' formula finds is not the fastest."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    asked = PlanRequest(
        Workload.model_validate(WORKLOAD | SIZES),
        load_cluster(tmp_path / "cluster.yaml"),
        tmp_path / "rows",
        searches=searches,
        microbatches=(4,),
        budget_seconds=2.0,
    )
    choice = Planner().plan(asked)
    rows = [row for row in choice.considered if row.search == ANNEALED]
    assert bool(rows) == (not searches)
    for row in rows:
        for one in row.candidates:
            assert one.plan.schedule in asked.allowed_schedules and one.plan.num_microbatches == 4
            assert one.simulated_seconds >= choice.simulated_lower_bound_seconds * (1 - 1e-9)
            assert not one.fits or one.simulated_seconds >= choice.simulated_seconds * (1 - 1e-9)
