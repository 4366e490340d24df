"""The page of a run: one HTML file with its figures and the script that draws them; it needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from dejavu.cost.ranges import memory_range
from dejavu.foundation.units import (
    format_bound,
    format_bytes,
    format_bytes_per_second,
    format_gap,
    format_seconds,
    in_microbatches,
    plural,
)
from dejavu.planning.considered import none_below
from dejavu.planning.sentences import between, name_of, short
from dejavu.plans import Plan
from dejavu.report.charts import (
    accuracy_chart,
    convergence_chart,
    counts_chart,
    layers_chart,
    losses_chart,
    memory_chart,
    slice_charts,
    timeline_chart,
)
from dejavu.report.charts._base import COLORS
from dejavu.report.charts.steps import drawn_until_seconds
from dejavu.report.data import ReportData
from dejavu.report.summary import saved, waited_for_data
from dejavu.report.timeline import Work
from dejavu.report.topology import topology_svg
from dejavu.report.verdict import verdict

MOST_TRIALS = 50
ABSENT = "–"


def page(run: ReportData) -> str:
    """Render what was chosen, its gain over the baselines, predicted against measured, and how to repeat it."""
    trials = sorted(run.trials or (), key=lambda trial: trial.score)
    slices = slice_charts(trials, run.winner) if run.winner is not None else {}
    figures = dict(_figures(run)) | {f"slice-{name}": chart for name, chart in slices.items()}
    drawn_until = drawn_until_seconds(run.timelines)
    return _template().render(
        run=run,
        verdict=verdict(run),
        figures={name: json.loads(figure.to_json()) for name, figure in figures.items()},
        slices=list(slices),
        saved=saved(run.training.long_saved) if run.training and run.training.long_saved else "",
        waited=waited_for_data(*run.training.waits_for_data) if run.training and run.training.waits_for_data else "",
        works=[work for work in Work if any(work in one.works for one in run.timelines.values())],
        colors=COLORS,
        drawn_until=drawn_until if math.isfinite(drawn_until) else None,
        several_hosts=len({placed.device.host for placed in run.binding.placements}) > 1,
        topology=Markup(topology_svg(run.binding, run.cluster, run.links)),
        fullest=_fullest(run),
        none_below=none_below,
        name_of=name_of,
        format_gap=format_gap,
        trials=trials[:MOST_TRIALS],
        num_more_trials=max(0, len(trials) - MOST_TRIALS),
        in_microbatches=in_microbatches,
        css=Markup(_read("page.css")),
        script=Markup(_read("page.js")),
        plotly=Markup(get_plotlyjs()),
    )


def _figures(run: ReportData) -> Iterator[tuple[str, go.Figure]]:
    devices = run.rank_devices
    yield "timeline", timeline_chart(run.timelines, devices)
    yield "layers", layers_chart(run.table, run.plan, run.baseline.plan if run.baseline else None, run.baseline_name)
    if run.compared:
        yield "accuracy", accuracy_chart(run.compared)
    yield "convergence", convergence_chart(run.choice)
    yield "counts", counts_chart(run.choice)
    yield "memory", memory_chart(run.simulation, devices, run.rank_capacity_bytes, run.rank_measured_bytes)
    if run.trials and run.winner is not None:
        yield "losses", losses_chart(sorted(run.trials, key=lambda trial: trial.score), run.winner, run.training)
    elif run.training is not None and run.training.losses:
        yield "training", losses_chart((), None, run.training)


def _fullest(run: ReportData) -> str:
    """Say how full the fullest device becomes, as the tables and `dejavu plan` count it."""
    ranks = run.choice.held(run.bound)
    held, capacity = run.choice.fullest_of(run.bound)
    share = f"{held / capacity:.1%} of its {format_bytes(capacity)}"
    likely = between(memory_range(run.plan, held), format_bytes)
    whose = f"rank {ranks.index((held, capacity))}'s, with at most {format_bytes(held)}"
    return f"With that the fullest device is {whose}, {share}; in nine of ten cases {likely}."


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Callable[..., str]] = {
        "bound": lambda value, best: format_bound(value, best or math.inf) if 0 < value < math.inf else ABSENT,
        "seconds": lambda value: _or_absent(value, format_seconds),
        "bytes": lambda value: _or_absent(value, format_bytes),
        "range": lambda found: between(found, format_seconds),
        "rates": lambda found: between(found, short),
        "rate": lambda value: _or_absent(value, format_bytes_per_second),
        "percent": lambda value: _or_absent(value, "{:.1%}".format),
        "signed_percent": lambda value: _or_absent(value, "{:+.1%}".format),
        "times": lambda value: _or_absent(value, "{:.2f} ×".format),
        "plan": _plan_in_words,
        "loss": lambda value: _or_absent(value, "{:.4f}".format),
    }
    environment.filters.update(filters)
    return environment.from_string(_read("page.html"))


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _plan_in_words(plan: Plan) -> str:
    cuts = f"cut before layers {', '.join(map(str, plan.cuts))}" if plan.cuts else "not cut"
    return f"{plan.schedule_name}, {plural(plan.num_microbatches, 'microbatch')}, {cuts}"


def _or_absent(value: float | None, form: Callable[[float], str]) -> str:
    return ABSENT if value is None or not math.isfinite(value) else form(value)
