"""Sums of replicas' gradients beside computing, on two emulated hosts, with torch's DDP in the same run.

    python -m benchmarks.overlap --json overlap.json
    python -m benchmarks.overlap --megabits 16,64 --microbatches 1 --schedules gpipe,zbv --width 96

Two hosts of one core each, joined by a link of limited bandwidth (network namespaces, for which it needs the rights of
root on Linux), and two ranks on this machine without a network between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report
from benchmarks.overlap.trained import rows_of
from benchmarks.pipeline.ranks import AT_THE_END, DDP, OURS


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the ways to sum, link by link."""
    known = [row for row in rows if "measured_ms" in row]
    steps = {
        (f"{row['link']}, {row['schedule']}, {row['microbatches']} microbatches", row["summed"]): row["measured_ms"]
        for row in known
    }
    gained = {
        other: {
            case: steps[case, other] / ours
            for (case, way), ours in steps.items()
            if way == OURS and (case, other) in steps
        }
        for other in (AT_THE_END, DDP)
    }
    return {
        "step_over_ours": gained,
        "worst_loss_difference": max((row["loss_difference"] for row in known), default=None),
    }


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
    megabits: Annotated[str, typer.Option(help="a second, between hosts; 0: loopback")] = "16,64,0",
    schedules: Annotated[str, typer.Option(help="of the one stage's or two stages' passes")] = "gpipe,zbv",
    width: Annotated[int, typer.Option(min=8, help="channels of the convolutions")] = 128,
    microbatches: Annotated[str, typer.Option(help="of a step, each with 8 images")] = "1,4",
    rounds: Annotated[int, typer.Option(min=1, help="how often each is trained, in turn")] = 3,
    steps: Annotated[int, typer.Option(min=3, help="of each training, the first two without a clock")] = 6,
) -> None:
    """Compare ways to sum the gradients of replicas."""
    rows = [
        row
        for link in megabits.split(",")
        for count in microbatches.split(",")
        for row in rows_of(float(link), schedules.split(","), width, int(count), rounds, steps)
    ]
    report("Gradients of two replicas", rows, summary_of(rows), json_path)


if __name__ == "__main__":
    typer.run(main)
