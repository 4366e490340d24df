"""Real ranks over gloo under every schedule and every way to spread a stage: the losses of a single process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_in_turn
from dejavu.foundation.errors import DejavuError
from dejavu.init import Draw
from dejavu.launch.launcher import LaunchError, launch
from dejavu.launch.preflight import check_split, check_spreading
from dejavu.plans import Offload, StageConfiguration
from dejavu.plans.schedule import SCHEDULES, Pass, actions
from dejavu.report.timeline import PASSES, Work, measured_timeline
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.single import train_single
from dejavu.runtime.state import read_checkpoint
from dejavu.simulation import StageSeconds, simulate
from dejavu.timing.clock import Timed
from dejavu.timing.events import bubble_fraction, first_replicas, measured_events, waited_messages
from dejavu.workload import OptimizerSettings, SyntheticSettings, TrialSettings, Workload
from dejavu.workload.models import layers_of
from tests.conftest import asked
from tests.test_models import ZOO

pytestmark = pytest.mark.integration
TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
BFLOAT16_TOLERANCE = 2**-6  # the step between neighbours of a loss from 2 to 4 that is computed in bfloat16
STEPS = 4

GPT = Workload(
    model_options={"num_blocks": 6, "width": 32, "num_heads": 4},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=50),
    sequence_length=16,
    batch_size=24,
    num_microbatches=4,
    num_steps=STEPS,
    checkpoint_every=2,
    optimizer=OptimizerSettings(learning_rate=1e-2, clip_norm=0.5, decay="cosine"),
    trials=TrialSettings(count=0),
    held_out=0.25,
    evaluate_every=2,
    evaluation_examples=40,
)
DIGITS = GPT.model_copy(
    update={
        "model": "cnn",
        "model_options": {"num_blocks": 2, "width": 8},
        "evaluate_every": 3,
        "data": "digits",
        "synthetic": None,
        "optimizer": OptimizerSettings(name="sgd", learning_rate=0.1, momentum=0.9),
    }
)
AWAY, UPDATED = Offload("host"), Offload(None, "host")  # activations, the optimizer
ON_DISK = Offload(None, "nvme")
FETCHED, ALL_AWAY = Offload(None, "host", "host"), Offload("host", "host", "host")
one, by_expert = one_device(), one_device(1, 2, expert_parallel=True)
TWO = [one, one]


SHARED = DIGITS.model_copy(update={"model": "tests.own_models:with_shared_weight", "model_options": {}})
OF_SUMS = DIGITS.model_copy(update={"model": "tests.own_models:of_sums", "model_options": {}})
COMPLEX = DIGITS.model_copy(update={"model": "tests.own_models:conjugated", "model_options": {}})
AT_TIMES = DIGITS.model_copy(
    update={"model": "tests.own_models:used_at_times", "model_options": {"microbatches": DIGITS.num_microbatches}}
)
DROPOUT = DIGITS.model_copy(update={"model": "tests.own_models:with_dropout", "model_options": {}})
MIXED = GPT.model_copy(update={"mixed_precision": True})
MASTERS = GPT.model_copy(
    update={"dtype": "bfloat16", "optimizer": GPT.optimizer.model_copy(update={"master_weights": True})}
)
TUNED = GPT.model_copy(
    update={"optimizer": OptimizerSettings(weight_decay=0.3, betas=(0.8, 0.95), epsilon=1e-6, decayed="matrices")}
)
T5 = GPT.model_copy(
    update={
        "model": "t5",
        "model_options": {"num_blocks": 1, "width": 32, "num_heads": 2, "head_width": 16, "feedforward": 64},
    }
)
ACCUMULATED, DROPPED = (one.model_copy(update={"accumulate": 3}) for one in (GPT, DROPOUT))
BERT = GPT.model_copy(update={"model": "bert", "model_options": {"num_blocks": 2, "width": 32, "num_heads": 4}})


def of_zoo(name: str) -> Workload:
    settings = {"num_microbatches": 4, "batch_size": 16, "num_steps": STEPS, "trials": TrialSettings(count=0)}
    settings |= {"held_out": 0.25, "evaluate_every": 2, "evaluation_examples": 16}
    return ZOO[name].model_copy(update=settings)


T5_GATED, RESNET = of_zoo("t5_gated"), of_zoo("wide_resnet")
LLAMA, MIXTRAL, MOE = of_zoo("llama"), of_zoo("mixtral"), of_zoo("moe")
CLIPPED = OptimizerSettings(learning_rate=1e-2, clip_norm=0.5)
Case = tuple[Workload, str, tuple[int, ...], Sequence[StageConfiguration]]
CASES: dict[str, Case] = {}
for name, schedule in SCHEDULES.items():
    deep = schedule.stages_per_rank > 1
    even, uneven = ((0, 2, 4, 6, 8), (0, 1, 3, 6, 8)) if deep else ((0, 4, 8), (0, 3, 8))
    if schedule.stages_per_rank == 4:  # as many stages as the model has layers
        even = uneven = tuple(range(9))
    CASES |= {
        f"{name}, uneven cuts": (GPT, name, uneven, TWO),
        f"{name}, recompute": (GPT, name, even, [one_device(recompute=True)] * 2),
        f"{name}, 2 replicas": (GPT, name, even, [one_device(2)] * 2),
        f"{name}, 3 replicas and 1": (GPT, name, even, [one_device(3), one]),
    }
    if schedule.stages_per_rank <= 2:
        CASES[f"{name}, shared weight"] = (SHARED, name, (0, 1, 2, 3, 4) if deep else (0, 2, 4), TWO)
    CASES[f"{name}, weights on host"] = (GPT, name, uneven, [one_device(offload=FETCHED)] * 2)
for name in ("zbv", "dualpipe_v"):
    bounds = (0, 1, 2, 3, 4)
    CASES |= {
        f"{name}, shared weight recomputed": (SHARED, name, bounds, [one_device(recompute=True)] * 2),
        f"{name}, sums of weights": (OF_SUMS, name, (0, 2, 3, 5, 6), TWO),
        f"{name}, sums of weights, 2 replicas": (OF_SUMS, name, (0, 2, 3, 5, 6), [one, one_device(2)]),
        f"{name}, sums of weights, ZeRO 1": (OF_SUMS, name, (0, 2, 3, 5, 6), [one_device(2, zero_level=1)] * 2),
        f"{name}, shared weight, 2 replicas": (SHARED, name, bounds, [one_device(2), one]),
        f"{name}, shared weight, ZeRO 1": (SHARED, name, bounds, [one_device(2, zero_level=1)] * 2),
    }
for name in ("1f1b", "zbv"):
    bounds = (0, 4, 8) if name == "1f1b" else (0, 2, 4, 6, 8)
    CASES |= {
        f"{name}, tensor parallel 2": (GPT, name, bounds, [one_device(1, 2)] * 2),
        f"{name}, ZeRO 1": (GPT, name, bounds, [one_device(2, zero_level=1)] * 2),
    }
CASES |= {
    "ZeRO 2": (GPT, "1f1b", (0, 4, 8), [one_device(2, zero_level=2)] * 2),
    "ZeRO 3 and 1 replica": (GPT, "gpipe", (0, 4, 8), [one, one_device(3, zero_level=3)]),
    "2 replicas of 2 shards, ZeRO 1": (GPT, "1f1b", (0, 8), [one_device(2, 2, zero_level=1)]),
    "1 shard to 2": (GPT, "1f1b", (0, 3, 8), [one, one_device(1, 2)]),
    "2 shards to 1": (GPT, "1f1b", (0, 3, 8), [one_device(1, 2), one]),
    "t5 in 2 shards": (T5, "1f1b", (0, 2, 5), [one_device(1, 2), one]),
    "bert in 2 replicas of 2 shards": (BERT, "1f1b", (0, 4), [one_device(2, 2)]),
    "llama in 2 shards, and 2 replicas": (LLAMA, "1f1b", (0, 2, 4), [one_device(1, 2), one_device(2)]),
    "llama, split backward, 2 shards": (LLAMA, "zbv", (0, 1, 2, 3, 4), [one_device(1, 2), one]),
    "experts in 2 shards, clipped": (
        MIXTRAL.model_copy(update={"optimizer": CLIPPED}),
        "1f1b",
        (0, 2, 4),
        [one_device(1, 2), one],
    ),
    "experts, split backward, 2 shards": (MIXTRAL, "zbv", (0, 1, 2, 3, 4), [one, one_device(1, 2)]),
    "experts in 2 replicas of 2 shards, ZeRO 1": (MIXTRAL, "1f1b", (0, 4), [one_device(2, 2, zero_level=1)]),
    "experts in 2 shards, recomputed": (MIXTRAL, "1f1b", (0, 3, 4), [one_device(1, 2, recompute=True), one]),
    "experts under autocast in 2 shards": (
        MIXTRAL.model_copy(update={"mixed_precision": True}),
        "1f1b",
        (0, 2, 4),
        [one_device(1, 2), one],
    ),
    "experts of a capacity in 2 shards": (MOE, "1f1b", (0, 2, 4), [one_device(1, 2)] * 2),
    "3 runs of 1f1b, uneven cuts, recomputed": (ACCUMULATED, "1f1b", (0, 3, 8), [one_device(recompute=True), one]),
    "3 runs of zbv, 2 replicas": (ACCUMULATED, "zbv", (0, 2, 4, 6, 8), [one_device(2)] * 2),
    "3 runs of zbv, ZeRO 1": (ACCUMULATED, "zbv", (0, 2, 4, 6, 8), [one_device(2, zero_level=1)] * 2),
    "3 runs of gpipe, ZeRO 2": (ACCUMULATED, "gpipe", (0, 4, 8), [one_device(2, zero_level=2), one]),
    "3 runs of 1f1b, ZeRO 3": (ACCUMULATED, "1f1b", (0, 4, 8), [one, one_device(2, zero_level=3)]),
    "3 runs of 1f1b, 2 shards": (ACCUMULATED, "1f1b", (0, 4, 8), [one_device(1, 2), one]),
    "3 runs with dropout": (DROPPED, "interleaved_1f1b", (0, 1, 3, 5, 6), TWO),
    "offloaded": (GPT, "1f1b", (0, 3, 8), [one_device(offload=AWAY)] * 2),
    "offloaded, 2 replicas and recomputed": (
        GPT,
        "interleaved_1f1b",
        (0, 2, 4, 6, 8),
        [one_device(2, offload=AWAY), one_device(recompute=True, offload=AWAY)],
    ),
    "offloaded, ZeRO 3 and 2 shards by sequence": (
        GPT,
        "1f1b",
        (0, 4, 8),
        [one_device(2, zero_level=3, offload=AWAY), one_device(1, 2, sequence_parallel=True, offload=AWAY)],
    ),
    "optimizer on host, uneven cuts": (GPT, "1f1b", (0, 3, 8), [one_device(offload=UPDATED)] * 2),
    "optimizer on host, momentum": (DIGITS, "1f1b", (0, 2, 4), [one_device(offload=UPDATED), one_device(2)]),
    "optimizer on host, split backward, 3 replicas": (
        GPT,
        "zbv",
        (0, 2, 4, 6, 8),
        [one_device(3, offload=UPDATED), one],
    ),
    "optimizer on host, ZeRO 1": (
        TUNED,
        "1f1b",
        (0, 3, 8),
        [one_device(2, zero_level=1, offload=UPDATED), one_device(offload=UPDATED)],
    ),
    "optimizer and activations on host, ZeRO 3 and 2 shards by sequence": (
        GPT,
        "1f1b",
        (0, 4, 8),
        [
            one_device(2, zero_level=3, offload=Offload("host", "host")),
            one_device(1, 2, sequence_parallel=True, offload=Offload("host", "host")),
        ],
    ),
    "master weights on host, uneven cuts": (MASTERS, "1f1b", (0, 3, 8), [one_device(offload=UPDATED)] * 2),
    "master weights on host, 2 shards": (MASTERS, "1f1b", (0, 4, 8), [one_device(1, 2, offload=UPDATED), one]),
    "weights on host, 3 replicas to recomputed with all else there": (
        GPT,
        "1f1b",
        (0, 4, 8),
        [one_device(3, offload=FETCHED), one_device(recompute=True, offload=ALL_AWAY)],
    ),
    "weights on host, momentum": (DIGITS, "1f1b", (0, 2, 4), [one_device(offload=FETCHED), one_device(2)]),
    "weights on host, masters": (MASTERS, "1f1b", (0, 3, 8), [one_device(offload=FETCHED)] * 2),
    "weights on host, masters, split backward, 2 replicas": (
        MASTERS,
        "zbv",
        (0, 2, 4, 6, 8),
        [one_device(2, offload=FETCHED), one_device(offload=FETCHED)],
    ),
    "weights on host, shared, split backward": (SHARED, "zbv", (0, 1, 2, 3, 4), [one_device(offload=FETCHED)] * 2),
    "weights on host, 2 share a sequence": (
        GPT,
        "1f1b",
        (0, 3, 8),
        [one_device(2, context_parallel=2, offload=FETCHED), one],
    ),
    "weights on host, 3 runs, recomputed": (
        ACCUMULATED,
        "1f1b",
        (0, 3, 8),
        [one_device(recompute=True, offload=FETCHED), one_device(offload=FETCHED)],
    ),
    "optimizer on NVMe, uneven cuts": (GPT, "1f1b", (0, 3, 8), [one_device(offload=ON_DISK)] * 2),
    "optimizer on NVMe, ZeRO 1": (
        TUNED,
        "1f1b",
        (0, 3, 8),
        [one_device(2, zero_level=1, offload=ON_DISK), one_device(offload=ON_DISK)],
    ),
    "optimizer on NVMe, master weights, 2 shards": (
        MASTERS,
        "1f1b",
        (0, 4, 8),
        [one_device(1, 2, offload=ON_DISK), one],
    ),
    "by sequence, 2 shards": (GPT, "1f1b", (0, 3, 8), [one_device(1, 2, sequence_parallel=True), one]),
    "by sequence, split backward, to unsplit shards": (
        GPT,
        "zbv",
        (0, 2, 4, 6, 8),
        [one_device(1, 2, sequence_parallel=True), one_device(1, 2)],
    ),
    "by sequence, 2 shards to 2, tied": (
        GPT.model_copy(update={"model_options": {**GPT.model_options, "tied": True}}),
        "1f1b",
        (0, 3, 8),
        [one_device(1, 2, sequence_parallel=True)] * 2,
    ),
    "by sequence, 2 replicas of 2 shards, ZeRO 1": (
        GPT,
        "1f1b",
        (0, 8),
        [one_device(2, 2, zero_level=1, sequence_parallel=True)],
    ),
    "by sequence, 1 to 2 shards, recomputed": (
        GPT,
        "1f1b",
        (0, 3, 8),
        [one, one_device(1, 2, recompute=True, sequence_parallel=True)],
    ),
    "llama by sequence, split backward": (
        LLAMA,
        "zbv",
        (0, 1, 2, 3, 4),
        [one_device(1, 2, sequence_parallel=True)] * 2,
    ),
    "experts by sequence, 2 shards, clipped": (
        MIXTRAL.model_copy(update={"optimizer": CLIPPED}),
        "1f1b",
        (0, 2, 4),
        [one_device(1, 2, sequence_parallel=True), one],
    ),
    "by expert, 2 shards, clipped": (
        MIXTRAL.model_copy(update={"optimizer": CLIPPED}),
        "1f1b",
        (0, 2, 4),
        [by_expert, one],
    ),
    "by expert, split backward, to shards of each": (MIXTRAL, "zbv", (0, 1, 2, 3, 4), [by_expert, one_device(1, 2)]),
    "by expert and sequence": (
        MIXTRAL,
        "1f1b",
        (0, 2, 4),
        [one_device(1, 2, sequence_parallel=True, expert_parallel=True), by_expert],
    ),
    "by expert, 2 replicas of 2 shards, ZeRO 1": (
        MIXTRAL,
        "1f1b",
        (0, 4),
        [one_device(2, 2, zero_level=1, expert_parallel=True)],
    ),
    "by expert, one whole expert a device, ZeRO 3": (
        MIXTRAL.model_copy(update={"model_options": {**MIXTRAL.model_options, "num_experts": 2}}),
        "1f1b",
        (0, 4),
        [one_device(2, 2, zero_level=3, expert_parallel=True)],
    ),
    "by expert, recomputed, under autocast": (
        MIXTRAL.model_copy(update={"mixed_precision": True}),
        "1f1b",
        (0, 3, 4),
        [one_device(1, 2, recompute=True, expert_parallel=True), one],
    ),
    "by expert, places of a capacity": (MOE, "1f1b", (0, 2, 4), [by_expert] * 2),
    "by expert, places of a capacity, split backward": (MOE, "zbv", (0, 1, 2, 3, 4), [by_expert, one]),
    "2 share a sequence": (GPT, "1f1b", (0, 3, 8), [one_device(2, context_parallel=2), one]),
    "2 share a sequence, to 2 that share another, split backward": (
        GPT.model_copy(update={"model_options": {**GPT.model_options, "tied": True}}),
        "zbv",
        (0, 2, 4, 6, 8),
        [one_device(2, context_parallel=2)] * 2,
    ),
    "4 share two sequences, ZeRO 2, recomputed, clipped": (
        GPT.model_copy(update={"optimizer": CLIPPED}),
        "1f1b",
        (0, 8),
        [one_device(4, context_parallel=2, zero_level=2, recompute=True)],
    ),
    "llama, 4 share a sequence": (LLAMA, "gpipe", (0, 4), [one_device(4, context_parallel=4)]),
    "odd parts of a sequence, 3 to 1": (
        LLAMA.model_copy(update={"sequence_length": 27, "batch_size": 12}),
        "1f1b",
        (0, 2, 4),
        [one_device(3, context_parallel=3), one_device(1)],
    ),
    "llama, 2 share a sequence, of 2 shards by sequence": (
        LLAMA,
        "1f1b",
        (0, 4),
        [one_device(2, 2, context_parallel=2, sequence_parallel=True)],
    ),
    "mixtral, ZeRO 3, 2 share a sequence, to 2 shards by sequence, offloaded": (
        MIXTRAL,
        "1f1b",
        (0, 2, 4),
        [one_device(2, context_parallel=2, zero_level=3, offload=AWAY), one_device(1, 2, sequence_parallel=True)],
    ),
    "bert, 2 replicas to 2 that share a sequence": (
        BERT,
        "1f1b",
        (0, 2, 4),
        [one_device(2), one_device(2, context_parallel=2)],
    ),
    "bert by sequence, 2 replicas of 2 shards": (BERT, "1f1b", (0, 4), [one_device(2, 2, sequence_parallel=True)]),
    "images, 1 replica to 2": (DIGITS, "1f1b", (0, 2, 4), [one, one_device(2)]),
    "dropout, cut here": (DROPOUT, "1f1b", (0, 3, 6), TWO),
    "dropout, cut there, recomputed": (DROPOUT, "gpipe", (0, 1, 6), [one_device(recompute=True)] * 2),
    "betas, and norms that do not decay, ZeRO 1": (TUNED, "1f1b", (0, 3, 8), [one_device(2, zero_level=1), one]),
    "bfloat16 under autocast": (MIXED, "1f1b", (0, 3, 8), TWO),
    "master weights, uneven cuts": (MASTERS, "1f1b", (0, 3, 8), TWO),
    "master weights, split backward, 2 replicas and 1": (MASTERS, "zbv", (0, 2, 4, 6, 8), [one_device(2), one]),
    "master weights, 2 shards": (MASTERS, "1f1b", (0, 4, 8), [one_device(1, 2), one]),
    "master weights, ZeRO 1, uneven cuts": (MASTERS, "1f1b", (0, 3, 8), [one_device(2, zero_level=1), one]),
    "master weights, ZeRO 2, 2 replicas of 2 shards": (MASTERS, "1f1b", (0, 8), [one_device(2, 2, zero_level=2)]),
    "master weights, ZeRO 3, recomputed": (
        MASTERS,
        "gpipe",
        (0, 4, 8),
        [one_device(2, zero_level=3, recompute=True), one_device(2, zero_level=3)],
    ),
    "master weights, split backward, ZeRO 1": (MASTERS, "zbv", (0, 2, 4, 6, 8), [one_device(2, zero_level=1), one]),
    "weights of every other step, ZeRO 1": (AT_TIMES, "1f1b", (0, 2, 5), [one, one_device(2, zero_level=1)]),
    "weights of every other step, ZeRO 3": (AT_TIMES, "1f1b", (0, 3, 5), [one_device(2, zero_level=3), one]),
    "weights of every other step, 2 replicas": (AT_TIMES, "1f1b", (0, 3, 5), [one_device(2), one]),
    "master weights on host, ZeRO 1": (MASTERS, "1f1b", (0, 3, 8), [one_device(2, zero_level=1, offload=UPDATED), one]),
    "t5, cut inside its encoder and its decoder": (T5_GATED, "1f1b", (0, 2, 5, len(layers_of(T5_GATED))), [one] * 3),
    "conjugated numbers cross": (COMPLEX, "1f1b", (0, 2, 4), [one, one_device(2)]),
    "batch norm sees the same microbatches": (RESNET, "1f1b", (0, 3, len(layers_of(RESNET))), TWO),
}

# What others combine as well: outside `make test`, in `make slow`. Every schedule and every way of a stage stays.
COMBINED = {f"{name}, {how}" for name in SCHEDULES for how in ("recompute", "2 replicas")}
COMBINED |= {f"{name}, shared weight" for name in SCHEDULES if name not in ("1f1b", "zbv", "dualpipe_v")} & CASES.keys()
COMBINED |= {f"{name}, 3 replicas and 1" for name in SCHEDULES if name not in ("1f1b", "interleaved_1f1b", "zbv")}
COMBINED |= {f"{name}, shared weight recomputed" for name in ("zbv", "dualpipe_v")}
COMBINED |= {"zbv, shared weight, ZeRO 1", "dualpipe_v, shared weight, 2 replicas", "experts in 2 shards, recomputed"}
COMBINED |= {"3 runs of zbv, ZeRO 1", "3 runs of gpipe, ZeRO 2", "3 runs of 1f1b, 2 shards"}
COMBINED |= {"experts, split backward, 2 shards", "by expert, places of a capacity, split backward"}
COMBINED |= {"zbv, tensor parallel 2", "2 shards to 1", "bert in 2 replicas of 2 shards", "3 runs of 1f1b, ZeRO 3"}
COMBINED |= {"experts in 2 replicas of 2 shards, ZeRO 1", "experts under autocast in 2 shards"}
COMBINED |= {"offloaded, 2 replicas and recomputed", "offloaded, ZeRO 3 and 2 shards by sequence"}
COMBINED |= {"optimizer on host, momentum"}
COMBINED |= {
    "optimizer and activations on host, ZeRO 3 and 2 shards by sequence",
    "master weights on host, uneven cuts",
}
COMBINED |= {"by sequence, 2 replicas of 2 shards, ZeRO 1", "by sequence, 1 to 2 shards, recomputed"}
COMBINED |= {"llama by sequence, split backward", "by expert, split backward, to shards of each"}
COMBINED |= {"by expert, 2 replicas of 2 shards, ZeRO 1", "by expert, recomputed, under autocast"}
COMBINED |= {"2 share a sequence, to 2 that share another, split backward", "llama, 4 share a sequence"}
COMBINED |= {"4 share two sequences, ZeRO 2, recomputed, clipped", "bert, 2 replicas to 2 that share a sequence"}
COMBINED |= {"bert by sequence, 2 replicas of 2 shards", "master weights, split backward, 2 replicas and 1"}
COMBINED |= {f"{name}, weights on host" for name in SCHEDULES if name not in ("1f1b", "zbv")} & CASES.keys()
COMBINED |= {"optimizer on NVMe, ZeRO 1"}
COMBINED |= {"weights on host, momentum", "weights on host, 3 runs, recomputed", "weights on host, 2 share a sequence"}
COMBINED |= {
    "3 runs of zbv, 2 replicas",
    "llama, split backward, 2 shards",
    "by sequence, split backward, to unsplit shards",
}
COMBINED |= {"optimizer on host, split backward, 3 replicas", "optimizer on NVMe, master weights, 2 shards"}
COMBINED |= {"weights on host, masters, split backward, 2 replicas", "weights on host, shared, split backward"}
COMBINED |= {"weights on host, masters", "weights on host, 3 replicas to recomputed with all else there"}
COMBINED |= {"by sequence, 2 shards to 2, tied", "experts by sequence, 2 shards, clipped", "by expert and sequence"}
COMBINED |= {"llama, 2 share a sequence, of 2 shards by sequence", "2 replicas of 2 shards, ZeRO 1"}
COMBINED |= {
    "by expert, one whole expert a device, ZeRO 3",
    "dropout, cut there, recomputed",
    "master weights, 2 shards",
}
COMBINED |= {"master weights, ZeRO 2, 2 replicas of 2 shards", "master weights on host, ZeRO 1"}
COMBINED |= {"experts of a capacity in 2 shards", "master weights on host, 2 shards", "zbv, ZeRO 1"}
assert not COMBINED - CASES.keys()
every_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in COMBINED else []) for name in CASES]
)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """All cases in two launches: those of fewer ranks follow those of more, but for layers that devices share.

    MKL's products depend on where in memory their matrices begin, on a Xeon to the last bit of a loss, unless it is
    told to use one way for all (`MKL_CBWR`): cases are compared bit by bit.
    """
    named, disks = asked(request.session, "name", "on_host", "on_devices"), tmp_path_factory.mktemp("disks")
    jobs = {
        case: job_of(w, by_hand(name, bounds, ranks, 4, disk_folder=str(disks)), STEPS)
        for case, (w, name, bounds, ranks) in CASES.items()
        if case in (named & CASES.keys() or CASES.keys() - COMBINED)
    }
    order = sorted(jobs, key=lambda case: -len(jobs[case].binding.placements))
    most = len(jobs[order[0]].binding.placements)
    apart = [case for case in order if shares_layers(case) and len(jobs[case].binding.placements) < most]
    found: dict[str, Trained] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MKL_CBWR", "AVX2")
        for together in ([case for case in order if case not in apart], apart):
            found.update(zip(together, train_in_turn([jobs[case] for case in together]), strict=True))
    assert not list(disks.iterdir()), "files of state are gone with their ranks"
    return found


def shares_layers(case: str) -> bool:
    """Whether devices share a layer or a sequence: torch remembers their groups beyond the end of the process group."""
    return any(way.tensor_parallel * way.context_parallel > 1 for way in CASES[case][3])


_singles: dict[Workload, list[float]] = {}


def single(workload: Workload) -> list[float]:
    key = workload.model_dump_json()
    if key not in _singles:
        _singles[key] = train_single(workload, Draw(), range(STEPS))
    return _singles[key]


def tolerance_of(name: str) -> float:
    """Under autocast parts of sums are rounded, too: in which order a CPU adds them depends on the number of rows."""
    workload = CASES[name][0]
    in_16_bits = workload.dtype == "bfloat16" or workload.mixed_precision
    return BFLOAT16_TOLERANCE if in_16_bits else TOLERANCE


@every_case
def test_losses_equal_a_single_process(trained: dict[str, Trained], name: str) -> None:
    found, expected = trained[name].losses, single(CASES[name][0])
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, abs=tolerance_of(name))
    assert expected[-1] != expected[0]


PAIRS = (
    ("optimizer on host, uneven cuts", "1f1b, uneven cuts"),
    ("optimizer on host, momentum", "images, 1 replica to 2"),
    ("optimizer on host, split backward, 3 replicas", "zbv, 3 replicas and 1"),
    ("optimizer on host, ZeRO 1", "betas, and norms that do not decay, ZeRO 1"),
    (
        "optimizer and activations on host, ZeRO 3 and 2 shards by sequence",
        "offloaded, ZeRO 3 and 2 shards by sequence",
    ),
    ("master weights on host, uneven cuts", "master weights, uneven cuts"),
    ("master weights on host, 2 shards", "master weights, 2 shards"),
    ("master weights on host, ZeRO 1", "master weights, ZeRO 1, uneven cuts"),
    ("weights on host, 3 replicas to recomputed with all else there", "1f1b, 3 replicas and 1"),
    ("weights on host, momentum", "images, 1 replica to 2"),
    ("optimizer on NVMe, uneven cuts", "1f1b, uneven cuts"),
    ("optimizer on NVMe, ZeRO 1", "betas, and norms that do not decay, ZeRO 1"),
    ("optimizer on NVMe, master weights, 2 shards", "master weights, 2 shards"),
    ("weights on host, masters", "master weights, uneven cuts"),
    ("weights on host, 2 share a sequence", "2 share a sequence"),
    ("weights on host, shared, split backward", "zbv, shared weight"),
    ("weights on host, 3 runs, recomputed", "3 runs of 1f1b, uneven cuts, recomputed"),
    *(
        (f"{name}, weights on host", f"{name}, uneven cuts")
        for name in SCHEDULES
        if f"{name}, weights on host" in CASES
    ),
)


@pytest.mark.parametrize(
    ("on_host", "on_devices"),
    [pytest.param(*pair, marks=[pytest.mark.slow] if COMBINED & {*pair} else []) for pair in PAIRS],
)
def test_where_the_optimizer_and_weights_are_changes_no_bit_of_a_loss(
    trained: dict[str, Trained], on_host: str, on_devices: str
) -> None:
    assert CASES[on_host][2] == CASES[on_devices][2], "sums of other stages' gradients are other sums"
    assert trained[on_host].losses == trained[on_devices].losses


_evaluated: dict[str, list[float]] = {}


def evaluated(workload: Workload) -> list[float]:
    """What one process finds on the held-out part; its training's losses are those without it, to the last bit."""
    key = workload.model_dump_json()
    if key not in _evaluated:
        rows: list[tuple[int, float]] = []
        losses = train_single(workload, Draw(), range(STEPS), on_evaluation=lambda *row: rows.append(row))
        assert losses == single(workload)
        every = workload.evaluate_every
        assert [step for step, _ in rows] == [k for k in range(STEPS) if (k + 1) % every == 0 or k + 1 == STEPS]
        _evaluated[key] = [loss for _, loss in rows]
    return _evaluated[key]


