"""Running pipelines, measured; one table for each flag, all of them without any.

python -m benchmarks.pipeline --json pipeline.json          # everything, about 90 minutes on 2 cores
python -m benchmarks.pipeline --quick --json quick.json     # a short form of everything
python -m benchmarks.pipeline --simulation --json simulation.json
python -m benchmarks.pipeline --losses --gain

The machine should be quiet: ranks are pinned to cores, and whatever else runs there is measured with them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report, write

TABLES = ("losses", "simulation", "gain", "recovery", "speed")


def main(
    losses: Annotated[bool, typer.Option("--losses", help="the losses of one process")] = False,
    simulation: Annotated[bool, typer.Option("--simulation", help="simulated against measured steps")] = False,
    gain: Annotated[bool, typer.Option("--gain", help="our plan against even splits and random bindings")] = False,
    recovery: Annotated[bool, typer.Option("--recovery", help="faults in the middle of a training")] = False,
    speed: Annotated[bool, typer.Option("--speed", help="the simulator's own time")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="a short form of each")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run the tables that were asked for, or all."""
    flags = {"losses": losses, "simulation": simulation, "gain": gain, "recovery": recovery, "speed": speed}
    asked = [name for name in TABLES if flags[name]] or list(TABLES)
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name in asked:
        module = importlib.import_module(f"benchmarks.pipeline.{name}")
        title, found, figures = module.table(**(module.QUICK if quick else {}))
        report(title, found, figures, None)
        rows += [{"table": name, **row} for row in found]
        summary |= figures
    if json_path is not None:
        write(rows, summary, json_path)


if __name__ == "__main__":
    typer.run(main)
