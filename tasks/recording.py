"""Record each step of a run in MLflow. Only the flow's own process calls these."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from dejavu.binding.binding import Binding
from dejavu.cluster import Cluster
from dejavu.cost.rates import tokens_in_a_step
from dejavu.foundation.errors import DejavuError
from dejavu.foundation.hashing import stable_hash
from dejavu.foundation.units import format_bytes
from dejavu.init._base import FACTORS
from dejavu.planning import Candidate, Choice, Considered, choice_to_dict, reason
from dejavu.planning.sentences import names_apart, what_was_gained
from dejavu.profiling.profiler import MeasureResult
from dejavu.report import (
    ReportData,
    losses_figure,
    page,
    space_figure,
    summary_markdown,
    timeline_figure,
)
from dejavu.report.note import command_of, headline, left_out_of_command, note_markdown, strip_figure
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.job.export import Exported, export
from dejavu.runtime.single import trained_module
from dejavu.runtime.state import best_checkpoint, weights_bytes
from dejavu.timing.training_times import slowest_of_stages
from dejavu.track import FOLDER_TAG, VERDICT_TAG, Curve, DataSet, Metric, Run, Tracker, save_model
from dejavu.trials import TrialResult, Trials
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import model_of
from dejavu.workload.models.hugging_face import HuggingFace
from dejavu.workload.pretrained import folder_of

MOST_MODEL_BYTES = 512 * 2**20  # of weights
COPIES = 4  # of the weights: traced and as safetensors, once to save them and once to keep them
LEAST_FREE_BYTES = 100 * 2**20  # for the rest of a run
MOST_TRIAL_RUNS = 100  # a run takes MLflow 0.05 s; trials.json has all trials
STRIP = "report/strip.png"
HELD_OUT_LOSS = "held_out_loss"  # beside the metric loss, which is of training batches


def record_question(run: Run, workload: Workload, cluster: Cluster, cluster_file: str) -> None:
    """Record the workload, its data and the cluster, as used.

    Args:
        cluster_file: its text as it was read; it may have been edited since.
    """
    run.parameters({"workload": workload.model_dump(mode="json"), "cluster": cluster.name})
    run.tags({"dejavu.cluster_fingerprint": cluster.fingerprint})
    data = dataset_of(workload)
    files = [one.path for one in (workload.tokens, workload.parquet, workload.image_folder) if one]
    factory = workload.examples.factory if workload.examples else f"dejavu data set {workload.data}"
    source = workload.text or workload.images or (files[0] if files else factory)
    run.data_sets([DataSet(workload.data, data.fingerprint, str(source), "training", {"example": str(data.shape)})])
    run.artifact_text("plan/cluster.yaml", cluster_file)
    run.artifact_json("plan/cluster.json", cluster.to_dict())
    run.artifact_json("plan/workload.json", workload.model_dump(mode="json"))


def record_measured(run: Run, measured: Sequence[MeasureResult]) -> None:
    """Record how much the database knew, and how much was measured now."""
    known, new = sum(one.num_known for one in measured), sum(one.num_new for one in measured)
    run.tags({"dejavu.measurements_reused": known, "dejavu.measurements_new": new})


@task(name="record-choice", task_run_name="record-choice", cache_policy=NO_CACHE)
def record_choice(run: Run, choice: Choice, binding: Binding, bound: Candidate) -> None:
    """Record what was considered, search by search, the plan, and the cost table that it rests on.

    Args:
        bound: the plan as bound, which the figures are of: as on the run's page.
    """
    graph = choice.prices.graph_of(choice.plan.num_microbatches)
    table = choice.prices.table_of(choice.plan.num_microbatches)
    run.metric("predicted_step_seconds", bound.step_seconds)
    if (gap := choice.gap_of(bound)) is not None:
        run.metric("simulated_gap_percent", 100.0 * gap)
    run.parameters({"num_layers": len(graph.layers), "num_parameters": graph.num_parameters})
    costs = table.to_arrow(graph)
    profile = {"rows": costs.num_rows, "costs": table.num_prices, "measured": table.num_known}
    run.data_sets([DataSet("costs", _hash_of(costs), "cost/costs.parquet", "planning", profile)])
    run.artifact_table("cost/costs.parquet", costs)
    run.artifact_json("plan/choice.json", choice_to_dict(choice))
    run.tags({VERDICT_TAG: what_was_gained(choice), "mlflow.note.content": reason(choice)})  # until there is a report
    record_plan(run, binding)
    names = names_apart(choice)
    for name in dict.fromkeys(names.values()):
        record_search(run, name, [row for row, other in names.items() if other == name])


def record_plan(run: Run, binding: Binding) -> None:
    """Record the plan on its devices, and its id: equal plans have equal ones."""
    run.tags({"dejavu.plan": stable_hash(binding.plan.to_dict()), "dejavu.schedule": binding.plan.schedule_name})
    run.artifact_json("plan/plan.json", binding.plan.to_dict())
    run.artifact_json("plan/binding.json", binding.to_dict())


def record_search(run: Run, name: str, rows: Sequence[Considered]) -> None:
    """Record one way of a search: price and proof for each number of microbatches (MLflow's step), and the best."""
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
        child.artifact_json("plan/plan.json", best.plan.to_dict())


def record_trials(run: Run, trials: Trials) -> None:
    """Record the trials, the best as runs of their own: factors as parameters, losses step by step."""
    run.parameters({"winner": str(trials.winner.draw), "num_trials": len(trials.results)})
    run.metrics(
        [
            Metric("score", trials.winner.score),
            Metric("total_steps", trials.total_steps),
            Metric("seconds", trials.seconds),
            *(Metric("best_score", rung.best_score, rung.steps) for rung in trials.rungs),
        ]
    )
    best_first = sorted(enumerate(trials.results), key=lambda one: (-one[1].steps, one[1].score))
    for number, trial in sorted(best_first[:MOST_TRIAL_RUNS]):
        _record_trial(run, number, trial, is_winner=trial.draw == trials.winner.draw)
    run.artifact_json("report/trials.json", asdict(trials))


def _record_trial(run: Run, number: int, trial: TrialResult, *, is_winner: bool) -> None:
    draw = trial.draw
    factors = {"scheme": draw.scheme, "seed": draw.seed, **{name: f"{getattr(draw, name):.6g}" for name in FACTORS}}
    figures = [Metric("loss", loss, step) for step, loss in enumerate(trial.losses)]
    figures += [Metric("score", trial.score), Metric("steps", trial.steps), Metric("seconds", trial.seconds)]
    if trial.first_gradient_norm is not None:
        figures.append(Metric("first_gradient_norm", trial.first_gradient_norm))
    tags: dict[str, Any] = {"dejavu.draw": str(draw), "dejavu.attempt": trial.attempts}
    tags |= {"dejavu.remembered": trial.remembered, "dejavu.winner": is_winner}
    if trial.failure:
        tags["dejavu.failure"] = trial.failure
    name = f"trial {number}: {draw.scheme} × {draw.gain:.2f}, seed {draw.seed}"
    run.add_child(name, factors, figures, tags, trial.seconds)


def record_training(run: Run, losses: Curve, held_out: Curve, result: TrainingResult) -> None:
    """Record the losses that were not recorded while it ran, and the measured times."""
    for step, loss in enumerate(result.losses, result.first_step):
        losses.add(step, loss)
    for step, loss in result.evaluations:
        held_out.add(step, loss)
    losses.flush()
    held_out.flush()
    run.metric("restarts", result.restarts)
    run.tags({"dejavu.attempt": result.restarts + 1, "dejavu.checkpoint": result.final_checkpoint})
    run.metric("migrations", len(result.migrations))
    if result.left_out_steps:
        run.metric("left_out_steps", len(result.left_out_steps))
    if result.step_seconds is not None:
        run.metric("measured_step_seconds", result.step_seconds)
    if result.compile_seconds:
        run.metric("compile_seconds", max(result.compile_seconds))
    if result.waited_for_data:
        run.metric("data_wait_percent", 100.0 * max(one.share for one in result.waited_for_data))
    if result.saved:
        run.metric("checkpoint_percent", 100.0 * max(one.share for one in result.saved))
    for stage, times in slowest_of_stages(result.stages).items():  # as on the page; the artifact has every rank's
        figures = {
            "forward_seconds": times.forward_seconds,
            "backward_seconds": times.all_backward_seconds,
            "optimizer_seconds": times.optimizer_seconds,
            "peak_bytes": times.peak_bytes,
        }
        if times.backward_input_seconds or times.backward_weight_seconds:
            figures["backward_input_seconds"] = times.backward_input_seconds
            figures["backward_weight_seconds"] = times.backward_weight_seconds
        run.metrics(Metric(f"stage_{stage}_{name}", value) for name, value in figures.items())
    run.artifact_json("report/training.json", result.to_dict())


@task(name="record-training", task_run_name="record-training", cache_policy=NO_CACHE)
def record_trained(record: Run, job: TrainingJob, log: Any) -> TrainingResult:
    """Record a complete training whose run ended before it had done so, and return its result."""
    result = TrainingResult.from_dict(json.loads(job.result_path.read_text()))
    record.tags({FOLDER_TAG: job.folder})
    with record.child("training", tags={FOLDER_TAG: job.folder}) as run:
        record_logs(run, Path(job.folder))
        record_training(run, Curve(run, "loss"), Curve(run, HELD_OUT_LOSS), result)
        log.info("%s", record_model(run, job, result))
    return result


def record_model(run: Run, job: TrainingJob, result: TrainingResult) -> str:
    """Register the trained weights as a new version of the model of the workload's name, and say what was done.

    Those of the checkpoint that is the best on what is held out are a version of their own, made before the last's.
    Each is registered twice: traced, for `mlflow.pytorch.load_model`, and as safetensors under the plain module's or
    transformers' names. Not where they take more than `MOST_MODEL_BYTES`, where the disk has no room for `COPIES` of
    them (half of them for a moment only), or where torch cannot trace the model: then the checkpoint is what there is.
    """
    last, why = Path(result.final_checkpoint), "" if result.final_checkpoint else "there is no checkpoint"
    best = None if why else best_checkpoint(last.parent)
    try:
        for checkpoint in () if why else dict.fromkeys([best or last, last]):
            why = why or _why_not_registered(checkpoint)
            if not why:
                _register(run, job, checkpoint, best)
    except (DejavuError, OSError, RuntimeError) as error:  # the training itself has succeeded
        why = " ".join(str(error).split())
    names = run.registered_models
    if not why and names:
        said = f"The weights are the registered model {names[max(names)]}: `mlflow.pytorch.load_model` reads it."
        for step, name in names.items() if len(names) > 1 else ():
            said += f" The best on what is held out, after step {step}, is {name}." if step < max(names) else ""
    else:
        why = why or "MLflow does not answer now"
        said = f"The weights are not registered: {why}. The checkpoint is `{last}`."
    said += f" `dejavu export {Path(job.folder).name}` writes them to a file."
    run.tags({"mlflow.note.content": said})
    return said


def _register(run: Run, job: TrainingJob, checkpoint: Path, best: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="model-", dir=job.folder) as aside:
        to = "hf" if isinstance(model_of(job.workload), HuggingFace) else "safetensors"
        written = export(Path(job.folder), checkpoint, to, Path(aside) / "weights")
        save_model(*trained_module(job, checkpoint), Path(aside) / "model", written.files)
        shutil.rmtree(written.folder)
        tags = _lineage(job, checkpoint, written) | {"dejavu.best": checkpoint == best}
        run.model(Path(aside) / "model", job.workload.model, written.step, tags)


def _lineage(job: TrainingJob, checkpoint: Path, written: Exported) -> dict[str, Any]:
    """Return what a model came from; its run, with all that was recorded, MLflow has itself."""
    workload = job.workload
    tags: dict[str, Any] = {
        "dejavu.checkpoint": checkpoint,
        "dejavu.training": Path(job.folder).name,
        "dejavu.plan": stable_hash(job.binding.plan.to_dict()),  # as its run has it
        "dejavu.schedule": job.binding.plan.schedule_name,
        "dejavu.data": f"{workload.data} {dataset_of(workload).fingerprint}",
        "dejavu.model": f"{workload.model} {model_of(workload).code}",
    }
    if written.loss is not None:
        tags["dejavu.loss"] = written.loss
    if written.held_out_loss is not None:
        tags["dejavu.held_out_loss"] = written.held_out_loss
    if workload.pretrained:
        tags["dejavu.pretrained"] = folder_of(workload)
    else:
        tags["dejavu.draw"] = job.draw
    return tags


def _why_not_registered(checkpoint: Path) -> str:
    needed_bytes, free_bytes = weights_bytes(checkpoint), shutil.disk_usage(checkpoint).free
    if needed_bytes > MOST_MODEL_BYTES:
        return f"they take {format_bytes(needed_bytes)}, and at most {format_bytes(MOST_MODEL_BYTES)} are copied"
    if free_bytes < COPIES * needed_bytes + LEAST_FREE_BYTES:
        return f"{COPIES} copies of {format_bytes(needed_bytes)} have no room where {format_bytes(free_bytes)} are free"
    return ""


def record_logs(run: Run, folder: Path) -> None:
    """Record what the ranks of a training printed, whether it succeeded or not."""
    for path in sorted([*folder.glob("ranks*.log"), *folder.glob("error-*.txt")]):
        run.artifact_file(path, f"logs/{path.name}")


@task(name="report", task_run_name="report", cache_policy=NO_CACHE)
def record_report(run: Tracker, data: ReportData) -> None:
    """Record what was chosen and how it compares: the figures, the page, and the note that MLflow shows first."""
    losses = [Metric("loss", loss, step) for step, loss in enumerate(data.losses, data.first_loss_step - 1)]
    first, then = (
        [Metric(name, value) for name, value in part.items() if value is not None] for part in _figures_of(data)
    )
    if data.training:
        losses += [Metric(HELD_OUT_LOSS, one.loss, one.step) for one in data.training.evaluations]
    run.metrics([*first, *losses, *then])  # in the order in which MLflow shows them
    record_plan(run, data.binding)
    if data.comparison is not None:
        run.artifact_json("report/comparison.json", data.comparison.to_dict())
    run.artifact_json("trace/trace.json", data.trace)
    run.figure("report/timeline.png", timeline_figure(data.simulation))
    if data.trials and data.winner:
        run.figure("report/losses.png", losses_figure(data.trials, data.winner, data.training))
        run.figure("report/space.png", space_figure(data.trials, data.winner))
    run.figure(STRIP, strip_figure(data))
    run.artifact_text("report/report.html", page(data))
    command = command_of(flow_run.parameters, run.artifact_folder)
    picture = f"get-artifact?path={STRIP}&run_uuid={run.run_id}" if run.run_id else ""
    note = note_markdown(data, command, picture, left_out_of_command(flow_run.parameters))
    run.tags({VERDICT_TAG: headline(data), "mlflow.note.content": note})
    create_markdown_artifact(summary_markdown(data), key="summary", description=headline(data))


def _figures_of(data: ReportData) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return what a run's figures are, before the loss and after it; None: there is none."""
    measured = data.training.step_seconds if data.training else None
    tokens = tokens_in_a_step(data.workload)
    rate = "examples_per_second" if tokens is None else "tokens_per_second"
    first = {
        "predicted_step_seconds": data.predicted_step_seconds,
        "simulated_gap_percent": _percent(data.gap),
        "measured_step_seconds": measured,
    }
    return first, {
        rate: (tokens or data.workload.batch_size) / measured if measured else None,
        "prediction_error_percent": _percent(data.step_error),
        "predicted_speedup": data.speedup,
        "measured_speedup": data.comparison.gain if data.comparison else None,
        "baseline_step_seconds": data.baseline_step_seconds,
        "simulated_step_seconds": data.simulation.step_seconds,
        "simulated_lower_bound_seconds": data.lower_bound_seconds,
        "bubble_percent": _percent(data.simulation.bubble_fraction),
        "measured_bubble_percent": _percent(data.measured_bubble_fraction),
        "predicted_step_seconds_without_feedback": data.step_seconds_without_feedback,
        "prediction_error_percent_without_feedback": _percent(data.step_error_without_feedback),
        "reference_difference": data.reference_difference,
    }


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100.0 * fraction


def _hash_of(table: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()[:16]