@every_case
def test_what_is_held_out_is_evaluated_as_by_a_single_process(trained: dict[str, Trained], name: str) -> None:
    """Forward only, under every schedule and every way to spread a stage; the training's own losses stay, above."""
    found, expected = trained[name].evaluations, evaluated(CASES[name][0])
    assert len(found) == len(expected) == 2
    assert found == pytest.approx(expected, abs=tolerance_of(name))
    assert expected[0] != expected[1]


def of_first_run(event: str) -> str:
    return f"{event[0]}{int(event[1:]) % 4}"


@every_case
def test_every_pass_ran_in_the_order_that_is_simulated(trained: dict[str, Trained], name: str) -> None:
    workload, schedule, bounds, ranks = CASES[name]
    once = actions(schedule, len(bounds) - 1, 4)
    listed = [
        [one._replace(microbatch=4 * run + one.microbatch) for run in range(workload.accumulate) for one in own]
        for own in once
    ]
    devices = [rank for rank, configuration in enumerate(ranks) for _ in range(configuration.num_devices)]
    for rank, passes in zip(devices, trained[name].passes, strict=True):
        assert [(p.stage, p.direction, p.microbatch) for p in passes] == listed[rank]
        assert all(a.stop_seconds <= b.start_seconds for a, b in itertools.pairwise(passes))
        assert all(p.start_seconds < p.stop_seconds for p in passes)


