"""Trains many plans in one group of ranks, so that starting processes is paid once: `train_all(jobs)`.

Every rank does for each job what the product's own ranks do (`dejavu.runtime.worker`), but writes no checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

from benchmarks.pipeline.emulation import NOTHING_EMULATED, Emulation, take_seat
from benchmarks.pipeline.replicated import replicated_row
from benchmarks.pipeline.undisturbed import Cores
from dejavu.binding.binding import Binding
from dejavu.plans.schedule import Pass
from dejavu.runtime.batches import HeldOut
from dejavu.runtime.gradients.overlapped import OverlappedSum
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.layout import World
from dejavu.runtime.pipeline import Pipeline
from dejavu.runtime.process import claim_device, die_with_parent, end_agent, named_parent, rank_environment
from dejavu.runtime.process.failures import what_failed
from dejavu.runtime.process.group import join_group
from dejavu.runtime.process.own_rank import HOST, ranks_on
from dejavu.runtime.state import start_from_pretrained
from dejavu.runtime.training import train
from dejavu.runtime.worker import TIMEOUT, gather_moments, peak_bytes, stage_times
from dejavu.timing.clock import Span, Timed
from dejavu.timing.interference import undisturbed
from dejavu.timing.training_times import StageTimes

POLL_SECONDS = 0.05
WARMUP_STEPS = 2  # the first steps fill caches and connect ranks
ENOUGH_STEPS = 5  # undisturbed ones: with them a training ends
LEAST_STEPS = 3  # count, however disturbed
OURS, AT_THE_END, DDP = "while computing", "at the end", "torch's DDP"  # gradients of replicas are summed


@dataclass(frozen=True)
class Trained:
    """What one job did.

    Attributes:
        step_seconds: of every step after the first ones, or of those of them that were undisturbed; the slowest rank's.
        all_step_seconds: of every step after the first ones.
        num_undisturbed: how many of these were, if it was asked; where too few, `step_seconds` has others, too.
        stages: each rank's times of its stages.
        passes: the last step, rank by rank.
        once: when each rank, in that step, summed gradients and ran its optimizer.
        evaluations: the losses on what is held out, where the workload wants them.
    """

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    all_step_seconds: tuple[float, ...]
    num_undisturbed: int
    stages: tuple[StageTimes, ...]
    passes: tuple[tuple[Timed, ...], ...]
    once: tuple[tuple[Span, ...], ...]
    evaluations: tuple[float, ...] = ()

    @property
    def median_step_seconds(self) -> float:
        return median(self.step_seconds)


def train_all(jobs: Sequence[TrainingJob], *, only_undisturbed: bool = False) -> list[Trained]:
    """Train every job from its first to its last step, in as few launches as torch allows (see `train_in_turn`).

    Args:
        only_undisturbed: steps count that nobody outside this machine disturbed; jobs end when they are enough. Those
            of fewer ranks are then launched apart, so that none waits beside what is timed.

    Raises:
        RuntimeError: a rank failed; the message has its last error, and the file with all that ranks said.
    """
    found: dict[int, Trained] = {}
    left = sorted(range(len(jobs)), key=lambda k: (-len(jobs[k].binding.placements), not _shares_layers(jobs[k])))
    while left:
        most = len(jobs[left[0]].binding.placements)
        fewer = [k for k in left if len(jobs[k].binding.placements) < most]
        later = fewer if only_undisturbed else [k for k in fewer if _shares_layers(jobs[k])]
        now = [k for k in left if k not in later]
        trained = train_in_turn([jobs[k] for k in now], only_undisturbed=only_undisturbed)
        found.update(zip(now, trained, strict=True))
        left = later
    return [found[number] for number in range(len(jobs))]


def _shares_layers(job: TrainingJob) -> bool:
    """Whether devices share a layer, a sequence or what replicas keep: their weights are DTensors on a mesh."""
    plans = [worker.plan for worker in job.binding.workers] or [job.binding.plan]
    ways = [stage.configuration for plan in plans for stage in plan.stages]
    return any(way.tensor_parallel * way.context_parallel > 1 or way.zero_level > 0 for way in ways)


def train_in_turn(
    jobs: Sequence[TrainingJob],
    timeout_seconds: float = 1800.0,
    emulation: Emulation = NOTHING_EMULATED,
    *,
    only_undisturbed: bool = False,
    ways: Sequence[str] = (),
) -> list[Trained]:
    """Train the jobs in this order in one launch; where one has fewer ranks, the others wait.

    Where jobs have different ranks, at most those before the first change may have weights that devices share: torch
    keeps groups of devices from one process group to the next.

    Args:
        emulation: of hosts and slower devices; without it all ranks are on this machine, whatever their hosts' names.
        only_undisturbed: as in `train_all`.
        ways: for each job how its replicas' gradients are summed (`OURS`, `AT_THE_END`, `DDP`); empty: as we do.

    Raises:
        RuntimeError: a rank failed; the message has its last error, and the file with all that ranks said.
    """
    deadline = time.monotonic() + timeout_seconds
    ranks: Counter[str] = Counter()
    for job in jobs:
        ranks |= Counter(place.device.host if emulation.namespaces else "" for place in job.binding.placements)
    with tempfile.TemporaryDirectory(prefix="dejavu-ranks-") as folder, ExitStack() as stack:
        path = Path(folder) / "jobs.json"
        asked = {"only_undisturbed": only_undisturbed, "ways": list(ways) or [OURS] * len(jobs)}
        path.write_text(json.dumps({**asked, "jobs": [job.to_dict() for job in jobs]}))
        agents = [
            stack.enter_context(_agent(host, ranks[host], sorted(ranks), path, emulation)) for host in sorted(ranks)
        ]
        while not all(agent.poll() == 0 for agent in agents):
            if any(agent.poll() for agent in agents) or time.monotonic() > deadline:
                said = "\n".join(log.read_text() for log in Path(folder).glob("*.log"))
                late = time.monotonic() > deadline
                who = f"{ranks.total()} ranks" + (f" that took over {timeout_seconds:.0f} s" if late else "")
                raise RuntimeError(what_failed(who, said))
            time.sleep(POLL_SECONDS)
        return [_trained(json.loads(_row_path(path, number).read_text())) for number in range(len(jobs))]


@contextmanager
def _agent(
    host: str, count: int, hosts: Sequence[str], path: Path, emulation: Emulation
) -> Iterator[subprocess.Popen[bytes]]:
    """Torch's agent on one host."""
    words = [f"--nproc-per-node={count}", *emulation.meeting(host, hosts), "-m", "benchmarks.pipeline.ranks", str(path)]
    with path.with_name(f"agent-{host}.log").open("wb") as log:
        agent = subprocess.Popen(
            [*emulation.before(host), sys.executable, "-m", "dejavu.launch.agent", *words],
            env={**rank_environment(), **named_parent(), **emulation.environment(host)},
            stdout=log,
            stderr=log,
        )
        try:
            yield agent
        finally:
            end_agent(agent)


