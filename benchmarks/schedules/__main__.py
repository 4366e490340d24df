"""Every schedule on the same problems: step, bubble, memory, versions of weights, staleness.

    python -m benchmarks.schedules --json schedules.json

Simulated: 4 and 8 ranks with 1, 2 and 4 microbatches for each, layers alike (forward as long as backward, and half as
long), with messages and updates, and uneven ones, cut for each schedule so that its slowest stage is fastest.
Asynchronous schedules are simulated over several steps; their row is the steady state. Predicted: TeraPipe's slices of
large decoders. Trained: a perceptron of 8 stages on handwritten digits in one process, by each schedule's versions of
the weights; the losses say what the staleness costs. Run by 2 and 4 ranks over gloo, beside one process: small decoders
in slices and in both directions, and the perceptron by orders with plain messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks._report import report, write
from benchmarks.schedules.late import LEARNING_RATES, ONE_STEP, WAYS, late_rows
from benchmarks.schedules.problems import schedule_rows
from benchmarks.schedules.ran import CHIMERA, WIDE, plain_rows, product_rows
from benchmarks.schedules.slices import slice_rows
from dejavu.schedules import PIPELINE_SCHEDULES


def main(
    steps: Annotated[int, typer.Option(min=20, help="of each training")] = 120,
    seeds: Annotated[int, typer.Option(min=1, help="of each training")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="of the uneven layers")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Simulate, predict, and train."""
    torch.set_num_threads(1)  # on tensors this small threads wait for each other
    simulated, sliced = list(schedule_rows(seed)), list(slice_rows())
    report("Simulated: step, bubble, memory of the fullest rank, staleness", simulated, {}, None)
    report("Predicted: one step of causal decoders in slices", sliced, {}, None)
    trained = list(late_rows(steps, seeds))
    on_ranks, plain = list(product_rows()), list(plain_rows())
    report("Run by ranks: sequences in slices, both directions", on_ranks, {}, None)
    report("Run by ranks: orders with plain messages", plain, {}, None)
    summary = _summary(simulated, trained) | _of_ranks(on_ranks, plain)
    report("Trained: the loss of the last steps", trained, summary, None)
    if json_path is not None:
        write([*simulated, *sliced, *trained, *on_ranks, *plain], summary, json_path)


def _summary(simulated: list[dict[str, Any]], trained: list[dict[str, Any]]) -> dict[str, Any]:
    with_formula = [row for row in simulated if row["formula_bubble_percent"] is not None]
    problems: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in simulated:
        problems.setdefault((row["problem"], row["ranks"], row["microbatches"]), []).append(row)
    fastest = [
        min((row for row in rows if row["synchronous"]), key=lambda row: row["step_ms"])["schedule"]
        for rows in problems.values()
    ]
    losses = {(row["way"], row["learning_rate"]): row["final_loss"] for row in trained}
    return {
        "problems": len(problems),
        "schedules": len(PIPELINE_SCHEDULES),
        "compared_with_formulas": len(with_formula),
        "most_percentage_points_from_formula": max(
            abs(row["bubble_percent"] - row["formula_bubble_percent"]) for row in with_formula
        ),
        "fastest_synchronous": {name: fastest.count(name) for name in sorted(set(fastest))},
        "loss_by_learning_rate": {way: {str(rate): losses[way, rate] for rate in LEARNING_RATES} for way in WAYS},
        "staleness_steps": {row["way"]: row["staleness_steps"] for row in trained},
        "most_loss_apart_of_synchronous": max(
            abs(losses["chimera", rate] - losses[ONE_STEP, rate])
            for rate in LEARNING_RATES
            if losses[ONE_STEP, rate] is not None and losses["chimera", rate] is not None
        ),
    }


def _of_ranks(product: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    in_slices = [row for row in product if row["slices"] != "1"]
    both_ways = [row for row in product if row["schedule"] == CHIMERA]
    small = [row["cpu_times_whole"] for row in in_slices if row["model"] != WIDE]
    return {
        "ran": {
            name: {"trainings": len(rows), "worst_loss_difference": max(row["loss_difference"] for row in rows)}
            for name, rows in (("slices", in_slices), (CHIMERA, both_ways))
        },
        "slices_cpu_times_whole": {
            "small, least": min(small),
            "small, most": max(small),
            WIDE: {row["slices"]: row["cpu_times_whole"] for row in in_slices if row["model"] == WIDE},
        },
        "ran_by_plain_messages": {row["schedule"]: row["loss_difference"] for row in plain},
    }


if __name__ == "__main__":
    typer.run(main)