def test_measured_passes_are_those_of_the_schedule(trained: dict[str, Trained]) -> None:
    for name, row in trained.items():
        split = SCHEDULES[CASES[name][1]].splits_backward
        for times in row.stages:
            assert times.forward_seconds > 0
            assert (times.backward_weight_seconds > 0) == split
            assert times.backward_seconds > 0 or split


@every_case
def test_the_measured_step_is_a_trace_like_the_simulated_one(trained: dict[str, Trained], name: str) -> None:
    _, schedule, bounds, ranks = CASES[name]
    binding, passes = by_hand(schedule, bounds, ranks, 4), trained[name].passes
    events = measured_events(binding, passes)
    simulated = simulate(binding.plan, [StageSeconds(1.0, 2.0, 0.0)] * (len(bounds) - 1))
    assert {(e.stage, of_first_run(e.name), e.rank) for e in events} == {
        (e.stage, e.name, e.rank) for e in simulated.events if e.to_rank is None and e.name != "optimizer"
    }
    share = bubble_fraction(binding, passes)
    assert share is not None and 0 <= share < 1
    assert bubble_fraction(binding, ()) is None


@every_case
def test_the_measured_step_has_a_row_without_gaps_for_every_rank(trained: dict[str, Trained], name: str) -> None:
    """From its own clocks: what ran, the optimizer after the last pass, and waiting in between."""
    _, schedule, bounds, ranks = CASES[name]
    binding, found = by_hand(schedule, bounds, ranks, 4), trained[name]
    done = TrainingResult(
        0, found.losses, 1.0, found.stages, 0, None, "", last_step_passes=found.passes, last_step_once=found.once
    )
    timeline = measured_timeline(binding, done)
    assert timeline is not None and timeline.num_ranks == len(binding.plan.ranks)
    for rank, own in enumerate(first_replicas(binding, found.passes)):
        bars = [bar for bar in timeline.bars if bar.rank == rank]
        assert bars[0].start_seconds == 0.0 and bars[-1].stop_seconds == timeline.step_seconds
        assert all(a.stop_seconds == b.start_seconds for a, b in itertools.pairwise(bars))
        assert sum(bar.work in PASSES for bar in bars) == len(own)
        last = max(bar.stop_seconds for bar in bars if bar.work in PASSES)
        assert [bar.start_seconds >= last for bar in bars if bar.work is Work.ONCE][-1], "the optimizer"
    is_split = {Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT} <= set(timeline.works)
    assert is_split == SCHEDULES[schedule].splits_backward
    assert sum(timeline.share(work) for work in Work) == pytest.approx(1.0)