def _row_path(path: Path, number: int) -> Path:
    return path.with_name(f"done-{number}.json")


def _trained(row: dict[str, Any]) -> Trained:
    return Trained(
        losses=tuple(row["losses"]),
        step_seconds=tuple(row["step_seconds"]),
        all_step_seconds=tuple(row["all_step_seconds"]),
        num_undisturbed=row["num_undisturbed"],
        stages=tuple(StageTimes(**times) for times in row["stages"]),
        passes=tuple(tuple(Timed(stage, Pass(way), *rest) for stage, way, *rest in rank) for rank in row["passes"]),
        once=tuple(tuple(Span(*span) for span in rank) for rank in row["once"]),
        evaluations=tuple(row["evaluations"]),
    )


def _main(path: Path) -> None:
    die_with_parent(signal.SIGKILL)
    device = claim_device(int(os.environ["LOCAL_RANK"]))
    hosts: list[str] = []
    asked = json.loads(path.read_text())
    cores = Cores() if asked["only_undisturbed"] else None
    for number, (data, way) in enumerate(zip(asked["jobs"], asked["ways"], strict=True)):
        job = TrainingJob.from_dict(data)
        rank, before = _own_rank(job.binding), hosts
        hosts = [place.device.host for place in job.binding.placements]
        if hosts != before:  # ranks are numbered anew
            if dist.is_initialized():
                dist.destroy_process_group()
            if rank is not None:
                _join(rank, len(hosts), device, f"job{number}")
        if rank is not None:
            take_seat(job.binding.placements[rank].device)
            with _summed(way):
                row = replicated_row(job) if way == DDP else _one(job, device, cores)
            if rank == 0:
                _row_path(path, number).write_text(json.dumps(row))
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_rank(binding: Binding) -> int | None:
    """This process's rank, as a place in the binding; None: it has nothing to do."""
    host, local = os.environ.get(HOST), int(os.environ["LOCAL_RANK"])
    ranks = ranks_on(binding, host) if host else range(len(binding.placements))
    return ranks[local] if local < len(ranks) else None


