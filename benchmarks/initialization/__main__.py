"""Parallel initialization, measured: what it gains over plain ways to start, and what running it on Dask costs.

python -m benchmarks.initialization --json initialization.json            # everything, 10 repeats
python -m benchmarks.initialization --quick --json quick.json             # a short form, 5 repeats
python -m benchmarks.initialization --tasks gpt --repeats 10 --counts 40
python -m benchmarks.initialization --overhead                            # only what orchestration costs
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report, write
from benchmarks.initialization import figures, gains, overhead
from benchmarks.initialization.tasks import TASKS, USUAL


def main(
    tasks: Annotated[str, typer.Option(help=f"with commas, of {', '.join(TASKS)}")] = ",".join(USUAL),
    repeats: Annotated[int | None, typer.Option(min=2, help="fresh seeds and splits; 10, quick 5")] = None,
    counts: Annotated[
        str, typer.Option(help="numbers of trials, with commas; the last is the one that is summed up")
    ] = "",
    gain: Annotated[bool, typer.Option("--gain", help="only the gain")] = False,
    only_overhead: Annotated[bool, typer.Option("--overhead", help="only what orchestration costs")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="a short form")] = False,
    figures_folder: Annotated[Path | None, typer.Option("--figures", help="where curves and slices are drawn")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run what was asked for, or all."""
    names = [name.strip() for name in tasks.split(",")]
    if unknown := [name for name in names if name not in TASKS]:
        raise typer.BadParameter(f"unknown task {unknown[0]!r}; wanted some of {', '.join(TASKS)}")
    sizes = (
        tuple(int(count) for count in counts.split(",")) if counts else (gains.QUICK_COUNTS if quick else gains.COUNTS)
    )
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"tasks": {name: {} for name in names}}
    if gain or not only_overhead:
        configuration = gains.QUICK if quick else gains.WHOLE
        measured = gains.measure(names, repeats or configuration.repeats, sizes, configuration)
        report("Steps to the target", gains.table(measured), {}, None)
        rows += gains.rows(measured)
        for name, found in gains.summary(measured).items():
            summary["tasks"][name] |= found
        if figures_folder is not None:
            figures.draw(measured, figures_folder)
    if only_overhead or not gain:
        found_rows, found_summary = overhead.measure(names, quick=quick)
        report("What orchestration costs", found_rows, {}, None)
        rows += [{"table": "overhead", **row} for row in found_rows]
        for name, found in found_summary.pop("tasks").items():
            summary["tasks"][name] |= found
        summary |= found_summary
    report("Summary", [{"task": name, **gains.flat(found)} for name, found in summary["tasks"].items()], {}, None)
    if json_path is not None:
        write(rows, summary, json_path)


if __name__ == "__main__":
    typer.run(main)
