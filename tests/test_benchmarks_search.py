"""The benchmarks of the searches: their generators, references and tables, on problems that take milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.search import anytime, cases, generate, heterogeneous, scale
from benchmarks.search.__main__ import TABLES, main
from benchmarks.search.alpa_loop import AlpaArrays, alpa_loop
from benchmarks.search.generate import Shape
from benchmarks.search.generated import heterogeneous as mixed_problem
from benchmarks.search.generated import operators
from benchmarks.search.pareto import optimum
from benchmarks.search.runs import Run, chosen
from dejavu.importers.alpa.cases import load_case
from dejavu.plans import Infeasible, NotFound, Obstacle, SearchResult, check, solved
from dejavu.search import Exact, Uniform

SHAPES = [
    Shape(6, 1, 4),
    Shape(7, 3, 2, every_host_count=True),
    Shape(9, 2, 4, room=1.2),
    Shape(8, 3, 3, every_host_count=True, room=1.6),
    Shape(1, 1, 1),
]


def run(main: Callable[..., None], *words: str) -> str:
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("names", ["exact,coarse", " exact , coarse", "exact,,coarse,"])
def test_searches_are_named_with_commas_and_blanks(names: str) -> None:
    assert list(chosen(names, ("mcmc",))) == ["exact", "coarse"]
    assert list(chosen(" ", ("mcmc",))) == ["mcmc"]


VALUES = {
    "microbatches": "4",
    "searches": "exact",
    "repeats": "2",
    "budget_seconds": "1",
    "problems": "2",
    "seed": "3",
    "alpa_up_to_layers": "5",
    "alpa_most_steps": "100",
    "figures": "pictures",
}


@pytest.mark.parametrize("option", VALUES)
def test_an_option_that_a_table_does_not_take_is_refused(option: str, tmp_path: Path) -> None:
    """So is one of its tables' where none is asked for; otherwise it would do nothing, without a word."""
    app = Typer()
    app.command()(main)
    field = {"problems": "num_problems"}.get(option, option)
    word = f"--{option.replace('_', '-')}"
    asked = {name: [f"--{name}", *([str(tmp_path)] if name in ("cases", "generate") else [])] for name in TABLES}
    without = [words for name, words in asked.items() if field not in TABLES[name]]
    if not any(field in TABLES[name] for name in ("heterogeneous", "anytime")):
        without.append([])
    assert without
    for words in without:
        result = CliRunner().invoke(app, [*words, word, VALUES[option]], env={"COLUMNS": "500"})
        assert result.exit_code == 2, (words, result.output)
        assert f"{word} is not for" in result.output


def case_of(shape: Shape, seed: int, folder: Path) -> Path:
    path = folder / f"{shape}-{seed}.npz"
    np.savez_compressed(path, **generate.arrays(shape, seed))
    return path


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alpas_loop_the_trade_off_and_the_exact_search_agree(shape: Shape, tmp_path: Path) -> None:
    for seed, num_microbatches in product(range(4), (1, 5, 32)):
        path = case_of(shape, seed, tmp_path)
        arrays = AlpaArrays.load(path)
        best = optimum(arrays, num_microbatches)
        loop = alpa_loop(arrays, num_microbatches, epsilon_seconds=0.0)
        assert loop.step_seconds == pytest.approx(best, rel=1e-9)
        assert solved(Exact().run(load_case(path, num_microbatches))).step_seconds == pytest.approx(best, rel=1e-9)


def test_alpas_loop_is_no_further_off_than_epsilon_allows(tmp_path: Path) -> None:
    tried = set()
    for seed in range(10):
        arrays = AlpaArrays.load(case_of(Shape(8, 2, 4), seed, tmp_path))
        exact = alpa_loop(arrays, 16, epsilon_seconds=0.0)
        for epsilon in (1e-6, 0.05, 1.0):
            loop = alpa_loop(arrays, 16, epsilon_seconds=epsilon)
            assert exact.step_seconds <= loop.step_seconds * (1 + 1e-12)
            assert loop.step_seconds <= exact.step_seconds + 16 * epsilon
            tried.add(loop.num_programs)
    assert len(tried) > 5


def test_alpas_loop_says_where_nothing_fits(tmp_path: Path) -> None:
    arrays = AlpaArrays.load(case_of(Shape(6, 2, 2, room=0.3), 0, tmp_path))
    assert alpa_loop(arrays, 8).step_seconds == optimum(arrays, 8) == np.inf


def test_generated_clusters_are_what_was_asked_for() -> None:
    for case in heterogeneous.cases(8, seed=3, num_tiny=2):
        problem, about = case.problem, case.about
        again = mixed_problem(
            about["seed"], num_types=about["types"], num_devices=about["devices"], num_layers=about["layers"]
        )
        assert np.array_equal(problem.costs.dense().seconds_CLL1, again.costs.dense().seconds_CLL1)
        assert (len(problem.device_counts), sum(problem.device_counts.values())) == (about["types"], about["devices"])
        assert problem.num_layers == about["layers"]
    sizes = {tuple(case.about[key] for key in ("types", "devices", "layers")) for case in heterogeneous.cases(105, 0)}
    assert len(sizes) == 105


def test_operators_cost_unevenly_and_cut_cheapest_between_blocks() -> None:
    problem = operators(0, num_operators=240, num_devices=24, num_types=2)
    seconds, cuts = problem.costs.seconds_CL[0].reshape(-1, 12), problem.cut_bytes_L1[1:-1]
    assert (seconds.max(axis=1) > 10 * seconds.min(axis=1)).all()
    within = cuts[:228].reshape(-1, 12)
    assert (within[:, 11] <= within.min(axis=1)).all()
    assert (within.max(axis=1) > 5 * within[:, 11]).all()
    check(problem, solved(Uniform().run(problem)).plan)


