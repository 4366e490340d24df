"""What a plan gains over the even split: every model of the zoo and of the examples on every example cluster.

Models are captured without weights and priced as `dejavu plan` does; the plan and the even split have the workload's
own number of microbatches. `gain` is the price of the best even split, on any subset of the devices, over that of
the search's own plan: nothing falls back to an even split where that is better. `gain_over_best_baseline` is what
`dejavu plan` says: simulated, over the best of all baselines, each under its fastest schedule.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.search.runs import chosen
from dejavu.cluster import Cluster, load_cluster
from dejavu.foundation.errors import DejavuError
from dejavu.planning import Planner, PlanRequest
from dejavu.workload import Workload
from dejavu.workload.loader import load_workload
from dejavu.workload.models import MODELS

WORKLOADS, CLUSTERS = Path("examples/workloads"), Path("examples/clusters")
QUICK = {"workloads": ("bert48", "t5-11b"), "clusters": ("4x8-v100", "a100-and-t4")}
CLOSE = 1e-9  # relative: prices this near are the same


def table(
    *,
    searches: str = "",
    budget_seconds: float = 8.0,
    workloads: tuple[str, ...] = (),
    clusters: tuple[str, ...] = (),
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every model on every cluster; those that cannot be priced, or do not fit, say why."""
    names = list(chosen(searches, ("auto", "exact")))[: None if searches else 1]
    models = workloads or tuple(dict.fromkeys([path.stem for path in sorted(WORKLOADS.glob("*.yaml"))] + [*MODELS]))
    machines = clusters or tuple(path.stem for path in sorted(CLUSTERS.glob("*.yaml")))
    rows = [row for model in models for machine in machines for row in _rows(model, machine, names, budget_seconds)]
    return f"Plans against even splits, {budget_seconds:g} s each", rows, _summary(rows)


def _rows(model: str, machine: str, searches: list[str], budget_seconds: float) -> list[dict[str, Any]]:
    about = {"workload": model, "cluster": machine}
    try:
        cluster, workload = load_cluster(CLUSTERS / f"{machine}.yaml"), load_workload(model)
    except DejavuError as error:
        return [{**about, "search": None, **_nothing(str(error))}]
    return [{**about, "search": name, **_answer(cluster, workload, name, budget_seconds)} for name in searches]


def _answer(cluster: Cluster, workload: Workload, search: str, budget_seconds: float) -> dict[str, Any]:
    start = time.perf_counter()
    counts = (workload.num_microbatches,)
    request = PlanRequest(workload, cluster, searches=(search,), microbatches=counts, budget_seconds=budget_seconds)
    try:
        choice = Planner().plan(request)
    except DejavuError as error:
        return _nothing(str(error))
    row = next(row for row in choice.considered if row.search == search)
    plan, even = row.result, choice.uniform_step_seconds
    if plan is None or row.shown is None:
        return _nothing(row.failure)
    return {
        "microbatches": workload.num_microbatches,
        "layers": row.priced.problem.num_layers,
        "configurations": len(row.priced.problem.configurations),
        "step_seconds": plan.step_seconds,
        "gap_percent": 100.0 * plan.gap,
        "uniform_step_seconds": even,
        "gain": None if even is None else even / plan.step_seconds,
        "simulated_step_seconds": choice.simulated_seconds,
        "simulated_gap_percent": None if choice.gap is None else 100.0 * choice.gap,
        "gain_over_best_baseline": choice.speedup,
        "stages": len(plan.plan.stages),
        "devices_used": row.shown.num_devices,
        "wall_seconds": time.perf_counter() - start,
        "note": None if even else "no even split fits",
    }


def _nothing(why: str) -> dict[str, Any]:
    return {"step_seconds": None, "gain": None, "gain_over_best_baseline": None, "note": why[:90]}


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    planned = [row for row in rows if row["step_seconds"] is not None]
    summary: dict[str, Any] = {
        "pairs": len(rows),
        "planned": len(planned),
        "planned_where_no_even_split_fits": sum(row["uniform_step_seconds"] is None for row in planned),
        "not_planned": len(rows) - len(planned),
    }
    for column in ("gain", "gain_over_best_baseline"):
        gains = sorted(row[column] for row in planned if row[column] is not None)
        if gains:
            quarters = statistics.quantiles(gains, n=4, method="inclusive") if len(gains) > 1 else gains * 3
            summary |= {
                f"least_{column}": gains[0],
                f"lower_quartile_{column}": quarters[0],
                f"median_{column}": quarters[1],
                f"upper_quartile_{column}": quarters[2],
                f"largest_{column}": gains[-1],
                f"{column}_below_1": sum(gain < 1.0 - CLOSE for gain in gains),
            }
    return summary
