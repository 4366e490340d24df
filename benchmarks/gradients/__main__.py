"""Rules of combining replicas' gradients: steps to a target with faulty replicas, what they cost, where they harm.

    python -m benchmarks.gradients --json gradients.json

A perceptron on scikit-learn's digits, whole-model replicas, 16 examples each in a step; the target is a share of the
held-out digits that are read correctly. Faults last from the first step to the last. Most trainings are in one process,
by the rules and faults that ranks use; some are by real ranks over gloo, and compared with those.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks._report import report
from benchmarks.gradients.costs import arithmetic, steps_of_ranks
from benchmarks.gradients.in_process import Replicated, train
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.foundation.errors import DejavuError
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.runtime.gradients.faults import FAULTS, GradientFault, in_environment
from dejavu.runtime.gradients.rules import Judgement, Rule
from dejavu.runtime.gradients.rules.suspicion import Suspicion
from dejavu.workload import GradientSettings, OptimizerSettings, TrialSettings, Workload

TARGET = 0.9  # of the held-out digits
MOST_STEPS, EVERY_STEPS = 150, 5
EXAMPLES = 16  # of a replica in a step
NONE = "none"
ONE_LAYER = "hidden1"  # of three, where a fault strikes one
PRINTED = "suspicion as printed"
Row = dict[str, Any]


@dataclass(frozen=True)
class AsPrinted(Rule):
    """Algorithm 2 with weights that are not divided by their sum, as the paper has it."""

    suspicion: Suspicion

    def judge(self, measured: torch.Tensor, trust_N: torch.Tensor) -> Judgement:
        found = self.suspicion.judge(measured, trust_N)
        total = (self.suspicion.alpha / (self.suspicion.alpha + found.suspicion_N)).sum()
        return replace(found, weights_N=found.weights_N * total)


@dataclass(frozen=True)
class Case:
    """A row of the table, trained once for each seed."""

    what: str
    rule: str
    replicas: int
    faulty: int
    fault: str = NONE
    layer: str = ""
    unequal: bool = False

    def row(self) -> Row:
        found: Row = {"what": self.what, "rule": self.rule, "replicas": self.replicas, "faulty": self.faulty}
        return {**found, "fault": f"{self.fault} in one layer" if self.layer else self.fault}


def rules(num_suspected: int) -> dict[str, GradientSettings]:
    """All rules, told how many replicas may be faulty."""
    count = {"num_suspected": num_suspected}
    named: dict[str, dict[str, Any]] = {
        "mean": {"rule": "mean"},
        "suspicion": {"rule": "suspicion", **count},
        "suspicion by layer": {"rule": "suspicion", "per": "layer", **count},
        "median": {"rule": "median"},
        "trimmed_mean": {"rule": "trimmed_mean", **count},
        "krum": {"rule": "krum", **count},
        "zeno": {"rule": "zeno"},
    }
    return {name: GradientSettings.model_validate(fields) for name, fields in named.items()}


def settings_of(case: Case) -> GradientSettings:
    """The rule's settings; without a fault it expects as many as of this number of replicas could be in other rows."""
    known = rules(case.faulty or (2 if case.replicas >= 7 else 1))
    if case.rule == PRINTED:
        return known["suspicion"]
    if case.rule.startswith("suspicion α"):
        return known["suspicion"].model_copy(update={"alpha": float(case.rule.split()[-1])})
    return known[case.rule]


def workload_of(settings: GradientSettings, replicas: int, seed: int) -> Workload:
    """The perceptron, and a batch of equal parts."""
    return Workload(
        model="mlp",
        model_options={"num_blocks": 2, "width": 32},
        data="digits",
        batch_size=EXAMPLES * replicas,
        num_microbatches=1,
        held_out=0.25,
        evaluation_examples=384,
        num_steps=MOST_STEPS,
        checkpoint_every=MOST_STEPS,
        seed=seed,
        gradients=settings,
        optimizer=OptimizerSettings(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.0),
        trials=TrialSettings(count=0),
    )


def draw_of(seed: int) -> Draw:
    return Draw("kaiming", seed=seed)


