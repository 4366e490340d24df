"""One step over time: what each pipeline rank does, and how much memory it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dejavu.foundation.units import format_bytes, format_seconds, scale_of_bytes, scale_of_seconds
from dejavu.report.charts._base import CARD, COLORS, QUIET, TEMPLATE, figure, plain
from dejavu.report.timeline import PASSES, Bar, Timeline, Work
from dejavu.simulation import Simulation

MOST_BARS = 5_000  # of both timelines together; beyond, only the beginning of the step is drawn
ROW_PIXELS, LEAST_ROW_PIXELS, MOST_ROWS_PIXELS = 30, 9, 420
MOST_LINES = 16  # of ranks whose memory is drawn, the fullest
MOST_OUTLINED = 400  # bars of one kind; outlines of more would cover them
TITLE_PIXELS, AXIS_PIXELS = 36, 50
SHOWS_CAPACITY = 0.3  # of the capacity; of less, the line of the capacity would flatten everything
_ON_BARS = {Work.FORWARD: "var(--on-forward)", Work.BACKWARD: "var(--on-backward)"}


def timeline_chart(timelines: Mapping[str, Timeline], devices: Sequence[str]) -> go.Figure:
    """Draw one step for each timeline, one above the other on the same scale: a row for each pipeline rank.

    Args:
        timelines: by what they are (`simulated`, `measured`).
        devices: of each pipeline rank, for people.
    """
    longest = max(one.step_seconds for one in timelines.values())
    until = drawn_until_seconds(timelines)
    scale, unit = scale_of_seconds(longest)
    ranks = len(devices)
    row = max(LEAST_ROW_PIXELS, min(ROW_PIXELS, MOST_ROWS_PIXELS // ranks))
    height = len(timelines) * (row * ranks + TITLE_PIXELS)
    found = make_subplots(len(timelines), 1, shared_xaxes=True, vertical_spacing=TITLE_PIXELS / height)
    for number, (name, one) in enumerate(timelines.items(), 1):
        for work in one.works:
            bars = [bar for bar in one.bars if bar.work is work and bar.start_seconds < until]
            found.add_trace(_bars(work, bars, devices, (name, one.numbered), scale), row=number, col=1)
        said = f"<b>{name}</b> {format_seconds(one.step_seconds)}"
        found.add_annotation(
            text=said,
            x=0,
            xref="paper",
            xanchor="left",
            showarrow=False,
            y=1,
            yref="y domain" if number == 1 else f"y{number} domain",
            yanchor="bottom",
        )
    found.update_layout(
        template=TEMPLATE,
        height=height + AXIS_PIXELS,
        barmode="overlay",
        bargap=0.12,
        showlegend=False,
        uniformtext={"mode": "hide", "minsize": 8},
    )
    names = [f"rank {rank}" for rank in range(ranks)]
    shown = list(range(ranks)) if row >= 14 else list(range(0, ranks, -(-14 // row)))
    found.update_yaxes(
        range=[ranks - 0.5, -0.5], tickvals=shown, ticktext=[names[k] for k in shown], showgrid=False, fixedrange=True
    )
    found.update_xaxes(range=[0, min(longest, until) * scale], zeroline=False)
    found.update_xaxes(title_text=f"time in the step, {unit}", row=len(timelines), col=1)
    return found


def drawn_until_seconds(timelines: Mapping[str, Timeline]) -> float:
    """Return up to where the step is drawn: all of it, or as much as has no more bars than a browser draws well."""
    starts = sorted(bar.start_seconds for one in timelines.values() for bar in one.bars)
    return starts[MOST_BARS] if len(starts) > MOST_BARS else float("inf")


def _bars(work: Work, bars: Sequence[Bar], devices: Sequence[str], names: tuple[str, str], scale: float) -> go.Bar:
    """Draw one trace; what the pointer shows is a template, so that thousands of bars stay small.

    Args:
        names: of the timeline, and of what its passes' numbers are of.
    """
    name, numbered = names
    is_pass = work in PASSES
    what = f"{work} of {numbered} %{{text}}, stage %{{customdata[2]}}" if is_pass else str(work)
    return go.Bar(
        name=str(work),
        orientation="h",
        y=[bar.rank for bar in bars],
        base=_short(bar.start_seconds * scale for bar in bars),
        x=_short(bar.seconds * scale for bar in bars),
        marker={"color": COLORS[work], "line": {"width": 0.5 if len(bars) <= MOST_OUTLINED else 0.0, "color": CARD}},
        text=[bar.name[1:] for bar in bars] if is_pass else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": _ON_BARS.get(work, "var(--on-other)")},
        customdata=[[_when(bar), plain(devices[bar.rank]), *([bar.stage] if is_pass else ())] for bar in bars],
        hovertemplate=f"<b>{what}</b><br>{name}: %{{customdata[0]}}<br>rank %{{y}}: %{{customdata[1]}}<extra></extra>",
    )


def _when(bar: Bar) -> str:
    start, stop = format_seconds(bar.start_seconds), format_seconds(bar.stop_seconds)
    return f"{format_seconds(bar.seconds)}, from {start} to {stop}"


def _short(values: Iterable[float]) -> list[float]:
    """Return the values with as many digits as a screen can show."""
    return [float(f"{value:.7g}") for value in values]


def memory_chart(
    simulation: Simulation,
    devices: Sequence[str],
    capacity_bytes: Sequence[float],
    measured_bytes: Sequence[float | None],
) -> go.Figure:
    """Draw what a device of each pipeline rank (of the fullest) holds over the simulated step, against its capacity.

    Args:
        devices, capacity_bytes: of each pipeline rank.
        measured_bytes: the largest amount that was measured on it; None: not comparable.
    """
    lines = [_held(simulation, rank) for rank in range(simulation.num_ranks)]
    peaks = [max(held) for _, held in lines]
    near = {size for peak, size in zip(peaks, capacity_bytes, strict=True) if peak > SHOWS_CAPACITY * size}
    scale, unit = scale_of_seconds(simulation.step_seconds)
    size, size_unit = scale_of_bytes(max([*peaks, *near]))
    found = figure(300, hovermode="closest", showlegend=1 < len(lines) <= 8)
    fullest = sorted(range(len(lines)), key=lambda rank: -peaks[rank] / capacity_bytes[rank])[:MOST_LINES]
    for rank in sorted(fullest):
        seconds, held = lines[rank]
        share = f"at most {format_bytes(peaks[rank])}, {peaks[rank] / capacity_bytes[rank]:.2%} of a device"
        who = f"<b>rank {rank}</b>: {plain(devices[rank])}"
        found.add_scatter(
            x=_short(one * scale for one in seconds),
            y=_short(one * size for one in held),
            mode="lines",
            line_shape="hv",
            name=f"rank {rank}",
            line_width=2,
            hovertemplate=f"{who}<br>%{{y:.4g}} {size_unit} from %{{x:.4g}} {unit} on<br>{share}<extra></extra>",
        )
    for capacity in sorted(near):
        found.add_hline(y=capacity * size, line={"color": QUIET, "dash": "dash"}, annotation_text="capacity")
    for rank, peak in enumerate(measured_bytes):
        if peak is not None:
            found.add_scatter(
                x=[0, simulation.step_seconds * scale],
                y=[peak * size] * 2,
                mode="lines",
                line={"dash": "dot", "width": 1},
                name=f"rank {rank}, measured",
                hovertemplate=f"measured: {format_bytes(peak)}<extra>rank {rank}</extra>",
            )
    found.update_yaxes(title_text=f"held by a device, {size_unit}", rangemode="tozero")
    found.update_xaxes(title_text=f"time in the simulated step, {unit}", range=[0, simulation.step_seconds * scale])
    return found


def _held(simulation: Simulation, rank: int) -> tuple[list[float], list[float]]:
    """Return (seconds, bytes) from the beginning of the step to its end."""
    when, held = simulation.held_bytes(rank)
    level_at = {0.0: float(simulation.fixed_bytes_P[rank])}
    level_at.update(zip(when.tolist(), held.tolist(), strict=True))  # what one pass frees, the next may take at once
    level_at.setdefault(simulation.step_seconds, list(level_at.values())[-1])
    return list(level_at), list(level_at.values())
