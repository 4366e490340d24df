"""What the gradient is worth: parameters and prices that restarts descended to, against those they were drawn with.

The same restarts, decoder, beam and rounds; only the number of gradient steps differs. Mixed clusters as in
`--heterogeneous`; the best price known is the least that any of these searches, or `exact`, found.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from benchmarks.search.heterogeneous import cases
from benchmarks.search.runs import run, warm_up
from dejavu.search import Differentiable, Exact

WITHIN_PERCENT = 1.0
QUICK = {"num_problems": 2, "budget_seconds": 3.0}


def table(
    *, num_problems: int = 21, seed: int = 0, budget_seconds: float = 20.0
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Both on every problem, and `exact` for the best price."""
    learnt = Differentiable()
    ways = {"learnt": learnt, "drawn": replace(learnt, num_steps=0)}
    asked = cases(num_problems, seed)
    warm_up([*ways.values(), Exact()], [asked[0].problem])
    rows: list[dict[str, Any]] = []
    for case in asked:
        runs = {name: run(search, case.problem, budget_seconds, seed) for name, search in ways.items()}
        exact = run(Exact(), case.problem, budget_seconds)
        best = min(one.step_seconds for one in (*runs.values(), exact))
        for name, one in runs.items():
            over = 100.0 * (one.step_seconds / best - 1.0) if one.result else None
            about = {**case.about, "parameters": name, "over_best_percent": over, "cpu_seconds": one.cpu_seconds}
            rows.append({**about, "best_is_proved": exact.result is not None and exact.result.gap == 0.0})
    return f"Gradient steps or none, {budget_seconds:g} s each", rows, summary(rows, num_problems)


def summary(rows: list[dict[str, Any]], num_problems: int) -> dict[str, Any]:
    """Over the problems on which both found a plan."""
    found: dict[str, Any] = {"problems": num_problems}
    over: dict[str, list[float]] = {}
    for name in ("learnt", "drawn"):
        own = [row for row in rows if row["parameters"] == name]
        over[name] = [row["over_best_percent"] for row in own if row["over_best_percent"] is not None]
        found[f"{name}_found"] = len(over[name])
        found[f"{name}_within_1_percent"] = sum(value <= WITHIN_PERCENT for value in over[name])
        found[f"{name}_median_over_best_percent"] = statistics.median(over[name]) if over[name] else None
        found[f"{name}_worst_over_best_percent"] = max(over[name], default=None)
        found[f"{name}_median_cpu_seconds"] = statistics.median(row["cpu_seconds"] for row in own)
    if len(over["learnt"]) == len(over["drawn"]):
        pairs = list(zip(over["learnt"], over["drawn"], strict=True))
        found["learnt_is_cheaper"] = sum(a < b - 1e-9 for a, b in pairs)
        found["drawn_is_cheaper"] = sum(b < a - 1e-9 for a, b in pairs)
    return found
