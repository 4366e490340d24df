"""Cases side by side, for a terminal; sentences about what a change brings and what is cheapest."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from dejavu.cost.ranges import Range, memory_range
from dejavu.cost.rates import tokens_in_a_step
from dejavu.foundation.units import format_bytes, format_gap, format_seconds, plural
from dejavu.planning.sentences import between, scope, short
from dejavu.simulation.bound import CLOSE
from dejavu.what_if.answers import Answered, difference
from dejavu.what_if.cheapest import Cheapest, Trained

ABSENT = "–"
DAY_SECONDS = 86400.0
OVERLAP = (
    "The ranges of the two steps overlap; errors of one type of device are the same in both, so that the difference is "
    "surer than each."
)


def cases_table(title: str, first: str, rows: Sequence[Answered]) -> Table:
    """Tabulate a row for each case: predictions, below each its 90 % range, and the gap that is proved.

    Args:
        first: what the rows differ in.
    """
    priced = any(row.cost_of_a_step is not None for row in rows)
    costs = ("a step", f"10⁹ {_priced_thing(rows[0])}") if priced else ()
    names = ("step", "tokens/s", "samples/s", "MFU", "fullest device", "gap", *costs)
    table = Table(title=f"{title}: predicted, in nine of ten cases between", title_justify="left")
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.case.name, *(_cells(row, priced) if row.choice else ("no plan",)))
    return table


def _cells(row: Answered, priced: bool) -> list[str]:
    choice = row.choice
    assert choice is not None
    step, rates, workload = choice.range_seconds, choice.rates, row.case.request.workload
    tokens, (held, capacity) = tokens_in_a_step(workload), choice.fullest
    cells = [
        f"{format_seconds(choice.step_seconds)}\n{between(step, format_seconds)}",
        ABSENT
        if tokens is None or rates.tokens_per_second is None
        else f"{short(rates.tokens_per_second)}\n{between(step.of_rate(tokens), short)}",
        f"{short(rates.samples_per_second)}\n{between(step.of_rate(workload.batch_size), short)}",
        ABSENT if rates.utilization is None else f"{rates.utilization:.1%}",
        f"{format_bytes(held)}\n{between(memory_range(choice.plan, held), format_bytes)}\nof {format_bytes(capacity)}"
        if held == held
        else ABSENT,
        ABSENT if choice.gap is None else format_gap(choice.gap),
    ]
    if priced:
        cost = row.cost_of_a_step
        cells.append(ABSENT if cost is None else f"{short(cost[0])} {cost[1]}")
        cells.append(ABSENT if cost is None else f"{short(rates.cost_of_1e9_tokens or 0.0)} {cost[1]}")
    return cells


def what_changes(before: Answered, after: Answered) -> str:
    """Say what the change brings: step, rate, cost."""
    found = difference(before, after)
    if found is None:
        without = before if before.choice is None else after
        return f"{without.case.name} has no plan: {without.failure}"
    more, faster = found.speedup >= 1, found.speedup if found.speedup >= 1 else 1 / found.speedup
    assert before.choice is not None and after.choice is not None
    if before.choice.plan == after.choice.plan and abs(found.speedup - 1.0) < CLOSE:
        return "the same plan, as fast as before: it has no use for the change."
    steps = f"{format_seconds(before.choice.step_seconds)} → {format_seconds(after.choice.step_seconds)}"
    said = [f"predicted, a step {steps}, {faster:.2f} × as {'fast' if more else 'slow'}"]
    tokens = (before.choice.rates.tokens_per_second, after.choice.rates.tokens_per_second)
    if tokens[0] is not None and tokens[1] is not None:
        said.append(f"{_signed(tokens[1] - tokens[0])} tokens/s")
    if found.cost_per_hour is not None:
        said.append(f"{_signed(found.cost_per_hour)} {found.currency}/hour")
        said.append(f"{_signed(found.cost_of_1e9_tokens or 0.0)} {found.currency} for 10⁹ {_priced_thing(after)}")
    sure = "The ranges of the two steps do not overlap." if found.is_sure else OVERLAP
    return f"{', '.join(said)}. {sure}"


def _priced_thing(row: Answered) -> str:
    """Name what 10⁹ of have a cost."""
    return "samples" if tokens_in_a_step(row.case.request.workload) is None else "tokens"


def _signed(amount: float) -> str:
    return f"{'+' if amount >= 0 else '−'}{short(abs(amount))}"


def goal_table(found: Cheapest, title: str) -> Table:
    """Tabulate every cluster that was planned, what the training takes there and costs."""
    table = Table(title=title, title_justify="left")
    table.add_column("nodes", no_wrap=True)
    for name in ("step", "tokens/s", "training", "in nine of ten cases", "cost", "in time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        choice = row.answered.choice
        if choice is None:
            table.add_row(row.answered.case.name, "no plan")
            continue
        mark = "✔ " if row is found.best else ""
        table.add_row(
            f"{mark}{named(row)}",
            format_seconds(choice.step_seconds),
            short(choice.rates.tokens_per_second or 0.0),
            days(row.seconds),
            between(row.range_seconds, days),
            f"{short(row.cost)} {found.currency}",
            in_time(row),
        )
    return table


def named(row: Trained) -> str:
    """Name a cluster, and say how many of its nodes are paid, where the plan leaves some without work."""
    name, used = row.answered.case.name, row.num_used_nodes
    return name if used == row.num_nodes else f"{name}, {used} used"


def in_time(row: Trained) -> str:
    """Say whether a cluster is in time, and what that rests on."""
    if row.is_in_time:
        return "predicted"
    return "no, proved" if row.is_proved_late else "no, predicted"


def what_is_cheapest(found: Cheapest) -> str:
    """Say which cluster is cheapest of those in time, or that none is and what the fastest needs."""
    goal, is_one = found.goal, len(found.rows) == 1
    asked = f"{short(goal.tokens)} tokens within {days(goal.within_seconds)}"
    none = f"None of the {plural(len(found.rows), 'cluster')} that were planned"
    late = [row for row in found.rows if not row.is_in_time and row.answered.choice]
    of_late = f"; {len(late)} {'is' if len(late) == 1 else 'are'} too slow{_proved_late(late)}" if late else ""
    if found.best is not None:
        best = found.best
        slow = best.range_seconds.high > goal.within_seconds
        risk = " At the slow end of that range it would be late." if slow else ""
        over = "of the one cluster" if is_one else f"over the {plural(len(found.rows), 'cluster')}"
        return (
            f"Cheapest for {asked}: {named(best)}, predicted {_needs(best.seconds, best.range_seconds)}, "
            f"{short(best.cost)} {found.currency}.{risk} That is a prediction, {over} that "
            f"{'was' if is_one else 'were'} planned{of_late}."
        )
    if found.fastest is None:
        failed = "The one cluster that was planned has no plan" if is_one else f"{none} has a plan"
        return f"{failed}: {found.rows[-1].answered.failure}"
    fastest = found.fastest
    name, needs = fastest.answered.case.name, _needs(fastest.seconds, fastest.range_seconds)
    if is_one:
        return f"{name}, which alone was planned, is not predicted to train {asked}: it needs {needs}{of_late}."
    return f"{none} is predicted to train {asked}: the fastest, {name}, needs {needs}{of_late}."


def _proved_late(late: Sequence[Trained]) -> str:
    """Say of how many it is proved that they are too slow, and of which plans; nothing where it is of none."""
    proved = [row.answered.choice for row in late if row.is_proved_late and row.answered.choice]
    if not proved:
        return ""
    all_of = "of it" if len(late) == 1 else "of all of these"
    which = all_of if len(proved) == len(late) else f"of {len(proved)} of these"
    covered = " or".join(dict.fromkeys(map(scope, proved)))
    return f", and {which} it is proved that no plan{covered} is simulated in time"


def _needs(seconds: float, likely: Range) -> str:
    return f"{days(seconds)} (in nine of ten cases {between(likely, days)})"


def days(seconds: float) -> str:
    """Write `12.3 days`, and less than two days in smaller units."""
    return format_seconds(seconds) if seconds < 2 * DAY_SECONDS else f"{short(seconds / DAY_SECONDS)} days"