@every_case
def test_messages_are_timed_where_somebody_waited(trained: dict[str, Trained], name: str) -> None:
    _, schedule, bounds, ranks = CASES[name]
    binding, passes = by_hand(schedule, bounds, ranks, 4), trained[name].passes
    simulated = simulate(binding.plan, [StageSeconds(1.0, 2.0, 0.0)] * (len(bounds) - 1))
    sent = {(e.stage, e.name, e.rank, e.to_rank) for e in simulated.messages}
    found = waited_messages(binding, passes)
    for message in found:
        assert (message.stage, of_first_run(message.name), message.rank, message.to_rank) in sent
        assert message.seconds > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_that_somebody_waited_for_took_what_was_simulated(name: str) -> None:
    num_stages = 2 * SCHEDULES[name].stages_per_rank
    binding = by_hand(name, range(num_stages + 1), TWO, 4)
    simulated = simulate(binding.plan, [StageSeconds(1.0, 2.0, 0.0, transfer_seconds=0.25)] * num_stages)
    way = {"F": Pass.FORWARD, "B": Pass.BACKWARD, "I": Pass.BACKWARD_INPUT, "W": Pass.BACKWARD_WEIGHT}
    ran = [event for event in simulated.events if event.to_rank is None and event.name != "optimizer"]
    passes = [
        [
            Timed(e.stage, way[e.name[0]], int(e.name[1:]), e.start_seconds, e.stop_seconds)
            for e in ran
            if e.rank == rank
        ]
        for rank in range(2)
    ]
    found = waited_messages(binding, passes)
    assert ("F0", 1) in {(message.name, message.to_rank) for message in found}  # rank 1 has nothing to do until then
    assert [message.seconds for message in found] == pytest.approx([0.25] * len(found))


