"""What MLflow shows first of a run: a headline, the plan in a strip, the command that repeats it, the stages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dejavu.foundation.units import format_gap, format_seconds, in_microbatches, plural
from dejavu.parallelism import Parallelism
from dejavu.planning.sentences import faster, faster_than_the_best
from dejavu.plans.answers import BUDGET_SECONDS
from dejavu.report.data import ReportData
from dejavu.report.figures import CHOSEN, INK
from dejavu.report.summary import in_a_cell
from dejavu.simulation.bound import CLOSE

MOST_STAGES = 16  # rows of a note, which MLflow cuts off at 5,000 characters
STRIP_INCHES, STRIP_DOTS_PER_INCH = (6.4, 0.38), 100  # as wide as its column; MLflow folds away all below 100 pixels
NARROWEST_LABELLED = 0.22  # of the strip; a narrower stage has its number alone
OPTIONS = {  # of `dejavu run`, by the flow's parameter
    "searches": "--search",
    "schedules": "--schedule",
    "microbatches": "--microbatches",
    "budget_seconds": "--budget-seconds",
    "resume": "--resume",
    "dask": "--dask",
}
DEFAULTS = {"budget_seconds": BUDGET_SECONDS}
DEGREES = {"max_data_parallel": "--data-parallel", "max_tensor_parallel": "--tensor-parallel"}


def headline(run: ReportData) -> str:
    """Say in a line how the plan compares with the best baseline, and what is proved of it."""
    return f"{_against_baseline(run)}; {_proved(run)}"


def _against_baseline(run: ReportData) -> str:
    name = run.baseline_name
    if run.comparison is not None and run.comparison.is_slower:
        return f"the {name}: the other plan was {run.comparison.gain:.2f} × as fast, measured"
    if run.comparison is not None:
        return f"{run.comparison.gain:.2f} × as fast as the {name}, measured"
    if run.speedup is None:
        return "no baseline fits in memory"
    if run.speedup < 1 - CLOSE:
        return f"{1 / run.speedup - 1:.1%} slower than the {name}, predicted{run.why_slower}"
    return f"{faster(run.speedup) if run.speedup > 1 + CLOSE else 'as fast as'} the {name}, predicted"


def _proved(run: ReportData) -> str:
    if run.gap is None:
        return "nothing proved of other plans"
    if run.gap < CLOSE:
        return f"proved: no plan{run.within} is simulated {faster_than_the_best(run.gap)}"
    return f"proved: no plan{run.within} is simulated more than {format_gap(run.gap)} shorter"


def note_markdown(run: ReportData, command: str, picture: str, left_out: str = "") -> str:
    """Return the note of a run, for MLflow.

    Args:
        command: that repeats the run.
        left_out: see `left_out_of_command`.
        picture: the address of `strip_figure`'s image, relative to MLflow's page; empty: without it. MLflow removes
            pictures that are part of the text (`data:`), and shows those that its own server has.
    """
    said = headline(run)
    lines = [f"**{said[0].upper()}{said[1:]}.**", ""]
    lines += [f"![stages and their predicted seconds]({picture})", ""] if picture else []
    lines += [_steps(run), ""]
    # A line for each option: MLflow's page becomes as wide as the longest line.
    lines += ["Repeat it with", "", *(f"    {part}" for part in command.replace(" --", " \\\n  --").splitlines()), ""]
    lines += [left_out, ""] if left_out else []
    lines += ["| stage | layers | devices | forward | backward |", "|---|---|---|---|---|"]
    for stage in run.stages[:MOST_STAGES]:
        forward, backward = (
            format_seconds(stage.predicted.forward_seconds),
            format_seconds(stage.predicted_backward_seconds),
        )
        cells = f"{in_a_cell(stage.layers)} | {in_a_cell(stage.devices)}"
        lines.append(f"| {stage.stage} | {cells} | {forward} | {backward} |")
    if len(run.stages) > MOST_STAGES:
        lines.append(f"| … | {plural(len(run.stages) - MOST_STAGES, 'more stage')} | | | |")
    plan = run.plan
    lines += [
        "",
        f"{plan.schedule_name}, {in_microbatches(plan.num_microbatches, run.workload.accumulate)} of "
        f"{plural(run.workload.microbatch_size, 'example')}; seconds of one microbatch are predicted. "
        "Artifacts: the page is report/report.html, one step for Perfetto trace/trace.json. "
        + ("The nested run *training* has the weights." if run.training else "Nothing was trained."),
    ]
    return "\n".join(lines)


def _steps(run: ReportData) -> str:
    said = f"A step takes {format_seconds(run.predicted_step_seconds)}, predicted"
    if run.training is not None and run.training.step_seconds is not None:
        said += f"; {format_seconds(run.training.step_seconds)}, measured ({run.step_error:+.1%} off)"
    if run.losses:
        said += f". Loss {run.said_of_losses}"
    return f"{said}."


def strip_figure(run: ReportData) -> Figure:
    """Plot the stages side by side, each as wide as its predicted seconds; the slowest stands out."""
    figure = Figure(figsize=STRIP_INCHES, dpi=STRIP_DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    seconds = [stage.predicted.forward_seconds + stage.predicted_backward_seconds for stage in run.stages]
    total, left = sum(seconds) or 1.0, 0.0
    for stage, its in zip(run.stages, seconds, strict=True):
        alpha = 0.75 if its == max(seconds) else 0.35
        axes.barh(0, its, 0.9, left, color=CHOSEN, alpha=alpha, edgecolor="white", linewidth=3)
        label = f"{stage.stage}"
        if its / total > NARROWEST_LABELLED:
            label = f"{stage.stage}: {run.plan.stages[stage.stage].layers}, {format_seconds(its)}"
        axes.text(left + its / 2, 0, label, ha="center", va="center", fontsize=8, color=INK)
        left += its
    axes.set_xlim(0, total)
    axes.set_ylim(-0.5, 0.5)
    return figure


def command_of(parameters: Mapping[str, Any], artifacts: Path | None) -> str:
    """Return the `dejavu run` that repeats a flow's run in this folder, from the workload and the cluster as read.

    Args:
        parameters: the flow's.
        artifacts: the run's folder of artifacts; None: on a server, from which `plan/` is to be fetched first.
    """
    folder = artifacts / "plan" if artifacts is not None else Path("plan")
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    words = ["dejavu", "run", "--workload", str(folder / "workload.json"), "--cluster", str(folder / "cluster.yaml")]
    for name, option in OPTIONS.items():
        value = parameters.get(name)
        if value and value != DEFAULTS.get(name):
            words += [option, ",".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"]
    spread = parameters.get("parallelism")
    for name, option in DEGREES.items():
        most = spread.get(name) if isinstance(spread, Mapping) else getattr(spread, name, None)
        if most is not None:
            words += [option, str(most)]
    if parameters.get("train") is False:
        words.append("--no-train")
    return shlex.join(words)


def left_out_of_command(parameters: Mapping[str, Any]) -> str:
    """Say which settings of a flow's run `dejavu run` has no option for; empty: `command_of` has all of them."""
    spread = parameters.get("parallelism")
    if spread is None:
        return ""
    given = dict(spread) if isinstance(spread, Mapping) else asdict(spread)
    usual = asdict(Parallelism())
    plain = {name: json.loads(json.dumps(value)) for name, value in usual.items()}
    others = {name: value for name, value in given.items() if name not in DEGREES and name in plain}
    others = {name: value for name, value in others.items() if json.loads(json.dumps(value)) != plain[name]}
    if all(given.get(name) is None for name in DEGREES):  # without its options the command may look at fewer ways
        others = dict.fromkeys(DEGREES) | others
    if not others:
        return ""
    said = ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in others.items())
    return (
        f"The command has no options for these settings of the run's `parallelism`, which a deployment takes: {said}."
    )