def _join(rank: int, num_ranks: int, device: torch.device, name: str) -> None:
    """Join the others under this name: a store keeps what an earlier group of the same name left there."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(name, TCPStore(address, port, is_master=False, timeout=TIMEOUT))
    join_group(device, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)


def _summed(way: str) -> AbstractContextManager[object]:
    """Let no sum begin before the last backward pass has ended, where that is wanted."""
    return patch.object(OverlappedSum, "begin", lambda self: None) if way == AT_THE_END else nullcontext()


class _Enough(Exception):
    """Steps that count."""


def _one(job: TrainingJob, device: torch.device, cores: Cores | None) -> dict[str, Any]:
    workload, place = job.workload, job.binding.placements[dist.get_rank()]
    if device.type == "cuda":  # what an earlier job left, in cycles of references too, is free again
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    pipeline = Pipeline(job.draw, World.of(job.binding, workload), place, device)
    optimizer = pipeline.make_optimizer()
    for module in pipeline.modules.values() if workload.pretrained else ():
        start_from_pretrained(module, workload)
    pipeline.clock.watch_optimizer(optimizer)
    losses: list[float] = []
    evaluations: list[float | None] = []
    held_out = HeldOut(workload, job.last_step, device)
    seconds: list[tuple[float, float]] = []  # of each step, and of its optimizer
    looks: list[list[float]] = []

    def on_step(step: int, loss: float | None, step_seconds: float, per_step_seconds: float) -> None:
        seconds.append((step_seconds, per_step_seconds))
        if loss is not None:
            losses.append(loss)
        if held_out.is_due(step):
            evaluations.append(held_out.loss(pipeline))
        if cores:
            looks.append(cores.sample())
            if len(undisturbed(cores.slowdowns(looks[WARMUP_STEPS:]))) >= ENOUGH_STEPS:
                raise _Enough

    if cores:
        cores.sample()
    with suppress(_Enough):
        train(pipeline, optimizer, workload, range(job.first_step, job.last_step), device=device, on_step=on_step)
    counted, slowdowns = list(range(WARMUP_STEPS, len(seconds))), list[float]()
    if cores:
        slowdowns = cores.slowdowns(looks[WARMUP_STEPS:])
        counted = [counted[k] for k in undisturbed(slowdowns, LEAST_STEPS)]
    pipeline.clock.keep(counted)
    once = median([seconds[k][1] for k in counted] or [0.0]) / len(pipeline.modules)
    own = [stage_times(pipeline.clock, s, place, once, peak_bytes(device)) for s in pipeline.modules]
    everyone: list[Any] = [None] * dist.get_world_size()
    reported = (losses, evaluations) if pipeline.has_loss else ([], [])
    known = ([step for step, _ in seconds], [asdict(times) for times in own], *reported)
    dist.all_gather_object(everyone, known)
    slowest = [max(step) for step in zip(*(row[0] for row in everyone), strict=True)]
    return {
        "step_seconds": [slowest[k] for k in counted],
        "all_step_seconds": slowest[WARMUP_STEPS:],
        "num_undisturbed": len(undisturbed(slowdowns)),
        "stages": sorted((times for row in everyone for times in row[1]), key=lambda t: (t["stage"], t["replica"])),
        "losses": [loss for row in everyone for loss in row[2]],
        "evaluations": [loss for row in everyone for loss in row[3]],
        "passes": gather_moments(pipeline.clock, pipeline.clock.last_step, job.binding),
        "once": gather_moments(pipeline.clock, pipeline.clock.last_step_once, job.binding),
    }


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
