"""The paper's side experiment: a knapsack by dynamic programs, by greed, by its relaxation, and by a price on the room.

    python -m benchmarks.knapsack --items 1000 --capacity 100000 --json knapsack.json

Weights and values are whole numbers, uniform from 1 to 1,000. The paper argues with this problem that a relaxation
trained by gradients can replace a dynamic program. The relaxation runs with a large penalty on excess weight, and with
one just above what room is worth.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks._report import report
from benchmarks.knapsack.ways import generated, priced, ways


def main(
    items: Annotated[int, typer.Option(min=1)] = 1000,
    capacity: Annotated[int, typer.Option(min=0)] = 100_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="medians of; what takes seconds runs once")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Every way on one problem, in turn."""
    torch.set_num_threads(1)  # on tensors this small threads wait for each other
    problem = generated(items, capacity, seed)
    rows: list[dict[str, Any]] = []
    priced(problem)  # numpy's first sorts load code
    for name, way in ways(seed).items():
        seconds: list[float] = []
        while not seconds or (len(seconds) < repeats and seconds[0] < 1.0):
            start = time.perf_counter()
            answer = way(problem)
            seconds.append(time.perf_counter() - start)
        value, bound = problem.value(answer.chosen), answer.bound
        rows.append(
            {
                "way": name,
                "value": value,
                "fits": problem.fits(answer.chosen),
                "proved": bound is not None and value >= bound,
                "roundings_refused": answer.refused,
                "seconds": statistics.median(seconds),
                "repeats": len(seconds),
            }
        )
    proved = {row["value"] for row in rows if row["fits"] and row["proved"]}
    best = max(proved)
    for row in rows:
        row["percent_of_optimum"] = 100.0 * row["value"] / best if best else 100.0
    summary: dict[str, Any] = {"proved_answers_agree": len(proved) == 1}
    for row in rows:
        name = row["way"].replace(",", "").replace(" ", "_")
        summary |= {f"{name}_percent_of_optimum": row["percent_of_optimum"], f"{name}_seconds": row["seconds"]}
    report(f"Knapsack of {items:,} items, capacity {capacity:,}, seed {seed}", rows, summary, json_path)


if __name__ == "__main__":
    typer.run(main)
