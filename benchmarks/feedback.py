"""Déjà vu: how far predicted steps are off before and after earlier trainings are remembered.

    python -m benchmarks.feedback --workload examples/workloads/digits.yaml --json feedback.json

Every cut of a two-stage pipeline that leaves neither stage less than a quarter of the work is trained once on this
machine, in an order drawn from a seed. Each step is predicted twice before it is measured: from layers measured alone,
and from these as the trainings before it correct them.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks._report import report
from dejavu.binding import bind
from dejavu.cluster import this_machine
from dejavu.cost.trainings.remember import remember
from dejavu.cost.trainings.steps import step_factor
from dejavu.foundation.strict_yaml import load
from dejavu.graphs.capture import capture
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest, Prices
from dejavu.plans import Plan, Stage
from dejavu.plans.priced_problem import PricedProblem
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.profiles import ProfileDatabase
from dejavu.profiling.profiler import Profiler
from dejavu.runtime.job import TrainingJob
from dejavu.simulation import simulate_plan
from dejavu.workload import TrialSettings, Workload

LEAST_SHARE = 0.25


def main(
    workload: Annotated[Path | None, typer.Option(help="what to train; otherwise the default GPT")] = None,
    steps: Annotated[int, typer.Option(min=4, help="of each training")] = 16,
    seed: int = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Train every sensible cut, and predict each before and after the ones before it."""
    wanted = load(workload, Workload).value if workload else Workload()
    with tempfile.TemporaryDirectory() as folder:
        rows = _rows(wanted, steps, seed, Path(folder))
    later = rows[1:]  # nothing is remembered before the first
    summary: dict[str, Any] = {}
    for name in ("without_memory", "with_memory"):
        errors = [abs(row[f"{name}_error_percent"]) for row in later]
        summary |= {f"{name}_mape_percent": mean(errors), f"{name}_median_percent": median(errors)}
    report(f"Predicted steps of {wanted.model}, before and after remembering", rows, summary, json_path)


def _rows(workload: Workload, steps: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    cluster, database, graph = this_machine(), ProfileDatabase(folder / "profiles_db"), capture(workload)
    Profiler(graph, workload, cluster, database).run()
    request = PlanRequest(workload, cluster, database.path, Parallelism.one_device())

    def priced(*, remembers: bool) -> PricedProblem:
        prices = Prices(request, remembers=remembers, graph_at=lambda _: graph)
        return prices.priced(workload.num_microbatches)

    fresh = priced(remembers=False)
    (configuration,) = fresh.problem.configurations
    costs = fresh.problem.costs
    assert isinstance(costs, AdditiveCosts)  # priced layer by layer
    seconds = costs.seconds_CL[0]
    share = np.cumsum(seconds)[:-1] / seconds.sum()
    cuts = [cut + 1 for cut in np.flatnonzero((share >= LEAST_SHARE) & (share <= 1 - LEAST_SHARE))]

    rows = []
    for cut in np.random.default_rng(seed).permutation(cuts):
        ends = (0, int(cut), len(graph.layers))
        stages = (Stage(ends[0], ends[1], configuration), Stage(ends[1], ends[2], configuration))
        plan = Plan(stages, workload.searched_schedule, workload.num_microbatches)
        corrected = priced(remembers=True)
        factor = step_factor(graph, plan, database, partial(_simulated, corrected))
        job = TrainingJob(
            workload=workload.model_copy(update={"num_steps": steps, "trials": TrialSettings(count=0)}),
            binding=bind(fresh.problem, plan, cluster),
            draw=Draw(),
            start_from=None,
            first_step=0,
            last_step=steps,
            folder=str(folder / f"cut-{cut}"),
        )
        result = launch(job)
        assert result.step_seconds is not None
        row: dict[str, Any] = {"cut": int(cut), "measured_ms": 1e3 * result.step_seconds}
        for name, predicted in (
            ("without_memory", _simulated(fresh, plan)),
            ("with_memory", _simulated(corrected, plan) * factor.factor),
        ):
            row[f"{name}_ms"] = 1e3 * predicted
            row[f"{name}_error_percent"] = 100 * (predicted / result.step_seconds - 1)
        rows.append(row)
        remember(job.workload, job.binding, result.times, graph, database)
    return rows


def _simulated(priced: PricedProblem, plan: Plan) -> float:
    return simulate_plan(priced, plan).step_seconds


if __name__ == "__main__":
    typer.run(main)
