"""One rank of a pipeline training: `torchrun … -m dejavu.runtime.worker job.json`."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from dejavu.foundation.gc_frozen import gc_frozen

with gc_frozen():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

    from dejavu.binding.binding import Binding, Placement
    from dejavu.foundation.processes.files import write_json
    from dejavu.foundation.units import plural
    from dejavu.graphs.compiling import CompileClock
    from dejavu.plans.schedule import Pass
    from dejavu.profiles.host import host_fingerprint
    from dejavu.runtime.batches import HeldOut
    from dejavu.runtime.job import DIVERGED, Saved, TrainingJob, TrainingResult, Waited
    from dejavu.runtime.job.copies import Copier
    from dejavu.runtime.job.progress import last_losses, read_evaluations, read_left_out
    from dejavu.runtime.job.saving import Saving
    from dejavu.runtime.job.suspects import Suspect
    from dejavu.runtime.layout import World
    from dejavu.runtime.pipeline import Pipeline
    from dejavu.runtime.process import (
        attempt_number,
        claim_device,
        die_with_parent,
        group,
        is_launched_by_hand,
        name_process,
    )
    from dejavu.runtime.process.failures import DivergedError
    from dejavu.runtime.process.gradients import GradientWatch
    from dejavu.runtime.process.heartbeat import Heartbeat
    from dejavu.runtime.process.own_rank import own_rank
    from dejavu.runtime.process.pace import PACE, Pace
    from dejavu.runtime.snapshots import Memory, SnapshotKeeper, read_start
    from dejavu.runtime.state import (
        State,
        checkpoint_step,
        complete_checkpoints,
        first_not_finite,
        gather_state,
        given_not_finite,
        read_checkpoint,
        read_trial,
        restore_state,
        save_checkpoint,
        start_from_pretrained,
    )
    from dejavu.runtime.training import train
    from dejavu.timing.clock import Clock, Span, Timed
    from dejavu.timing.step_times import StepWatch, count_steps
    from dejavu.timing.training_times import StageTimes

Moment = TypeVar("Moment", Timed, Span)
FIRST_SECONDS = 5.0  # for the rank that sent garbage to fail first, upon which this one is ended
TIMEOUT = timedelta(hours=1)  # for another rank; long, because the watchdog kills and names a stuck rank earlier


def main(path: Path, folder: Path | None = None) -> None:
    """Run this rank of the job to its end, in the job's folder or another."""
    die_with_parent(signal.SIGKILL)
    job = TrainingJob.read(path, folder)
    rank, attempt = own_rank(job.binding), attempt_number()
    name_process(f"rank {rank}")
    placement = job.binding.placements[rank]
    speaks = rank == 0 and is_launched_by_hand()  # else the launcher does
    try:
        if speaks and attempt == 0:
            _say_what_is_other(job)
        device = claim_device(placement.device.index)
        heartbeat = Heartbeat(job.folder, rank, attempt)
        join_group(rank, device)
        _run(job, placement, device, heartbeat)
        heartbeat.close()
        if speaks:
            _say_what_is_trained(job)
    except Exception as error:
        said = f"pipeline rank {placement.pipeline_rank} on {placement.device.host}: {type(error).__name__}: {error}"
        if isinstance(error, DivergedError):
            job.error_path(attempt, rank).with_suffix(DIVERGED).touch()
        job.error_path(attempt, rank).write_text(said)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_group(rank: int, device: torch.device) -> None:
    """Join the process group of this attempt; keys of an earlier attempt are not seen."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(f"try{attempt_number()}", TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    group.join_group(device, store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=TIMEOUT)


def _run(job: TrainingJob, place: Placement, device: torch.device, heartbeat: Heartbeat) -> None:
    workload = job.workload
    compiling = CompileClock(heartbeat.beat) if workload.compile else None
    pipeline = Pipeline(job.draw, World.of(job.binding, workload), place, device)
    modules = pipeline.modules
    optimizer = pipeline.make_optimizer()
    pipeline.clock.watch_optimizer(optimizer)
    memory, rank = Memory.from_environment(), dist.get_rank()
    resumed = _restore(job, modules.values(), optimizer, memory)
    first = job.first_step if resumed is None else resumed
    given = {name for module in modules.values() for name in given_not_finite(module)}
    keeper = None
    if memory is not None and memory.every_steps:
        keeper = SnapshotKeeper(memory, attempt_number(), rank, modules.values(), optimizer, partial(_warn, job))
    pace = Pace(attempt_number(), rank) if PACE in os.environ else None
    clock, is_cpu = pipeline.clock, device.type == "cpu"
    gradients = GradientWatch(
        place.pipeline_rank, place.device.host, modules, pipeline.arrived_finite, job.warnings_path
    )
    least = job.least_sample_seconds.get(host_fingerprint(), math.inf) if is_cpu else math.inf
    watch = StepWatch(is_cpu=is_cpu, is_alone=is_alone_on_core(job.binding), least_sample_seconds=least)
    held_out = HeldOut(workload, job.last_step, device)
    named: set[tuple[int, int]] = set()  # stages and replicas that are suspected
    copier = Copier(job, partial(_warn, job)) if workload.checkpoints and rank == 0 else None
    saving = Saving(workload, range(first, job.last_step))
    overflowed: set[int] = set()  # steps that were left out

    def on_step(step: int, loss: float | None, step_seconds: float, per_step_seconds: float) -> None:
        watch.end(step_seconds, per_step_seconds, counts=step > first or job.last_step - first == 1)
        if pipeline.has_loss:
            left_out = {"left_out": True} if step in overflowed else {}
            tell(job.progress_path, step=step, loss=loss, seconds=step_seconds, **left_out)
            if loss is not None and not math.isfinite(loss):
                raise _diverged(job, f"the loss of step {step + 1} is {loss}", updates=step)
        if gradients.garbage:
            raise _diverged(job, gradients.garbage, updates=step)
        for suspect in pipeline.suspects():
            if (suspect.stage, suspect.replica) not in named:
                named.add((suspect.stage, suspect.replica))
                print(suspect, file=sys.stderr, flush=True)
                _warn(job, f"step {step + 1}: {suspect}")
        heartbeat.beat(step)
        found: float | None = None
        if held_out.is_due(step):  # before a checkpoint: a training that goes on from there has it
            found = held_out.loss(pipeline, on_batch=lambda: heartbeat.beat(step))
            if pipeline.has_loss:
                tell(job.progress_path, step=step, loss=loss, seconds=step_seconds, held_out_loss=found)
        done = step + 1
        if keeper is not None:
            keeper.take(done)
        if pace is not None:
            pace.report(step, clock)
        if saving.is_due(done):
            held: State = {}
            with saving.after(done):
                for module in modules.values():
                    held |= gather_state(module, optimizer)
                if bad := first_not_finite(held, given):
                    time.sleep(FIRST_SECONDS if gradients.was_sent else 0.0)
                    raise _diverged(job, f"{bad} is not finite after step {done}", updates=done)
                save_checkpoint(job.checkpoints, done, held, found)
            if copier is not None:
                copier.wake()
            heartbeat.beat(step)
        watch.begin()

    watch.begin()
    with keeper or nullcontext():
        steps_left = range(first, job.last_step)
        looks = {"on_gradients": gradients.look, "on_overflow": overflowed.add}
        waited = train(pipeline, optimizer, workload, steps_left, device=device, on_step=on_step, **looks)
    compiled = None if compiling is None else compiling.seconds
    _tell_result(job, place, pipeline, watch, resumed, Waits(waited, saving.told, compiled))
    if copier is not None:  # no rank waits for this one any more
        copier.close(heartbeat.beat)


class Waits(NamedTuple):
    """What a rank's steps waited for besides computing."""

    for_data: Waited | None = None
    for_checkpoints: Saved | None = None
    compile_seconds: float | None = None