def test_the_table_of_cases(tmp_path: Path) -> None:
    shapes = (SHAPES[0], SHAPES[2], Shape(5, 1, 2, own_microbatches=7))
    generate.table(folder=tmp_path / "cases", shapes=shapes)
    out = tmp_path / "out.json"
    run(main, "--cases", str(tmp_path / "cases"), "--microbatches", "2,9", "--repeats", "1", "--json", str(out))
    found = json.loads(out.read_text())
    wanted = {"case", "microbatches", "search", "step_seconds", "lower_bound_seconds", "cpu_seconds", "wall_seconds"}
    assert all(wanted | {"stages"} <= set(row) for row in found["rows"])
    assert {row["microbatches"] for row in found["rows"]} == {2, 9, 7}
    assert {row["search"] for row in found["rows"]} == {"exact", "uniform"}
    assert found["summary"]["exact_proved"] == found["summary"]["exact_problems"] == 5
    assert found["summary"]["exact_at_the_stored_optimum"] == 1  # 16 and 64 microbatches were not asked for
    assert found["summary"]["exact_at_alpa_loop_price"] == found["summary"]["exact_beside_alpa_loop"] == 5
    assert found["machine"]["cpu"]


def test_alpas_loop_can_be_left_out(tmp_path: Path) -> None:
    generate.table(folder=tmp_path, shapes=SHAPES[:1])
    for limit in ({"alpa_up_to_layers": 0}, {"alpa_most_steps": 10.0}):
        _, rows, summary = cases.table(tmp_path, searches="exact", repeats=1, **limit)
        assert summary["alpa_loop_left_out_cases"] == 1
        assert all(row["alpa_cpu_seconds"] is None and abs(row["over_optimum"]) <= cases.CLOSE for row in rows)


def test_the_table_of_mixed_clusters() -> None:
    _, rows, summary = heterogeneous.table(searches="exact,uniform", num_problems=1, num_tiny=3, seed=5)
    assert len(rows) == 8
    assert summary["worst_gap_percent"] <= 1e-6
    assert summary["exact_equals_exhaustive"] == 3
    assert summary["exact_within_1_percent"] == summary["exact_within_1_percent_proved"] == 1.0
    assert summary["worst_cpu_seconds"] >= max(row["cpu_seconds"] for row in rows if row["search"] == "exact")
    even = [row for row in rows if row["search"] == "uniform" and row["step_seconds"]]
    assert even and all(row["over_best_percent"] >= 0 and row["gap_percent"] == 100 for row in even)


def test_what_is_not_proved_counts_as_open() -> None:
    case = heterogeneous.cases(1, seed=0)[0]
    nothing = Run(NotFound("exact", Obstacle.OUT_OF_TIME, "out of time", 1.0), 1.0, 1.0)
    infeasible = Run(Infeasible("exact", "no plan fits", 1.0), 1.0, 1.0)
    for one, problems_left in ((nothing, 1), (infeasible, 0)):
        rows = [heterogeneous.row(case, "exact", one, np.inf, 0.0, None)]
        summary = heterogeneous.summary(rows, ["exact"])
        assert summary["problems_proved_infeasible"] == 1 - problems_left
        assert summary.get("worst_gap_percent") == (100.0 if problems_left else None)


def result(plan: object, history: list[tuple[float, float]], bound: float) -> Run:
    price = history[-1][1]
    return Run(SearchResult(plan, price, bound, "any", 1.0, tuple(history)), 1.0, 1.0)  # type: ignore[arg-type]


def test_prices_over_time() -> None:
    late, early = result(None, [(0.5, 10.0), (2.0, 8.0)], 8.0), result(None, [(0.1, 12.0), (1.0, 9.0)], 0.0)
    assert [anytime.price_at(late, at) for at in (0.4, 0.5, 1.9, 5.0)] == [np.inf, 10.0, 10.0, 8.0]
    assert anytime.price_at(Run(NotFound("any", Obstacle.OUT_OF_TIME, "", 0.0), 0.0, 0.0), 9.0) == np.inf
    runs = {"hybrid": late, "parent": early}
    excesses = anytime.excesses(runs, "hybrid", ["parent"])  # at 0.1, 0.5, 1 and 2 s
    assert excesses == [np.inf, 10 / 12 - 1, 10 / 9 - 1, 8 / 9 - 1]


def test_the_table_over_time(tmp_path: Path) -> None:
    _, rows, summary = anytime.table(searches="exact,uniform", num_problems=1, budget_seconds=0.4, figures=tmp_path)
    assert {(row["search"], row["seconds"]) for row in rows} == set(product(("exact", "uniform"), (0.1, 0.3)))
    assert summary["problems"] == 1
    assert (tmp_path / "search-anytime.png").stat().st_size > 1000


def test_the_table_of_sizes_measures_each_in_a_process_of_its_own(tmp_path: Path) -> None:
    _, rows, summary = scale.table(searches="uniform", sizes=((60, 12), (120, 24)), figures=tmp_path)
    assert [(row["operators"], row["devices"]) for row in rows] == [(60, 12), (120, 24)]
    assert all(row["wall_seconds"] > 0 and row["peak_bytes"] > 2**24 for row in rows)
    assert summary["uniform_at_the_top_operators"] == 120
    assert (tmp_path / "search-scale.png").stat().st_size > 1000
