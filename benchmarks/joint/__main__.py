"""A running plan improved from what its training measures: by gradient steps on A (eq. 4 to 6), and by exact search.

    python -m benchmarks.joint --json joint.json
    python -m benchmarks.joint --complexity --json complexity.json      # what a step on A takes alone

The same wrong prices, the same measurements, the same rule for whether a change pays; what differs is how the next
plan is found. `once`: the first plan to the end. `search`: the exact search at every look. `joint`: A's gradient steps
between reports. `joint without gradient`: the plans one cut away alone. Real ranks (two over gloo, with shares of a
core) and trainings by a simulated clock, in all some six minutes of processor time.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks._report import report
from benchmarks.joint import complexity, simulated, trainings
from benchmarks.joint.simulated import JOINT, NO_GRADIENT, ONCE, SEARCH

Rows = list[dict[str, Any]]


def of_real(rows: Rows) -> dict[str, Any]:
    """Compare the ways on real ranks, seed by seed."""
    speed = {(row["seed"], row["way"]): row["steps_per_second"] for row in rows}
    seeds = sorted({seed for seed, _ in speed})
    over = {way: [speed[seed, way] / speed[seed, ONCE] for seed in seeds] for way in (SEARCH, JOINT)}
    changed = [row for row in rows if row["step_after_ms"]]
    return {
        "real_seeds": len(seeds),
        "real_speed_over_once": {
            way: {"median": median(x), "least": min(x), "most": max(x)} for way, x in over.items()
        },
        "real_joint_over_search": median(speed[seed, JOINT] / speed[seed, SEARCH] for seed in seeds),
        "real_decided_cpu_ms": {
            way: median(row["decided_cpu_ms"] for row in rows if row["way"] == way) for way in (SEARCH, JOINT)
        },
        "real_worst_loss_difference": max(row["worst_loss_difference"] for row in rows),
        "real_trainings_that_changed": len(changed),
        "real_prediction_off_percent": median(
            100 * abs(row["step_predicted_ms"] / row["step_after_ms"] - 1) for row in changed
        )
        if changed
        else None,
    }


def of_simulated(rows: Rows) -> dict[str, Any]:
    """Compare the ways by size and by what is wrong."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["way"] != ONCE:
            case = found.setdefault(f"{row['layers']} layers, {row['devices']} devices, {row['wrong']}", {})
            case[row["way"]] = {
                "speed_over_once": row["speed_over_once"],
                "last_plan_over_best": row["last_plan_over_best"],
                "decided_cpu_ms": row["decided_cpu_ms"],
            }
    medians = {
        way: {
            key: median(case[way][key] for case in found.values())
            for key in ("speed_over_once", "last_plan_over_best", "decided_cpu_ms")
        }
        for way in (SEARCH, JOINT, NO_GRADIENT)
    }
    return {"simulated": found, "simulated_medians": medians}


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
    only_complexity: Annotated[bool, typer.Option("--complexity", help="only what a step on A takes")] = False,
    only_simulated: Annotated[bool, typer.Option("--simulated", help="only trainings by a simulated clock")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="wrong prices for real ranks")] = 3,
    simulated_seeds: Annotated[int, typer.Option(min=1, help="wrong prices for each simulated case")] = 3,
    first_seed: Annotated[int, typer.Option(help="of the simulated cases")] = 100,
) -> None:
    """Compare planning once, A's gradient steps and the exact search on the same measurements."""
    everything = not (only_complexity or only_simulated)
    rows, summary = list[dict[str, Any]](), dict[str, Any]()
    if everything or only_complexity:
        timed, fitted = complexity.all_timed()
        rows, summary = rows + timed, summary | fitted
    if everything or only_simulated:
        found = simulated.all_trained(simulated_seeds, first_seed)
        rows, summary = rows + found, summary | of_simulated(found)
    if everything:
        real, notes = trainings.all_trained(seeds)
        rows, summary = rows + real, summary | of_real(real) | ({"notes": notes} if notes else {})
    report("A running plan, improved from what the training measures", rows, summary, json_path)


if __name__ == "__main__":
    typer.run(main)
