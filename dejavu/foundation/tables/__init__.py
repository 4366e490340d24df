"""Tables for a terminal, a pipe or a file."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

MOST_COLUMNS = 10_000


def print_whole(console: Console, table: Table) -> None:
    """Print a table, wider than the console where columns that do not wrap need it: no number is cut off.

    Its texts are shown as they are: names may have brackets, which rich reads as styles.
    """
    table.title = _plain(table.title)
    for column in table.columns:
        column.header, column._cells = _plain(column.header), [_plain(cell) for cell in column.cells]
        if column.no_wrap:
            lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
            column.min_width = max(map(cell_len, lines), default=0)
    needed = Measurement.get(console, console.options.update(max_width=MOST_COLUMNS), table).minimum
    before = console.width
    console.width = max(before, needed)
    console.print(table)
    console.width = before


def _plain(text: Any) -> Any:
    return Text(text) if isinstance(text, str) else text
