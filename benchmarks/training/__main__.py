"""Losses of pipelines beside one process's, and a training's throughput beside plain torch on as many cores.

python -m benchmarks.training --losses --json benchmarks/results/training-losses.json      # minutes
python -m benchmarks.training --throughput --json benchmarks/results/training-throughput.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks._report import report


def main(
    losses: Annotated[bool, typer.Option("--losses", help="models × schedules × ways to train, beside one process")] = (
        False
    ),
    throughput: Annotated[
        bool, typer.Option("--throughput", help="a 10-million-parameter model on tokens, beside plain torch")
    ] = False,
    models: Annotated[str, typer.Option(help="of --losses, comma-separated; default: all")] = "",
    schedules: Annotated[str, typer.Option(help="of --losses, comma-separated; default: 1f1b, zbv, interleaved")] = "",
    ways: Annotated[str, typer.Option(help="of --losses, comma-separated; default: all")] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="of a training; default: 4, or 300 of --throughput")] = None,
    microbatches: Annotated[int, typer.Option(min=2, help="of --throughput")] = 8,
    tokens: Annotated[Path | None, typer.Option(help="of --throughput: a .bin of uint16 tokens; default: made")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of data and weights")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run one of them; exit 1 if a float32 loss is not one process's to 1e-5."""
    if losses == throughput:
        raise typer.BadParameter("wanted one of --losses and --throughput")
    if throughput:
        from benchmarks.training.throughput import measure

        rows, summary = measure(steps or 300, microbatches, tokens, seed)
        report("Two ranks beside plain torch on two cores", rows, summary, json_path)
        return
    from benchmarks.training.losses import MODELS, SCHEDULES, WAYS, compare

    chosen = models.split(",") if models else list(MODELS)
    if unknown := [name for name in chosen if name not in MODELS]:
        raise typer.BadParameter(f"unknown model {unknown[0]!r}; wanted some of {', '.join(MODELS)}")
    how = ways.split(",") if ways else list(WAYS)
    if unknown := [name for name in how if name not in WAYS]:
        raise typer.BadParameter(f"unknown way {unknown[0]!r}; wanted some of {', '.join(WAYS)}")
    rows, summary = compare(chosen, schedules.split(",") if schedules else list(SCHEDULES), steps or 4, seed, how)
    report("Losses of pipelines beside one process's", rows, summary, json_path)
    if not summary["float32_within_1e-5"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
