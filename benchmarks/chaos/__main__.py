"""Random faults during whole flows, and what is left after each: a table, and exit 1 if anything was wrong.

python -m benchmarks.chaos --seed 0 --minutes 30 --json chaos.json

The same seed gives the same faults in the same phases; on which instruction they fall is the machine's chance. As root
on Linux disks fill and links slow down too; elsewhere these faults are left out, and the table says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks._report import report
from benchmarks.chaos.campaign import campaign


def main(
    seed: Annotated[int, typer.Option(min=0, help="of the faults, their order and their moments")] = 0,
    minutes: Annotated[float, typer.Option(min=0.0, help="no round starts later")] = 30.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Strike whole flows with faults; exit 1 if one left or lost anything."""
    title, rows, summary = campaign(seed, 60.0 * minutes)
    report(title, rows, summary, json_path)
    if summary["rounds_with_something_wrong"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
