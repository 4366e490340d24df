"""What came of it: predictions beside measurements, and the losses of trials and of the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dejavu.foundation.units import format_seconds
from dejavu.init import DIMENSIONS
from dejavu.report.charts._base import COLORS, INK, MARK, QUIET, figure, plain, ticks_of
from dejavu.report.data import Compared
from dejavu.report.timeline import Work
from dejavu.runtime.job import TrainingResult
from dejavu.trials import TrialResult

BAND = 0.10  # drawn around the diagonal
MOST_CURVES = 60  # of trials, the best ones
MOST_POINTS = 1_500  # of a curve
SHOWN_PERCENT = 90  # of the trials; diverging ones would flatten all others
_SYMBOLS = {
    Work.FORWARD: "circle",
    Work.BACKWARD: "square",
    Work.INPUT_GRADIENT: "triangle-up",
    Work.WEIGHT_GRADIENT: "triangle-down",
    Work.ONCE: "diamond",
}


def accuracy_chart(rows: Sequence[Compared]) -> go.Figure:
    """Plot measured over predicted seconds, with the diagonal and a band of 10 % around it. `rows` is not empty."""
    every = [seconds for row in rows for seconds in (row.predicted_seconds, row.measured_seconds)]
    low, high = min(every) / 1.6, max(every) * 1.6
    found = figure(420)
    for factor, fill in ((1 - BAND, None), (1 + BAND, "tonexty")):
        found.add_scatter(
            x=[low, high],
            y=[low * factor, high * factor],
            mode="lines",
            line_width=0,
            fill=fill,
            fillcolor="var(--band)",
            showlegend=False,
            hoverinfo="skip",
        )
    found.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        line={"color": QUIET, "width": 1},
        name="equal, ± 10 %",
        hoverinfo="skip",
    )
    for work in dict.fromkeys(row.work for row in rows):
        own = [row for row in rows if row.work is work]
        color, symbol = (MARK, "star") if work is None else (COLORS[work], _SYMBOLS[work])
        found.add_scatter(
            x=[row.predicted_seconds for row in own],
            y=[row.measured_seconds for row in own],
            mode="markers",
            name="whole step" if work is None else str(work),
            marker={
                "color": color,
                "symbol": symbol,
                "size": 15 if work is None else 11,
                "line": {"width": 1, "color": INK},
            },
            hovertext=[_difference(row) for row in own],
            hoverinfo="text",
        )
    axis = ticks_of(low, high)
    found.update_xaxes(title_text="predicted", **axis)
    found.update_yaxes(title_text="measured", **axis)
    return found


def _difference(row: Compared) -> str:
    predicted, measured = format_seconds(row.predicted_seconds), format_seconds(row.measured_seconds)
    return f"<b>{plain(row.name)}</b><br>predicted {predicted}<br>measured {measured} ({row.error:+.1%})"


def losses_chart(
    trials: Sequence[TrialResult], winner: TrialResult | None, training: TrainingResult | None
) -> go.Figure:
    """Plot the losses of the best trials until they stopped, of the winner, and of the training that continues it.

    A line of its own is the loss on what is held out. There is a winner, or a training with steps.
    """
    found = figure(360)
    others = [trial for trial in trials if winner and trial.draw != winner.draw and trial.losses][:MOST_CURVES]
    for trial in others:
        found.add_scatter(
            **_curve(1, trial.losses),
            mode="lines",
            name="other trials",
            line={"color": QUIET, "width": 1},
            opacity=0.55,
            legendgroup="others",
            showlegend=trial is others[0],
            hovertemplate=f"{plain(str(trial.draw))}<br>loss %{{y:.4f}} at step %{{x}}<extra></extra>",
        )
    shown: list[float] = []
    if winner is not None:
        shown += winner.losses
        found.add_scatter(
            **_curve(1, winner.losses),
            mode="lines",
            name="the winning trial",
            line={"color": MARK, "width": 2.5},
            hovertemplate=f"the winner, {plain(str(winner.draw))}<br>loss %{{y:.4f}} at step %{{x}}<extra></extra>",
        )
    if training is not None and training.losses:
        shown += training.losses
        found.add_scatter(
            **_curve(training.first_step + 1, training.losses),
            mode="lines",
            name="the pipelined training",
            line={"color": "var(--backward)", "width": 2.5},
            hovertemplate="training<br>loss %{y:.4f} at step %{x}<extra></extra>",
        )
        shown += _add_held_out(found, training)
    firsts = sorted(trial.losses[0] for trial in trials if trial.losses and math.isfinite(trial.losses[0]))
    shown = [loss for loss in shown if math.isfinite(loss)] or [0.0]
    top, bottom = max([*shown, firsts[len(firsts) // 2]] if firsts else shown), min(shown)
    room = 0.06 * (top - bottom) or 0.1
    found.update_xaxes(title_text="step")
    found.update_yaxes(title_text="training loss", range=[bottom - room, top + room])
    return found


def _add_held_out(found: go.Figure, training: TrainingResult) -> list[float]:
    """Add the losses on what is held out; return those that are finite."""
    rows = [row for row in training.evaluations if math.isfinite(row.loss)]
    if rows:
        found.add_scatter(
            x=[row.step + 1 for row in rows],
            y=[float(f"{row.loss:.5g}") for row in rows],
            mode="lines+markers",
            name="on what is held out",
            line={"color": "var(--once)", "width": 2.5},
            hovertemplate="held out<br>loss %{y:.4f} after step %{x}<extra></extra>",
        )
    return [row.loss for row in rows]


def slice_charts(trials: Sequence[TrialResult], winner: TrialResult) -> dict[str, go.Figure]:
    """Plot the trials' losses at the last step that all reached, over each factor that differs; by its name."""
    usable = [trial for trial in trials if trial.losses and math.isfinite(trial.score)]
    shared = min((len(trial.losses) for trial in usable), default=0)
    names = ["scheme", *(one.name for one in DIMENSIONS)]
    moving = [name for name in names if len({getattr(trial.draw, name) for trial in usable}) > 1]
    return {name: _slice(name, usable, shared, winner) for name in moving}


