"""What a rule takes beside the mean: its arithmetic, what each replica sends and holds, and steps of real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks._report import timed_seconds
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.cluster import this_machine
from dejavu.cost.gradients import combining_seconds, gathered_bytes
from dejavu.plans import StageConfiguration
from dejavu.runtime.gradients.rules import Part, combine, rule_of
from dejavu.workload import GradientSettings, Workload

NUMBERS = 1_000_000  # of one gradient
REPEATS = 5
RANKS, STEPS, WIDTH = 4, 14, 500
Row = dict[str, Any]


def arithmetic(rules: dict[str, GradientSettings], counts: tuple[int, ...]) -> Iterator[Row]:
    """Each rule on so many gradients of a million numbers, in one thread: measured and priced; bytes by formula."""
    cluster = this_machine()
    (device_type,) = cluster.device_counts
    device, size = cluster.device_types[device_type], 4.0 * NUMBERS
    for count in counts:
        gradients_NP = torch.randn(count, NUMBERS, generator=torch.Generator().manual_seed(0))
        trust_SN = torch.full((1, count), 1 / count, dtype=torch.float64)
        configuration = StageConfiguration(device_type, 1, count, count)
        for name, settings in rules.items():
            if count < settings.least_replicas or settings.per == "layer":
                continue
            rule, held_out_P = rule_of(settings), gradients_NP[0] if settings.rule == "zeno" else None

            work = partial(combine, rule, gradients_NP, [Part(0, NUMBERS)], trust_SN, held_out_P=held_out_P)
            priced = combining_seconds(settings, configuration, np.array([size]), device)
            held = gathered_bytes(settings, configuration, np.array([size]), on_cpu=device.kind == "cpu")
            sent = (count - 1) * size if settings.gathers else 2 * (count - 1) / count * size
            yield {
                "what": "cost of combining 4 MB",
                "rule": name,
                "replicas": count,
                "combine_ms": 1e3 * median(timed_seconds(work, REPEATS)) if settings.gathers else 0.0,
                "priced_ms": 1e3 * float(priced[0]),
                "sent_mb": sent / 1e6,
                "held_mb": float(held[0]) / 1e6,
            }


def steps_of_ranks(workload: Workload, rules: dict[str, GradientSettings]) -> Iterator[Row]:
    """Train a wider model by real ranks over gloo under each rule in turn; the median of all steps.

    With whole gradients on each, and with shards of the optimizer's state and of all gradients (ZeRO 1), whose losses
    are compared with those.
    """
    wide = {"model_options": {**workload.model_options, "width": WIDTH}, "num_steps": STEPS, "batch_size": 16 * RANKS}
    usable = {name: one for name, one in rules.items() if one.least_replicas <= RANKS and one.per == "stage"}
    cases, jobs = [(name, level) for name in usable for level in (0, 1)], []
    for name, level in cases:
        own = Workload.model_validate({**workload.model_dump(), **wide, "gradients": usable[name].model_dump()})
        jobs.append(job_of(own, by_hand("1f1b", (0, 3), [one_device(RANKS, zero_level=level)], 1), STEPS))
    found = dict(zip(cases, train_in_turn(jobs), strict=True))
    for (name, level), trained in found.items():
        pairs = zip(trained.losses, found[name, 0].losses, strict=True)
        yield {
            "what": "steps of real ranks",
            "rule": name,
            "replicas": RANKS,
            "zero_level": level,
            "step_ms": 1e3 * trained.median_step_seconds,
            "over_mean": trained.median_step_seconds / found["mean", level].median_step_seconds,
            "off_whole": max(abs(a - b) for a, b in pairs),
        }
