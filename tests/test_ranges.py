"""90 % ranges of predicted steps and memory: what they hold, and how often they hold the truth."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dejavu.cluster import load_cluster
from dejavu.cost.ranges import (
    MOST_MEMORY_RATIO,
    SHARED_MEMORY_RATIO,
    UNTRAINED_LOG_DEVIATION,
    Draws,
    Range,
    memory_range,
)
from dejavu.cost.trainings.believed import NORMAL_90
from dejavu.cost.trainings.steps import Basis, StepFactor
from dejavu.parallelism import Parallelism
from dejavu.planning import Choice, Planner, PlanRequest
from dejavu.planning.plan_json import choice_to_dict
from dejavu.planning.sentences import between, what_is_likely
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.simulation import simulate_plan, stages_of
from dejavu.workload import Workload

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"
SMALL = Workload(
    model="gpt", model_options={"num_blocks": 6, "width": 256, "num_heads": 4}, batch_size=8, num_microbatches=4
)


@pytest.fixture(scope="module", params=["two-generations", "h100-and-l4"])
def choice(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Choice:
    cluster = load_cluster(CLUSTERS / f"{request.param}.yaml")
    alone = Parallelism(1, 1)  # no collectives: what is left are the passes of layers
    asked = PlanRequest(SMALL, cluster, tmp_path_factory.mktemp("db"), alone, ("proportional",), ("1f1b",), (4,))
    return Planner().plan(asked)


def test_the_prediction_is_inside_and_the_range_is_the_same_each_time(choice: Choice) -> None:
    low, high = choice.range_seconds
    assert low < choice.step_seconds < high
    assert choice.step_range(choice.chosen) == (low, high)


def test_no_range_is_narrower_than_what_was_never_trained(choice: Choice) -> None:
    low, high = choice.range_seconds
    assert math.log(high / low) > 2 * NORMAL_90 * UNTRAINED_LOG_DEVIATION * 0.9


@pytest.mark.parametrize("basis", [Basis.OWN, Basis.ALIKE, Basis.OTHERS])
def test_where_trainings_correct_the_step_the_range_is_theirs(choice: Choice, basis: Basis) -> None:
    factor = StepFactor(1.1, 0.03, basis, 4)
    trained = replace(choice.chosen, factor=factor)
    assert choice.step_range(trained) == factor.interval(trained.step_seconds)


def test_nine_of_ten_truths_are_inside_where_errors_are_as_stated(choice: Choice) -> None:
    """Truths by plain draws of the stated errors, each simulated anew, without the ranges' own way to draw."""
    low, high = choice.range_seconds
    chosen, random, inside, rounds = choice.chosen, np.random.default_rng(5), 0, 300
    base = stages_of(chosen.priced, chosen.plan)
    table = choice.prices.table_of(4)
    for _ in range(rounds):
        z = {name: random.normal() for name in table.device_types}
        rows = []
        for stage, row in zip(chosen.plan.stages, base, strict=True):
            device, span = stage.configuration.device_type, slice(stage.start, stage.stop)
            column, at = table.device_types.index(device), z[device] / NORMAL_90
            drawn = []
            for name in ("forward", "backward"):
                grid = table.grids[name]
                seconds, least, most = (
                    getattr(grid, f"{kind}seconds_LD")[span, column].sum() for kind in ("", "low_", "high_")
                )
                drawn.append(1 + (most / seconds - 1) * at if at > 0 else max(0.0, 1 + (1 - least / seconds) * at))
            rows.append(
                replace(
                    row,
                    forward_seconds=row.forward_seconds * drawn[0],
                    backward_seconds=row.backward_seconds * drawn[1],
                )
            )
        step = simulate_plan(chosen.priced, chosen.plan, stages=rows).step_seconds
        inside += low <= step * math.exp(UNTRAINED_LOG_DEVIATION * random.normal()) <= high
    assert 0.85 <= inside / rounds <= 0.96


LARGE = Workload.model_validate(
    {"model": "gpt", "model_options": {"num_blocks": 3, "width": 2048, "num_heads": 16}, "data": "synthetic"}
    | {"synthetic": {"num_classes": 256}, "sequence_length": 2048, "batch_size": 4, "num_microbatches": 4}
)


