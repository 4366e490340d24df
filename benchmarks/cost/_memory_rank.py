"""One rank of a pipeline whose allocator is watched: `torchrun … -m benchmarks.cost._memory_rank job.json`.

The job: `{"workload": …, "plan": …, "recompute": …, "num_steps": …, "folder": …}`; a rank writes `peak-<stage>.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dejavu.init import Draw
from dejavu.plan import Plan
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.process import claim_device
from dejavu.runtime.stage import PipelinedStage
from dejavu.runtime.training import Recomputed, build_layers, train
from dejavu.runtime.worker import join_group
from dejavu.workload import Workload


def allocator_peak_bytes(work: Callable[[], Any]) -> int:
    """The most that torch's CPU allocator had handed out at once while `work` ran, from its own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive = most = 0
    for event in events:
        alive += event.nbytes()
        most = max(most, alive)
    return most


def main(path: Path) -> None:
    """Train the stage of this rank as the runtime does."""
    job = json.loads(path.read_text())
    workload, plan = Workload.model_validate(job["workload"]), Plan.from_dict(job["plan"])
    stage = int(os.environ["RANK"])
    device = claim_device(stage)
    join_group(device)
    span = plan.stages[stage]

    def work() -> None:
        module = build_layers(workload, Draw(), device, span.start, span.stop)
        if job["recompute"]:
            module = Recomputed(OrderedDict(module.named_children()))
        optimizer = make_optimizer(workload.optimizer, module.parameters())
        executor = PipelinedStage(module, workload, plan, stage, device)
        train(executor, optimizer, workload, range(job["num_steps"]), device=device, on_step=lambda *times: None)

    peak = allocator_peak_bytes(work)
    (Path(job["folder"]) / f"peak-{stage}.json").write_text(json.dumps({"peak_bytes": peak}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
