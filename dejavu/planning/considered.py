"""Print a choice to the terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from dejavu.foundation.tables import print_whole
from dejavu.foundation.units import format_bound, format_bytes, format_seconds, in_microbatches, plural
from dejavu.planning.choice import Choice, Considered
from dejavu.planning.sentences import (
    NAMES,
    OTHER_WAYS,
    name_of,
    what_devices_are_assumed,
    what_hosts_are_assumed,
    what_is_away,
    what_is_likely,
    what_is_masked,
    what_is_proved,
    what_it_yields,
    what_links_cost,
    what_routing_is_assumed,
    what_the_formula_says,
    what_was_chosen,
    what_was_compared,
    what_was_gained,
    which_way,
)
from dejavu.plans import Plan

WIDTH_COLUMNS = 100
MOST_STAGES = 16  # each with a row of its own


def print_choice(choice: Choice) -> None:
    """Print what was considered, the baselines, the chosen plan's stages, and the sentences about it."""
    console = Console(width=WIDTH_COLUMNS)
    print_whole(console, considered_table(choice))
    print_whole(console, stages_table(choice))
    assumed = (what_routing_is_assumed, what_hosts_are_assumed, what_devices_are_assumed)
    before = (what_was_chosen, what_it_yields, what_is_masked, what_is_likely, what_is_away, what_links_cost, *assumed)
    if said := which_way(choice.plan):
        console.print(said, highlight=False)
    for sentence in (*before, what_is_proved, what_was_compared, what_was_gained):
        if said := sentence(choice):
            console.print(said, highlight=False, markup=False)
    times = [f"{one.plan.schedule_name} {format_seconds(one.simulated_seconds)}" for one in choice.schedules]
    if len(times) > 1:
        console.print(f"The same devices and microbatches, simulated: {', '.join(times)}.", highlight=False)
    console.print(what_the_formula_says(choice), style="dim", highlight=False, markup=False)


def considered_table(choice: Choice) -> Table:
    """Tabulate the fastest answer for each number of microbatches and each other search, and every baseline."""
    title = f"{choice.request.workload.model} on {choice.request.cluster.name}: plans considered, steps simulated"
    table = Table(title=title, title_justify="left")
    table.add_column("found by", no_wrap=True)
    for name in ("microbatches", "schedule", "step", "none below", "stages", "devices", "free"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _shown(choice):
        proved = none_below(choice, row)
        shown, count, name = row.shown, str(row.num_microbatches), name_of(row)
        if row is choice.origin:
            moved = ", cuts moved" if choice.cuts_moved and row.search in NAMES else ""
            shown, name = choice.chosen, f"✔ {name}{moved}"
        if shown is None:
            table.add_row(name, count, "", "does not fit" if row.is_proved_infeasible else "none found", proved)
            continue
        held, capacity = choice.fullest_of(shown)
        table.add_row(
            name,
            count,
            shown.plan.schedule_name,
            format_seconds(shown.simulated_seconds),
            proved,
            str(len(shown.plan.stages)),
            str(shown.num_devices),
            format_bytes(capacity - held) if shown.fits else "does not fit",
        )
    return table


def none_below(choice: Choice, row: Considered) -> str:
    """Write the bound on steps with a row's number of microbatches, `–` where there is none: on plans of other ways."""
    bound = choice.simulated_bound_seconds(row.num_microbatches)
    if row.search in OTHER_WAYS or not 0 < bound < float("inf"):
        return "–"
    bounded = [one for one in choice.considered if one.num_microbatches == row.num_microbatches and one.best]
    steps = [one.best.simulated_seconds for one in bounded if one.best and one.search not in OTHER_WAYS]
    return format_bound(bound, min(steps, default=math.inf))


def stages_table(choice: Choice) -> Table:
    """Tabulate the chosen plan, stage by stage; of many stages, those alike that follow each other in one row."""
    plan, found, accumulate = choice.plan, choice.chosen.price, choice.priced.accumulate
    table = Table(
        title=f"chosen: {plan.schedule_name}, {in_microbatches(plan.num_microbatches, accumulate)}",
        title_justify="left",
    )
    table.add_column("layers", no_wrap=True)
    table.add_column("from … to", overflow="fold")
    table.add_column("on", overflow="fold")
    for name in ("a microbatch", "peak", "free"):
        table.add_column(name, justify="right", no_wrap=True)
    names, held = choice.priced.problem.layers, choice.held(choice.chosen)
    rank_of = {s: rank for rank, stages in enumerate(plan.ranks) for s in stages}
    times = [format_seconds(seconds * plan.num_slices / accumulate) for seconds in found.stage_seconds]
    for alike in _rows_of_stages(plan, times):
        first, last = plan.stages[alike[0]], plan.stages[alike[-1]]
        together = replace(first, stop=last.stop)
        layers = (
            names[first.start] if together.stop == first.start + 1 else f"{names[first.start]} … {names[last.stop - 1]}"
        )
        each = f", {plural(len(alike), 'stage')} of {plural(first.stop - first.start, 'layer')}"
        ranks = f"ranks {rank_of[alike[0]]} to {rank_of[alike[-1]]}" if len(alike) > 1 else f"rank {rank_of[alike[0]]}"
        peaks, free = [held[rank_of[s]][0] for s in alike], [held[rank_of[s]][1] - held[rank_of[s]][0] for s in alike]
        table.add_row(
            together.numbers,
            layers + (each if len(alike) > 1 else ""),
            f"{first.configuration} ({ranks})" if len(plan.ranks) < len(plan.stages) else str(first.configuration),
            times[alike[0]],
            _at("≤", peaks, max(peaks)),
            _at("≥", free, min(free)),
        )
    return table


def _rows_of_stages(plan: Plan, times: Sequence[str]) -> list[list[int]]:
    """Return which stages share a row: of many, those on ranks that follow each other and differ in memory alone."""

    def what(s: int) -> tuple[object, ...]:
        stage = plan.stages[s]
        return stage.configuration, stage.stop - stage.start, times[s], s // len(plan.ranks)

    stages = range(len(plan.stages))
    if len(stages) <= MOST_STAGES:
        return [[s] for s in stages]
    return [list(alike) for _, alike in itertools.groupby(stages, what)]


def _at(sign: str, sizes: Sequence[float], shown: float) -> str:
    """Write a size, after the sign where not all are written so."""
    return format_bytes(shown) if len(set(map(format_bytes, sizes))) == 1 else f"{sign} {format_bytes(shown)}"


def _shown(choice: Choice) -> list[Considered]:
    """Return one answer for each number of microbatches, one for each other search, and the baselines."""

    def speed(row: Considered) -> float:
        return row.best.step_seconds if row.best is not None else float("inf")

    shown: list[Considered] = [choice.origin]
    for count in choice.counts:
        rows = [row for row in choice.considered if row.num_microbatches == count]
        if choice.origin not in rows:
            shown.append(min(rows, key=speed))
    for search in dict.fromkeys(row.search for row in choice.considered):
        fastest = min((row for row in choice.considered if row.search == search), key=speed)
        if search in NAMES or (fastest.best is not None and all(row.search != search for row in shown)):
            shown.append(fastest)
    return sorted(set(shown), key=lambda row: (row.search in NAMES, row.num_microbatches, row.search))