def launched(job: TrainingJob, folder: Path, **fields: object) -> TrainingJob:
    return replace(job, folder=str(folder), **fields)  # type: ignore[arg-type]


def test_a_training_goes_on_under_any_other_plan(tmp_path: Path) -> None:
    """Replicas with sharded state → tensor parallel → a V of four stages, each from the checkpoint before it."""
    workload = GPT.model_copy(update={"num_steps": 6})
    plans = (
        by_hand("1f1b", (0, 3, 8), [one_device(3, zero_level=3), one], 4),
        by_hand("gpipe", (0, 5, 8), [one_device(1, 2, sequence_parallel=True), one_device(2, zero_level=1)], 4),
        by_hand("zbv", (0, 2, 4, 6, 8), TWO, 4),
    )
    expected = train_single(workload, Draw(), range(6))
    for binding, last in zip(plans, (2, 4, 6), strict=True):
        result = launch(launched(job_of(workload, binding, last), tmp_path))
        assert result.losses == pytest.approx(expected[:last], abs=TOLERANCE)
    assert result.resumed_from_step == 4


@pytest.mark.slow
def test_whole_experts_go_on_as_parts_of_each(tmp_path: Path) -> None:
    """A checkpoint has whole matrices of all experts, whoever had which."""
    workload = MIXTRAL.model_copy(update={"num_steps": 4})
    plans = (
        by_hand("1f1b", (0, 4), [one_device(2, 2, zero_level=1, expert_parallel=True)], 4),
        by_hand("1f1b", (0, 3, 4), [one_device(1, 2), one], 4),
    )
    expected, builders = train_single(workload, Draw(), range(4)), layers_of(workload)
    for binding, last in zip(plans, (2, 4), strict=True):
        result = launch(launched(job_of(workload, binding, last), tmp_path))
        assert result.losses == pytest.approx(expected[:last], abs=TOLERANCE)
        saved = read_checkpoint(Path(result.final_checkpoint), {builder.name for builder in builders})
        for builder in builders:
            for name, weight in builder.build().named_parameters():
                moments = [f"optimizer.{builder.name}.{name}.{what}" for what in ("exp_avg", "exp_avg_sq")]
                assert all(saved[one].shape == weight.shape for one in (f"model.{builder.name}.{name}", *moments))
    assert result.resumed_from_step == 2


