"""Virtual workers for people: tables and sentences. All times are predicted."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from dejavu.foundation.units import format_seconds, plural
from dejavu.virtual_workers.planning import NoTeam
from dejavu.virtual_workers.team import SAME, Team, Tried


def team_tables(found: Team | NoTeam) -> Iterator[Table]:
    """Yield a table of the divisions that were considered, and one of the chosen team's workers."""
    if not found.tried:
        return
    yield _tried_table(found)
    if isinstance(found, Team):
        yield _workers_table(found)


def _tried_table(found: Team | NoTeam) -> Table:
    table = Table(title="virtual workers: divisions considered, by quick plans", title_justify="left")
    table.add_column("division", overflow="fold")
    for name in ("workers", "examples of each", "tensor parallel", "step, predicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.tried:
        table.add_row(*_tried_row(found, one))
    return table


def _tried_row(found: Team | NoTeam, one: Tried) -> tuple[str, ...]:
    is_chosen = isinstance(found, Team) and (one.division, one.tensor_parallel) == (
        found.division.name,
        found.tensor_parallel,
    )
    step = "no plan for each" if one.step_seconds is None else format_seconds(one.step_seconds)
    examples = ", ".join(map(str, one.examples)) or "–"
    mark = "✔ " if is_chosen else ""
    return f"{mark}{one.division}", str(one.num_workers), examples, str(one.tensor_parallel), step


def _workers_table(team: Team) -> Table:
    table = Table(title=f"virtual workers: {team.division.name}, planned", title_justify="left")
    table.add_column("worker", justify="right", no_wrap=True)
    table.add_column("devices", overflow="fold")
    for name in ("examples", "microbatches", "schedule"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stages", overflow="fold")
    table.add_column("its time, predicted", justify="right", no_wrap=True)
    for number, one in enumerate(team.workers):
        has = ", ".join(f"{count} × {name}" for name, count in one.devices.counts(team.cluster).items())
        plan, own = one.choice.plan, one.choice.request.workload
        runs = f"{own.accumulate} × " if own.accumulate > 1 else ""
        stages = "\n".join(f"{stage.numbers}: {stage.configuration}" for stage in plan.stages)
        numbers = (str(own.batch_size), f"{runs}{plan.num_microbatches}", plan.schedule)
        table.add_row(str(number), has, *numbers, stages, format_seconds(one.seconds))
    return table


def what_a_team_yields(found: Team | NoTeam) -> str:
    """Compare the team with one pipeline, in words."""
    if isinstance(found, NoTeam):
        return str(found)
    step, alone = found.step_seconds, found.alone.simulated_seconds
    gain = found.speedup
    compared = f"{gain:.2f} × faster than" if gain >= 1 else f"{1 / gain:.2f} × slower than"
    compared = "as fast as" if abs(gain - 1) < SAME else compared
    return (
        f"{plural(len(found.workers), 'virtual worker')}: predicted step {format_seconds(step)}, of which summing all "
        f"gradients takes {format_seconds(found.sum_seconds)}; {compared} one pipeline ({format_seconds(alone)}, "
        "simulated). Each worker's plan is for its own devices and examples; that no other division is better is not "
        "proved."
    )
