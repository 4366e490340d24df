"""The orchestration of whole flows: its seconds on an empty workload, and many runs in a row and at once.

python -m benchmarks.orchestration --json benchmarks/results/orchestration.json     # a quarter of an hour

In a project of its own, with `dejavu up` on free ports, the smallest workload that can be planned and trained: so what
is neither measuring, searching nor running ranks is orchestration. The same by `dejavu run`, in turn, which uses the
same server. Then runs of dejavu/full in a row and several at once, with the servers' memory, messages about a locked
database, and what is left after `dejavu down`: processes, ports, files, shared memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks._report import report
from benchmarks.orchestration.soak import soak


def main(
    repeats: Annotated[int, typer.Option(min=0, help="of both ways to run, for their seconds")] = 5,
    in_a_row: Annotated[int, typer.Option(min=0, help="runs of dejavu/full one after the other")] = 20,
    at_once: Annotated[int, typer.Option(min=0, help="runs submitted together")] = 4,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run them; exit 1 if one failed, said that a database is locked, or left anything."""
    found = soak(repeats=repeats, in_a_row=in_a_row, at_once=at_once)
    summary = found.summary()
    report("Orchestration of whole flows on an empty workload", found.rows, summary, json_path)
    if found.failed or found.locked_messages or found.left:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
