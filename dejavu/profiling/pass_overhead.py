"""Measure the CPU overhead of torch's pipeline runtime: for every pass, and for every message.

Ranks share their cores with the threads that send and receive for them, so on CPUs a message costs computing time on
both ends. A pipeline of nearly empty layers shows it: the CPU seconds of a pass minus those of its layer alone.
`python -m dejavu.profiling.pass_overhead` runs one of the ranks.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from dejavu.binding.binding import Binding, Placement
from dejavu.cluster import Device
from dejavu.init import Draw
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.profiling.measuring import figures_of_ranks, measured_here
from dejavu.runtime.layout import World
from dejavu.runtime.pipeline import Pipeline
from dejavu.runtime.process import claim_device, die_with_parent, go_first
from dejavu.timing.interference import InterferenceProbe, TimedWork, counted, least_told, waited_seconds
from dejavu.timing.repeats import stretch_of
from dejavu.timing.spread import spread
from dejavu.workload import SyntheticSettings, TrialSettings, Workload
from dejavu.workload.models import model_of

if TYPE_CHECKING:
    from dejavu.profiles import Measurement

ALONE, EXCHANGE = "alone", "exchange"  # subjects of the rows: stages on one rank, and on two
SIZES_BYTES = (1 * 2**10, 32 * 2**10, 256 * 2**10, 1 * 2**20)
NUM_MICROBATCHES = 16
WARMUP_STEPS, STEPS = 2, 24
LEAST_STEPS = 8  # count, however disturbed
LEAST_SECONDS = 1e-6  # of a step: differences of two noisy times may come out below zero


class Scale(nn.Module):
    """The cheapest layer that has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def two_layers() -> nn.Sequential:
    return nn.Sequential(Scale(), Scale())


def measure_passes(device_type: str, least_sample_seconds: float = math.inf) -> Iterator[Measurement]:
    """Measure a pass's CPU seconds beyond its layers': without messages, and with one of each of `SIZES_BYTES`.

    Args:
        least_sample_seconds: the fastest known sample of a core of this host.

    Raises:
        LaunchError: the ranks failed.
    """
    for num_ranks, subject in ((1, ALONE), (2, EXCHANGE)):
        module, measured = "dejavu.profiling.pass_overhead", "what a pass costs"
        for figures in figures_of_ranks(module, num_ranks, measured, least_sample_seconds):
            yield measured_here(
                kind="pass",
                subject=subject,
                name=f"a pass and {num_ranks - 1} messages",
                device_type=device_type,
                dtype="float32",
                num_ranks=num_ranks,
                how="processor seconds of layers that do little, less those of the layers alone, median",
                **figures,
            )


def _main() -> None:
    die_with_parent(signal.SIGKILL)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = claim_device(rank)
    if device.type == "cpu":
        go_first()
    dist.init_process_group("gloo")
    probe = InterferenceProbe(least_told())
    for size in SIZES_BYTES[: 1 if num_ranks == 1 else None]:
        both: list[Any] = [None] * num_ranks
        dist.all_gather_object(both, _beside_layers(size // 4, rank, num_ranks, device, probe))
        if rank == 0:
            steps = [_of_all_ranks(step) for step in zip(*both, strict=True)]
            chosen = counted(steps, LEAST_STEPS)
            figures = spread([steps[k].seconds for k in chosen.places])
            share = chosen.disturbed_share
            print(json.dumps({"size_bytes": size, "disturbed_share": share, **figures}), flush=True)
    dist.destroy_process_group()


def _of_all_ranks(step: Sequence[TimedWork]) -> TimedWork:
    """Average a step's passes over the ranks, with the disturbance of the most disturbed rank."""
    return TimedWork(fmean(t.seconds for t in step), max(t.stretch for t in step), max(t.slowdown for t in step))


def _beside_layers(
    width: int, rank: int, num_ranks: int, device: torch.device, probe: InterferenceProbe
) -> list[TimedWork]:
    """Return one pass of each step: CPU seconds beyond the layers', and the disturbance of this rank's core."""
    B = NUM_MICROBATCHES
    workload = Workload(
        model=f"{__spec__.name}:two_layers",
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=2, image_shape=(1, 1, width)),
        batch_size=B,
        num_microbatches=B,
        trials=TrialSettings(count=0),
    )
    how = StageConfiguration("cpu")
    bounds = (0, 2) if num_ranks == 1 else (0, 1, 2)
    plan = Plan(tuple(Stage(a, b, how) for a, b in itertools.pairwise(bounds)), "1f1b", B)
    places = tuple(Placement(r, 0, 0, Device("cpu", "here", "localhost", 0, r)) for r in range(num_ranks))
    world = World.of(Binding(plan, places, 0.0, 0.0), workload)
    pipeline = Pipeline(Draw(), world, places[rank], device)
    batch, targets = torch.randn(B, 1, 1, width), torch.zeros(B, dtype=torch.int64)
    loss, has_loss = model_of(workload).loss, rank == num_ranks - 1
    (module,) = pipeline.modules.values()

    def layers_alone() -> None:
        for x in batch.chunk(B):
            for layer in module:
                x = layer(x.detach().requires_grad_(rank > 0))
            end = loss(x, targets[:1]) if has_loss else x.sum()
            end.backward()

    found, looks = list[tuple[float, float]](), list[float]()
    probe.sample()
    for step in range(WARMUP_STEPS + STEPS):
        began, waited = time.perf_counter(), waited_seconds(all_threads=False)
        times = [time.process_time()]
        pipeline(step, batch, targets)
        times.append(time.process_time())
        layers_alone()
        times.append(time.process_time())
        stretch = stretch_of(time.perf_counter() - began, waited_seconds(all_threads=False) - waited)
        sample = probe.sample()
        if step >= WARMUP_STEPS:
            looks.append(sample)
            whole, alone = (later - earlier for earlier, later in itertools.pairwise(times))
            found.append((max(whole - alone, LEAST_SECONDS) / (2 * B), stretch))
    return [TimedWork(*one, probe.slowdown(sample)) for one, sample in zip(found, looks, strict=True)]


if __name__ == "__main__":
    _main()
