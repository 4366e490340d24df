"""Figures of a run. Each function returns a new Figure, and reads or changes no global state of matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dejavu.cost import CostTable
from dejavu.foundation.units import format_seconds
from dejavu.planning import Candidate
from dejavu.plans import Plan, Price
from dejavu.report.data import predicted_backward_seconds
from dejavu.runtime.job import TrainingResult
from dejavu.simulation import Simulation, StageSeconds
from dejavu.trials import TrialResult

DOTS_PER_INCH = 120
WIDTH_INCHES = 9.0
MOST_NAMED_LAYERS = 32
MOST_CHARACTERS_ACROSS = 80  # of all layer names in a row
NARROWEST_LABELLED = 0.06  # of all layers; a narrower stage has no room for its seconds
MOST_NUMBERED_BARS = 24  # microbatches whose numbers can be read in the timeline
BAR_WIDTH = 0.19  # four bars to a stage
MOST_STAGES_WITH_ERRORS = 16

# Okabe and Ito's palette, which colour-blind readers can tell apart.
FORWARD, BACKWARD, WEIGHTS, OTHER = "#56B4E9", "#0072B2", "#CC79A7", "#009E73"
CHOSEN, EVEN, GREY, INK = "#D55E00", "#666666", "#B8B8B8", "#222222"


def plan_figure(
    table: CostTable, plan: Plan, price: Price, baseline: Candidate | None, baseline_name: str = "baseline"
) -> Figure:
    """Plot what each layer costs on the plan's devices, and where the plan and the best baseline cut."""
    plans = [(CHOSEN, plan, price)]
    if baseline is not None:
        plans.append((EVEN, baseline.plan, baseline.price))
    figure = _figure(4.6)
    bars, strips = figure.subplots(2, 1, sharex=True, height_ratios=[3, 0.45 * len(plans)])
    on = [table.device_types.index(stage.configuration.device_type) for stage in plan.stages]
    columns = np.repeat(on, [stage.stop - stage.start for stage in plan.stages])
    rows = np.arange(len(table.layers))
    forward, backward = table.forward.seconds_LD[rows, columns], table.backward.seconds_LD[rows, columns]
    scale, unit = _scale(float((forward + backward).max()))
    bars.bar(rows, forward * scale, 0.82, color=FORWARD, label="forward")
    bars.bar(rows, backward * scale, 0.82, bottom=forward * scale, color=BACKWARD, label="backward")
    bars.set_ylabel(f"one microbatch, {unit}")
    for row, (color, one, its_price) in enumerate(plans):
        style, name = ["-", "--"][row], ["cut of the plan", f"cut of the {baseline_name}"][row]
        for cut in one.cuts:
            bars.axvline(cut - 0.5, color=color, linewidth=2, linestyle=style, label=name, zorder=3 + row)
            name = ""
        _stage_strip(strips, row, one, its_price, color)
    bars.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    strips.set_yticks(range(len(plans)), ["the plan", baseline_name][: len(plans)])
    strips.invert_yaxis()
    strips.tick_params(axis="y", length=0)
    strips.spines[:].set_visible(False)
    strips.set_xlabel(
        "layers; in the strips one microbatch through each stage, forward and backward (bold: the slowest)"
    )
    _layer_ticks(strips, table.layers)
    title = f"The plan's slowest stage takes {format_seconds(max(price.stage_seconds))} a microbatch"
    if baseline is not None and baseline.plan.num_microbatches == plan.num_microbatches:
        title += f", the {baseline_name}'s {format_seconds(max(baseline.price.stage_seconds))}"
    _title(bars, title)
    return figure


def _stage_strip(axes: Axes, row: int, plan: Plan, price: Price, color: str) -> None:
    """Draw the plan's stages under the layers that they hold; the slowest stands out."""
    slowest, num_layers = max(price.stage_seconds), plan.stages[-1].stop
    for stage, seconds in zip(plan.stages, price.stage_seconds, strict=True):
        width, strong = stage.stop - stage.start, seconds == slowest
        alpha = 0.75 if strong else 0.4
        axes.barh(row, width, 0.8, stage.start - 0.5, color=color, alpha=alpha, edgecolor="white", linewidth=2)
        if width / num_layers > NARROWEST_LABELLED:
            weight = "bold" if strong else "normal"
            middle = stage.start + width / 2 - 0.5
            axes.text(middle, row, format_seconds(seconds), ha="center", va="center", fontsize=9, fontweight=weight)


