"""What `dejavu runs` and `dejavu compare` show of the runs that MLflow has: tables, or the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from dejavu.foundation.units import format_seconds
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.track import RecordedRun, RunSummary

ID_CHARACTERS = 8
ABSENT = "–"
Rows = Mapping[str, Any]


def runs_table(found: Iterable[RunSummary]) -> Table:
    """Return a row for each run, and below it what the run says of its plan, or why it failed."""
    table = Table(box=None, pad_edge=False)
    for name in ("run", "when", "model", "cluster", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("predicted", "measured", "loss"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("verdict", overflow="fold")
    for run in found:
        when = f"{datetime.fromtimestamp(run.start_seconds):%Y-%m-%d %H:%M}"
        steps = (_seconds(run.predicted_step_seconds), _seconds(run.measured_step_seconds), _number(run.loss))
        row = (
            run.run_id[:ID_CHARACTERS],
            when,
            run.model,
            run.cluster,
            run.status.lower(),
            *steps,
            _first_line(run.verdict),
        )
        table.add_row(*map(Text, row))
    return table


def compared(first: RecordedRun, second: RecordedRun) -> dict[str, Any]:
    """Return what two runs found, planned and were asked: by name both values, and whether they differ.

    Of figures also `ratio`, the second over the first; None where one has none, or the first is 0.
    """
    figures = _side_by_side(first.metrics, second.metrics)
    for row in figures.values():
        one, other = row["values"]
        row["ratio"] = other / one if one and other is not None else None
    return {
        "runs": [asdict(first.summary), asdict(second.summary)],
        "figures": figures,
        "plan": _side_by_side(_plan_rows(first.plan), _plan_rows(second.plan)),
        "parameters": _side_by_side(first.parameters, second.parameters),
    }


def _side_by_side(first: Rows, second: Rows) -> dict[str, dict[str, Any]]:
    both = {name: [first.get(name), second.get(name)] for name in dict.fromkeys([*first, *second])}
    return {name: {"values": values, "differs": values[0] != values[1]} for name, values in both.items()}


def _plan_rows(plan: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a plan, as `Plan.to_dict` writes it, in rows; plans that are not the same have a row that is not."""
    if plan is None:
        return {}
    rows = {"schedule": Plan.from_dict(plan).schedule_name, "microbatches": str(plan["num_microbatches"])}
    if slices := plan.get("slices"):
        rows["slices"] = ", ".join(map(str, slices))
    for number, stage in enumerate(plan["stages"]):
        its = StageConfiguration.from_dict(stage["configuration"])
        rows[f"stage {number}"] = str(Stage(stage["start"], stage["stop"], its))
    return rows


def comparison_tables(content: Mapping[str, Any], *, everything: bool) -> list[Table]:
    """Return tables of what `compared` found: how they ended, all figures, the plans, and what differs, or all."""
    names = [f"{run['run_id'][:ID_CHARACTERS]}  {run['name']}" for run in content["runs"]]
    ended = _table("runs", names, "")
    ended.add_row("state", *(run["status"].lower() for run in content["runs"]), "")
    ended.add_row("verdict", *(Text(_first_line(run["verdict"])) for run in content["runs"]), "")
    figures = _table("figures", names, "second / first")
    for name, row in content["figures"].items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        figures.add_row(name, *(_figure(name, value) for value in row["values"]), ratio)
    tables = [ended, figures]
    for part in ("plan", "parameters"):
        rows = content[part]
        hidden = 0 if everything or part == "plan" else sum(not row["differs"] for row in rows.values())
        table = _table(f"{part}; {hidden} are the same (--all shows them)" if hidden else part, names, "")
        for name, row in rows.items():
            if row["differs"] or not hidden:
                values = [ABSENT if value is None else value for value in row["values"]]
                table.add_row(*map(Text, (name, *values, "differs" if row["differs"] else "")))
        tables.append(table)
    return tables


def _table(title: str, names: Iterable[str], last: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", *names, last):
        table.add_column(Text(name), overflow="fold")
    return table


def _figure(name: str, value: float | None) -> str:
    return _seconds(value) if "_seconds" in name else _number(value)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _seconds(value: float | None) -> str:
    return ABSENT if value is None else format_seconds(value)


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4g}"
