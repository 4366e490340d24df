"""Figures of a run. Each function returns a new Figure, and reads or changes no global state of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dejavu.foundation.units import format_seconds, plural, scale_of_seconds
from dejavu.report.timeline import IDLE, PASSES, Work, simulated_timeline
from dejavu.runtime.job import TrainingResult
from dejavu.simulation import Simulation
from dejavu.trials import TrialResult

DOTS_PER_INCH = 120
WIDTH_INCHES = 9.0
MOST_NUMBERED_BARS = 48  # of a row; the numbers of more cannot be read

COLORS = {  # as on the page in light
    Work.FORWARD: "#68A6FF",
    Work.BACKWARD: "#003E79",
    Work.INPUT_GRADIENT: "#F7A010",
    Work.WEIGHT_GRADIENT: "#A260B4",
    Work.ONCE: "#0B8F52",
    Work.MESSAGES: "#F2F042",
    Work.WAIT: "#C4CCD0",
}
CHOSEN, TRAINED, GREY, INK = "#D55E00", "#0072B2", "#B8B8B8", "#222222"


def losses_figure(trials: Sequence[TrialResult], winner: TrialResult, training: TrainingResult | None) -> Figure:
    """Plot the losses of all trials until they stopped, of the winner, and of the training that continues it."""
    figure = _figure(4.4)
    axes = figure.subplots()
    label: str | None = f"the other {plural(len(trials) - 1, 'trial')}"
    for trial in trials:
        if trial.draw == winner.draw or not trial.losses:
            continue
        axes.plot(range(1, len(trial.losses) + 1), trial.losses, color=GREY, linewidth=1.2, label=label, zorder=1)
        axes.plot(len(trial.losses), trial.losses[-1], marker="x" if trial.failure else "o", markersize=4, color=GREY)
        label = None
    count = len(winner.losses)
    axes.plot(range(1, count + 1), winner.losses, color=CHOSEN, linewidth=2, label=f"the best: {winner.draw}", zorder=3)
    which, after = plural(len(trials), "initialization"), plural(count, "step")
    title = f"The best of {which}: running loss {winner.score:.4g} after {after}"
    if training is not None and training.losses:
        before = winner.losses[: training.first_step]
        steps = np.arange(training.first_step, training.first_step + len(training.losses)) + 1
        goes_on = 0 < training.first_step == len(before)  # no loss between them is lost
        losses = np.array([*(before[-1:] if goes_on else ()), *training.losses])
        steps = np.concatenate([steps[:1] - 1, steps]) if goes_on else steps
        axes.plot(
            steps, losses, color=COLORS[Work.BACKWARD], linewidth=2, label="pipelined training from there", zorder=2
        )
        if rows := training.evaluations:
            axes.plot(
                [row.step + 1 for row in rows],
                [row.loss for row in rows],
                color=COLORS[Work.ONCE],
                marker=".",
                linewidth=2,
                label="on what is held out",
                zorder=4,
            )
        axes.axvline(training.first_step + 0.5, color=INK, linewidth=0.8, linestyle=":")
        title += f"; last batch of the training: {training.losses[-1]:.4g}"
    axes.set_ylim(*_readable_limits(trials, winner, training))
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    figure.legend(edgecolor="none", loc="outside lower left")  # inside, a winner's long name covers the curves
    _title(axes, title)
    return figure


def _readable_limits(
    trials: Sequence[TrialResult], winner: TrialResult, training: TrainingResult | None
) -> tuple[float, float]:
    """Return limits from the lowest loss to the typical trial's first; a trial that diverges leaves the picture."""
    shown = [*winner.losses, *(training.losses if training else ())]
    if training and training.losses:
        shown += [row.loss for row in training.evaluations if math.isfinite(row.loss)]
    firsts = [trial.losses[0] for trial in trials if trial.losses]
    top, bottom = max(*shown, float(np.median(firsts))), min(shown)
    margin = 0.06 * (top - bottom) or 0.1
    return bottom - margin, top + margin


def timeline_figure(simulation: Simulation) -> Figure:
    """Draw one simulated step: a row for each pipeline rank, time to the right.

    Example:
        >>> import dejavu
        >>> choice = dejavu.plan("mlp", "examples/clusters/h100-and-l4.yaml", searches=("exact",), microbatches=(8,))
        >>> dejavu.draw(dejavu.simulate(choice.priced, choice.plan)).savefig("step.png")  # doctest: +SKIP
    """
    timeline = simulated_timeline(simulation)
    figure = _figure(1.5 + 0.5 * min(timeline.num_ranks, 16))
    axes = figure.subplots()
    scale, unit = scale_of_seconds(simulation.step_seconds)
    for work in timeline.works:
        bars = [bar for bar in timeline.bars if bar.work is work]
        axes.barh(
            [bar.rank for bar in bars],
            [bar.seconds * scale for bar in bars],
            0.8,
            [bar.start_seconds * scale for bar in bars],
            color=COLORS[work], edgecolor="white", linewidth=0.0 if work in IDLE else 0.6, label=str(work),
        )  # fmt: skip
    passes = [bar for bar in timeline.bars if bar.work in PASSES]
    if len(passes) <= MOST_NUMBERED_BARS * timeline.num_ranks:
        for bar in passes:
            if bar.seconds > 0.012 * simulation.step_seconds:
                middle = (bar.start_seconds + bar.stop_seconds) / 2 * scale
                ink = "white" if bar.work is Work.BACKWARD else "black"
                axes.text(middle, bar.rank, bar.name[1:], ha="center", va="center", fontsize=7.5, color=ink)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, simulation.step_seconds * scale)
    axes.set_xlabel(f"time in one step, {unit}; the number is the {timeline.numbered}")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _title(
        axes,
        f"One step as simulated: {format_seconds(simulation.step_seconds)}; ranks wait, send or receive for "
        f"{timeline.share(*IDLE):.1%} of it",
    )
    return figure


def _figure(height_inches: float) -> Figure:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
