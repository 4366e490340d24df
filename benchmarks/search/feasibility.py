"""What searches say of tight problems: no search may call a problem infeasible that has a plan, nor crash.

Problems are small (every plan can be listed) or have 257 to 500 layers, with memory within two percent of the least
that works, on both sides of it. The check that decides shares no code with the searches (`tight`).
"""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter
from typing import Any

from benchmarks.search.runs import chosen, warm_up
from benchmarks.search.tight import Tight, has_a_plan_by_listing, plan_fits, tight
from dejavu.plans import Infeasible, SearchResult
from dejavu.search import SEARCHES, Search

QUICK = {"num_problems": 6, "budget_seconds": 0.2}


def table(
    *, searches: str = "", num_problems: int = 100, seed: int = 0, budget_seconds: float = 0.3
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every search on every problem."""
    picked = chosen(searches, list(SEARCHES))
    asked = [tight(seed + i, large=i % 2 == 1) for i in range(num_problems)]
    warm_up(picked.values(), [case.problem for case in asked[:2]])
    rows = [row(case, name, search, budget_seconds) for case in asked for name, search in picked.items()]
    return f"Tight problems, {budget_seconds:g} s each", rows, summary(rows, list(picked), asked)


def row(case: Tight, name: str, search: Search, budget_seconds: float) -> dict[str, Any]:
    """One answer, judged."""
    problem, crash, answer = case.problem, "", None
    cpu = time.process_time()
    try:
        answer = search.run(problem, budget_seconds=budget_seconds, seed=case.seed)
    except Exception as error:  # whatever it is, a search that raises one is to be counted
        crash = "".join(traceback.format_exception_only(error)).strip()
    said = type(answer).__name__ if answer is not None else "crash"
    found = answer.plan if isinstance(answer, SearchResult) else None
    return {
        "seed": case.seed,
        "layers": problem.num_layers,
        "devices": sum(problem.device_counts.values()),
        "configurations": len(problem.configurations),
        "over_percent": None if math.isnan(case.over) else 100.0 * case.over,
        "has_a_plan": case.has_a_plan,
        "search": name,
        "answer": said,
        "false_infeasible": isinstance(answer, Infeasible) and case.has_a_plan,
        "false_feasible": found is not None and not (case.has_a_plan and plan_fits(problem, found)),
        "missed": case.has_a_plan and found is None,
        "cpu_seconds": time.process_time() - cpu,
        "said": crash or (str(answer)[:80] if found is None else ""),
    }


def summary(rows: list[dict[str, Any]], names: list[str], asked: list[Tight]) -> dict[str, Any]:
    """Counts over all searches, then of each."""
    small = [case for case in asked if case.problem.num_layers < 10]
    found: dict[str, Any] = {
        "problems": len(asked),
        "false_infeasible": sum(row["false_infeasible"] for row in rows),
        "false_feasible": sum(row["false_feasible"] for row in rows),
        "crashes": sum(row["answer"] == "crash" for row in rows),
        "problems_with_a_plan": sum(case.has_a_plan for case in asked),
        "problems_of_many_layers": len(asked) - len(small),
        "check_differs_from_listing": sum(has_a_plan_by_listing(case.problem) != case.has_a_plan for case in small),
    }
    for name in names:
        own = [row for row in rows if row["search"] == name]
        said = Counter(row["answer"] for row in own)
        found[f"{name}_found"], found[f"{name}_infeasible"] = said["SearchResult"], said["Infeasible"]
        found[f"{name}_not_found"] = said["NotFound"]
        for kind in ("missed", "false_infeasible", "false_feasible"):
            found[f"{name}_{kind}"] = sum(row[kind] for row in own)
        found[f"{name}_crashes"] = said["crash"]
        found[f"{name}_worst_cpu_seconds"] = max((row["cpu_seconds"] for row in own), default=None)
    return found
