"""The searches on planner problems in Alpa's form: price, proof, CPU seconds, and how far from the stored optimum.

    python -m benchmarks.search --cases ../shared/data/dp_cases --microbatches 16,64 --json search.json

A case that has a number of microbatches of its own keeps it. The searches take turns on each case; CPU seconds are the
median of the repeats, after one run that does not count.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks._report import report
from dejavu.importers.alpa_cases import load_case
from dejavu.plan import InfeasibleError, Problem, SearchResult
from dejavu.search import Search, search_named

_CLOSE = 1e-6  # relative: a price this near the stored optimum is the optimum; the cases are in single precision


def main(
    cases: Annotated[Path, typer.Option(help="folder of .npz problems, with the optimum beside them in .json")],
    microbatches: Annotated[str, typer.Option(help="numbers of microbatches")] = "16,64",
    searches: Annotated[str, typer.Option(help="names of searches")] = "exact,uniform",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    budget_seconds: Annotated[float, typer.Option(min=0)] = 30.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Every search on every case."""
    chosen = {name: search_named(name)() for name in searches.split(",")}
    rows = []
    for path in sorted(cases.glob("*.npz")):
        stored = _stored(path.with_suffix(".json"))
        for B in _own_microbatches(path) or [int(text) for text in microbatches.split(",")]:
            rows += _rows(path, B, chosen, stored.get(B, {}), repeats, budget_seconds)
    if not rows:
        raise typer.BadParameter(f"{cases} holds no .npz problem")
    report(f"Searches on {cases}", rows, _summary(rows, list(chosen)), json_path)


def _rows(
    path: Path, B: int, searches: dict[str, Search], stored: dict[str, Any], repeats: int, budget_seconds: float
) -> list[dict[str, Any]]:
    problem = load_case(path, B)
    runs: dict[str, list[tuple[float, float, SearchResult | None]]] = {name: [] for name in searches}
    for _ in range(1 + repeats):
        for name, search in searches.items():
            runs[name].append(_timed(search, problem, budget_seconds))
    rows = []
    for name, timed in runs.items():
        result, counted = timed[-1][2], timed[1:]
        optimum = stored.get("opt")
        rows.append(
            {
                "case": path.stem,
                "microbatches": B,
                "search": name,
                "step_seconds": result and result.step_seconds,
                "lower_bound_seconds": result and result.lower_bound_seconds,
                "over_optimum": result.step_seconds / optimum - 1 if result and optimum else None,
                "cpu_seconds": statistics.median(cpu for cpu, _, _ in counted),
                "wall_seconds": statistics.median(wall for _, wall, _ in counted),
                "alpa_cpu_seconds": stored.get("alpa_full_cpu_s") or stored.get("alpa_pred_cpu_s"),
                "stages": result and len(result.plan.stages),
            }
        )
    return rows


def _timed(search: Search, problem: Problem, budget_seconds: float) -> tuple[float, float, SearchResult | None]:
    """CPU and wall seconds, and the answer; None where nothing fits."""
    cpu, wall = time.process_time(), time.perf_counter()
    try:
        result = search.run(problem, budget_seconds=budget_seconds)
    except InfeasibleError:
        result = None
    return time.process_time() - cpu, time.perf_counter() - wall, result


def _summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in names:
        own = [row for row in rows if row["search"] == name]
        compared = [row["over_optimum"] for row in own if row["over_optimum"] is not None]
        summary[f"{name}_problems"] = len(own)
        summary[f"{name}_found_a_plan"] = sum(row["step_seconds"] is not None for row in own)
        summary[f"{name}_at_the_stored_optimum"] = sum(abs(over) <= _CLOSE for over in compared)
        summary[f"{name}_median_over_optimum"] = statistics.median(compared) if compared else None
        summary[f"{name}_worst_over_optimum"] = max(compared, default=None)
        summary[f"{name}_median_cpu_seconds"] = statistics.median(row["cpu_seconds"] for row in own)
        summary[f"{name}_worst_cpu_seconds"] = max(row["cpu_seconds"] for row in own)
    return summary


def _stored(path: Path) -> dict[int, dict[str, Any]]:
    """What is known of a case, by its number of microbatches."""
    if not path.exists():
        return {}
    known = json.loads(path.read_text())
    return {row["B"]: row for row in (known if isinstance(known, list) else [known])}


def _own_microbatches(path: Path) -> list[int]:
    with np.load(path, allow_pickle=False) as data:
        return [int(data["num_microbatches"])] if "num_microbatches" in data.files else []


if __name__ == "__main__":
    typer.run(main)
