"""Trains many plans in one group of ranks, so that starting processes is paid once: `train_all(jobs)`.

Every rank does for each job what the product's own ranks do (`dejavu.runtime.worker`), but writes no checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline.emulation import NOTHING_EMULATED, Emulation, take_seat
from dejavu.runtime.clock import Timed
from dejavu.runtime.hosts import own_rank
from dejavu.runtime.job import StageTimes, TrainingJob
from dejavu.runtime.layout import Layout
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.pipeline import Pipeline
from dejavu.runtime.process import claim_device, die_with_parent, end_agent, named_parent, rank_environment
from dejavu.runtime.training import train
from dejavu.runtime.worker import gather_passes, peak_bytes, stage_times
from dejavu.schedule import Pass

WARMUP_STEPS = 2  # the first steps fill caches and connect ranks


@dataclass(frozen=True)
class Trained:
    """What one job did.

    Attributes:
        step_seconds: of every step after the first ones, the slowest rank's.
        stages: each rank's times of its stages.
        passes: the last step, rank by rank.
    """

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    stages: tuple[StageTimes, ...]
    passes: tuple[tuple[Timed, ...], ...]

    @property
    def median_step_seconds(self) -> float:
        return median(self.step_seconds)


def train_all(
    jobs: Sequence[TrainingJob], timeout_seconds: float = 1800.0, emulation: Emulation = NOTHING_EMULATED
) -> list[Trained]:
    """Train every job from its first to its last step; jobs of as many ranks on each host share one launch.

    Args:
        emulation: of hosts and slower devices; without it all ranks are on this machine, whatever their hosts' names.

    Raises:
        RuntimeError: a rank failed; the message has the end of what it said.
    """
    by_ranks: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for position, job in enumerate(jobs):
        hosts = Counter(place.device.host if emulation.namespaces else "" for place in job.binding.placements)
        by_ranks[tuple(sorted(hosts.items()))].append(position)
    found: dict[int, Trained] = {}
    for ranks, positions in by_ranks.items():
        trained = _launch([jobs[k] for k in positions], dict(ranks), timeout_seconds, emulation)
        found.update(zip(positions, trained, strict=True))
    return [found[position] for position in range(len(jobs))]


def _launch(
    jobs: list[TrainingJob], ranks: dict[str, int], timeout_seconds: float, emulation: Emulation
) -> list[Trained]:
    """One agent on each host."""
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory(prefix="dejavu-ranks-") as folder, ExitStack() as stack:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps([job.to_dict() for job in jobs]))
        agents = []
        for host, count in ranks.items():
            log = stack.enter_context((Path(folder) / f"log-{host}").open("wb"))
            meeting = emulation.meeting(host, list(ranks))
            words = [f"--nproc-per-node={count}", *meeting, "-m", "benchmarks.pipeline.ranks", str(path)]
            agent = subprocess.Popen(
                [*emulation.before(host), sys.executable, "-m", "dejavu.runtime.agent", *words],
                env={**rank_environment(), **named_parent(), **emulation.environment(host)},
                stdout=log,
                stderr=log,
            )
            stack.callback(end_agent, agent)
            agents.append(agent)
        while any(agent.poll() is None for agent in agents) and not any(agent.poll() for agent in agents):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if any(agent.poll() != 0 for agent in agents):
            said = "\n".join(file.read_text()[-4000:] for file in Path(folder).glob("log-*"))
            raise RuntimeError(f"{sum(ranks.values())} ranks failed, or took over {timeout_seconds:.0f} s:\n{said}")
        rows = json.loads((Path(folder) / "done.json").read_text())
    return [_trained(row) for row in rows]


def _trained(row: dict[str, Any]) -> Trained:
    stages = tuple(StageTimes(**times) for times in row["stages"])
    passes = tuple(tuple(Timed(stage, Pass(way), *rest) for stage, way, *rest in rank) for rank in row["passes"])
    return Trained(tuple(row["losses"]), tuple(row["step_seconds"]), stages, passes)


def _main(path: Path) -> None:
    die_with_parent(signal.SIGKILL)
    device = claim_device(int(os.environ["LOCAL_RANK"]))
    rows: list[dict[str, Any]] = []
    hosts: list[str] = []
    for data in json.loads(path.read_text()):
        job = TrainingJob.from_dict(data)
        if hosts != [place.device.host for place in job.binding.placements]:  # ranks are numbered anew
            hosts = [place.device.host for place in job.binding.placements]
            if dist.is_initialized():
                dist.destroy_process_group()
            _join(own_rank(job.binding), device, f"job{len(rows)}")
        take_seat(job.binding.placements[dist.get_rank()].device)
        rows.append(_one(job, device))
        dist.barrier()
    if dist.get_rank() == 0:
        (path.parent / "done.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _join(rank: int, device: torch.device, name: str) -> None:
    """Join the others under this name: a store keeps what an earlier group of the same name left there."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(name, dist.TCPStore(address, port, is_master=False))
    backend, size = "nccl" if device.type == "cuda" else "gloo", int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _one(job: TrainingJob, device: torch.device) -> dict[str, Any]:
    workload, place = job.workload, job.binding.placements[dist.get_rank()]
    pipeline = Pipeline(workload, job.draw, Layout(job.binding, workload.microbatch_size), place, device)
    optimizer = make_optimizer(workload.optimizer, pipeline.parameters())
    losses: list[float] = []
    seconds: list[float] = []
    once: list[float] = []

    def on_step(step: int, loss: float | None, step_seconds: float, once_seconds: float) -> None:
        if step - job.first_step < WARMUP_STEPS:
            pipeline.clock.forget()
        else:
            seconds.append(step_seconds)
            once.append(once_seconds)
        if loss is not None:
            losses.append(loss)

    train(pipeline, optimizer, workload, range(job.first_step, job.last_step), device=device, on_step=on_step)
    own = [
        stage_times(pipeline.clock, s, place, median(once or [0.0]) / len(pipeline.modules), peak_bytes(device))
        for s in pipeline.modules
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (seconds, [asdict(times) for times in own], losses if pipeline.has_loss else []))
    return {
        "step_seconds": [max(step) for step in zip(*(row[0] for row in everyone), strict=True)],
        "stages": sorted((times for row in everyone for times in row[1]), key=lambda t: (t["stage"], t["replica"])),
        "losses": [loss for row in everyone for loss in row[2]],
        "passes": gather_passes(pipeline.clock, job.binding),
    }


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
