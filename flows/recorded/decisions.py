"""The decisions of the watch as a table for the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from dejavu.foundation.units import format_seconds
from dejavu.watching import Notes


def decisions_table(project: Path, last: int) -> Table:
    """Return the newest decisions of a project, the oldest first."""
    table = Table("when (UTC)", "model", "what changed", "decided", "step, predicted", "why", box=None, pad_edge=False)
    for one in list(Notes.decisions(project / ".dejavu"))[-last:]:
        seconds = (one.old_step_seconds, one.new_step_seconds)
        steps = " → ".join("–" if each is None else format_seconds(each) for each in seconds)
        words = (one.at.partition("+")[0], one.model, one.change, one.decided, steps, one.why)
        table.add_row(*map(Text, words))
    if not table.row_count:
        table.caption = "nothing was decided yet; `dejavu up --watch` looks at the cluster"
    return table
