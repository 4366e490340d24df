"""Record each step of a run in MLflow. Only the flow's own process calls these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from dejavu.binding.binding import Binding
from dejavu.cluster import Cluster
from dejavu.planning import Choice, Considered, choice_to_dict
from dejavu.profiling.profiler import MeasureResult
from dejavu.report import (
    ReportData,
    losses_figure,
    page,
    plan_figure,
    space_figure,
    stages_figure,
    summary_markdown,
    timeline_figure,
)
from dejavu.runtime.job import TrainingResult
from dejavu.track import Metric, Run
from dejavu.trials import Trials
from dejavu.workload import Workload


def record_question(run: Run, workload: Workload, cluster: Cluster, cluster_file: Path) -> None:
    """Record the workload and the cluster, as used."""
    run.parameters({"workload": workload.model_dump(mode="json"), "cluster": cluster.name})
    run.tags({"dejavu.cluster_fingerprint": cluster.fingerprint})
    run.artifact_file(cluster_file, "cluster.yaml")
    run.artifact_json("cluster.json", cluster.to_dict())
    run.artifact_json("workload.json", workload.model_dump(mode="json"))


def record_measured(run: Run, measured: Sequence[MeasureResult]) -> None:
    """Record how much the database knew, and how much was measured now."""
    run.metrics(
        [
            Metric("figures_known", sum(one.num_known for one in measured)),
            Metric("figures_measured_now", sum(one.num_new for one in measured)),
        ]
    )


@task(name="record-choice", cache_policy=NO_CACHE)
def record_choice(run: Run, choice: Choice, binding: Binding) -> None:
    """Record what was considered, search by search, the plan, and the cost table that it rests on."""
    graph = choice.prices.graph_of(choice.plan.num_microbatches)
    table = choice.prices.table_of(choice.plan.num_microbatches)
    run.parameters({"num_layers": len(graph.layers), "num_parameters": graph.num_parameters})
    run.metrics([Metric("prices", table.num_prices), Metric("prices_measured", table.num_known)])
    run.artifact_table("costs.parquet", table.to_arrow())
    run.artifact_json("choice.json", choice_to_dict(choice))
    run.artifact_json("plan.json", binding.plan.to_dict())
    run.artifact_json("binding.json", binding.to_dict())
    for name in dict.fromkeys(row.search for row in choice.considered):
        rows = [row for row in choice.considered if row.search == name and row.result is not None]
        if rows:
            record_search(run, name, rows)


def record_search(run: Run, name: str, rows: Sequence[Considered]) -> None:
    """Record a search: price and proof of its plan for each number of microbatches (MLflow's step), and the best."""
    results = [(row.num_microbatches, row.result) for row in rows if row.result is not None]
    best = min((result for _, result in results), key=lambda result: result.step_seconds)
    with run.child(f"search: {name}", {"search": best.search, "cuts": list(best.plan.cuts)}) as child:
        child.metrics(
            Metric(metric, value, count)
            for count, result in results
            for metric, value in (
                ("step_seconds", result.step_seconds),
                ("lower_bound_seconds", result.lower_bound_seconds),
                ("search_seconds", result.seconds),
            )
        )
        child.metrics(Metric("best_step_seconds", seconds, step) for step, (_, seconds) in enumerate(best.history))
        child.artifact_json("plan.json", best.plan.to_dict())


def record_trials(run: Run, trials: Trials) -> None:
    """Record every trial's losses, which were promoted at each rung of successive halving, and which won."""
    run.parameters({"winner": str(trials.winner.draw), "num_trials": len(trials.results)})
    run.metrics(
        [
            Metric("total_steps", trials.total_steps),
            Metric("seconds", trials.seconds),
            *(Metric("best_score", rung.best_score, rung.steps) for rung in trials.rungs),
        ]
    )
    run.metrics(
        Metric(f"trial_{number}_loss", loss, step)
        for number, trial in enumerate(trials.results)
        for step, loss in enumerate(trial.losses)
    )
    run.artifact_json("trials.json", asdict(trials))


def record_training(run: Run, result: TrainingResult) -> None:
    """Record the loss of every step and the measured times."""
    run.metrics(Metric("loss", loss, result.first_step + k) for k, loss in enumerate(result.losses))
    run.metric("restarts", result.restarts)
    run.metric("migrations", len(result.migrations))
    if result.step_seconds is not None:
        run.metric("measured_step_seconds", result.step_seconds)
    for times in result.stages:
        figures = asdict(times)
        stage, replica = figures.pop("stage"), figures.pop("replica")
        if replica:  # replicas do the same work; the artifact has all
            continue
        run.metrics(Metric(f"stage_{stage}_{name}", value) for name, value in figures.items())
    run.artifact_json("training.json", result.to_dict())


@task(name="report", cache_policy=NO_CACHE)
def record_report(run: Run, data: ReportData) -> None:
    """Record what was chosen and how it compares: the figures and the report page."""
    answers = {
        "predicted_step_seconds": data.predicted_step_seconds,
        "simulated_step_seconds": data.simulation.step_seconds,
        "simulated_lower_bound_seconds": data.lower_bound_seconds,
        "baseline_step_seconds": data.baseline_step_seconds,
        "speedup": data.speedup,
        "measured_speedup": data.comparison.gain if data.comparison else None,
        "measured_step_seconds": data.training.step_seconds if data.training else None,
        "step_error": data.step_error,
        "step_seconds_without_feedback": data.step_seconds_without_feedback,
        "step_error_without_feedback": data.step_error_without_feedback,
        "gap": data.gap,
        "bubble_fraction": data.simulation.bubble_fraction,
        "measured_bubble_fraction": data.measured_bubble_fraction,
        "reference_difference": data.reference_difference,
        "final_loss": data.losses[-1] if data.losses else None,
    }
    run.metrics(Metric(name, value) for name, value in answers.items() if value is not None)
    if data.comparison is not None:
        run.artifact_json("comparison.json", data.comparison.to_dict())
    run.artifact_json("trace.json", data.trace)
    run.figure("figures/plan.png", plan_figure(data.table, data.plan, data.price, data.baseline, data.baseline_name))
    run.figure("figures/timeline.png", timeline_figure(data.simulation))
    if data.training is not None:
        run.figure("figures/stages.png", stages_figure(data.predicted_stages, data.training))
    if data.trials and data.winner:
        run.figure("figures/losses.png", losses_figure(data.trials, data.winner, data.training))
        run.figure("figures/space.png", space_figure(data.trials, data.winner))
    run.artifact_text("report.html", page(data))
    run.tags({"mlflow.note.content": summary_markdown(data)})
    create_markdown_artifact(summary_markdown(data), key="summary", description=f"MLflow run {run.run_id}")
