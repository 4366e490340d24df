"""One rank of a pipeline training: `torchrun … -m dejavu.runtime.worker job.json`."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from dejavu.runtime.job import StageTimes, TrainingJob, TrainingResult, parse_progress, write_json
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.process import claim_device, die_with_parent
from dejavu.runtime.stage import PipelinedStage
from dejavu.runtime.state import (
    checkpoint_step,
    complete_checkpoints,
    read_checkpoint,
    read_trial,
    restore_state,
    save_checkpoint,
)
from dejavu.runtime.training import build_layers, train

TIMEOUT = timedelta(seconds=120)  # a rank that waits longer for another gives up, and torchrun starts all again


def main(path: Path, folder: Path | None = None) -> None:
    """Run this rank of the job to its end, in the job's folder or another."""
    die_with_parent(signal.SIGKILL)
    job = TrainingJob.read(path, folder)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    placement = job.binding.placements[rank]
    try:
        device = claim_device(placement.device.index)
        join_group(device)
        _run(job, placement.stage, device)
    except Exception as error:
        said = f"stage {placement.stage} on {placement.device.host}: {type(error).__name__}: {error}"
        job.error_path(attempt, rank).write_text(said)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_group(device: torch.device) -> None:
    """Join the other ranks of this attempt; keys of an earlier attempt are not seen."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"try{attempt}", dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def _run(job: TrainingJob, stage: int, device: torch.device) -> None:
    plan, workload = job.binding.plan, job.workload
    span = plan.stages[stage]
    module = build_layers(workload, job.draw, device, span.start, span.stop)
    optimizer = make_optimizer(workload.optimizer, module.parameters())
    layers = {name for name, _ in module.named_children()}
    complete = complete_checkpoints(job.checkpoints)
    first = job.first_step
    if complete:
        restore_state(module, optimizer, read_checkpoint(complete[-1], layers))
        first = checkpoint_step(complete[-1])
    elif job.start_from:
        restore_state(module, optimizer, read_trial(Path(job.start_from), layers))
    resumed = first if complete else None
    executor = PipelinedStage(module, workload, plan, stage, device)
    seconds: list[float] = []
    optimizer_seconds: list[float] = []

    def on_step(step: int, loss: float | None, step_seconds: float, once_seconds: float) -> None:
        if step == first and job.last_step - first > 1:
            executor.forget_times()  # torch sets its stages up in the first step
        else:
            seconds.append(step_seconds)
            optimizer_seconds.append(once_seconds)
        if loss is not None:
            with job.progress_path.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss, "seconds": step_seconds}) + "\n")
        done = step + 1
        if done == job.last_step or (done - job.first_step) % workload.checkpoint_every == 0:
            save_checkpoint(job.checkpoints, done, module, optimizer)

    train(executor, optimizer, workload, range(first, job.last_step), device=device, on_step=on_step)
    own = None
    if seconds:
        own = StageTimes(stage, *executor.medians(), median(optimizer_seconds), _peak_bytes(device)), median(seconds)
    everyone: list[tuple[StageTimes, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    timed = [times for times in everyone if times is not None]
    if dist.get_rank() == 0:
        result = TrainingResult(
            first_step=job.first_step,
            losses=read_losses(job.progress_path),
            step_seconds=max((step for _, step in timed), default=None),
            stages=tuple(times for times, _ in timed),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            resumed_from_step=resumed,
            final_checkpoint=str(complete_checkpoints(job.checkpoints)[-1]),
        )
        write_json(job.result_path, result.to_dict())


def read_losses(path: Path) -> tuple[float, ...]:
    """The loss of every step so far; of a step that was trained again after a restart, the later one."""
    rows = (parse_progress(line) for line in path.read_bytes().splitlines()) if path.exists() else ()
    losses = dict(row for row in rows if row)
    return tuple(losses[step] for step in sorted(losses))


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
