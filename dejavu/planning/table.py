"""The answer to a what-if question, for a terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dejavu.errors import InputError
from dejavu.planning.choice import Choice, Considered
from dejavu.units import format_bytes, format_seconds

WIDTH_COLUMNS = 100


def print_choice(choice: Choice) -> None:
    """What was considered, the chosen plan's stages, and the reason."""
    console = Console(width=WIDTH_COLUMNS)
    console.print(considered_table(choice))
    console.print(stages_table(choice))
    console.print(choice.reason, highlight=False, markup=False)
    price, played = format_seconds(choice.step_seconds), format_seconds(choice.chosen.simulation.step_seconds)
    gap = f"certified gap {max(choice.gap_percent, 0.0):.2f}%"
    console.print(f"Step {price} by the searches' price, {gap}; {played} as torch's order plays it.", highlight=False)
    times = [f"{one.plan.schedule} {format_seconds(one.simulation.step_seconds)}" for one in choice.schedules]
    console.print(f"On the same devices, as played: {', '.join(times)}.", highlight=False)


def write_choice(choice: Choice, path: Path | None) -> None:
    """As JSON into a file; None: to standard output.

    Raises:
        InputError: the file cannot be written.
    """
    text = json.dumps(choice.to_dict(), indent=2, allow_nan=False)
    if path is None:
        print(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}") from error


def considered_table(choice: Choice) -> Table:
    """The best of each search, and the cheapest answer for each number of microbatches."""
    table = Table(title=f"{choice.model} on {choice.cluster.name}: plans considered", title_justify="left")
    table.add_column("search", no_wrap=True)
    for name in ("microbatches", "step", "bound", "played", "bubble", "stages", "devices", "least free"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in _shown(choice):
        if row.result is None:
            count = str(row.num_microbatches)
            table.add_row(row.search, count, "does not fit" if row.proved_infeasible else "none found")
            continue
        found, costs = choice.priced(row), row.result
        bound = choice.bound_seconds(row.num_microbatches)
        table.add_row(
            row.search,
            str(row.num_microbatches),
            format_seconds(costs.step_seconds),
            format_seconds(bound) if bound > 0 else "–",
            format_seconds(row.simulation.step_seconds),
            f"{found.price.bubble_fraction:.0%}",
            str(len(costs.plan.stages)),
            str(found.num_devices),
            format_bytes(min(found.headroom_bytes)),
            "✔" if row is choice.chosen else "",
        )
    return table


def stages_table(choice: Choice) -> Table:
    """The chosen plan, stage by stage."""
    count = choice.plan.num_microbatches
    table = Table(title=f"chosen: {choice.plan.schedule}, {count} microbatch{'es' if count > 1 else ''}")
    table.title_justify = "left"
    table.add_column("layers", no_wrap=True)
    table.add_column("from … to")
    table.add_column("on")
    for name in ("a microbatch", "peak", "free"):
        table.add_column(name, justify="right")
    names, found = choice.chosen.posed.problem.layers, choice.priced(choice.chosen)
    rows = zip(choice.plan.stages, found.price.stage_seconds, found.price.peak_bytes, found.headroom_bytes, strict=True)
    for stage, seconds, peak_bytes, headroom_bytes in rows:
        table.add_row(
            f"{stage.start}–{stage.stop - 1}",
            names[stage.start] if stage.stop == stage.start + 1 else f"{names[stage.start]} … {names[stage.stop - 1]}",
            str(stage.configuration),
            format_seconds(seconds),
            format_bytes(peak_bytes),
            format_bytes(headroom_bytes),
        )
    return table


def _shown(choice: Choice) -> list[Considered]:
    """One answer a number of microbatches, and one a search besides; in the order in which they were asked."""
    shown: list[Considered] = []
    for count in dict.fromkeys(row.num_microbatches for row in choice.considered):
        rows = [row for row in choice.considered if row.num_microbatches == count]
        shown.append(min(rows, key=lambda row: row.found.step_seconds if row.result else float("inf")))
    best = (choice.best_of(search) for search in dict.fromkeys(row.search for row in choice.considered))
    shown += [row for row in best if row is not None and row not in shown]
    return shown
