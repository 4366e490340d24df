"""The knapsacks: against brute force, the paper's listing as it is, and its figure."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.knapsack.__main__ import main
from benchmarks.knapsack.relaxations import LISTING, Listing, Relaxation, listing, relaxation
from benchmarks.knapsack.ways import Knapsack, generated, greedy, numpy_program, priced, python_program


def brute_force(problem: Knapsack) -> int:
    every = (np.array(bits) for bits in product([False, True], repeat=len(problem.values)))
    return max(problem.value(chosen) for chosen in every if problem.fits(chosen))


def small_knapsack(seed: int) -> Knapsack:
    rng = np.random.default_rng(seed)
    n, largest = int(rng.integers(1, 9)), int(rng.choice([4, 50, 1000]))
    values, weights = rng.integers(1, largest + 1, (2, n))
    return Knapsack(values, weights, int(rng.integers(0, n * largest // 2 + 2)))


def test_knapsacks_are_filled_as_by_brute_force() -> None:
    for seed in range(60):
        problem = small_knapsack(seed)
        best = brute_force(problem)
        for way in (python_program, numpy_program, priced):
            answer = way(problem)
            assert problem.fits(answer.chosen)
            assert problem.value(answer.chosen) == answer.bound == best
        for answer in (greedy(problem), relaxation(problem, Relaxation(steps=30), seed)):
            assert problem.fits(answer.chosen)
            assert problem.value(answer.chosen) <= best


def test_a_price_settles_knapsacks_of_hundreds_of_items() -> None:
    rng = np.random.default_rng(0)
    for capacity in (900, 20_000, 120_000):
        values, weights = rng.integers(1, 1001, (2, 400))
        problem = Knapsack(values, weights, capacity)
        assert priced(problem).bound == problem.value(priced(problem).chosen) == numpy_program(problem).bound


@pytest.mark.parametrize("seed", range(2))
def test_the_paper_s_listing_tells_what_it_keeps_from_what_fits(seed: int) -> None:
    """Its own settings need 10,000 steps before it takes anything; a small penalty and clamp need some hundred."""
    problem = generated(40, 4000, seed)
    answer = listing(problem, Listing(penalty=1e-3, learning_rate=1.0, steps=800, most_logit=1.0), seed)
    assert answer.fitting is not None and problem.fits(answer.fitting)
    best = priced(problem).bound
    assert best is not None and 0 < problem.value(answer.fitting) <= best
    assert problem.value(answer.fitting) <= problem.value(answer.chosen)
    assert problem.value(answer.fitting) < problem.value(answer.chosen) or problem.fits(answer.chosen)
    assert [point.step for point in answer.curve] == sorted(point.step for point in answer.curve)
    assert answer.curve[-1].kept_value == problem.value(answer.chosen)
    assert answer.curve[-1].fitting_value == problem.value(answer.fitting)


def test_the_table_of_knapsacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.knapsack.relaxations.LARGE_PENALTY", Relaxation(steps=50))
    monkeypatch.setattr("benchmarks.knapsack.relaxations.LISTING_SETTINGS", Listing(steps=50))
    out = tmp_path / "knapsack.json"
    app = typer.Typer()
    app.command()(main)
    words = ["--items", "30", "--capacity", "3000", "--repeats", "1", "--json", str(out), "--figures", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["command"] and found["date_utc"] and found["machine"]["conditions"]
    assert found["summary"]["proved_answers_agree"] is True
    for row in found["rows"]:
        assert row["fitting_percent_of_optimum"] <= 100
        assert row["fits"] or row["way"] == LISTING
    assert (tmp_path / "knapsack.png").stat().st_size > 1000
