"""Virtual workers (HetPipe) beside one pipeline.

    python -m benchmarks.virtual_workers --json workers.json
    python -m benchmarks.virtual_workers --trained --slowness 2,3 --megabits 50     # real ranks alone

Planned: steps predicted on HetPipe's cluster and on the examples' mixed ones. Trained: two emulated hosts, for which it
needs the rights of root on Linux; without them those rows say why they were skipped.
"""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import typer

from benchmarks._report import report
from benchmarks.virtual_workers import planned, trained

Rows = list[dict[str, Any]]


def of_planned(rows: Rows) -> dict[str, Any]:
    gains = {f"{row['model']} on {row['cluster']}": row["gain"] for row in rows if "gain" in row}
    return {"gain_over_one_pipeline_predicted": gains}


def of_trained(rows: Rows) -> dict[str, Any]:
    known = [row for row in rows if "measured_ms" in row]
    over = {
        name: [row["over_unequal_parts"] for row in known if row["competitor"] == name]
        for name in (trained.ALONE, trained.EQUAL)
    }
    off = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in known if row["predicted_ms"]]
    return {
        "measured_over_unequal_parts": {name: geometric_mean(found) if found else None for name, found in over.items()},
        "prediction_off_percent": 100 * sum(off) / len(off) if off else None,
        "worst_loss_difference": max((row["loss_difference"] for row in known), default=None),
    }


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
    only_planned: Annotated[bool, typer.Option("--planned", help="only predicted steps")] = False,
    only_trained: Annotated[bool, typer.Option("--trained", help="only real ranks")] = False,
    budget_seconds: Annotated[float, typer.Option(min=0.0, help="of searches, for each plan")] = 8.0,
    seed: Annotated[int, typer.Option(min=0, help="of searches")] = 0,
    slowness: Annotated[str, typer.Option(help="of the second host's core: so many times slower")] = "2,3",
    megabits: Annotated[float, typer.Option(min=1.0, help="a second, between the hosts")] = 50.0,
    rounds: Annotated[int, typer.Option(min=1, help="how often each is trained, in turn")] = 3,
    steps: Annotated[int, typer.Option(min=3, help="of each training, the first two without a clock")] = 8,
) -> None:
    """Compare virtual workers with one pipeline."""
    rows, summary = Rows(), dict[str, Any]()
    if not only_trained:
        rows += planned.rows(budget_seconds, seed)
        summary |= of_planned(rows)
    if not only_planned:
        real = trained.rows([float(word) for word in slowness.split(",")], rounds, steps, 1e6 * megabits)
        rows, summary = rows + real, summary | of_trained(real)
    report("Virtual workers and one pipeline", rows, summary, json_path)


if __name__ == "__main__":
    typer.run(main)
