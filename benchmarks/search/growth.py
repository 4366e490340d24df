"""How the time of searches that prove grows: branch and cut over an integer program beside the dynamic program.

Generated clusters of mixed devices from a few layers on, until a search's median no longer ends in its budget. Both
know the same problem and share nothing but the price, so where both end their prices must be equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.search.generated import heterogeneous
from benchmarks.search.runs import Run, chosen, run, warm_up
from dejavu.search import Search

SIZES = ((2, 4, 4), (2, 6, 6), (2, 8, 8), (2, 8, 12), (2, 8, 16), (2, 12, 16), (2, 12, 24))  # types, devices, layers
CLOSE = 1e-6  # relative, of prices: what HiGHS works to
QUICK = {"num_problems": 1, "budget_seconds": 5.0}


def table(
    *, searches: str = "", num_problems: int = 3, seed: int = 0, budget_seconds: float = 60.0
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every search on problems of every size, until one on which it did not end at all."""
    picked, rows = chosen(searches, ("ilp", "exact")), list[dict[str, Any]]()
    warm_up(picked.values(), [_problem(SIZES[0], seed)])
    asked = dict(picked)
    for size in SIZES:
        own = [row for k in range(num_problems) for row in _rows(asked, size, seed + k, budget_seconds)]
        rows += own
        asked = {name: one for name, one in asked.items() if any(row["ended"] for row in own if row["search"] == name)}
    title = f"Time of searches that prove, by size; {budget_seconds:g} s each"
    return title, rows, {"integer_program": summary(rows, list(picked))}


def _problem(size: tuple[int, int, int], seed: int) -> Any:
    types, devices, layers = size
    return heterogeneous(seed, num_types=types, num_devices=devices, num_layers=layers)


def _rows(
    asked: dict[str, Search], size: tuple[int, int, int], seed: int, budget_seconds: float
) -> list[dict[str, Any]]:
    problem = _problem(size, seed)
    runs = {name: run(search, problem, budget_seconds, seed) for name, search in asked.items()}
    best = min((one.step_seconds for one in runs.values()), default=float("inf"))
    return [
        {
            "layers": problem.num_layers,
            "devices": size[1],
            "configurations": len(problem.configurations),
            "seed": seed,
            "search": name,
            "ended": _has_ended(one),
            "gap_percent": None if one.infeasible else one.gap_percent,
            "above_best_percent": 100.0 * (one.step_seconds / best - 1.0) if one.result and best > 0 else None,
            "cpu_seconds": one.cpu_seconds,
        }
        for name, one in runs.items()
    ]


def _has_ended(one: Run) -> bool:
    return one.infeasible or (one.result is not None and one.gap_percent <= 100.0 * 10 * CLOSE)


def summary(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return each search's median time by size, and whether those that ended agree."""
    sizes = list(dict.fromkeys(f"{row['layers']} layers, {row['devices']} devices" for row in rows))
    found: dict[str, Any] = {}
    for name in names:
        by_size: dict[str, Any] = {}
        for size in sizes:
            own = [r for r in rows if r["search"] == name and f"{r['layers']} layers, {r['devices']} devices" == size]
            if own:
                by_size[size] = {
                    "median_cpu_seconds": statistics.median(row["cpu_seconds"] for row in own),
                    "ended": sum(row["ended"] for row in own),
                    "problems": len(own),
                }
        found[name] = by_size
    ended = [row["above_best_percent"] or 0.0 for row in rows if row["ended"]]
    found["worst_disagreement_percent"] = max(ended, default=0.0)
    return found
