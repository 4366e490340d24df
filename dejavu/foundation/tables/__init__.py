"""Tables for a terminal, a pipe or a file."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MOST_COLUMNS = 10_000


def print_whole(console: Console, table: Table) -> None:
    """Print a table, wider than the console where columns that do not wrap need it: no number is cut off."""
    for column in table.columns:
        if column.no_wrap:
            lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
            column.min_width = max(map(cell_len, lines), default=0)
    needed = Measurement.get(console, console.options.update(max_width=MOST_COLUMNS), table).minimum
    before = console.width
    console.width = max(before, needed)
    console.print(table)
    console.width = before
