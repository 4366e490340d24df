"""The curves of `--scale` and `--anytime`; no global state of matplotlib is touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

DOTS_PER_INCH = 120
GIB = 2**30
ROOM_ABOVE = 1.15  # of the largest value, for the numbers at the points
SMALLEST_GAP_PERCENT = 0.01  # on the logarithmic axis; anything smaller is drawn here
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#222222")


def growth(rows: Sequence[dict[str, Any]]) -> Figure:
    """Seconds, memory and gap against operators; the devices stand at the points."""
    figure = _figure(10.0, 3.4)
    panels = figure.subplots(1, 3)
    columns = (
        ("wall_seconds", 1.0, "search, s"),
        ("peak_bytes", 1 / GIB, "peak memory, GiB"),
        ("gap_percent", 1.0, "gap, %"),
    )
    for axes, (column, scale, label) in zip(panels, columns, strict=True):
        for color, name in zip(COLORS, dict.fromkeys(row["search"] for row in rows), strict=False):
            own = [row for row in rows if row["search"] == name]
            values = [row[column] * scale for row in own]
            axes.plot([row["operators"] for row in own], values, "o-", color=color, label=name)
            for row, value in zip(own, values, strict=True):
                place = (row["operators"], value)
                axes.annotate(f"{row['devices']}", place, (0, 6), textcoords="offset points", ha="center", fontsize=7)
        axes.set_xlabel("operators (devices at the points)")
        axes.set_ylabel(label)
        axes.set_ylim(0, ROOM_ABOVE * max(row[column] * scale for row in rows) or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    panels[0].legend(frameon=False)
    return figure


def anytime(curves: dict[str, dict[float, float]], num_problems: int) -> Figure:
    """Median gap over the problems against time, one line for each search."""
    figure = _figure(7.0, 4.2)
    axes = figure.subplots()
    for color, (name, curve) in zip(COLORS, curves.items(), strict=False):
        seconds = list(curve)
        gaps = [max(curve[at], SMALLEST_GAP_PERCENT) for at in seconds]
        axes.step(seconds, gaps, where="post", marker="o", markersize=3, color=color, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.8 * SMALLEST_GAP_PERCENT)
    axes.set_xlabel("wall-clock seconds")
    axes.set_ylabel(f"gap to the best proved bound, %\n(median of {num_problems} problems)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path


def _figure(width_inches: float, height_inches: float) -> Figure:
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
