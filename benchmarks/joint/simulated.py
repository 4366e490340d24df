"""Trainings by a simulated clock: passes take what is true, times noise; the plan is improved as in a real training."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.joint.problems import Wrong, generated
from dejavu.binding import Binding
from dejavu.migration import Remaining, options
from dejavu.migration.joint import Improvement
from dejavu.migration.problem_now import ProblemNow, problem_now
from dejavu.migration.replanning import best_on, held_now
from dejavu.plans.schedule import Pass
from dejavu.runtime.process.pace import EVERY_SECONDS, Paced
from dejavu.timing.clock import Timed

NUM_STEPS = 300
NOISE = 0.05  # standard deviation of the logarithm of every pass and step
ONCE, SEARCH, JOINT, NO_GRADIENT = "once", "search", "joint", "joint without gradient"
WAYS = (ONCE, SEARCH, JOINT, NO_GRADIENT)
SIZES = ((12, 2), (24, 4), (48, 8))
WRONG = {"prices": (0.5, 1.0), "device": (0.0, 2.0)}  # spread of prices, slowness of a device


@dataclass(frozen=True)
class Trained:
    """How a training went.

    Attributes:
        steps_per_second: with changes of plan.
        last_over_best: the last plan's true step over the true best plan's.
        changes: of plan.
        predicted_over_measured: of the step after each change: the prediction that it was made for, over the truth.
        decided_seconds: processor seconds for A and for looks.
    """

    steps_per_second: float
    last_over_best: float
    changes: int
    predicted_over_measured: tuple[float, ...]
    decided_seconds: float


def train(wrong: Wrong, binding: Binding, way: str, seed: int) -> Trained:
    """Train `NUM_STEPS` steps."""
    rng, truth = np.random.default_rng(seed), problem_now(wrong.true, wrong.true_now)
    improvement = improvement_of(wrong, way, seed)
    seconds, done, changes, found = 0.0, 0, 0, list[float]()
    step_seconds = true_step_seconds(truth, binding)
    if improvement:
        improvement.begin(binding)
    while done < NUM_STEPS:
        stride = 2 ** max(0, math.ceil(math.log2(EVERY_SECONDS / step_seconds)))
        done, seconds = done + stride, seconds + stride * step_seconds * rng.lognormal(0.0, NOISE)
        if improvement is None:
            continue
        improvement.see(reports(truth, binding, done, seconds, rng), wrong.now)
        if improvement.is_due and done < NUM_STEPS:
            decision = improvement.decide(wrong.now, Remaining(NUM_STEPS - done))
            if not decision.stays:
                binding, changes = decision.chosen.binding, changes + 1
                step_seconds, seconds = true_step_seconds(truth, binding), seconds + decision.move_seconds
                found.append(decision.chosen.step_seconds / step_seconds)
                improvement.begin(binding)
    best = best_on(wrong.true, wrong.true_now)
    decided = improvement.decided_seconds if improvement else 0.0
    return Trained(done / seconds, step_seconds / best.step_seconds, changes, tuple(found), decided)


def improvement_of(wrong: Wrong, way: str, seed: int) -> Improvement | None:
    """Return what improves the plan in this way."""
    if way == ONCE:
        return None
    if way == NO_GRADIENT:
        return Improvement(wrong.planned, "joint", seed, steps_per_report=0)
    return Improvement(wrong.planned, "search" if way == SEARCH else "joint", seed)


def true_step_seconds(truth: ProblemNow, binding: Binding) -> float:
    """Return what a step really takes, without noise."""
    option = options.as_it_is(truth, binding, held_now(truth, binding))
    assert option is not None
    return option.step_seconds


def reports(truth: ProblemNow, binding: Binding, step: int, began: float, rng: np.random.Generator) -> dict[int, Paced]:
    """Return what the ranks report of a step, one stage each."""
    priced, found = truth.every, {}
    for rank, placed in enumerate(binding.placements):
        stage, kind = binding.plan.stages[rank], truth.devices[placed.device.host, placed.device.index].type_name
        c = next(c for c, one in enumerate(priced.problem.configurations) if one.device_type == kind)
        rows = []
        for way, table_CL in ((Pass.FORWARD, priced.forward_seconds_CL), (Pass.BACKWARD, priced.backward_seconds_CL)):
            took = float(table_CL[c, stage.start : stage.stop].sum()) * rng.lognormal(0.0, NOISE)
            rows += [Timed(rank, way, m, 0.0, took) for m in range(binding.plan.num_microbatches)]
        found[rank] = Paced(step, began, tuple(rows))
    return found


def all_trained(seeds: int, first_seed: int) -> list[dict[str, Any]]:
    """Train every size and every kind of wrong prices in every way."""
    rows = []
    for num_layers, num_hosts in SIZES:
        for what, (spread, slowness) in WRONG.items():
            cases = [generated(num_layers, num_hosts, spread, slowness, first_seed + k) for k in range(seeds)]
            bindings = [best_on(case.planned, case.now).binding for case in cases]
            found: dict[str, list[Trained]] = {}
            for way in WAYS:
                began = time.process_time()
                found[way] = [
                    train(case, one, way, k) for k, (case, one) in enumerate(zip(cases, bindings, strict=True))
                ]
                rows.append(_row(num_layers, num_hosts, what, way, found, time.process_time() - began))
    return rows


def _row(
    num_layers: int, num_hosts: int, what: str, way: str, found: dict[str, list[Trained]], seconds: float
) -> dict[str, Any]:
    over_once = [
        mine.steps_per_second / once.steps_per_second for mine, once in zip(found[way], found[ONCE], strict=True)
    ]
    off = [abs(math.log(one)) for mine in found[way] for one in mine.predicted_over_measured]
    return {
        "what": "simulated",
        "wrong": what,
        "layers": num_layers,
        "devices": num_hosts,
        "way": way,
        "seeds": len(over_once),
        "speed_over_once": median(over_once),
        "least": min(over_once),
        "most": max(over_once),
        "last_plan_over_best": median(mine.last_over_best for mine in found[way]),
        "changes": sum(mine.changes for mine in found[way]) / len(over_once),
        "prediction_off_percent": 100 * median(off) if off else None,
        "decided_cpu_ms": 1e3 * median(mine.decided_seconds for mine in found[way]),
        "cpu_seconds": seconds,
    }
