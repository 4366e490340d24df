"""Rules of combining replicas' gradients: steps to a target with faulty replicas, what they cost, where they harm.

    python -m benchmarks.gradients --json gradients.json

A perceptron on scikit-learn's digits, whole-model replicas, 16 examples each in a step; the target is a share of the
held-out digits that are read correctly. Faults last from the first step to the last. Most trainings are in one process,
by the rules and faults that ranks use; some are by real ranks over gloo, and compared with those.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks._report import report
from benchmarks.gradients.campaign import MOST_STEPS, NONE, TARGET, Case, Row, all_trained, draw_of, rules, workload_of
from benchmarks.gradients.costs import arithmetic, steps_of_ranks
from benchmarks.gradients.in_process import Replicated, train
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.foundation.errors import DejavuError
from dejavu.launch.launcher import launch
from dejavu.runtime.gradients.faults import GradientFault, in_environment


def by_ranks(rule: str, fault: str) -> Row:
    """Four real ranks over gloo, one of them late and faulty: as the same training in one process, or how it ends."""
    workload = workload_of(rules(1)[rule], 4, 0).model_copy(update={"num_steps": 60, "checkpoint_every": 60})
    faults = () if fault == NONE else (GradientFault(fault, 2, seconds=0.01, seed=2),)
    case = Case("real ranks over gloo", rule, 4, len(faults), fault)
    expected = train(Replicated(workload, 4, faults), draw_of(0), workload.num_steps).losses
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="dejavu-gradients-") as folder:
        job = job_of(workload, by_hand("1f1b", (0, 3), [one_device(4)], 1), workload.num_steps, draw_of(0))
        os.environ.update(in_environment(*faults))
        try:
            result = launch(replace(job, folder=folder))
        except DejavuError as error:
            return {**case.row(), "result": f"ends with {type(error).__name__}"}
        finally:
            os.environ.clear()
            os.environ.update(before)
    off = None  # a rank's gradient is its part of the sum: other bits than those of one process
    if fault != "bit_flip":
        off = max(abs(a - b) for a, b in zip(result.losses, expected, strict=True))
    named = [f"rank {suspect.rank} is named" for suspect in result.suspects]
    return {
        **case.row(),
        "loss": result.losses[-1],
        "off_one_process": off,
        "result": "; ".join(named) or "nobody is named",
    }


def table(rows: list[Row], replicas: int, faulty: int) -> dict[str, dict[str, int | None]]:
    """Steps to the target by fault and rule, with so many faulty replicas and with none."""
    found: dict[str, dict[str, int | None]] = {}
    for row in rows:
        if row["what"] == "equal data" and row["replicas"] == replicas and row["faulty"] in (0, faulty):
            found.setdefault(row["fault"], {})[row["rule"]] = row["steps_to_target"]
    return found


def steps_of(rows: list[Row], what: str) -> dict[str, int | None]:
    """Steps to the target by rule."""
    return {row["rule"]: row["steps_to_target"] for row in rows if row["what"] == what}


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="trainings of each row")] = 3,
) -> None:
    """Train with faulty replicas under every rule, in some ten minutes on two cores."""
    rows = all_trained(seeds)
    by_rank = [by_ranks(rule, fault) for rule in ("mean", "suspicion") for fault in (NONE, "noise", "bit_flip")]
    costs = list(arithmetic(rules(1), (4, 8)))
    steps = list(steps_of_ranks(workload_of(rules(1)["mean"], 4, 0), rules(1)))
    honest = [row for row in rows if row["what"] == "equal data"]
    summary = {
        "steps_to_target": table(rows, 8, 2),
        "steps_to_target_1_of_8": table(rows, 8, 1),
        "steps_to_target_1_of_4": table(rows, 4, 1),
        "unequal_data": {what: steps_of(rows, what) for what in ("half by class", "all by class")},
        "learning_rate_times_4": steps_of(rows, "learning rate × 4"),
        "suspicion_named_of_2_in_each_seed": {
            row["fault"]: row["named_faulty"]
            for row in honest
            if (row["rule"], row["replicas"], row["faulty"]) == ("suspicion", 8, 2)
        },
        "named_honest_equal_data": sum(row.get("named_honest", 0) for row in honest),
        "named_honest_unequal_data": sum(row.get("named_honest", 0) for row in rows if row["what"] == "half by class"),
        "trainings_equal_data": sum(row["seeds"] for row in honest if "named_honest" in row),
        "target_accuracy": TARGET,
        "most_steps": MOST_STEPS,
        "combine_ms_8": {row["rule"]: row["combine_ms"] for row in costs if row["replicas"] == 8},
        "priced_ms_8": {row["rule"]: row["priced_ms"] for row in costs if row["replicas"] == 8},
        "step_over_mean_4_ranks": {row["rule"]: row["over_mean"] for row in steps if row["zero_level"] == 0},
        "step_over_mean_4_ranks_zero_1": {row["rule"]: row["over_mean"] for row in steps if row["zero_level"] == 1},
        "sharded_off_whole": max(row["off_whole"] for row in steps),
        "ranks_off_one_process": max(row.get("off_one_process") or 0.0 for row in by_rank),
    }
    report("Steps to 90 % of the held-out digits", [*rows, *by_rank, *costs, *steps], summary, json_path)


if __name__ == "__main__":
    typer.run(main)
