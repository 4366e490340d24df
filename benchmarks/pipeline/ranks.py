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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from dejavu.runtime.clock import Timed
from dejavu.runtime.job import StageTimes, TrainingJob
from dejavu.runtime.layout import Layout
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.pipeline import Pipeline
from dejavu.runtime.process import claim_device, die_with_parent, named_parent
from dejavu.runtime.training import train
from dejavu.runtime.worker import gather_passes, join_group, peak_bytes, stage_times
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


def train_all(jobs: Sequence[TrainingJob], timeout_seconds: float = 1800.0) -> list[Trained]:
    """Train every job from its first to its last step; jobs of as many ranks share one launch.

    Raises:
        RuntimeError: a rank failed; the message has the end of what it said.
    """
    by_ranks: dict[int, list[int]] = defaultdict(list)
    for position, job in enumerate(jobs):
        by_ranks[len(job.binding.placements)].append(position)
    found: dict[int, Trained] = {}
    for num_ranks, positions in by_ranks.items():
        found.update(zip(positions, _launch([jobs[k] for k in positions], num_ranks, timeout_seconds), strict=True))
    return [found[position] for position in range(len(jobs))]


def _launch(jobs: list[TrainingJob], num_ranks: int, timeout_seconds: float) -> list[Trained]:
    with tempfile.TemporaryDirectory(prefix="dejavu-ranks-") as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps([job.to_dict() for job in jobs]))
        words = [f"--nproc-per-node={num_ranks}", "--standalone", "--local-addr=localhost"]
        done = subprocess.run(
            [sys.executable, "-m", "dejavu.runtime.agent", *words, "-m", "benchmarks.pipeline.ranks", str(path)],
            env={**os.environ, **named_parent(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
        if done.returncode:
            raise RuntimeError(f"{num_ranks} ranks failed:\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}")
        rows = json.loads((Path(folder) / "done.json").read_text())
    return [_trained(row) for row in rows]


def _trained(row: dict[str, Any]) -> Trained:
    stages = tuple(StageTimes(**times) for times in row["stages"])
    passes = tuple(tuple(Timed(stage, Pass(way), *rest) for stage, way, *rest in rank) for rank in row["passes"])
    return Trained(tuple(row["losses"]), tuple(row["step_seconds"]), stages, passes)


def _main(path: Path) -> None:
    die_with_parent(signal.SIGKILL)
    device = claim_device(int(os.environ["LOCAL_RANK"]))
    join_group(int(os.environ["RANK"]), device)
    rows = []
    for data in json.loads(path.read_text()):
        rows.append(_one(TrainingJob.from_dict(data), device))
        dist.barrier()
    if dist.get_rank() == 0:
        (path.parent / "done.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _one(job: TrainingJob, device: Any) -> dict[str, Any]:
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
