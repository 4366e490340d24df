"""python -m benchmarks.bound: the bound on the simulated step against the least of all plans, and on real questions.

Small random problems (one and two kinds of devices, replicas, messages, pass costs and memory or without) are bounded
twice: with the best simulated step given, and with one that is 7 % above it. A bound above the least step of any
schedule is a violation. Of the real questions the least is not known: the gap is to the fastest plan known after it.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks._report import report_table
from benchmarks.bound.every_plan import count, least_by_schedule, small_priced
from benchmarks.bound.questions import QUESTIONS, QUICK, best_of_exact
from dejavu.plans.schedule import SCHEDULES
from dejavu.simulation.bound import SimulatedBound, simulated_lower_bound

MOST_PLANS = 3000  # of a small problem: seconds to simulate
LOOSE = 1.07  # times the least: what a planner knows that did not find the best plan
BUDGET_SECONDS = 5.0
EXACT_SECONDS = 8.0

app = typer.Typer(pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    problems: Annotated[int, typer.Option(help="small random problems")] = 60,
    seed: Annotated[int, typer.Option(help="of the first of them")] = 0,
    real: Annotated[bool, typer.Option(help="bound the real questions too, all of them or the quick one")] = True,
    quick: bool = False,
    budget_seconds: Annotated[float, typer.Option(help="processor time for each bound")] = BUDGET_SECONDS,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    report_table(
        lambda: table(problems, seed, (QUICK if quick else QUESTIONS) if real else (), budget_seconds), json_path
    )


def table(
    problems: int, seed: int, questions: tuple[Any, ...], budget_seconds: float
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Rows by schedule, then the real questions."""
    gaps: dict[str, list[float]] = {name: [] for name in ("all", "all, loose", *SCHEDULES)}
    violations, asked, seconds = 0, 0, list[float]()
    while asked < problems:
        priced = small_priced(seed)
        seed += 1
        if count(priced, MOST_PLANS + 1) > MOST_PLANS:
            continue
        asked += 1
        least = least_by_schedule(priced)
        best = min(least.values())
        for name, loose in (("all", 1.0), ("all, loose", LOOSE)):
            found = _bound(priced, loose * best, budget_seconds)
            violations += sum(found.by_schedule[schedule] > least[schedule] for schedule in SCHEDULES)
            violations += found.seconds > best
            if np.isfinite(best):
                gaps[name].append(_gap_percent(found.seconds, best))
                seconds.append(found.spent_seconds)
        for schedule, step in least.items():  # alone, as when a person names the schedule
            if np.isfinite(step):
                alone = simulated_lower_bound(
                    priced, schedules=(schedule,), best_seconds=step, budget_seconds=budget_seconds
                )
                violations += alone.seconds > step
                gaps[schedule].append(_gap_percent(alone.seconds, step))
    rows = [{"problems": f"small, {name}", "bounds": len(found), **_spread(found)} for name, found in gaps.items()]
    asked_rows = [row for question in questions for row in _real_rows(question, budget_seconds)]
    summary = {
        "problems": problems,
        "violations": int(violations),
        "median_gap_percent": statistics.median(gaps["all"]),
        "p90_gap_percent": float(np.percentile(gaps["all"], 90)),
        "seconds_median": statistics.median(seconds),
        "loose_median_gap_percent": statistics.median(gaps["all, loose"]),
        "real_gap_percent": {row["problems"]: row["gap_percent"] for row in asked_rows},
    }
    return "Bound on the simulated step", [*rows, *asked_rows], summary


def _real_rows(question: Any, budget_seconds: float) -> list[dict[str, Any]]:
    rows = []
    for priced in question.priced():
        problem = priced.problem
        found = best_of_exact(priced, EXACT_SECONDS)
        bound = _bound(priced, found[0] if found else np.inf, budget_seconds)
        rows.append(
            {
                "problems": f"{question.workload} on {question.cluster}, {problem.num_microbatches} microbatches",
                "gap_percent": _gap_percent(bound.seconds, bound.plan_seconds),
                "layers": problem.num_layers,
                "configurations": len(problem.configurations),
                "bound_seconds": bound.seconds,
                "given_seconds": found and found[0],
                "given_schedule": found and found[1].schedule,
                "best_seconds": bound.plan_seconds,
                "best_schedule": bound.plan.schedule if bound.plan else found and found[1].schedule,
                "spent_seconds": bound.spent_seconds,
                "proved_by": str(bound.proved_by),
            }
        )
    return rows


def _bound(priced: Any, best_seconds: float, budget_seconds: float) -> SimulatedBound:
    schedules = tuple(SCHEDULES)
    return simulated_lower_bound(priced, schedules=schedules, best_seconds=best_seconds, budget_seconds=budget_seconds)


def _gap_percent(bound: float, best: float) -> float:
    return 100.0 * (1.0 - bound / best)


def _spread(gaps: list[float]) -> dict[str, float]:
    if not gaps:
        return {}
    return {
        "gap_percent": statistics.median(gaps),
        "p90_gap_percent": float(np.percentile(gaps, 90)),
        "worst": max(gaps),
    }


if __name__ == "__main__":
    app()