def _layer_ticks(axes: Axes, layers: Sequence[str]) -> None:
    axes.set_xlim(-0.6, len(layers) - 0.4)
    if len(layers) > MOST_NAMED_LAYERS:
        axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    elif len(layers) * max(map(len, layers)) > MOST_CHARACTERS_ACROSS:
        axes.set_xticks(range(len(layers)), layers, rotation=60, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(range(len(layers)), layers)


def losses_figure(trials: Sequence[TrialResult], winner: TrialResult, training: TrainingResult | None) -> Figure:
    """Plot the losses of all trials until they stopped, of the winner, and of the training that continues it."""
    figure = _figure(3.8)
    axes = figure.subplots()
    label: str | None = f"the other {len(trials) - 1} trials"
    for trial in trials:
        if trial.draw == winner.draw or not trial.losses:
            continue
        axes.plot(range(1, len(trial.losses) + 1), trial.losses, color=GREY, linewidth=1.2, label=label, zorder=1)
        axes.plot(len(trial.losses), trial.losses[-1], marker="x" if trial.failure else "o", markersize=4, color=GREY)
        label = None
    count = len(winner.losses)
    axes.plot(range(1, count + 1), winner.losses, color=CHOSEN, linewidth=2, label=f"the best: {winner.draw}", zorder=3)
    title = f"The best of {len(trials)} initializations reached {winner.losses[-1]:.3g} in {count} steps"
    if training is not None and training.losses:
        before = winner.losses[: training.first_step]
        steps = np.arange(training.first_step, training.first_step + len(training.losses)) + 1
        losses = np.array([*before[-1:], *training.losses])
        steps = np.concatenate([steps[:1] - 1, steps]) if before else steps
        axes.plot(steps, losses, color=BACKWARD, linewidth=2, label="pipelined training from there", zorder=2)
        axes.axvline(training.first_step + 0.5, color=INK, linewidth=0.8, linestyle=":")
        title += f"; training took it to {training.losses[-1]:.3g}"
    axes.set_ylim(*_readable_limits(trials, winner, training))
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.legend(facecolor="white", framealpha=0.9, edgecolor="none", loc="best")
    _title(axes, title)
    return figure


def _readable_limits(
    trials: Sequence[TrialResult], winner: TrialResult, training: TrainingResult | None
) -> tuple[float, float]:
    """Return limits from the lowest loss to the typical trial's first; a trial that diverges leaves the picture."""
    shown = [*winner.losses, *(training.losses if training else ())]
    firsts = [trial.losses[0] for trial in trials if trial.losses]
    top, bottom = max(*shown, float(np.median(firsts))), min(shown)
    margin = 0.06 * (top - bottom) or 0.1
    return bottom - margin, top + margin


def timeline_figure(simulation: Simulation) -> Figure:
    """Draw one simulated step: a row for each stage, time to the right.

    Example:
        >>> import dejavu
        >>> choice = dejavu.plan("mlp", "examples/clusters/h100-and-l4.yaml", searches=("exact",), microbatches=(8,))
        >>> dejavu.draw(dejavu.simulate(choice.priced, choice.plan)).savefig("step.png")  # doctest: +SKIP
    """
    num_stages = len(simulation.in_flight)
    figure = _figure(1.5 + 0.5 * min(num_stages, 16))
    axes = figure.subplots()
    scale, unit = _scale(simulation.step_seconds)
    looks = {
        "F": ("forward", FORWARD, "black"),
        "B": ("backward", BACKWARD, "white"),
        "I": ("backward: input", BACKWARD, "white"),
        "W": ("backward: weights", WEIGHTS, "black"),
        "o": ("optimizer", OTHER, "black"),
    }
    for first, (label, color, _) in looks.items():
        events = [event for event in simulation.events if event.name[0] == first]
        if not events:  # the schedule has no such part
            continue
        axes.barh(
            [event.stage for event in events],
            [(event.stop_seconds - event.start_seconds) * scale for event in events],
            0.8,
            [event.start_seconds * scale for event in events],
            color=color, edgecolor="white", linewidth=0.6, label=label,
        )  # fmt: skip
    numbered = {event.name for event in simulation.events if event.name != "optimizer"}
    if len(numbered) <= 2 * MOST_NUMBERED_BARS:
        for event in simulation.events:
            if event.name != "optimizer" and event.stop_seconds - event.start_seconds > 0.012 * simulation.step_seconds:
                middle = (event.start_seconds + event.stop_seconds) / 2 * scale
                color = looks[event.name[0]][2]
                axes.text(middle, event.stage, event.name[1:], ha="center", va="center", fontsize=7.5, color=color)
    axes.set_yticks(range(num_stages), [f"stage {s}" for s in range(num_stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, simulation.step_seconds * scale)
    axes.set_xlabel(f"time in one step, {unit}; the number is the microbatch")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _title(
        axes,
        f"One step as simulated: {format_seconds(simulation.step_seconds)}, of which ranks wait "
        f"{simulation.bubble_fraction:.1%} (bubble)",
    )
    return figure


def stages_figure(predicted: Sequence[StageSeconds], measured: TrainingResult) -> Figure:
    """Plot each stage's forward and backward of one microbatch: predicted next to measured, of its slowest rank.

    A backward pass that ran in two parts counts as their sum. A stage without a measured step has no second bar.
    """
    figure = _figure(3.4)
    axes = figure.subplots()
    stages = np.arange(len(predicted))
    times = [[row for row in measured.stages if row.stage == s] for s in stages]
    expected = {
        "forward": [row.forward_seconds for row in predicted],
        "backward": [predicted_backward_seconds(row, ran) for row, ran in zip(predicted, times, strict=True)],
    }
    found = {
        "forward": [max((row.forward_seconds for row in ran), default=0.0) for ran in times],
        "backward": [max((row.all_backward_seconds for row in ran), default=0.0) for ran in times],
    }
    scale, unit = _scale(max(max(*expected[name], *found[name]) for name in expected))
    errors = []
    for (name, color), left in zip((("forward", FORWARD), ("backward", BACKWARD)), (-0.4, 0.02), strict=True):
        for values, offset, look in (
            (expected[name], left, {"facecolor": "white", "edgecolor": color, "hatch": "////", "linewidth": 1.2}),
            (found[name], left + BAR_WIDTH, {"color": color}),
        ):
            label = f"{name}, {'predicted' if 'hatch' in look else 'measured'}"
            axes.bar(stages + offset, np.array(values) * scale, BAR_WIDTH, align="edge", label=label, **look)
        for s, (a, b) in enumerate(zip(expected[name], found[name], strict=True)):
            if not b:
                continue
            errors.append(a / b - 1.0)
            if len(predicted) <= MOST_STAGES_WITH_ERRORS:
                axes.annotate(
                    f"{errors[-1]:+.0%}", (s + left + BAR_WIDTH, max(a, b) * scale), xytext=(0, 2),
                    textcoords="offset points", ha="center", fontsize=8,
                )  # fmt: skip
    axes.set_xticks(stages, [f"stage {s}" for s in stages])
    axes.set_ylabel(f"one microbatch, {unit}")
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    said = (
        f"are off by {np.median(np.abs(errors)):.0%} in the median" if errors else "stand alone: no step was measured"
    )
    _title(axes, f"Predictions of the stages' times {said}")
    return figure


def _figure(height_inches: float) -> Figure:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(largest_seconds: float) -> tuple[float, str]:
    """Return the factor and name of the unit in which the largest number reads well."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if largest_seconds * factor >= 1:
            return factor, unit
    return 1e9, "ns"
