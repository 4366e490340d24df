"""The same problem in other units of time: the plan and what is proved of it may not change.

Generated clusters of mixed devices, every time × 1e-9 to 1e6; searches that end by themselves and not by the clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.search.generated import heterogeneous
from benchmarks.search.runs import chosen, run, warm_up
from dejavu.plans import Problem
from dejavu.plans.stage_costs import AdditiveCosts

SCALES = tuple(10.0**k for k in range(-9, 7))
SIZES = ((2, 8, 12), (3, 12, 16), (2, 16, 24), (3, 24, 48))  # types, devices, layers
CLOSE = 1e-9  # relative, of prices; absolute, of gaps
QUICK = {"num_problems": 1, "budget_seconds": 10.0}


def table(
    *, searches: str = "", num_problems: int = 4, seed: int = 0, budget_seconds: float = 60.0
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every search on every problem in every unit, against its own answer in the problem's own."""
    picked = chosen(searches, ("exact", "pipedream", "mcmc", "uniform"))
    rows = []
    for i in range(num_problems):
        types, devices, layers = SIZES[i % len(SIZES)]
        problem = heterogeneous(seed + i, num_types=types, num_devices=devices, num_layers=layers)
        if not i:
            warm_up(picked.values(), [problem])
        for name, search in picked.items():
            own = run(search, problem, budget_seconds, seed)
            for scale in SCALES:
                one = run(search, times(problem, scale), budget_seconds, seed)
                same = (own.result is None) == (one.result is None)
                rows.append(
                    {
                        "seed": seed + i,
                        "layers": layers,
                        "devices": devices,
                        "search": name,
                        "scale": scale,
                        "gap_percent": one.gap_percent,
                        "same_answer": same and type(own.answer) is type(one.answer),
                        "same_plan": same and (own.result is None or one.result.plan == own.result.plan),  # type: ignore[union-attr]
                        "same_price": same
                        and (own.result is None or abs(one.step_seconds / (scale * own.step_seconds) - 1) <= CLOSE),
                        "same_proof": abs(one.gap_percent - own.gap_percent) <= 100.0 * CLOSE,
                        "cpu_seconds": one.cpu_seconds,
                    }
                )
    return f"Times in other units, {budget_seconds:g} s each", rows, summary(rows, num_problems, list(picked))


def times(problem: Problem, scale: float) -> Problem:
    """The problem with every time multiplied."""
    costs = problem.costs
    assert isinstance(costs, AdditiveCosts)
    slower = replace(
        costs,
        seconds_CL=costs.seconds_CL * scale,
        per_step_seconds_CL=costs.per_step_seconds_CL * scale,
        per_step_latency_seconds_C=costs.per_step_latency_seconds_C * scale,
    )
    return replace(
        problem,
        costs=slower,
        link_latency_seconds_CC=problem.link_latency_seconds_CC * scale,
        link_seconds_per_byte_CC=problem.link_seconds_per_byte_CC * scale,
    )


def summary(rows: list[dict[str, Any]], num_problems: int, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"problems": num_problems, "scales": len(SCALES)}
    for what in ("answer", "plan", "price", "proof"):
        found[f"different_{what}s"] = sum(not row[f"same_{what}"] for row in rows)
    for name in names:
        gaps = [row["gap_percent"] for row in rows if row["search"] == name]
        found[f"{name}_worst_gap_percent"] = max(gaps, default=None)
    return found
