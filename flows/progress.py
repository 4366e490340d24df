"""Progress bars of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def rows_bar(console: Console, unit: str = "rows", what: str = "") -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar until the end; call it with the current item, how many are done, and the total, or None."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
