"""How the plan was found: the searches, the numbers of microbatches, and the layers between its cuts."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from dejavu.cost import CostTable
from dejavu.foundation.units import format_bound, format_seconds, plural, scale_of_seconds
from dejavu.planning import Candidate, Choice
from dejavu.planning.sentences import names_apart
from dejavu.plans import Plan, SearchResult
from dejavu.report.charts._base import INK, MARK, QUIET, SERIES, figure, plain, ticks_of

MOST_NAMED_LAYERS = 40
DASHES = ("solid", "dot", "dash", "longdash")  # of the parts of the cluster that searches are asked for
ENTRY_PIXELS = 19  # an entry of a legend that has a line for itself
LEAST_SECONDS = 1e-6  # an axis of logarithms has no zero


def convergence_chart(choice: Choice) -> go.Figure:
    """Plot the best price that each search knew after so many seconds, at the plan's number of microbatches."""
    count = choice.plan.num_microbatches
    rows, parts = _searched(choice, count)
    scale, unit = scale_of_seconds(max((result.step_seconds for _, result, _ in rows), default=1.0))
    found = figure(320 + (ENTRY_PIXELS * len(rows) if parts > 1 else 0))
    for name, result, line in rows:
        history = [*result.history, (result.seconds, result.step_seconds)]
        found.add_scatter(
            x=[max(seconds, LEAST_SECONDS) for seconds, _ in history],
            y=[price * scale for _, price in history],
            mode="lines+markers",
            line={"shape": "hv", **line},
            name=plain(name),
            marker_size=5,
            hovertemplate=f"<b>{plain(name)}</b><br>%{{y:.4g}} {unit} after %{{x:.3g}} s<extra></extra>",
        )
    bound = choice.bound_seconds(count)
    if 0 < bound < math.inf:
        least = min((result.step_seconds for _, result, _ in rows), default=math.inf)
        _proved(
            found,
            bound * scale,
            f"proved: none below {format_bound(bound, least)}",
        )
    moments = [
        max(t, LEAST_SECONDS) for _, result, _ in rows for t in (result.seconds, *(t for t, _ in result.history))
    ]
    if moments:
        found.update_xaxes(**ticks_of(min(moments) / 1.5, max(moments) * 1.5))
    found.update_xaxes(title_text="processor time of the search")
    prices = [price for _, result, _ in rows for _, price in result.history]
    found.update_yaxes(title_text=f"estimated cost, {unit}", rangemode=_range_mode(prices))
    return found


def _searched(choice: Choice, count: int) -> tuple[list[tuple[str, SearchResult, dict[str, str]]], int]:
    """Return each search's name, answer and look at this number of microbatches, and how many parts they are asked for.

    A search has one color. Parts of the cluster whose devices plans may have are told apart by name and dashes.
    """
    names = {row: name for row, name in names_apart(choice).items() if row.num_microbatches == count}
    parts = list(dict.fromkeys(row.devices for row in names))
    searches = list(dict.fromkeys(row.search for row in names))
    found = list[tuple[str, SearchResult, dict[str, str]]]()
    for row, name in names.items():
        color, dash = searches.index(row.search) % len(SERIES), parts.index(row.devices) % len(DASHES)
        if row.result:
            found.append((name, row.result, {"color": SERIES[color], "dash": DASHES[dash]}))
    return found, len(parts)


def counts_chart(choice: Choice) -> go.Figure:
    """Plot the fastest simulated step at each number of microbatches, and what is proved about all plans there."""
    counts = choice.counts
    bounds = [choice.simulated_bound_seconds(count) for count in counts]
    best = [_fastest(choice, count) for count in counts]
    shown = [one.simulated_seconds for one in best if one] + [b for b in bounds if 0 < b < math.inf]
    scale, unit = scale_of_seconds(max(shown))
    found = figure(320)
    places = [k for k, one in enumerate(best) if one]
    found.add_scatter(
        x=[str(counts[k]) for k in places],
        y=[one.simulated_seconds * scale for one in best if one],
        mode="lines+markers",
        name="fastest plan, simulated",
        marker_size=8,
        hovertext=[_described(one) for one in best if one],
        hoverinfo="text",
    )
    proved = [(str(count), bound * scale) for count, bound in zip(counts, bounds, strict=True) if 0 < bound < math.inf]
    found.add_scatter(
        x=[count for count, _ in proved],
        y=[bound for _, bound in proved],
        mode="lines+markers",
        name="proved: none below",
        line={"color": QUIET, "dash": "dash"},
        marker_symbol="line-ew-open",
        hovertemplate=f"no plan is simulated below %{{y:.4g}} {unit}<extra></extra>",
    )
    at = str(choice.plan.num_microbatches)
    found.add_scatter(
        x=[at],
        y=[choice.simulated_seconds * scale],
        mode="markers",
        name="chosen",
        hoverinfo="skip",
        marker={"symbol": "circle-open", "size": 16, "color": MARK, "line": {"width": 3}},
    )
    found.update_xaxes(type="category", title_text="microbatches in a step", categoryarray=list(map(str, counts)))
    found.update_yaxes(title_text=f"step, {unit}", rangemode=_range_mode(shown))
    return found


