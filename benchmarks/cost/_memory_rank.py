"""One rank of a pipeline whose allocator is watched: `torchrun … -m benchmarks.cost._memory_rank job.json`.

Rank r writes `peak-<r>.json` in the job's folder.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dejavu.runtime.job import TrainingJob
from dejavu.runtime.layout import World
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.pipeline import Pipeline
from dejavu.runtime.process import claim_device
from dejavu.runtime.training import train
from dejavu.runtime.worker import join_group


def allocated_bytes(work: Callable[[], Any]) -> list[int]:
    """What torch's CPU allocator had handed out after each of its own events while `work` ran."""
    gc.collect()  # what is garbage already would be counted as given back
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return list(accumulate(event.nbytes() for event in events))


def allocator_peak_bytes(work: Callable[[], Any]) -> int:
    """The most that it had handed out at once."""
    return max(allocated_bytes(work), default=0)


def main(path: Path) -> None:
    """Train as the runtime does."""
    job, rank = TrainingJob.read(path), int(os.environ["RANK"])
    device = claim_device(rank)
    join_group(rank, device)
    workload = job.workload

    def work() -> None:
        world = World.of(job.binding, workload)
        executor = Pipeline(job.draw, world, job.binding.placements[rank], device)
        optimizer = make_optimizer(workload.optimizer, executor.parameters())
        train(executor, optimizer, workload, range(job.last_step), device=device, on_step=lambda *times: None)

    peak = allocator_peak_bytes(work)
    (Path(job.folder) / f"peak-{rank}.json").write_text(json.dumps({"peak_bytes": peak}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
