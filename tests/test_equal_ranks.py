"""Plans of equal ranks under schedules that run several stages on each, where the plans of the searches do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dejavu.cluster import load_cluster
from dejavu.planning import Planner, PlanRequest
from dejavu.planning.candidates import Simulator
from dejavu.planning.prices import Prices
from dejavu.planning.schedules import fits, under
from dejavu.planning.ways.equal_ranks import plans_of_equal_ranks
from dejavu.plans import Plan, Stage
from dejavu.simulation import simulate_plan
from dejavu.workload import Workload

CLUSTER = """\
nodes: [{name: g, devices: {type: D, count: 8}, count: 4, link: {bandwidth: 50 GB/s, latency: 5 us}}]
links: {default: {bandwidth: 50 Gbit/s, latency: 20 us}}
devices: {D: {kind: cuda, memory: 1000 MiB, bandwidth: 900 GB/s, float32: 20 TFLOP/s}}
"""
WORKLOAD = {
    "model": "gpt",
    "model_options": {"num_blocks": 24, "width": 1024, "num_heads": 4},
    "data": "synthetic",
    "synthetic": {"num_classes": 1000},
    "sequence_length": 512,
    "batch_size": 128,
    "num_microbatches": 64,
    "optimizer": {"name": "adamw", "learning_rate": 0.001},
    "trials": {"count": 0},
}


def request(folder: Path, *schedules: str) -> PlanRequest:
    (folder / "tight.yaml").write_text(CLUSTER)
    asked, cluster = Workload.model_validate(WORKLOAD), load_cluster(folder / "tight.yaml")
    return PlanRequest(asked, cluster, folder / "rows", schedules=schedules, microbatches=(64,), budget_seconds=0.5)


def test_a_plan_is_found_where_the_searches_plans_hold_too_much(tmp_path: Path) -> None:
    """These count one stage on each rank, and memory was left in others: "no plan was found under …" was the end."""
    choice = Planner().plan(request(tmp_path, "interleaved_zero_bubble"))
    assert choice.plan.schedule == "interleaved_zero_bubble" and choice.chosen.fits
    assert choice.simulated_lower_bound_seconds <= choice.simulated_seconds


@pytest.mark.parametrize("name", ["interleaved_zero_bubble", "dualpipe_v", "hanayo"])
def test_none_with_as_many_equal_ranks_is_faster(name: str, tmp_path: Path) -> None:
    """Held against every configuration on as many ranks as the devices allow."""
    prices = Prices(request(tmp_path, name))
    (priced,) = prices.problems(64)
    (row,) = plans_of_equal_ranks([priced], ["1f1b", name], Simulator(prices))
    assert row.best is not None and len({stage.configuration for stage in row.best.plan.stages}) == 1
    L, steps = priced.problem.num_layers, list[float]()
    for one in priced.problem.configurations:
        ranks = 32 // one.num_devices
        if 2 * ranks <= L:
            stages = tuple(Stage(s, s + 1 if s < ranks - 1 else L, one) for s in range(ranks))
            plan = under(priced, Plan(stages, "1f1b", 64), name)
            simulation = simulate_plan(priced, plan)
            steps += [simulation.step_seconds] if fits(priced, plan, simulation) else []
    assert row.best.simulated_seconds <= min(steps)
