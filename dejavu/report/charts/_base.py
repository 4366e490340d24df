"""What all figures share: their look, and texts that plotly takes as they are."""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go

from dejavu.foundation.units import format_seconds
from dejavu.report.timeline import Work

COLORS = {
    Work.FORWARD: "var(--forward)",
    Work.BACKWARD: "var(--backward)",
    Work.INPUT_GRADIENT: "var(--input)",
    Work.WEIGHT_GRADIENT: "var(--weights)",
    Work.ONCE: "var(--once)",
    Work.MESSAGES: "var(--messages)",
    Work.WAIT: "var(--wait)",
}
INK, QUIET, LINE, MARK, CARD = (f"var(--{name})" for name in ("ink", "quiet", "line", "mark", "card"))
SERIES = ("var(--forward)", "var(--mark)", "var(--once)", "var(--weights)", "var(--backward)", "var(--messages)")
_AXIS = {"gridcolor": LINE, "zerolinecolor": LINE, "linecolor": LINE, "automargin": True, "title_standoff": 8}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": SERIES,
        "margin": {"l": 8, "r": 12, "t": 24, "b": 8},
        "hoverlabel": {"bgcolor": CARD, "bordercolor": LINE, "font": {"color": INK}, "align": "left"},
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "y": 1.0,
            "yanchor": "bottom",
            "x": 0.0,
            "bgcolor": "rgba(0,0,0,0)",
        },
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    }
)


def figure(height_pixels: int, **layout: Any) -> go.Figure:
    """Return an empty figure with the page's look."""
    return go.Figure(layout={"template": TEMPLATE, "height": height_pixels, **layout})


def plain(text: str) -> str:
    """Return the text as plotly has to be given it to show it as it is: it reads tags, entities and `%{variables}`."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def ticks_of(low_seconds: float, high_seconds: float) -> dict[str, Any]:
    """Return the settings of a logarithmic axis of times: powers of ten, and 2 and 5 between where there are few."""
    powers = range(math.floor(math.log10(low_seconds)), math.ceil(math.log10(high_seconds)) + 1)
    steps = (1, 2, 5) if len(powers) <= 3 else (1,)
    values = [step * 10.0**power for power in powers for step in steps]
    shown = [value for value in values if low_seconds <= value <= high_seconds]
    span = [math.log10(low_seconds), math.log10(high_seconds)]
    return {"type": "log", "range": span, "tickvals": shown, "ticktext": [format_seconds(value) for value in shown]}