def range_of_step(folder: Path, gbits: str, schedule: str, **changes: object) -> tuple[float, float]:
    """The ends of the range of the best plan under a schedule on two nodes of two, over its step."""
    (folder / "cluster.yaml").write_text(
        "nodes: [{name: a, count: 2, devices: {type: A100-PCIE-40GB, count: 2}, link: {bandwidth: 100 GB/s}}]\n"
        f"links: {{default: {{bandwidth: {gbits} Gbit/s, latency: 25 us}}}}\n"
    )
    workload, cluster = LARGE.model_copy(update=changes), load_cluster(folder / "cluster.yaml")
    asked = PlanRequest(workload, cluster, folder / "db", Parallelism(1, 1), ("proportional",), (schedule,), (4,))
    choice = Planner().plan(asked)
    assert choice.plan.both_ways == (schedule == "chimera")
    low, high = choice.range_seconds
    return low / choice.step_seconds, high / choice.step_seconds


@pytest.mark.parametrize("runs", [1, 2, 8])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_runs_of_the_schedule_and_slices_are_as_uncertain_as_one_run_of_whole_sequences(
    runs: int, slices: int, tmp_path: Path
) -> None:
    """The same layers on the same devices, whose errors do not even out by being computed again, or in parts."""
    whole = range_of_step(tmp_path, "400", "1f1b")
    found = range_of_step(tmp_path, "400", "1f1b", accumulate=runs, batch_size=4 * runs, slices=slices)
    assert found == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_sent_over_declared_links_is_taken_at_its_word_of_two_copies_as_of_one(
    accumulate: int, tmp_path: Path
) -> None:
    """Where links take nearly all of a step, the range is that of what no price knows, around the step."""
    low, high = range_of_step(tmp_path, "0.01", "chimera", accumulate=accumulate, batch_size=4 * accumulate)
    beside = math.exp(NORMAL_90 * UNTRAINED_LOG_DEVIATION)
    assert (low, high) == pytest.approx((1 / beside, beside), rel=0.03)


@pytest.mark.parametrize("count", [40, 200])
def test_draws_are_normal_and_equal_names_share_them(count: int) -> None:
    draws = Draws(count)
    one, other = draws.of("one"), draws.of("other")
    assert draws.of("one") is one
    assert abs(one.mean()) < 0.1 and abs(one.std() - 1) < 0.1
    assert np.quantile(one, 0.95) == pytest.approx(NORMAL_90, abs=0.25)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.4
    low, high = np.quantile(draws.factors("one", 0.7, 2.0), (0.05, 0.95))
    assert (low, high) == (pytest.approx(0.7, abs=0.06), pytest.approx(2.0, abs=0.2))


def test_nine_of_ten_measured_stages_hold_what_the_memory_range_says() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "cost-memory.json").read_text())["rows"]
    for num_stages, schedule in ((1, "1f1b"), (2, "zbv")):
        stages = tuple(Stage(s, s + 1, StageConfiguration("core")) for s in range(num_stages))
        plan, own = Plan(stages, schedule, 4), [row for row in rows if row["stages"] == num_stages]
        ranges = [memory_range(plan, float(row["planned_bytes"])) for row in own]
        inside = [found.low <= row["real_bytes"] <= found.high for found, row in zip(ranges, own, strict=True)]
        assert 0.9 * len(inside) <= sum(inside) < len(inside) == 48
    assert (MOST_MEMORY_RATIO, SHARED_MEMORY_RATIO) == (1.15, 1.25)


def test_ranges_are_said_and_written(choice: Choice) -> None:
    found = json.loads(json.dumps(choice_to_dict(choice), allow_nan=False))
    low, high = found["predicted_step_seconds_range"]
    assert [8 / high, 8 / low] == pytest.approx(found["samples_per_second_range"])
    assert [8 * 128 / high, 8 * 128 / low] == pytest.approx(found["tokens_per_second_range"])
    assert (
        found["fullest_device_bytes_range"][1] == found["fullest_device_bytes"] == max(choice.chosen.price.peak_bytes)
        or len({stage["device_type"] for stage in found["stages"]}) > 1
    )
    said = what_is_likely(choice)
    assert said.startswith("In nine of ten cases: a step of ") and " tokens/s, " in said


def test_a_range_names_its_unit_once() -> None:
    assert between(Range(1.0, 2.0), lambda x: f"{x:g} s") == "1 to 2 s"
    assert between(Range(0.9, 2.0), lambda x: f"{x:g} s" if x >= 1 else f"{1e3 * x:g} ms") == "900 ms to 2 s"
    assert between(Range(1.0, 2.0), lambda x: f"{x:g}") == "1 to 2"
