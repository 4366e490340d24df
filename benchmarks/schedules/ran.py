"""What ranks over gloo trained: slices and both directions by the product's ranks, other orders by plain messages."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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

STEPS, NUM_MICROBATCHES = 6, 4
SMALL = {"num_blocks": 6, "width": 64, "num_heads": 4}
# model, its settings, positions of a sequence
MODELS: dict[str, tuple[str, dict[str, int], int]] = {
    "gpt": ("gpt", SMALL, 64),
    "llama": ("llama", {**SMALL, "num_kv_heads": 2, "feedforward": 96}, 64),
}
# Large enough for what slices cost: the others' kernels take no longer than torch takes to call them.
WIDE = "gpt, width 256, 512 positions"
LARGE = {WIDE: ("gpt", {"num_blocks": 6, "width": 256, "num_heads": 4}, 512)}
SLICES: tuple[int | tuple[int, ...], ...] = (1, 4, (31, 17, 11, 5), (1, 40, 23))
ORDERS, CHIMERA = ("gpipe", "1f1b"), "chimera"
UNEVEN = {2: (0, 5, 8), 4: (0, 1, 2, 5, 8)}
PLAIN = (ONE_STEP, "chimera", "pipedream", "pipedream_2bw", "pipemare")
PLAIN_RANKS, PLAIN_STEPS, RATE = 4, 20, 0.1


class Case(NamedTuple):
    """A training by ranks.

    Attributes:
        order: of the passes; `chimera` is 1F1B in both directions.
        slices: as a workload says them.
        is_even: whether stages have as many layers each as can be.
    """

    model: str
    num_ranks: int
    order: str
    slices: int | tuple[int, ...] = 1
    is_even: bool = True
    num_microbatches: int = NUM_MICROBATCHES

    def job(self) -> TrainingJob:
        model, options, length = (MODELS | LARGE)[self.model]
        workload = Workload(
            model=model, model_options=options, data="synthetic", synthetic=SyntheticSettings(num_classes=50),
            sequence_length=length, batch_size=16, num_microbatches=4,
            num_steps=STEPS, trials=TrialSettings(count=0), slices=self.slices, both_ways=self.order == CHIMERA,
        )  # fmt: skip
        cuts = even_bounds(len(layers_of(workload)), self.num_ranks) if self.is_even else UNEVEN[self.num_ranks]
        order = "1f1b" if workload.both_ways else self.order
        return job_of(workload, by_hand(order, cuts, [one_device()] * self.num_ranks, self.num_microbatches), STEPS)


def cases() -> Iterator[Case]:
    """Yield the trainings by the product's ranks, those of as many ranks one after another."""
    yield from (Case(WIDE, 2, "1f1b", slices) for slices in (1, 2, 4, 8))
    for num_ranks, model in itertools.product(UNEVEN, MODELS):
        for order, slices in itertools.product(ORDERS, SLICES):
            yield Case(model, num_ranks, order, slices, isinstance(slices, int))
        for is_even, microbatches in itertools.product((True, False), (4, 8)):
            yield Case(model, num_ranks, CHIMERA, 1, is_even, microbatches)


def product_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each case, beside one process; CPU seconds of passes beside those of whole sequences."""
    every = list(cases())
    jobs = [case.job() for case in every]
    known = {
        key: train_single(job.workload, Draw(), range(STEPS))
        for key, job in {
            (case.model, case.num_microbatches): job for case, job in zip(every, jobs, strict=True)
        }.items()
    }
    found = dict(zip(every, train_in_turn(jobs), strict=True))
    for case, trained in found.items():
        whole = found[case._replace(slices=1, is_even=True)]
        yield {
            "what": "on ranks",
            "model": case.model,
            "ranks": case.num_ranks,
            "schedule": case.order,
            "microbatches": case.num_microbatches,
            "cuts": "even" if case.is_even else "uneven",
            "slices": str(case.slices) if isinstance(case.slices, int) else ", ".join(map(str, case.slices)),
            "steps": STEPS,
            "loss_difference": _worst(known[case.model, case.num_microbatches], trained.losses),
            "cpu_ms_of_a_microbatch": 1e3 * _cpu_seconds(trained),
            "cpu_times_whole": None if case.slices == 1 else _cpu_seconds(trained) / _cpu_seconds(whole),
        }


def _cpu_seconds(trained: Trained) -> float:
    """Return what the passes of a microbatch take through all stages; of two copies, of both."""
    return sum(one.forward_seconds + one.all_backward_seconds for one in trained.stages)


def _worst(one: Any, other: Any) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def plain_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each order that ranks carry out with plain messages, beside one process by the same rule."""
    with tempfile.TemporaryDirectory(prefix="dejavu-schedules-") as folder:
        spawn(_plain_rank, (folder,), nprocs=PLAIN_RANKS)
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