def cases() -> Iterator[Case]:
    """Every fault × rule, with 0, 1 and 2 of 8 replicas and 0 and 1 of 4; one layer; unequal data; weights' scale."""
    for replicas, counts in ((8, (1, 2)), (4, (1,))):
        usable = [name for name, one in rules(max(counts)).items() if one.least_replicas <= replicas]
        yield from (Case("equal data", name, replicas, 0) for name in usable)
        yield from (
            Case("equal data", name, replicas, faulty, fault)
            for faulty in counts
            for fault in FAULTS
            for name in usable
        )
    for fault in ("sign_flip", "noise", "nan"):
        yield from (Case("equal data", name, 8, 2, fault, ONE_LAYER) for name in rules(2))
    yield from (Case("a class or two each", name, 8, 0, unequal=True) for name in rules(2))
    for name in ("suspicion α 0.1", "suspicion α 10", PRINTED):
        yield from (Case("equal data", name, 8, faulty, fault) for faulty, fault in ((0, NONE), (2, "noise")))


def trained(asked: tuple[Case, int]) -> Row:
    """One training: steps to the target, or none; who was named."""
    torch.set_num_threads(1)
    case, seed = asked
    settings = settings_of(case)
    rule = AsPrinted(Suspicion(settings.num_suspected, settings.alpha)) if case.rule == PRINTED else None
    faults = tuple(GradientFault(case.fault, n, case.layer, seed=10 * seed + n) for n in range(case.faulty))
    replicated = Replicated(workload_of(settings, case.replicas, seed), case.replicas, faults, case.unequal, rule)
    found = train(
        replicated,
        draw_of(seed),
        MOST_STEPS,
        evaluate_every=EVERY_STEPS,
        until=lambda accuracy: accuracy >= TARGET,
    )
    reached = [step for step, accuracy in found.accuracies if accuracy >= TARGET]
    faulty = {fault.rank for fault in faults}
    return {
        "steps": reached[0] if reached else None,
        "accuracy": max((accuracy for _, accuracy in found.accuracies), default=0.0),
        "named_faulty": len(faulty & set(found.named)),
        "named_honest": len(set(found.named) - faulty),
    }


def together(case: Case, runs: list[Row]) -> Row:
    """The median of the seeds; none where most did not reach the target."""
    steps = sorted(run["steps"] if run["steps"] is not None else MOST_STEPS + 1 for run in runs)
    middle = steps[len(steps) // 2]
    return {
        **case.row(),
        "steps_to_target": middle if middle <= MOST_STEPS else None,
        "reached": sum(run["steps"] is not None for run in runs),
        "best_accuracy": median(run["accuracy"] for run in runs),
        "named_faulty": sum(run["named_faulty"] for run in runs),
        "named_honest": sum(run["named_honest"] for run in runs),
        "seeds": len(runs),
    }


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
            said = re.search(r"\w+Error: [^;]*", str(error))
            return {**case.row(), "result": f"ends: {said.group() if said else error}"}
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


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="trainings of each row")] = 3,
) -> None:
    """Train with faulty replicas under every rule, in some eight minutes on two cores."""
    asked = [(case, seed) for case in cases() for seed in range(seeds)]
    context = get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        runs = list(pool.map(trained, asked, chunksize=4))
    rows = [together(asked[k][0], runs[k : k + seeds]) for k in range(0, len(asked), seeds)]
    by_rank = [
        by_ranks(rule, fault) for rule, fault in (("mean", NONE), ("mean", "bit_flip"), ("suspicion", "bit_flip"))
    ]
    costs = list(arithmetic(rules(1), (4, 8)))
    steps = list(steps_of_ranks(workload_of(rules(1)["mean"], 4, 0), rules(1)))
    honest = [row for row in rows if row["what"] == "equal data"]
    summary = {
        "steps_to_target": table(rows, 8, 2),
        "steps_to_target_1_of_8": table(rows, 8, 1),
        "steps_to_target_1_of_4": table(rows, 4, 1),
        "unequal_data": {row["rule"]: row["steps_to_target"] for row in rows if row["what"] != "equal data"},
        "named_honest_equal_data": sum(row["named_honest"] for row in honest),
        "trainings_equal_data": len(honest) * seeds,
        "target_accuracy": TARGET,
        "most_steps": MOST_STEPS,
        "combine_ms_8": {row["rule"]: row["combine_ms"] for row in costs if row["replicas"] == 8},
        "priced_ms_8": {row["rule"]: row["priced_ms"] for row in costs if row["replicas"] == 8},
        "step_over_mean_4_ranks": {row["rule"]: row["over_mean"] for row in steps},
        "ranks_off_one_process": max(row.get("off_one_process") or 0.0 for row in by_rank),
    }
    report("Steps to 90 % of the held-out digits", [*rows, *by_rank, *costs, *steps], summary, json_path)


if __name__ == "__main__":
    typer.run(main)
