"""Every fault × rule × number of faulty replicas, trained in one process; other processes import this module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from benchmarks.gradients.in_process import Replicated, train
from dejavu.init import Draw
from dejavu.runtime.gradients.faults import FAULTS, GradientFault
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
    unequal_share: float = 0.0
    rate: float = 1.0  # times the usual learning rate

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


def workload_of(settings: GradientSettings, replicas: int, seed: int, rate: float = 1.0) -> Workload:
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
        optimizer=OptimizerSettings(name="sgd", learning_rate=0.05 * rate, momentum=0.9, weight_decay=0.0),
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
    for what, share in (("half by class", 0.5), ("all by class", 1.0)):
        yield from (Case(what, name, 8, 0, unequal_share=share) for name in rules(2))
    yield from (Case("learning rate × 4", name, 8, 0, rate=4.0) for name in ("suspicion", PRINTED))
    for name in ("suspicion α 0.1", "suspicion α 10", PRINTED):
        yield from (Case("equal data", name, 8, faulty, fault) for faulty, fault in ((0, NONE), (2, "noise")))


def trained(asked: tuple[Case, int]) -> Row:
    """One training: steps to the target, or none; who was named."""
    torch.set_num_threads(1)
    case, seed = asked
    settings = settings_of(case)
    rule = AsPrinted(Suspicion(settings.num_suspected, settings.alpha)) if case.rule == PRINTED else None
    faults = tuple(GradientFault(case.fault, n, case.layer, seed=10 * seed + n) for n in range(case.faulty))
    workload = workload_of(settings, case.replicas, seed, case.rate)
    replicated = Replicated(workload, case.replicas, faults, case.unequal_share, rule)
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
    counted = () if case.rule == "mean" else ("named_faulty", "named_honest")  # the mean's replicas are not compared
    return {
        **case.row(),
        "steps_to_target": middle if middle <= MOST_STEPS else None,
        "reached": sum(run["steps"] is not None for run in runs),
        "best_accuracy": median(run["accuracy"] for run in runs),
        **{name: sum(run[name] for run in runs) for name in counted},
        "seeds": len(runs),
    }


def all_trained(seeds: int) -> list[Row]:
    """Train every case with every seed, on all cores of this process; a row for each case."""
    asked = [(case, seed) for case in cases() for seed in range(seeds)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(trained, asked, chunksize=4))
    return [together(asked[k][0], runs[k : k + seeds]) for k in range(0, len(asked), seeds)]
