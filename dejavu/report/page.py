"""The page of a run: one HTML file that contains its figures and needs no network."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from matplotlib.figure import Figure

from dejavu.foundation.units import format_bytes, format_seconds
from dejavu.report.data import ReportData
from dejavu.report.figures import losses_figure, plan_figure, stages_figure, timeline_figure
from dejavu.report.space import space_figure

MOST_TRIALS = 50
ABSENT = "–"


def page(run: ReportData) -> str:
    """Render what was chosen, its gain over the baseline, predicted against measured, and how to repeat it."""
    figures = {
        "plan": plan_figure(run.table, run.plan, run.price, run.baseline, run.baseline_name),
        "timeline": timeline_figure(run.simulation),
    }
    if run.training is not None:
        figures["stages"] = stages_figure(run.predicted_stages, run.training)
    if run.trials and run.winner is not None:
        figures["losses"] = losses_figure(run.trials, run.winner, run.training)
        figures["space"] = space_figure(run.trials, run.winner)
    trials = sorted(run.trials or (), key=lambda trial: trial.score)
    return _template().render(
        run=run,
        figures={name: _data_uri(figure) for name, figure in figures.items()},
        trials=trials[:MOST_TRIALS],
        num_more_trials=max(0, len(trials) - MOST_TRIALS),
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "seconds": lambda value: _or_absent(value, format_seconds),
        "bytes": lambda value: _or_absent(value, format_bytes),
        "percent": lambda value: _or_absent(value, "{:.1%}".format),
        "signed_percent": lambda value: _or_absent(value, "{:+.1%}".format),
        "times": lambda value: _or_absent(value, "{:.2f} ×".format),
        "loss": lambda value: _or_absent(value, "{:.4f}".format),
    }
    return environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def _or_absent(value: float | None, form: Callable[[float], str]) -> str:
    return ABSENT if value is None or not math.isfinite(value) else form(value)


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