@pytest.mark.slow
def test_master_weights_travel_with_a_checkpoint(tmp_path: Path) -> None:
    """Beside their weights and in their place (ZeRO): else the training would start over from rounded weights."""
    workload, last = MASTERS.model_copy(update={"num_steps": 6}), 0
    bindings = (
        by_hand("1f1b", (0, 3, 8), [one_device(2, zero_level=1), one], 4),
        by_hand("1f1b", (0, 8), [one_device(1, 2)], 4),
        by_hand("1f1b", (0, 4, 8), [one, one_device(2, zero_level=3)], 4),
    )
    expected = train_single(workload, Draw(), range(6))
    for binding in bindings:
        before, last = last, last + 2
        result = launch(launched(job_of(workload, binding, last), tmp_path))
        assert result.resumed_from_step == (before or None)
        assert result.losses == pytest.approx(expected[:last], abs=BFLOAT16_TOLERANCE)
        saved = read_checkpoint(Path(result.final_checkpoint), {builder.name for builder in layers_of(workload)})
        masters = {name: tensor for name, tensor in saved.items() if name.endswith(".master")}
        assert len(masters) == len([name for name in saved if name.startswith("model.")])
        for name, master in masters.items():
            weight = saved["model." + name.removeprefix("optimizer.").removesuffix(".master")]
            assert (master.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
            assert torch.equal(master.bfloat16(), weight)
            assert not torch.equal(master, weight.float())


def test_layers_that_cannot_be_split_are_named() -> None:
    with pytest.raises(LaunchError, match=r"layer 'block0' has 4 heads, which tensor-parallel degree 3 .* 1, 2, 4"):
        check_split(layers_of(GPT)[1:], one_device(1, 3))
    check_split(layers_of(DIGITS), one_device(1, 2))  # they declare nothing: split as the plan found, or whole
    by_sequence = one_device(1, 2, sequence_parallel=True)
    with pytest.raises(LaunchError, match=r"layer 'stem' does not say how its devices may split the sequence"):
        check_split(layers_of(DIGITS), by_sequence)
    with pytest.raises(LaunchError, match=r"layer 'block0' does not work token by token .* wanted sequence_parallel"):
        check_split(layers_of(MOE)[1:], by_sequence)
    odd = GPT.model_copy(update={"sequence_length": 15})
    with pytest.raises(LaunchError, match=r"splits 15 positions among 2 devices; wanted a sequence_length"):
        check_spreading(job_of(odd, by_hand("1f1b", (0, 4, 8), [by_sequence, one], 4), STEPS))


def test_random_numbers_leave_torch_s_own_stream_of_weights_alone() -> None:
    """Layers draw from a stream of their own: two trainings in one process do not change each other."""
    torch.manual_seed(3)
    assert train_single(DROPOUT, Draw(), range(2)) == train_single(DROPOUT, Draw(), range(2))


def test_what_cannot_be_spread_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    for workload, binding, message in (
        (GPT, by_hand("1f1b", (0, 4, 8), [one_device(1, 3), one], 4), "layer 'embedding' has 4 heads"),
        (GPT, by_hand("zbv", (0, 2, 4, 6, 8), [one_device(2, zero_level=2)] * 2, 4), "ZeRO level 2.* zbv computes"),
        (GPT, by_hand("1f1b", (0, 4, 8), [one_device(7), one], 4), "7 replicas for microbatches of 6 examples"),
    ):
        with pytest.raises(DejavuError, match=message):
            launch(launched(job_of(workload, binding, STEPS), tmp_path))
    assert not list(tmp_path.glob("**/*.log"))
