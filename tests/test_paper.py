"""The papers' claims: each has a command that there is, and is judged by what the command found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.cost.collectives import linear_regression
from benchmarks.paper.__main__ import FAILED, LEFT_OUT, main, page, row_of
from benchmarks.paper.claims import CLAIMS, DATA, Claim, Finding, Verdict
from benchmarks.paper.regressions import PREDICTORS, two_stages

ROOT = Path(__file__).resolve().parents[1]
RESULTS = {
    "knapsack": "knapsack",
    "gradients": "gradients",
    "profiling": "cost-profiling-time",
    "joint": "joint",
    "partitioning": "operators-partitioning",
    "data-parallel": "operators-data-parallel",
    "pipeline": "operators-pipeline",
}
every_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)


def claim_of(name: str) -> Claim:
    return next(claim for claim in CLAIMS if claim.name == name)


def measured(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found["summary"], found["rows"]


def asked(command: Any, *words: str) -> str:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "400"}).output


@every_claim
def test_its_command_is_one_that_there_is(claim: Claim) -> None:
    try:
        module = importlib.import_module(f"{claim.module}.__main__")
    except ModuleNotFoundError:
        module = importlib.import_module(claim.module)
    said = asked(module.main, "--help")
    assert all(f"{word} " in said for word in (*claim.arguments, "--json") if word.startswith("--"))
    assert sum(other.name == claim.name for other in CLAIMS) == 1
    assert claim.needs_data == any(word.startswith(DATA) for word in claim.arguments)


@pytest.mark.parametrize("name", RESULTS)
def test_what_was_measured_is_judged(name: str) -> None:
    judged = claim_of(name).judge(*measured(RESULTS[name]))
    assert judged.verdict in Verdict and any(letter.isdigit() for letter in judged.ours)


def test_a_claim_is_judged_by_its_figures_and_not_by_its_name() -> None:
    """The knapsack's relaxation would hold if what it keeps fitted, sooner than the program."""
    found, rows = measured("knapsack")
    assert claim_of("knapsack").judge(found, rows).verdict is Verdict.DOES_NOT
    ways = found["ways"]
    ways["the paper's listing"] |= {"fits": True, "cpu_seconds": 0.5 * ways["numpy program"]["cpu_seconds"]}
    assert claim_of("knapsack").judge(found, rows).verdict is Verdict.HOLDS


def test_joint_training_holds_where_its_steps_are_cheap_and_pay() -> None:
    found, rows = measured("joint")
    judge, joint = claim_of("joint").judge, found["simulated_medians"]["joint"]
    joint["decided_cpu_ms"] = 0.0
    assert judge(found, rows).verdict is Verdict.HOLDS
    joint["decided_cpu_ms"] = 1e9
    assert judge(found, rows).verdict is Verdict.IN_PART
    joint["speed_over_once"] = 0.9
    assert judge(found, rows).verdict is Verdict.DOES_NOT
    joint["speed_over_once"], found["exponent_of_layers"]["large"] = 2.0, 2.0
    assert judge(found, rows).verdict is Verdict.DOES_NOT


def test_cuts_hold_by_how_many_are_theirs_and_draws_by_their_interval() -> None:
    found, rows = measured("operators-pipeline")
    judge = claim_of("pipeline").judge
    theirs = [{**row, "device_cuts": row.get("their_device_cuts")} for row in rows]
    others = [{**row, "device_cuts": "(1,)"} for row in rows]
    assert (judge(found, theirs).verdict, judge(found, others).verdict) == (Verdict.HOLDS, Verdict.DOES_NOT)
    judge = claim_of("initialization").judge
    for interval, verdict in (
        ([5.0, 1.0, 9.0], Verdict.HOLDS),
        ([5.0, -1.0, 9.0], Verdict.IN_PART),
        ([-5.0, -9.0, -1.0], Verdict.DOES_NOT),
    ):
        gains = {"tasks": {"cnn": {"by_count_percent": {"4": [90.0, 80.0, 99.0], "40": interval}, "repeats": 3}}}
        assert judge(gains, []).verdict is verdict
        assert f"40 workers {interval[0]:.0f} % ({interval[1]:.0f} to {interval[2]:.0f})" in judge(gains, []).ours


def test_data_that_are_not_there_leave_a_claim_out_and_a_command_that_fails_is_said(tmp_path: Path) -> None:
    missing = row_of(claim_of("program"), tmp_path / "nowhere", tmp_path)
    assert missing["verdict"] == LEFT_OUT and "nowhere" in missing["ours"]
    broken = Claim(
        "x", "w", "s", "benchmarks.knapsack", ("--items", "none"), lambda found, rows: Finding("", Verdict.HOLDS)
    )
    row = row_of(broken, tmp_path, tmp_path)
    assert row["verdict"] == FAILED and "--items" in (tmp_path / "x.txt").read_text()
    assert "unknown claim 'knapsak'" in asked(main, "--only", "knapsak")
    assert all(claim.states in asked(main, "--list") for claim in CLAIMS)


@pytest.mark.integration
def test_the_page_shows_theirs_beside_ours(tmp_path: Path) -> None:
    claim = claim_of("profiling")
    row = row_of(claim, tmp_path, tmp_path)
    (tmp_path / "profiling-now.png").touch()
    (tmp_path / "of-no-claim.png").touch()
    shown = page([row], tmp_path)
    assert f"{claim.where}: profiling-now.png" in shown and ">of-no-claim.png<" in shown
    assert row["cpu_seconds"] > 0
    assert row["verdict"] in list(Verdict) and claim.states in shown and row["verdict"] in shown
    again = row_of(claim, tmp_path, tmp_path, known_as=claim.name)
    assert again["ours"] == row["ours"]


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_predictor_knows_a_power_of_the_size(name: str) -> None:
    """Between the sizes that it saw; a forest answers with one of its neighbours."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        x = np.sort(rng.uniform(5.0, 20.0, 12))
        at, slope, start = float(0.5 * (x[5] + x[6])), rng.uniform(0.3, 1.0), rng.uniform(-10.0, -5.0)
        step = slope * (x[7] - x[4]) if name == "random forest" else 0.1
        assert abs(PREDICTORS[name](x, start + slope * x, at) - (start + slope * at)) <= step


def test_two_stages_follow_latency_and_bandwidth_where_one_line_does_not() -> None:
    x = np.log(2.0 ** np.arange(4, 28))
    seconds = np.maximum(1e-5, np.exp(x) / 1e10)
    off = {
        predict: max(
            abs(np.expm1(predict(np.delete(x, k), np.log(np.delete(seconds, k)), x[k]) - np.log(seconds[k])))
            for k in (*range(2, 11), *range(20, 22))
        )
        for predict in (two_stages, linear_regression, PREDICTORS["line on log axes"])
    }
    assert off[two_stages] < 0.01 < min(off[linear_regression], off[PREDICTORS["line on log axes"]])
