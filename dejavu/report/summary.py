"""The short summary that a command ends with and a run's page begins with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from dejavu.foundation.units import format_bound, format_bytes, format_gap, format_seconds, in_microbatches, plural
from dejavu.planning.sentences import faster, which_way
from dejavu.report.data import ReportData
from dejavu.runtime.job import Saved, Waited
from dejavu.runtime.job.progress import Evaluation
from dejavu.simulation.bound import CLOSE
from dejavu.workload.pretrained import folder_of

WIDTH_COLUMNS = 100
Rows = list[tuple[str, str]]


def summary_rows(run: ReportData) -> Rows:
    """Return (name, sentence) rows: plan, predicted and measured, the best baseline, the gap, trials, losses."""
    plan = run.plan
    counts = in_microbatches(plan.num_microbatches, run.workload.accumulate)
    counts += f" of {plural(run.workload.microbatch_size, 'example')}"
    rows: Rows = [("plan", f"{plan.schedule_name}, {plural(len(plan.stages), 'stage')}, {counts}")]
    for stage in run.stages:
        headroom = format_bytes(stage.headroom_bytes)
        planned = plan.stages[stage.stage]
        kind = "layer" if planned.stop - planned.start == 1 else "layers"
        rows.append((f"stage {stage.stage}", f"{kind} {stage.layers} on {stage.devices}, {headroom} of memory free"))
    rows.append(("devices", f"{len(run.binding.placements)} of {run.cluster.num_devices} are used"))
    rows += [("way", said)] if (said := which_way(plan)) else []
    rows.append(("step, predicted", format_seconds(run.predicted_step_seconds) + _without_memory(run)))
    if run.training is not None and run.training.step_seconds is not None:
        measured = format_seconds(run.training.step_seconds)
        before = f"; without earlier trainings {run.step_error_without_feedback:+.1%}" if run.remembers else ""
        rows.append(("step, measured", f"{measured} (the prediction is off by {run.step_error:+.1%}{before})"))
        if run.training.step_times is not None:
            rows.append(("", str(run.training.step_times)))
    if run.baseline_step_seconds is not None and run.speedup is not None:
        other = f"the {run.baseline_name}, predicted {format_seconds(run.baseline_step_seconds)}"
        gained = f"the plan is {faster(run.speedup)}" if run.speedup > 1 + CLOSE else "the plan is no faster than"
        if run.speedup < 1 - CLOSE:
            gained = f"the plan is predicted {1 / run.speedup - 1:.1%} slower than"
        rows.append(("best baseline", f"{gained} {other}{run.why_slower}"))
    if run.comparison is not None:
        rows.append(("gain, measured", str(run.comparison)))
    simulated = format_seconds(run.simulation.step_seconds)
    if run.gap is None:
        rows.append(("proved", f"nothing about other plans; this one is simulated at {simulated}"))
    else:
        bound, gap = format_bound(run.lower_bound_seconds, run.simulation.step_seconds), format_gap(run.gap)
        rows.append(
            (
                "proved",
                f"no plan{run.within} is simulated below {bound}; this one at {simulated}, a gap of {gap}",
            )
        )
    rows.append(("costs", ", ".join(f"{count} {source}" for source, count in run.prices_by_source.items())))
    if run.trials and run.winner is not None:
        rows.append(
            ("initialization", f"{run.winner.draw}, the best of {len(run.trials)}: running loss {run.winner.score:.4f}")
        )
    if run.workload.pretrained:
        rows.append(("initialization", f"the saved weights in {folder_of(run.workload)}"))
    if run.tried is not None and run.tried.bought is not None:
        rows.append(("what trials bought", str(run.tried.bought)))
    if run.losses:
        rows.append(("loss", run.said_of_losses))
    if run.training is not None and run.training.left_out_steps:
        rows.append(("left out", run.training.said_of_left_out))
    if run.training is not None and run.training.waits_for_data:
        rows.append(("data", waited_for_data(*run.training.waits_for_data)))
    if run.training is not None and run.training.long_saved is not None:
        rows.append(("checkpoints", saved(run.training.long_saved)))
    if run.training is not None:
        rows += [("suspected", str(suspect)) for suspect in run.training.suspects]
    if run.training is not None and run.training.compile_seconds:
        most = format_seconds(max(run.training.compile_seconds))
        rows.append(("compiled", f"layers, in {most}, which no step's time above has in it"))
    if run.training is not None and run.training.evaluations:
        rows.append(("held out", held_out(run.training.evaluations)))
    if run.reference_difference is not None:
        rows.append(("checked", f"first losses within {run.reference_difference:.1e} of single-process training"))
    return rows


def held_out(evaluations: Sequence[Evaluation]) -> str:
    """Say how the loss on what is held out went: at first, at last, and at its least where that was in between."""
    first, last = evaluations[0], evaluations[-1]
    least = min(evaluations, key=lambda one: one.loss)
    said = f"loss {last.loss:.4f} after {plural(last.step + 1, 'step')}"
    if first.step < last.step:
        said = f"loss {first.loss:.4f} after {plural(first.step + 1, 'step')}, {last.loss:.4f} after {last.step + 1}"
    return said if least in (first, last) else f"{said}; the least was {least.loss:.4f} after {least.step + 1}"


def waited_for_data(rank: int, waited: Waited) -> str:
    """Say how long steps waited for their examples."""
    how = ", though they are read beside the step before" if waited.ahead else ""
    return f"rank {rank} waited {format_seconds(waited.seconds)} of each step for its examples, {waited.share:.1%}{how}"


def saved(found: Saved) -> str:
    """Say how long steps waited for checkpoints."""
    how_many = f"{found.checkpoints} took" if found.checkpoints > 1 else "one took"
    each = " each" if found.checkpoints > 1 else ""
    return (
        f"{how_many} {format_seconds(found.seconds)}{each}, {found.share:.1%} of the training's time, which no step's "
        "time above has in it"
    )


def summary_table(run: ReportData) -> Table:
    """Return the summary for a terminal."""
    table = Table(show_header=False, title=Text(_title(run)), title_justify="left")
    table.width = WIDTH_COLUMNS
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in summary_rows(run):
        table.add_row(name, Text(text))
    return table


_NO_PAGE = "report: it could not be written, as a warning above says"


def where_to_look(artifacts: Path | None, tracking_uri: str) -> list[str]:
    """Return lines to print below the summary; paths are never wrapped, so that they can be copied."""
    page = page_in(artifacts)
    report = [] if artifacts is None else [f"report: {page}" if page else _NO_PAGE]
    shown = " (`dejavu up` shows it)" if tracking_uri.startswith("sqlite:") else ""  # a server shows it itself
    return [*report, f"MLflow: {tracking_uri}{shown}"]


def page_in(artifacts: Path | None) -> Path | None:
    """Return the page of a run with these artifacts; None: they are on a server, or it could not be written."""
    page = artifacts / "report" / "report.html" if artifacts is not None else None
    return page if page is not None and page.is_file() else None


def summary_markdown(run: ReportData) -> str:
    """Return the summary as Markdown, with the command that repeats the training."""
    lines = [f"**{_title(run)}**", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {in_a_cell(text)} |" for name, text in summary_rows(run)]
    if run.torchrun_line:
        lines += ["", "To repeat the training by hand:", "", f"    {run.torchrun_line}"]
    return "\n".join(lines)


def in_a_cell(text: str) -> str:
    """Return the text as a cell of a Markdown table has to have it: in one line, and without a cell's end."""
    return " ".join(text.split()).replace("|", r"\|")


def _without_memory(run: ReportData) -> str:
    if not run.remembers or run.step_seconds_without_feedback is None:
        return ""
    return f" (déjà vu; without earlier trainings: {format_seconds(run.step_seconds_without_feedback)})"


def _title(run: ReportData) -> str:
    return f"{run.workload.model} on {run.cluster.name}"
