"""What ranks over gloo trained: slices of sequences by the product's ranks, other orders by plain messages."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from benchmarks.pipeline.plans import by_hand, even_bounds, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_in_turn
from benchmarks.schedules.late import ONE_STEP, digits_batches, perceptron
from dejavu.init import Draw
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.single import train_single
from dejavu.schedules import PIPELINE_SCHEDULES
from dejavu.schedules.training import Rates, train_by
from dejavu.workload import SyntheticSettings, TrialSettings, Workload
from dejavu.workload.models import layers_of

STEPS, LENGTH, NUM_MICROBATCHES = 6, 64, 4
SMALL = {"num_blocks": 6, "width": 64, "num_heads": 4}
MODELS = {"gpt": SMALL, "llama": {**SMALL, "num_kv_heads": 2, "feedforward": 96}}
SLICES: tuple[int | tuple[int, ...], ...] = (1, 4, (31, 17, 11, 5), (1, 40, 23))
ORDERS = ("gpipe", "1f1b")
UNEVEN = {2: (0, 5, 8), 4: (0, 1, 2, 5, 8)}
PLAIN = (ONE_STEP, "chimera", "pipedream", "pipedream_2bw", "pipemare")
PLAIN_RANKS, PLAIN_STEPS, RATE = 4, 20, 0.1


def sliced_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each model, number of ranks, order and slices; CPU seconds beside those of whole sequences."""
    cases, jobs = list[tuple[str, int, str, int | tuple[int, ...]]](), list[TrainingJob]()
    for num_ranks, bounds in UNEVEN.items():
        for name, options in MODELS.items():
            workload = Workload(
                model=name, model_options=options, data="synthetic", synthetic=SyntheticSettings(num_classes=50),
                sequence_length=LENGTH, batch_size=16, num_microbatches=NUM_MICROBATCHES, num_steps=STEPS,
                trials=TrialSettings(count=0),
            )  # fmt: skip
            even = even_bounds(len(layers_of(workload)), num_ranks)
            for order in ORDERS:
                for slices in SLICES:
                    cuts = even if isinstance(slices, int) else bounds
                    plan = by_hand(order, cuts, [one_device()] * num_ranks, NUM_MICROBATCHES)
                    cases.append((name, num_ranks, order, slices))
                    jobs.append(job_of(workload.model_copy(update={"slices": slices}), plan, STEPS))
    known = {
        name: train_single(job.workload, Draw(), range(STEPS)) for (name, *_), job in zip(cases, jobs, strict=True)
    }
    found = dict(zip(cases, train_in_turn(jobs), strict=True))
    for (name, num_ranks, order, slices), trained in found.items():
        own, whole = (_cpu_seconds(one) for one in (trained, found[name, num_ranks, order, 1]))
        yield {
            "what": "slices on ranks",
            "model": name,
            "ranks": num_ranks,
            "schedule": order,
            "slices": [slices] if isinstance(slices, int) else list(slices),
            "steps": STEPS,
            "loss_difference": _worst(known[name], trained.losses),
            "cpu_ms_of_a_microbatch": 1e3 * own,
            "cpu_times_whole": own / whole,
        }


def _cpu_seconds(trained: Trained) -> float:
    return sum(one.forward_seconds + one.all_backward_seconds for one in trained.stages)


def _worst(one: Any, other: Any) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def plain_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each order that ranks carry out with plain messages, beside one process by the same rule."""
    with tempfile.TemporaryDirectory(prefix="dejavu-schedules-") as folder:
        spawn(_plain_rank, (folder,), nprocs=PLAIN_RANKS)  # type: ignore[no-untyped-call]
        for name in PLAIN:
            rows = [json.loads(Path(folder, f"{name}-{rank}.json").read_text()) for rank in range(PLAIN_RANKS)]
            losses = {int(number): loss for row in rows for number, loss in row.items()}
            steps = [range(step * PLAIN_RANKS, (step + 1) * PLAIN_RANKS) for step in range(PLAIN_STEPS)]
            by_step = [sum(losses[m] for m in step) / PLAIN_RANKS for step in steps]
            yield {
                "what": "orders on ranks",
                "schedule": name,
                "ranks": PLAIN_RANKS,
                "steps": PLAIN_STEPS,
                "loss_difference": _worst(_single(name), by_step),
                "off_one_process": _worst(_single(ONE_STEP), by_step),
            }


def _single(name: str) -> list[float]:
    stages, batches = perceptron(PLAIN_RANKS, 0), digits_batches(PLAIN_STEPS, 0)
    return train_by(PIPELINE_SCHEDULES[name], stages, batches, nn.functional.cross_entropy, Rates(RATE), PLAIN_RANKS)


def _plain_rank(rank: int, folder: str) -> None:
    from dejavu.schedules.ranks import train_rank

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PLAIN_RANKS)  # type: ignore[attr-defined]  # public, though not in its __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PLAIN_RANKS)
    for name in PLAIN:
        stages, batches = perceptron(PLAIN_RANKS, 0), digits_batches(PLAIN_STEPS, 0)
        losses = train_rank(
            PIPELINE_SCHEDULES[name], stages, batches, nn.functional.cross_entropy, Rates(RATE), PLAIN_RANKS
        )
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()
