"""Where in the space of initial weights the good trials lie: a slice for every dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dejavu.init import DIMENSIONS
from dejavu.report.figures import CHOSEN, GREY
from dejavu.trials import TrialResult

SLICE_INCHES, HEIGHT_INCHES = 1.9, 2.9
SHOWN_PERCENT = 90  # of the trials; diverging ones would flatten all others
MARGIN = 0.06  # of the shown range


def space_figure(trials: Sequence[TrialResult], winner: TrialResult) -> Figure:
    """Plot every trial's loss at the last step that all of them reached, over scheme and factors; winner in colour.

    Factors that all trials share are left out.
    """
    usable = [trial for trial in trials if trial.losses and math.isfinite(trial.score)]
    shared = min((len(trial.losses) for trial in usable), default=0)
    loss = [trial.losses[shared - 1] for trial in usable]
    moving = [
        name for name in (one.name for one in DIMENSIONS) if len({getattr(trial.draw, name) for trial in usable}) > 1
    ]
    schemes = sorted({trial.draw.scheme for trial in usable})
    figure = Figure(figsize=(SLICE_INCHES * (len(moving) + 1.4), HEIGHT_INCHES), layout="constrained")
    widths = [1.4, *(1.0 for _ in moving)]
    first, *others = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    _slice(first, [schemes.index(trial.draw.scheme) for trial in usable], loss, usable, winner)
    first.set_xticks(range(len(schemes)), [name.replace("_", " ") for name in schemes], rotation=55, ha="right")
    first.set_ylabel(f"training loss at step {shared}")
    for axes, name in zip(others, moving, strict=True):
        _slice(axes, [getattr(trial.draw, name) for trial in usable], loss, usable, winner)
        axes.set_xlabel(name)
        if all(getattr(trial.draw, name) > 0 for trial in usable) and name != "bias":
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=4))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
    if loss:
        low, high = min(loss), float(np.percentile(loss, SHOWN_PERCENT))
        room = MARGIN * (high - low or 1.0)
        first.set_ylim(low - room, high + room)
    return figure


def _slice(
    axes: Axes, where: Sequence[float], loss: Sequence[float], trials: Sequence[TrialResult], winner: TrialResult
) -> None:
    axes.scatter(where, loss, s=12, color=GREY, linewidths=0)
    axes.tick_params(labelsize=7)
    for x, y, trial in zip(where, loss, trials, strict=True):
        if trial.draw == winner.draw:
            axes.scatter([x], [y], s=40, color=CHOSEN, zorder=3)
