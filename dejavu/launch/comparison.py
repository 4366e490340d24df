"""Measure a plan's gain over another: some steps of each in turn, A B A B, in one launch on this machine.

`measure_gain(plan, baseline)` here starts `python -m dejavu.launch.comparison FILE` for each rank. A machine's speed
drifts; measuring in turn makes both drift alike. Nothing of the training itself is kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dejavu.binding.binding import Binding
from dejavu.foundation.hashing import stable_hash
from dejavu.foundation.processes.files import write_json
from dejavu.init import Draw
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.process import end_agent, named_parent, rank_environment
from dejavu.runtime.process.failures import LaunchError
from dejavu.workload import Workload

ROUNDS = 2  # A B A B
STEPS = 5  # measured in each turn
WARMUP_STEPS = 1  # of each turn, not measured: connects ranks, fills caches
START_SECONDS = 6.0  # of a launch, about
TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.05
RESAMPLES = 2_000
MOST_SECONDS = 20.0  # of a comparison that the workload does not ask for


@dataclass(frozen=True)
class Contestant:
    """A plan on its devices, and the workload with its number of microbatches."""

    workload: Workload
    binding: Binding


@dataclass(frozen=True)
class Comparison:
    """Measured steps of a plan and of a baseline, in seconds, in the order in which they were trained.

    Attributes:
        low_gain, high_gain: 90 % interval of `gain`, by resampling the steps.
        baseline_name: for people.
    """

    plan_seconds: tuple[float, ...]
    baseline_seconds: tuple[float, ...]
    low_gain: float
    high_gain: float
    baseline_name: str

    @classmethod
    def of(cls, plan_seconds: list[float], baseline_seconds: list[float], baseline_name: str) -> Comparison:
        """Compute the interval of the ratio of medians (percentile bootstrap, seeded)."""
        rng = np.random.default_rng(0)

        def medians(seconds: list[float]) -> np.ndarray:
            drawn = rng.choice(np.array(seconds), size=(RESAMPLES, len(seconds)))
            middles: np.ndarray = np.median(drawn, axis=1)
            return middles

        low, high = np.percentile(medians(baseline_seconds) / medians(plan_seconds), (5.0, 95.0))
        return cls(tuple(plan_seconds), tuple(baseline_seconds), float(low), float(high), baseline_name)

    def to_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return asdict(self) | {"gain": self.gain, "is_slower": self.is_slower}

    @property
    def gain(self) -> float:
        """The baseline's median step over the plan's."""
        return float(np.median(self.baseline_seconds) / np.median(self.plan_seconds))

    @property
    def is_slower(self) -> bool:
        """Whether the plan is slower than the baseline, beyond chance: the whole interval is below 1."""
        return self.high_gain < 1.0

    def __str__(self) -> str:
        """Describe it in one sentence for people."""
        between = f"90% interval {self.low_gain:.2f} to {self.high_gain:.2f}"
        steps = f"{len(self.plan_seconds)} steps of each in turn, {between}"
        said = f"{self.gain:.2f} × as fast as the {self.baseline_name}, measured ({steps})"
        return f"{said}: slower, so the {self.baseline_name} is trained" if self.is_slower else said


def expected_seconds(plan_step_seconds: float, baseline_step_seconds: float) -> float:
    """Return how long a comparison will take, from the predicted steps."""
    turns = ROUNDS * (STEPS + WARMUP_STEPS)
    return START_SECONDS + turns * (plan_step_seconds + baseline_step_seconds)


def measure_gain(plan: Contestant, baseline: Contestant, baseline_name: str, folder: Path) -> Comparison:
    """Train some steps of both in turn, from the same weights; earlier comparisons are read from the folder.

    Raises:
        LaunchError: a rank failed; the message includes the end of its output.
    """
    jobs = [_job(one) for one in (plan, baseline)]
    kept = folder / f"{stable_hash([ROUNDS, STEPS, *(job.to_dict() for job in jobs)])}.json"
    if kept.is_file():
        seconds = json.loads(kept.read_text())
    else:
        seconds = _train_in_turn(jobs)
        write_json(kept, seconds)
    return Comparison.of(seconds[0], seconds[1], baseline_name)


def _job(one: Contestant) -> TrainingJob:
    draw = Draw(seed=one.workload.seed)
    return TrainingJob(one.workload, one.binding, draw, None, 0, STEPS + WARMUP_STEPS, folder="")


def _train_in_turn(jobs: list[TrainingJob]) -> list[list[float]]:
    """Return the seconds of the measured steps, job by job."""
    num_ranks = max(len(job.binding.placements) for job in jobs)
    with tempfile.TemporaryDirectory(prefix="dejavu-compare-") as folder:
        path, log = Path(folder) / "jobs.json", Path(folder) / "ranks.log"
        write_json(path, [job.to_dict() for job in jobs])
        words = [f"--nproc-per-node={num_ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        words += ["--local-addr=localhost", "--max-restarts=0", "--monitor-interval=0.1", "-m", __name__, str(path)]
        with log.open("wb") as said:
            agent = subprocess.Popen(
                [sys.executable, "-m", "dejavu.launch.agent", *words],
                stdout=said,
                stderr=said,
                env={**rank_environment(), **named_parent()},
                start_new_session=True,
            )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            while (code := agent.poll()) is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        finally:
            end_agent(agent)
        done = path.with_name("done.json")
        if code or not done.is_file():
            end = log.read_text(errors="replace")[-2000:]
            why = f"exit code {code}" if code is not None else f"not done after {TIMEOUT_SECONDS:g} s"
            raise LaunchError(f"the plan and the baseline could not be compared ({why}):\n{end}")
        seconds: list[list[float]] = json.loads(done.read_text())
        return seconds


def _rank(path: Path) -> None:
    """Run one rank's part of every turn. Where a plan has fewer ranks than the other, the extra ranks wait."""
    import torch.distributed as dist

    from dejavu.runtime.process import claim_device, die_with_parent

    die_with_parent(signal.SIGKILL)
    local, cores = int(os.environ["LOCAL_RANK"]), os.sched_getaffinity(0)
    jobs = [TrainingJob.from_dict(data) for data in json.loads(path.read_text())]
    found: list[list[float]] = [[] for _ in jobs]
    for turn in range(ROUNDS):
        for number, job in enumerate(jobs):
            size = len(job.binding.placements)
            os.sched_setaffinity(0, cores)  # of all, each plan has its own for this rank
            device = claim_device(job.binding.placements[local].device.index if local < size else local)
            _join(local, size, f"turn{turn}-{number}", device)
            if local < size:
                found[number] += _turn(job, local, device)
                dist.barrier()
                dist.destroy_process_group()
            _meet(f"end{turn}-{number}")
    if local == 0:
        write_json(path.with_name("done.json"), found)


