"""What every benchmark ends with: a table for people, and JSON that names machine, date and command.

A result that README or docs quote is committed in `benchmarks/results/`; `docs/figures.toml` says which figure it is.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.profiles import host_fingerprint
from dejavu.profiles.host import cpu_name, gpu_names

CHARACTERS_IN_A_FILE = 240  # a row of a table that goes to a file or a pipe: nothing is cut off
LOAD_AT_START = os.getloadavg()  # of the programs before this one: a benchmark's own work is not in it yet
BUSY_LOAD = 0.25  # processes for each core; a quiet machine's own chores stay below


def conditions() -> str:
    """Describe whether other programs ran when this one began."""
    busy = LOAD_AT_START[0] > BUSY_LOAD * (os.cpu_count() or 1)
    return f"{os.cpu_count()} {'shared cores, other work beside it' if busy else 'cores, quiet at the start'}"


def command() -> str:
    """Name the command that repeats this process's work, as it is typed in the repository's root."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "").removesuffix(".__main__")
    return shlex.join(["python", "-m", module, *sys.argv[1:]] if module else ["python", *sys.argv])


def machine() -> dict[str, Any]:
    """Describe what the figures were measured on, and what else it was busy with."""
    return {
        "conditions": conditions(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpu_names(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": getattr(sys.modules.get("torch"), "__version__", None),
        "host_fingerprint": host_fingerprint(),
        "load_average_at_start": LOAD_AT_START,
        "load_average": os.getloadavg(),
    }


def timed_seconds(work: Callable[[], object], repeats: int, warmups: int = 1) -> list[float]:
    """The wall-clock seconds of each repeat, after warm-ups that do not count."""
    for _ in range(warmups):
        work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and most, in milliseconds: the columns that the tables share."""
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "min_ms": 1e3 * min(seconds),
        "max_ms": 1e3 * max(seconds),
        "repeats": len(seconds),
    }


def report(title: str, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], json_path: Path | None) -> None:
    """Prints the rows as a table with the summary below, and writes the result as a file if asked to."""
    console = Console() if sys.stdout.isatty() else Console(width=CHARACTERS_IN_A_FILE)
    table = Table(title=escape(title))  # names of plans, devices and models may have brackets, which rich would read
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        numeric = any(isinstance(row.get(column), int | float) for row in rows)
        table.add_column(escape(column.replace("_", " ")), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(escape(_shown(row.get(column))) for column in columns))
    console.print(table)
    for name, value in summary.items():
        console.print(f"{name.replace('_', ' ')}: {_shown(value)}", highlight=False, markup=False)
    if json_path is not None:
        write(rows, summary, json_path)


def refuse_unwritable(json_path: Path) -> None:
    """Make its folder, before minutes of work whose result it is to take.

    Raises:
        InputError: nothing can be written there.
    """
    from dejavu.planning import check_target  # a second, which benchmarks without --json need not wait for

    try:
        json_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--json {json_path}: no folder {json_path.parent} can be made: {error.strerror}") from error
    check_target(json_path)


def write(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], json_path: Path) -> None:
    """Write a `result_of` as a file."""
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(result_of(rows, summary), indent=1, allow_nan=False) + "\n")
    typer.echo(f"written to {json_path}")


def result_of(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"command", "date_utc", "machine", "rows", "summary"}`."""
    return {
        "command": command(),
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": list(rows),
        "summary": dict(summary),
    }


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def report_table(
    work: Callable[[], tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Any]]], json_path: Path | None
) -> None:
    """Reports what a benchmark's title, rows and summary come to; a mistake in what was asked is a sentence, exit 2."""
    try:
        if json_path is not None:
            refuse_unwritable(json_path)
        title, rows, summary = work()
    except DejavuError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error
    report(title, rows, summary, json_path)
