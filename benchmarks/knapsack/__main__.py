"""The paper's side experiment: a knapsack by dynamic programs, by greed, by relaxations, and by a price on the room.

    python -m benchmarks.knapsack --json knapsack.json --figures docs/images

Weights are whole numbers, uniform from 1 to 1,000, values from 1 to 100, as in the paper, which argues with this
problem that a relaxation trained by gradients can replace a dynamic program. Its listing is repeated as it is: what it
keeps, whether that fits, and the best that fits among what it saw. A relaxation of ours that refuses what does not fit
runs beside it, with the same large penalty and with one just above what room is worth.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks._report import report
from benchmarks.knapsack.figures import draw
from benchmarks.knapsack.relaxations import GREEDY, ways
from benchmarks.knapsack.ways import Answer, Knapsack, generated, priced


def main(
    items: Annotated[int, typer.Option(min=1)] = 1000,
    capacity: Annotated[int, typer.Option(min=0)] = 100_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="medians of; what takes seconds runs once")] = 5,
    figures_folder: Annotated[Path | None, typer.Option("--figures", help="where the curves are drawn")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Every way on one problem, in turn."""
    torch.set_num_threads(1)  # on tensors this small threads wait for each other
    problem = generated(items, capacity, seed)
    priced(problem)  # numpy's first sorts load code
    answers: dict[str, tuple[Answer, float]] = {}
    rows: list[dict[str, Any]] = []
    for name, way in ways(seed).items():
        seconds: list[float] = []
        while not seconds or (len(seconds) < repeats and seconds[0] < 1.0):
            start = time.process_time()
            answer = way(problem)
            seconds.append(time.process_time() - start)
        answers[name] = answer, statistics.median(seconds)
        rows.append(_row(problem, name, answer, seconds))
    proved = {row["value"] for row in rows if row["fits"] and row["proved"]}
    best = max(proved)
    for row in rows:
        row["percent_of_optimum"] = 100.0 * row["value"] / best if best else 100.0
        row["fitting_percent_of_optimum"] = 100.0 * row["fitting_value"] / best if best else 100.0
    summary: dict[str, Any] = {"proved_answers_agree": len(proved) == 1, "optimum": best, "ways": {}}
    kept = ("percent_of_optimum", "fitting_percent_of_optimum", "fits", "weight", "cpu_seconds")
    summary["ways"] = {row["way"]: {name: row[name] for name in kept} for row in rows}
    if figures_folder is not None:
        draw(answers, best, problem.value(answers[GREEDY][0].chosen), figures_folder)
    report(f"Knapsack of {items:,} items, capacity {capacity:,}, seed {seed}", rows, summary, json_path)


def _row(problem: Knapsack, name: str, answer: Answer, seconds: list[float]) -> dict[str, Any]:
    fitting = answer.chosen if answer.fitting is None else answer.fitting
    value = problem.value(answer.chosen)
    return {
        "way": name,
        "value": value,
        "weight": problem.weight(answer.chosen),
        "fits": problem.fits(answer.chosen),
        "fitting_value": problem.value(fitting) if problem.fits(fitting) else 0,
        "proved": answer.bound is not None and value >= answer.bound,
        "roundings_refused": answer.refused,
        "cpu_seconds": statistics.median(seconds),
        "repeats": len(seconds),
    }


if __name__ == "__main__":
    typer.run(main)