def _described(one: Candidate) -> str:
    stages, seconds = plural(len(one.plan.stages), "stage"), format_seconds(one.simulated_seconds)
    return f"{one.plan.schedule_name}, {stages}<br>simulated {seconds}"


def _range_mode(seconds: list[float]) -> str:
    """Show an axis from zero where the values differ by much, and where they hardly differ at all."""
    ratio = max(seconds, default=1.0) / min(seconds, default=1.0)
    return "normal" if 1.005 < ratio < 1.5 else "tozero"


def _fastest(choice: Choice, count: int) -> Candidate | None:
    """Return the fastest plan that is known with so many microbatches."""
    known = [row.best for row in choice.considered if row.num_microbatches == count and row.best]
    if choice.plan.num_microbatches == count:
        known.append(choice.chosen)
    return min(known, key=lambda one: one.simulated_seconds, default=None)


def layers_chart(table: CostTable, plan: Plan, baseline: Plan | None, baseline_name: str) -> go.Figure:
    """Plot what one microbatch takes in each layer on the plan's devices, and where the plan and a baseline cut."""
    on = [table.device_types.index(stage.configuration.device_type) for stage in plan.stages]
    columns = np.repeat(on, [stage.stop - stage.start for stage in plan.stages])
    rows = np.arange(len(table.layers))
    passes = {"forward": table.forward, "backward": table.backward}
    scale, unit = scale_of_seconds(float(sum(one.seconds_LD[rows, columns] for one in passes.values()).max()))
    found = figure(330, barmode="stack", bargap=0.15)
    for name, one in passes.items():
        seconds, sources = one.seconds_LD[rows, columns], one.source_LD[rows, columns]
        found.add_bar(
            x=rows.tolist(),
            y=(seconds * scale).tolist(),
            name=plain(name),
            marker_color=f"var(--{name})",
            hoverinfo="text",
            hovertext=[
                f"<b>{plain(layer)}</b> (layer {k})<br>{name} {format_seconds(float(seconds[k]))}, {sources[k]}"
                for k, layer in enumerate(table.layers)
            ],
        )
    _cuts(found, plan, "cuts of the plan", MARK, "solid")
    if baseline is not None:
        _cuts(found, baseline, f"cuts of the {baseline_name}", INK, "dot")
    found.update_xaxes(range=[-0.6, len(rows) - 0.4], showgrid=False)
    if len(rows) <= MOST_NAMED_LAYERS:
        names = [plain(layer) for layer in table.layers]
        found.update_xaxes(tickvals=rows.tolist(), ticktext=names, tickangle=-60)
    else:
        found.update_xaxes(title_text="layer")
    found.update_yaxes(title_text=f"one microbatch, {unit}")
    return found


def _cuts(found: go.Figure, plan: Plan, name: str, color: str, dash: str) -> None:
    """Draw a line at each cut; one entry in the legend for all."""
    line = {"color": color, "dash": dash, "width": 2}
    for cut in plan.cuts:
        found.add_vline(x=cut - 0.5, line=line)
    if plan.cuts:
        found.add_scatter(x=[None], y=[None], mode="lines", line=line, name=name)


def _proved(found: go.Figure, y: float, text: str) -> None:
    found.add_hline(
        y=y,
        line={"color": QUIET, "dash": "dash"},
        annotation_text=text,
        annotation_position="bottom right",
        annotation_font_color=QUIET,
    )
