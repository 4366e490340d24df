"""What the benchmark of initial weights makes of trainings: figures by hand, intervals that hold them, plain JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.initialization.__main__ import main
from benchmarks.initialization.gains import (
    DEFAULT,
    FILTER,
    SEEDS,
    Repeat,
    best_family,
    fewer_percent,
    flat,
    ours,
    rows,
    summary,
    table,
)
from benchmarks.initialization.runs import Run
from benchmarks.initialization.tasks import TASKS, USUAL
from dejavu.init import MENU, space_of

PLANNED = TASKS["gpt"].workload.num_steps


def run(steps: int | None, ended: bool = False) -> Run:
    taken = PLANNED if ended or steps is None else steps
    return Run((1.0,) * taken, PLANNED, steps, steps, 0.25 if taken == PLANNED else float("nan"))


def repeat(seed: int, default: int | None, kaiming: int, winner: int, seeds: int, filtered: int | None) -> Repeat:
    families = {scheme: [run(None)] for scheme in MENU}
    families |= {DEFAULT: [run(default, ended=True), run(default), run(default)], "kaiming": [run(kaiming)]}
    methods = {ours(4): run(kaiming), ours(40): run(winner, ended=True), SEEDS: run(seeds), FILTER: run(filtered)}
    return Repeat("gpt", seed, families, methods, {}, {})


REPEATS = [repeat(0, 400, 200, 100, 300, None), repeat(1, 200, 160, 120, 200, 250), repeat(2, None, 250, 200, 900, 500)]


def test_the_summary_is_what_one_counts_by_hand() -> None:
    found = summary(REPEATS)["gpt"]
    assert found["best_family"] == best_family(REPEATS) == "kaiming"
    expected = {
        "fewer_steps_than_default_percent": (75 + 40 + 80) / 3,
        "fewer_steps_than_best_family_percent": (50 + 25 + 20) / 3,
        "seeds_only_percent": (25 + 0 + 10) / 3,
        "papers_filter_percent": (-150 - 25 + 50) / 3,  # what never reached the target took all planned steps
    }
    for name, percent in expected.items():
        mean, low, high = found[name]
        assert mean == pytest.approx(percent), name
        assert low <= mean <= high
    assert found["by_count_percent"].keys() == {"4", "40"}
    assert found["never_worse_than_default"] and found["repeats"] == 3
    assert found["final_test_loss"] == found["default_final_test_loss"] == 0.25


def test_everything_is_plain_json_and_every_training_has_a_row() -> None:
    text = json.dumps({"rows": rows(REPEATS), "summary": summary(REPEATS)}, allow_nan=False)
    assert len(json.loads(text)["rows"]) == sum(len(runs) for row in REPEATS for runs in row.families.values()) + 12
    assert len(table(REPEATS)) == len(MENU) + 4
    assert all(isinstance(value, str | int | float) for value in flat(summary(REPEATS)["gpt"]).values())


@pytest.mark.parametrize("seed", range(5))
def test_an_interval_narrows_with_the_repeats_and_holds_the_mean(seed: int) -> None:
    """Against the normal approximation, of as many repeats as make it good."""
    generator = np.random.default_rng(seed)
    steps = generator.integers(50, 150, size=200)
    repeats = [repeat(k, 200, 200, int(one), 200, 200) for k, one in enumerate(steps)]
    mean, low, high = fewer_percent(repeats, ours(40), DEFAULT)
    error = np.std(steps / 2, ddof=1) / np.sqrt(len(steps))
    assert mean == pytest.approx(100 - np.mean(steps) / 2)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.15)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_can_be_searched(name: str) -> None:
    workload = TASKS[name].workload
    assert workload.trials.count == 40
    assert space_of(workload).is_chain == (name in ("cnn", "mlp"))
    assert set(USUAL) <= set(TASKS)


def test_an_unknown_task_is_named() -> None:
    app = Typer()
    app.command()(main)
    found = CliRunner().invoke(app, ["--tasks", "cnn,gtp"])
    assert found.exit_code == 2
    assert "unknown task 'gtp'" in found.output and "normed_cnn" in found.output