def _slice(name: str, trials: Sequence[TrialResult], shared: int, winner: TrialResult) -> go.Figure:
    found = figure(230, showlegend=False)
    for own, look in (
        ([trial for trial in trials if trial.draw != winner.draw], {"color": QUIET, "size": 6}),
        ([trial for trial in trials if trial.draw == winner.draw], {"color": MARK, "size": 11}),
    ):
        found.add_scatter(
            x=[getattr(trial.draw, name) for trial in own],
            y=[trial.losses[shared - 1] for trial in own],
            mode="markers",
            marker=look,
            hoverinfo="text",
            hovertext=[f"{plain(str(one.draw))}<br>loss {one.losses[shared - 1]:.4f} at step {shared}" for one in own],
        )
    values = [getattr(trial.draw, name) for trial in trials]
    found.update_xaxes(title_text=name, type="category" if name == "scheme" else "linear")
    if name not in ("scheme", "bias") and min(values) > 0:
        ticks = [factor * 10.0**power for power in range(-4, 4) for factor in (1, 3)]
        found.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    losses = [trial.losses[shared - 1] for trial in trials]
    low, high = min(losses), float(np.percentile(losses, SHOWN_PERCENT))
    room = 0.08 * (high - low or 1.0)
    found.update_yaxes(title_text=f"loss at step {shared}", range=[low - room, high + room])
    return found


def _curve(first_step: int, losses: Sequence[float]) -> dict[str, list[Any]]:
    """Return steps and losses, of long curves every so-manyth and the last; what is not finite is a gap."""
    every = -(-len(losses) // MOST_POINTS) or 1
    shown = [*range(0, len(losses), every)]
    if losses and shown[-1] != len(losses) - 1:
        shown.append(len(losses) - 1)
    finite = [float(f"{losses[k]:.5g}") if math.isfinite(losses[k]) else None for k in shown]
    return {"x": [first_step + k for k in shown], "y": finite}
