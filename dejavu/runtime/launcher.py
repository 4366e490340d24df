"""Launching ranks with torch's elastic launcher, watching their progress, and leaving none behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from dejavu.cluster import Cluster, this_machine
from dejavu.errors import DejavuError, InputError
from dejavu.runtime.job import TrainingJob, TrainingResult, parse_progress
from dejavu.runtime.process import named_parent

MOST_RESTARTS = 3
POLL_SECONDS = 0.2
GRACE_SECONDS = 15.0
_NOT_FOR_RANKS = ("MLFLOW_RUN_ID", "PREFECT__FLOW_RUN_ID")


class LaunchError(DejavuError):
    """The ranks did not finish; the message has the end of their log."""


class RankError(LaunchError):
    """A rank failed by itself, not by a signal: trying again would fail again."""


def launch(job: TrainingJob, *, on_step: Callable[[int, float], None] = lambda step, loss: None) -> TrainingResult:
    """Train the job's steps on this machine's devices; a rank that is killed costs a restart from the last checkpoint.

    Args:
        on_step: (step, loss), as ranks report them.

    Raises:
        LaunchError: the plan cannot run here, or the ranks failed more than `MOST_RESTARTS` times.
    """
    refuse(job)
    path = job.write()
    for stale in (job.result_path, *Path(job.folder).glob("error-*-*.txt")):
        stale.unlink(missing_ok=True)
    log = Path(job.folder) / "ranks.log"
    with log.open("ab") as file:
        agent = subprocess.Popen(
            [sys.executable, "-m", "dejavu.runtime.agent", *torchrun_words(len(job.binding.placements), path)],
            stdout=file,
            stderr=file,
            env=rank_environment() | named_parent(),
            start_new_session=True,
        )
    try:
        read_bytes = job.progress_path.stat().st_size if job.progress_path.exists() else 0
        while agent.poll() is None:
            time.sleep(POLL_SECONDS)
            read_bytes = _report(job.progress_path, read_bytes, on_step)
        _report(job.progress_path, read_bytes, on_step)
    finally:
        end_agent(agent)
    if agent.returncode or not job.result_path.exists():
        what = f"the training did not finish (exit code {agent.returncode}; all that the ranks said is in {log})"
        if (errors := job.errors()) and agent.returncode > 0:  # a killed agent says nothing against the ranks
            raise RankError(f"{what}; {errors[0].read_text()}")
        raise LaunchError(f"{what}; the end of it:\n{_tail(log)}")
    return TrainingResult.from_dict(json.loads(job.result_path.read_text()))


def refuse(job: TrainingJob) -> None:
    """Say before any rank starts what this launcher cannot run.

    Raises:
        InputError: a device on another host.
        LaunchError: a stage of more than one device, or more stages than microbatches.
    """
    plan = job.binding.plan
    refuse_hosts({placement.device.host for placement in job.binding.placements})
    for stage in plan.stages:
        if stage.configuration.num_devices > 1:
            raise LaunchError(f"{stage}: a stage of several devices cannot be launched yet; wanted one device a stage")
    if plan.num_microbatches < len(plan.stages):
        raise LaunchError(
            f"{plan.num_microbatches} microbatches for {len(plan.stages)} stages; torch wants at least one for each"
        )


def refuse_hosts(hosts: Iterable[str]) -> None:
    """That all these hosts are this machine.

    Raises:
        InputError: one is not.
    """
    here = {"localhost", "127.0.0.1", os.uname().nodename}
    elsewhere = sorted(set(hosts) - here)
    if elsewhere:
        shown = ", ".join(elsewhere[:3]) + (" …" if len(elsewhere) > 3 else "")
        raise InputError(
            f"the cluster's devices are on {shown}; ranks are started on this machine only: "
            "plan for it without training (--no-train, or the deployment dejavu/plan), or train on `nodes: auto`"
        )


def refuse_cluster(cluster: Cluster) -> None:
    """That all devices of the cluster are on this machine.

    Raises:
        InputError: a host is not this machine, or has other devices or more of them.
    """
    refuse_hosts(device.host for device in cluster.devices())
    here = this_machine().device_counts
    for name, count in cluster.device_counts.items():
        if count > here.get(name, 0):
            has = ", ".join(f"{number} × {kind}" for kind, number in here.items())
            raise InputError(f"the cluster says that this machine has {count} × {name}; it has {has}; see --no-train")


def torchrun_words(num_ranks: int, *arguments: Path) -> list[str]:
    """What comes behind `torchrun`: a free port on loopback and an identity of its own."""
    return [
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--local-addr=localhost",
        f"--rdzv-id={uuid.uuid4().hex[:12]}",
        f"--max-restarts={MOST_RESTARTS}",
        "--monitor-interval=0.2",
        "-m",
        "dejavu.runtime.worker",
        *map(str, arguments),
    ]


def torchrun_line(job: TrainingJob) -> str:
    """The one line that repeats this training by hand, on this machine, in a folder of its own beside the job's."""
    words = torchrun_words(len(job.binding.placements), Path(job.folder) / "job.json", Path(f"{job.folder}-again"))
    return shlex.join(["GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", "torchrun", *words])


def rank_environment() -> dict[str, str]:
    """The environment of a rank: loopback for gloo, one compute thread, nothing that belongs to the flow's own run."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_RANKS}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def end_agent(agent: subprocess.Popen[bytes]) -> None:
    """End the agent, which ends its ranks; if it will not, its ranks go with it by the kernel's signal."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def _report(progress: Path, read_bytes: int, on_step: Callable[[int, float], None]) -> int:
    """Tell the steps that ranks have written since; how far the file is read now."""
    if not progress.exists():
        return read_bytes
    with progress.open("rb") as file:
        file.seek(read_bytes)
        for line in file:
            if not line.endswith(b"\n"):
                break
            read_bytes += len(line)
            if row := parse_progress(line):
                on_step(*row)
    return read_bytes


def _tail(path: Path, characters: int = 2000) -> str:
    return path.read_text(errors="replace")[-characters:]