def _turn(job: TrainingJob, rank: int, device: Any) -> list[float]:
    """Train this rank's part from the first step; return the slowest rank's seconds of each measured step."""
    import torch.distributed as dist

    from dejavu.runtime.layout import World
    from dejavu.runtime.pipeline import Pipeline
    from dejavu.runtime.training import train

    workload, own = job.workload, list[float]()
    place = job.binding.placements[rank]
    pipeline = Pipeline(job.draw, World.of(job.binding, workload), place, device)
    optimizer = pipeline.make_optimizer()

    def on_step(step: int, loss: float | None, step_seconds: float, per_step_seconds: float) -> None:
        own.append(step_seconds)

    train(pipeline, optimizer, workload, range(job.first_step, job.last_step), device=device, on_step=on_step)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own[WARMUP_STEPS:])
    return [max(step) for step in zip(*everyone, strict=True)]


def _store(name: str) -> Any:
    """Open a store of this name, which does not see the keys of earlier groups."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

    from dejavu.runtime.worker import TIMEOUT

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(name, TCPStore(host, port, is_master=False, timeout=TIMEOUT))


def _join(rank: int, size: int, name: str, device: Any) -> None:
    """Join the process group of this turn; ranks beyond the plan's join none."""
    from dejavu.runtime.process.group import join_group
    from dejavu.runtime.worker import TIMEOUT

    if rank < size:
        join_group(device, store=_store(name), rank=rank, world_size=size, timeout=TIMEOUT)


def _meet(name: str) -> None:
    """Wait until every rank of the launch is here."""
    store = _store(name)
    store.add("here", 1)
    while int(store.add("here", 0)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
