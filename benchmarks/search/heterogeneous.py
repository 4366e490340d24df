"""Generated clusters of mixed devices: how far from the best each search ends, and what is proved.

Problem i has 2 to 4 types of devices, 12 to 64 devices and 12 to 96 layers; the cycles of the three lists have no
common length, so 105 problems hold every combination. Tiny problems follow, where every plan can be priced.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.search.generated import heterogeneous
from benchmarks.search.runs import Run, chosen, run, warm_up
from dejavu.plans import Problem
from dejavu.search import Exhaustive, Search

TYPES = (2, 3, 4)
DEVICES = (12, 16, 24, 48, 64)
LAYERS = (12, 24, 48, 96, 16, 32, 64)
TINY_LAYERS, TINY_DEVICES = (3, 4), (4, 5, 6)
MOST_LISTED_PLANS = 50_000  # for `exhaustive` to run beside: some seconds
CLOSE = 1e-9  # relative: prices this near are the same
WITHIN_PERCENT = 1.0
QUICK = {"num_problems": 3, "num_tiny": 2, "budget_seconds": 2.0}


@dataclass(frozen=True, eq=False)
class Case:
    """A problem and how it was made."""

    problem: Problem
    about: dict[str, Any]


def cases(num_problems: int, seed: int, num_tiny: int = 0) -> list[Case]:
    """The first problems of the cycle, then the tiny ones."""
    sizes = [(TYPES[i % 3], DEVICES[i % 5], LAYERS[i % 7]) for i in range(num_problems)]
    sizes += [(2, TINY_DEVICES[i % 3], TINY_LAYERS[i % 2]) for i in range(num_tiny)]
    found = []
    for i, (types, devices, layers) in enumerate(sizes):
        problem = heterogeneous(seed + i, num_types=types, num_devices=devices, num_layers=layers)
        about = {
            "types": types,
            "devices": devices,
            "layers": layers,
            "configurations": len(problem.configurations),
            "seed": seed + i,
            "tiny": i >= num_problems,
        }
        found.append(Case(problem, about))
    return found


def table(
    *, searches: str = "", num_problems: int = 15, num_tiny: int = 6, seed: int = 0, budget_seconds: float = 10.0
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every search on every problem, in turn."""
    picked = chosen(searches, ("exact", "differentiable", "hybrid", "uniform"))
    asked = cases(num_problems, seed, num_tiny)
    warm_up(picked.values(), [cases(1, seed + 1)[0].problem, asked[0].problem])
    rows: list[dict[str, Any]] = []
    for case in asked:
        rows += _rows(case, picked, budget_seconds)
    return f"Generated clusters of mixed devices, {budget_seconds:g} s each", rows, summary(rows, list(picked))


def _rows(case: Case, searches: dict[str, Search], budget_seconds: float) -> list[dict[str, Any]]:
    runs = {name: run(search, case.problem, budget_seconds) for name, search in searches.items()}
    every = list(runs.values())
    listed = listing(case.problem)
    if listed is not None:
        every.append(listed)
    best = min(one.step_seconds for one in every)
    bound = max(one.lower_bound_seconds for one in every)
    return [row(case, name, one, best, bound, listed) for name, one in runs.items()]


def listing(problem: Problem) -> Run | None:
    """The best of all plans where there are few enough of them."""
    # Layers and devices bound the number of plans well before they are counted.
    if problem.num_layers > max(TINY_LAYERS) or sum(problem.device_counts.values()) > max(TINY_DEVICES):
        return None
    answer = run(Exhaustive(max_plans=MOST_LISTED_PLANS), problem, 600.0)
    is_complete = answer.infeasible or (answer.result is not None and answer.result.gap == 0)
    return answer if is_complete else None


def row(case: Case, name: str, one: Run, best: float, bound: float, listed: Run | None) -> dict[str, Any]:
    result = one.result
    found = result is not None
    same = abs(one.step_seconds - listed.step_seconds) <= CLOSE * listed.step_seconds if found and listed else None
    if listed is not None and not found:
        same = listed.result is None
    return {
        **case.about,
        "search": name,
        "step_seconds": result and result.step_seconds,
        "lower_bound_seconds": result and result.lower_bound_seconds,
        "gap_percent": one.gap_percent if found else None,
        "over_best_percent": 100.0 * (one.step_seconds / best - 1.0) if found else None,
        "over_bound_percent": 100.0 * (one.step_seconds / bound - 1.0) if found and bound > 0 else None,
        "equals_exhaustive": same,
        "cpu_seconds": one.cpu_seconds,
        "wall_seconds": one.wall_seconds,
        "stages": result and len(result.plan.stages),
        "proved_infeasible": one.infeasible,
        "complaint": one.complaint[:60] or None,
    }


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Over the problems that are not tiny and were not proved to have no plan; a search without a plan: gap 100 %."""
    seeds = {row["seed"] for row in rows if not row["tiny"]}
    impossible = {row["seed"] for row in rows if row["proved_infeasible"]}
    found: dict[str, Any] = {"problems": len(seeds), "problems_proved_infeasible": len(seeds & impossible)}
    for name in names:
        own = [row for row in rows if row["search"] == name and row["seed"] in seeds - impossible]
        if not own:
            continue
        gaps = [100.0 if row["gap_percent"] is None else row["gap_percent"] for row in own]
        over = [row["over_best_percent"] for row in own if row["over_best_percent"] is not None]
        prefix = "" if name == "exact" else f"{name}_"
        found[f"{prefix}worst_gap_percent"] = max(gaps)
        found[f"{prefix}median_gap_percent"] = statistics.median(gaps)
        found[f"{prefix}worst_cpu_seconds"] = max(row["cpu_seconds"] for row in own)
        found[f"{prefix}median_cpu_seconds"] = statistics.median(row["cpu_seconds"] for row in own)
        found[f"{prefix}worst_wall_seconds"] = max(row["wall_seconds"] for row in own)
        found[f"{prefix}median_over_best_percent"] = statistics.median(over) if over else None
        found[f"{prefix}worst_over_best_percent"] = max(over, default=None)
        found[f"{name}_found_a_plan"] = len(over)
        found[f"{name}_within_1_percent"] = _fraction(own, "over_best_percent")
        found[f"{name}_within_1_percent_proved"] = _fraction(own, "over_bound_percent")
    refusals = [row["cpu_seconds"] for row in rows if row["seed"] in seeds and row["proved_infeasible"]]
    found["infeasible_worst_cpu_seconds"] = max(refusals, default=None)
    compared = [row["equals_exhaustive"] for row in rows if row["equals_exhaustive"] is not None]
    found["compared_with_exhaustive"] = len(compared)
    for name in names:
        own = [row["equals_exhaustive"] for row in rows if row["search"] == name]
        found[f"{name}_equals_exhaustive"] = sum(bool(value) for value in own)
    return found


def _fraction(rows: list[dict[str, Any]], column: str) -> float:
    """Of the rows, how many are within one percent of the best known price, or of the best bound."""
    return sum(row[column] is not None and row[column] <= WITHIN_PERCENT for row in rows) / len(rows)