def _tell_result(
    job: TrainingJob,
    place: Placement,
    pipeline: Pipeline,
    watch: StepWatch,
    resumed: int | None,
    waits: Waits,
) -> None:
    """Gather what the ranks measured, all together, and write the result."""
    clock, modules = pipeline.clock, pipeline.modules
    steps, everyone = watch.steps(), list[Any]([None] * dist.get_world_size())
    dist.all_gather_object(everyone, steps)
    chosen = count_steps(everyone, is_cpu=pipeline.device.type == "cpu")
    clock.keep(chosen.places)
    own: list[StageTimes] = []
    if chosen.places:
        per_step = median(steps[k].per_step_seconds for k in chosen.places) / len(modules)
        own = [stage_times(clock, s, place, per_step, peak_bytes(pipeline.device)) for s in modules]
    dist.all_gather_object(everyone, own)
    stages = sorted(
        (times for rank in everyone for times in rank), key=lambda times: (times.worker, times.stage, times.replica)
    )
    told: list[Waits] = [Waits()] * dist.get_world_size()
    dist.all_gather_object(told, waits)
    suspects: list[list[Suspect]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(suspects, pipeline.suspects())
    passes = gather_moments(clock, clock.last_step, job.binding)
    once = gather_moments(clock, clock.last_step_once, job.binding)
    if dist.get_rank() == 0:
        first_step, losses = last_losses(job.progress_path, job.first_step)
        result = TrainingResult(
            first_step=first_step,
            losses=losses,
            evaluations=read_evaluations(job.progress_path),
            left_out_steps=read_left_out(job.progress_path),
            waited_for_data=tuple(one.for_data for one in told if one.for_data is not None),
            saved=tuple(one.for_checkpoints for one in told if one.for_checkpoints is not None),
            compile_seconds=tuple(one.compile_seconds for one in told if one.compile_seconds is not None),
            step_seconds=chosen.times.seconds if chosen.times else None,
            stages=tuple(stages),
            restarts=attempt_number(),
            resumed_from_step=resumed,
            final_checkpoint=str(complete_checkpoints(job.checkpoints)[-1]),
            suspects=tuple(suspect for rank in suspects for suspect in rank),
            last_step_passes=passes,
            last_step_once=once,
            step_times=chosen.times,
            warnings=job.warnings(),
        )
        write_json(job.result_path, result.to_dict())


def _say_what_is_other(job: TrainingJob) -> None:
    from dejavu.runtime.job.resume import what_is_other  # no other rank needs what it imports

    for said in what_is_other(job):
        print(f"warning: {said}", file=sys.stderr, flush=True)


def _say_what_is_trained(job: TrainingJob) -> None:
    result = TrainingResult.from_dict(json.loads(job.result_path.read_text()))
    done = f"{job.last_step} of {plural(job.last_step, 'step')} trained"
    if result.resumed_from_step == job.last_step:
        done += ", all of them before"
    loss = f", the last at loss {result.losses[-1]:.4f}" if result.losses else ""
    print(f"{done}{loss}; result: {job.result_path}; weights: {result.final_checkpoint}", flush=True)


def _warn(job: TrainingJob, what: str) -> None:
    with job.warnings_path.open("a") as file:
        file.write(what + "\n")


def _diverged(job: TrainingJob, what: str, *, updates: int) -> DivergedError:
    """Return the error that names the last good checkpoint: none is saved of a state that is not finite.

    Args:
        updates: of the weights before that, since the training's begin.
    """
    complete = complete_checkpoints(job.checkpoints)
    kept = f"the last good checkpoint is {complete[-1]}; " if complete else ""  # who reports it says that there is none
    learned = "lower the learning rate, or set clip_norm, in a new training: one that is resumed keeps both"
    unlearned = "no weight had been changed by then: look at the examples of that step, and at the initial weights"
    return DivergedError(f"{what}, wanted a finite number; {kept}{learned if updates else unlearned}")


def _restore(
    job: TrainingJob, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer, memory: Memory | None
) -> int | None:
    """Load the newest state that there is; return the step to go on from, or None: the training begins."""
    modules = list(modules)
    layers = {name for module in modules for name, _ in module.named_children()}
    complete, start = complete_checkpoints(job.checkpoints), memory.start if memory is not None else None
    if memory is not None and start is not None:
        state, resumed = read_start(memory, start, layers, dist.get_rank()), start.step
    elif complete:
        state, resumed = read_checkpoint(complete[-1], layers), checkpoint_step(complete[-1])
    elif job.start_from:
        state, resumed = read_trial(Path(job.start_from), layers), None
    else:
        for module in modules if job.workload.pretrained else ():
            start_from_pretrained(module, job.workload)
        return None
    for module in modules:
        restore_state(module, optimizer, state)
    return resumed


def is_alone_on_core(binding: Binding) -> bool:
    """Return whether no other rank is pinned to this one's core. All ranks call this together."""
    own = (binding.placements[dist.get_rank()].device.host, *sorted(os.sched_getaffinity(0)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone.count(own) == 1


def gather_moments(clock: Clock, own: Sequence[Moment], binding: Binding) -> tuple[tuple[Moment, ...], ...]:
    """Gather all ranks' moments of the last step, timed from their host's first start of it: hosts' clocks differ."""
    everyone: list[tuple[float, Sequence[Moment]]] = [(0.0, []) for _ in binding.placements]
    dist.all_gather_object(everyone, (clock.began_seconds, list(own)))
    hosts = [placed.device.host for placed in binding.placements]
    first = {
        host: min(began for (began, _), where in zip(everyone, hosts, strict=True) if where == host) for host in hosts
    }
    return tuple(
        tuple(row.later(began - first[host]) for row in rows)
        for (began, rows), host in zip(everyone, hosts, strict=True)
    )


def stage_times(clock: Clock, stage: int, place: Placement, per_step_seconds: float, peak_bytes: int) -> StageTimes:
    """Return what this rank measured of one of its stages."""
    return StageTimes(
        stage=stage,
        replica=place.replica,
        worker=place.worker,
        pipeline_rank=place.pipeline_rank,
        forward_seconds=clock.median_seconds(stage, Pass.FORWARD),
        backward_seconds=clock.median_seconds(stage, Pass.BACKWARD),
        backward_input_seconds=clock.median_seconds(stage, Pass.BACKWARD_INPUT),
        backward_weight_seconds=clock.median_seconds(stage, Pass.BACKWARD_WEIGHT),
        optimizer_seconds=per_step_seconds,
        peak_bytes=peak_bytes,
    )


def tell(progress: Path, **known: float | None) -> None:
    """Append a line to the file of progress, in one write; after one that was cut off when a rank was killed, too."""
    with progress.open("ab+") as file:
        if size := file.tell():
            file.seek(size - 1)
        is_cut = size > 0 and file.read(1) != b"\n"
        file.write(b"\n" * is_cut + json.dumps(known).encode() + b"\n")


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
