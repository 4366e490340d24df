"""Gap against time, of every search on the same problems.

Each search runs once, in turn, with the whole budget; its history tells the price at any time before. The gap is taken
to the best bound that any of the searches proved: where that is the optimum, the gap is how far the plan is from it.
A gap is infinite before the first plan, shown as none. Times are wall-clock, from the call on.
"""

from __future__ import annotations

import bisect
import math
import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.search import figures as drawing
from benchmarks.search.heterogeneous import Case, cases
from benchmarks.search.runs import Run, chosen, run, warm_up
from dejavu.search import SEARCHES, Search

GRID_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0)
CURVE_SECONDS = tuple(0.01 * 10 ** (k / 8) for k in range(8 * 4 + 1))  # 0.01 to 100 s, for the figure
CLOSE = 1e-9  # relative: prices this near are the same
QUICK = {"num_problems": 2, "budget_seconds": 2.0}


def table(
    *,
    searches: str = "",
    num_problems: int = 6,
    seed: int = 0,
    budget_seconds: float = 10.0,
    figures: Path | None = None,
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every search but the referee, on the first problems of `--heterogeneous`."""
    picked = chosen(searches, [name for name in SEARCHES if name not in ("exhaustive", "ilp", "coarse")])
    asked = cases(num_problems, seed)
    warm_up(picked.values(), [asked[0].problem])
    grid = [at for at in GRID_SECONDS if at <= budget_seconds]
    rows: list[dict[str, Any]] = []
    answers: list[tuple[dict[str, Run], float]] = []
    for case in asked:
        runs = {name: run(search, case.problem, budget_seconds, seed) for name, search in picked.items()}
        bound = max(one.lower_bound_seconds for one in runs.values())
        answers.append((runs, bound))
        rows += _rows(case, runs, bound, grid)
    summary = _summary(rows, picked, answers, grid)
    if figures is not None:
        times = [at for at in CURVE_SECONDS if at <= budget_seconds]
        curves = {name: _medians(answers, name, times) for name in picked}
        drawn = {name: {at: gap for at, gap in curve.items() if math.isfinite(gap)} for name, curve in curves.items()}
        summary["figure"] = str(drawing.save(drawing.anytime(drawn, num_problems), figures / "search-anytime.png"))
    return f"Gap against time, {budget_seconds:g} s each", rows, summary


def price_at(one: Run, seconds: float) -> float:
    """The best price known so many seconds after the call; infinite before the first plan."""
    history = one.result.history if one.result else ()
    place = bisect.bisect_right([at for at, _ in history], seconds)
    return history[place - 1][1] if place else math.inf


def _gap_percent(price: float, bound: float) -> float:
    return 100.0 * (1.0 - bound / price) if math.isfinite(price) else math.inf


def _rows(case: Case, runs: dict[str, Run], bound: float, grid: list[float]) -> list[dict[str, Any]]:
    rows = []
    for name, one in runs.items():
        for at in grid:
            gap = _gap_percent(price_at(one, at), bound)
            row = {"search": name, **case.about, "seconds": at, "gap_percent": gap if math.isfinite(gap) else None}
            rows.append({**row, "finished_seconds": one.wall_seconds})
    return rows


def _medians(answers: list[tuple[dict[str, Run], float]], name: str, times: list[float]) -> dict[float, float]:
    return {
        at: statistics.median(_gap_percent(price_at(runs[name], at), bound) for runs, bound in answers) for at in times
    }


def _summary(
    rows: list[dict[str, Any]],
    searches: dict[str, Search],
    answers: list[tuple[dict[str, Run], float]],
    grid: list[float],
) -> dict[str, Any]:
    proved = [max(runs.values(), key=lambda one: one.lower_bound_seconds) for runs, _ in answers]
    summary: dict[str, Any] = {
        "problems": len(answers),
        "problems_with_a_proved_optimum": sum(one.result is not None and one.result.gap == 0 for one in proved),
    }
    for name in searches:
        for at in grid:
            gap = _medians(answers, name, [at])[at]
            summary[f"{name}_median_gap_percent_at_{at:g}_s"] = gap if math.isfinite(gap) else None
    for name, search in searches.items():
        parents = [parent for parent in _parents(search) if parent in searches]
        if parents:
            worse = [excess for runs, _ in answers for excess in excesses(runs, name, parents)]
            late = [excess for runs, _ in answers for excess in excesses(runs, name, parents, grid)]
            summary[f"{name}_parents"] = ", ".join(parents)
            summary[f"{name}_worse_than_a_parent"] = sum(excess > CLOSE for excess in worse)
            summary[f"{name}_compared_with_parents"] = len(worse)
            finite = [excess for excess in worse if math.isfinite(excess)]
            summary[f"{name}_worst_over_a_parent_percent"] = 100.0 * max(0.0, max(finite, default=0.0))
            summary[f"{name}_worse_than_a_parent_at_the_grid"] = sum(excess > CLOSE for excess in late)
            summary[f"{name}_compared_with_parents_at_the_grid"] = len(late)
    return summary


def _parents(search: Search) -> list[str]:
    """The searches that a search holds as fields."""
    held = [getattr(search, field.name) for field in fields(search)]
    members = [one for each in held for one in (each if isinstance(each, tuple) else (each,))]
    return [one.name for one in members if isinstance(one, Search)]


def excesses(runs: dict[str, Run], name: str, parents: list[str], times: list[float] | None = None) -> list[float]:
    """By how much the search is above its best parent, whenever one of them improved, or at the times given."""
    members = [runs[name], *(runs[parent] for parent in parents)]
    if times is None:
        times = sorted({at for one in members if one.result for at, _ in one.result.history})
    found = []
    for at in times:
        best = min(price_at(runs[parent], at) for parent in parents)
        if math.isfinite(best):
            found.append(price_at(runs[name], at) / best - 1.0)
    return found
