"""The searches on planner problems in Alpa's form: price, proof, CPU seconds, and how far from the stored optimum.

A case that has a number of microbatches of its own keeps it. The searches take turns on each case; CPU seconds are the
median of the repeats, after one run that does not count: compiled loops are loaded by then. Alpa's published loop runs
once beside the small ones.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.search.alpa_loop import AlpaAnswer, AlpaArrays, alpa_loop
from benchmarks.search.runs import Run, chosen, run
from dejavu.foundation.errors import InputError
from dejavu.importers.alpa.cases import load_case
from dejavu.search import Search

CLOSE = 1e-6  # relative: a price this near the stored optimum is the optimum; the cases are in single precision
QUICK = {"repeats": 1}


def table(
    cases: Path,
    *,
    microbatches: str = "16,64",
    searches: str = "",
    repeats: int = 5,
    budget_seconds: float = 30.0,
    alpa_up_to_layers: int = 16,
    alpa_most_steps: float = 1e9,
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every search on every case.

    Args:
        alpa_up_to_layers: Alpa's loop runs beside cases of at most as many layers.
        alpa_most_steps: and of at most as many innermost steps, about 1e-10 to 3e-10 s each.

    Raises:
        InputError: the folder holds no case.
    """
    picked = chosen(searches, ("exact", "uniform"))
    rows: list[dict[str, Any]] = []
    left_out = 0
    for path in sorted(cases.glob("*.npz")):
        stored = _stored(path.with_suffix(".json"))
        arrays = AlpaArrays.load(path)
        alpa = arrays.num_layers <= alpa_up_to_layers and arrays.num_steps <= alpa_most_steps
        left_out += not alpa
        for B in _own_microbatches(path) or [int(text) for text in microbatches.split(",")]:
            beside = _alpa(arrays, B) if alpa else None
            rows += _rows(path, B, picked, stored.get(B, {}), beside, repeats, budget_seconds)
    if not rows:
        raise InputError(f"{cases} holds no .npz problem")
    summary = _summary(rows, list(picked))
    summary["alpa_loop_left_out_cases"] = left_out
    return f"Searches on {cases} (medians of {repeats}, compiled loops loaded)", rows, summary


def _alpa(arrays: AlpaArrays, num_microbatches: int) -> AlpaAnswer:
    """As published, but for its price: that is of the loop without ε, which has no gap to forgive."""
    return replace(
        alpa_loop(arrays, num_microbatches),
        step_seconds=alpa_loop(arrays, num_microbatches, epsilon_seconds=0.0).step_seconds,
    )


def _rows(
    path: Path,
    B: int,
    searches: dict[str, Search],
    stored: dict[str, Any],
    alpa: AlpaAnswer | None,
    repeats: int,
    budget_seconds: float,
) -> list[dict[str, Any]]:
    problem = load_case(path, B)
    runs: dict[str, list[Run]] = {name: [] for name in searches}
    for _ in range(1 + repeats):
        for name, search in searches.items():
            runs[name].append(run(search, problem, budget_seconds))
    rows = []
    for name, timed in runs.items():
        result, counted = timed[-1].result, timed[1:]
        optimum = stored.get("opt")
        cpu_seconds = statistics.median(one.cpu_seconds for one in counted)
        rows.append(
            {
                "case": path.stem,
                "microbatches": B,
                "search": name,
                "step_seconds": result and result.step_seconds,
                "lower_bound_seconds": result and result.lower_bound_seconds,
                "over_optimum": result.step_seconds / optimum - 1 if result and optimum else None,
                "cpu_seconds": cpu_seconds,
                "wall_seconds": statistics.median(one.wall_seconds for one in counted),
                "stages": result and len(result.plan.stages),
                "over_alpa": result.step_seconds / alpa.step_seconds - 1 if result and alpa else None,
                "alpa_cpu_seconds": alpa and alpa.cpu_seconds,
                "stored_alpa_cpu_seconds": stored.get("alpa_full_cpu_s") or stored.get("alpa_pred_cpu_s"),
            }
        )
    return rows


def _summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in names:
        own = [row for row in rows if row["search"] == name]
        compared = [row["over_optimum"] for row in own if row["over_optimum"] is not None]
        beside = [row for row in own if row["over_alpa"] is not None]
        summary[f"{name}_problems"] = len(own)
        summary[f"{name}_found_a_plan"] = sum(row["step_seconds"] is not None for row in own)
        summary[f"{name}_proved"] = sum(
            row["step_seconds"] is not None and row["lower_bound_seconds"] >= row["step_seconds"] * (1 - CLOSE)
            for row in own
        )
        summary[f"{name}_compared_with_a_stored_optimum"] = len(compared)
        summary[f"{name}_at_the_stored_optimum"] = sum(abs(over) <= CLOSE for over in compared)
        summary[f"{name}_median_over_optimum"] = statistics.median(compared) if compared else None
        summary[f"{name}_worst_over_optimum"] = max(compared, default=None)
        summary[f"{name}_median_cpu_seconds"] = statistics.median(row["cpu_seconds"] for row in own)
        summary[f"{name}_worst_cpu_seconds"] = max(row["cpu_seconds"] for row in own)
        if beside:
            ratios = [row["alpa_cpu_seconds"] / row["cpu_seconds"] for row in beside]
            summary[f"{name}_beside_alpa_loop"] = len(beside)
            summary[f"{name}_at_alpa_loop_price"] = sum(abs(row["over_alpa"]) <= CLOSE for row in beside)
            summary[f"{name}_median_alpa_loop_cpu_ratio"] = statistics.median(ratios)
            summary[f"{name}_largest_alpa_loop_cpu_ratio"] = max(ratios)
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
