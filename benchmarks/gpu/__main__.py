"""The campaign on a GPU: calibrate, predict, then measure layers, pipelines and trainings, within a time limit.

    python -m benchmarks.gpu --json gpu.json               on a machine with a GPU, at most 9 minutes
    python -m benchmarks.gpu --rehearse --json gpu.json    the same code on CPU cores, with tiny models
    python -m benchmarks.gpu --parts layers,pipelines --json gpu.json    these parts, and what predicts them

Micro-benchmarks calibrate the device; from these alone every layer and every step is predicted, and written with the
time and a hash before it is measured. What does not fit into the time is listed as skipped. Files are written after
each unit: the figures, and beside them `…-rows.parquet`, measurements that `benchmarks.gpu.ship` adds to what ships.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks._report import report
from benchmarks.gpu.parts import MEASURED_PARTS, Campaign
from benchmarks.gpu.questions import questions
from benchmarks.gpu.results import Results
from benchmarks.gpu.schedule import Timetable
from benchmarks.gpu.site import NoDeviceError, Site
from dejavu.profiles import ProfileDatabase


def main(
    json_path: Annotated[Path, typer.Option("--json", help="where to write figures; rows of the database beside it")],
    rehearse: Annotated[bool, typer.Option("--rehearse", help="on CPU cores, with tiny models")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="for everything together")] = 9.0,
    parts: Annotated[str, typer.Option(help=f"which to measure, of {', '.join(MEASURED_PARTS)}; empty: all")] = "",
) -> None:
    """Run the campaign; exit 1 if a unit failed, 2 if there is no device."""
    asked = [name.strip() for name in parts.split(",")] if parts else list(MEASURED_PARTS)
    if unknown := [name for name in asked if name not in MEASURED_PARTS]:
        raise typer.BadParameter(f"{', '.join(unknown)}; wanted {', '.join(MEASURED_PARTS)}", param_hint="--parts")
    try:
        site = Site.here(rehearsal=rehearse)
    except NoDeviceError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error
    provenance = site.provenance()
    for name, value in provenance.items():
        typer.echo(f"{name.replace('_', ' ')}: {value}", err=True)
    with tempfile.TemporaryDirectory(prefix="dejavu-gpu-rows-") as folder:
        results = Results(json_path, ProfileDatabase(Path(folder)), provenance)
        timetable = Timetable(60 * minutes, lambda said: typer.echo(said, err=True), results.save)
        results.done = timetable.done
        campaign = Campaign(site, questions(site.device.memory_bytes, rehearsal=rehearse), results)
        for part in campaign.parts(timetable):
            if part.name in asked or part.name not in MEASURED_PARTS:
                timetable.run(part)
        rows, summary = results.rows, results.summary()
    measured = [{**row, "in_range": _yes(row["in_range"])} for row in rows]
    report(f"Predicted and measured on {provenance['device']}, {provenance['backend']}", measured, summary, None)
    typer.echo(f"written to {results.path} and {results.rows_path}")
    if summary["units_failed"]:
        raise typer.Exit(1)


def _yes(inside: bool | None) -> str | None:
    return None if inside is None else "yes" if inside else "no"


if __name__ == "__main__":
    typer.run(main)
