"""Launch ranks with torch's elastic launcher, watch their progress, and leave no process running."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dejavu.foundation.processes.files import write_json
from dejavu.launch.preflight import check_devices, check_hosts, check_job
from dejavu.launch.rendezvous import (
    Host,
    HostAgents,
    Pulse,
    is_here,
    look_at_hosts,
    look_here,
)
from dejavu.launch.torchrun import assignments, several_hosts_settings, torchrun_words, words_by_host
from dejavu.launch.watchdog import STALL_SECONDS, Watch
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.job.progress import parse_evaluation, parse_progress
from dejavu.runtime.process import end_agent, named_parent, rank_environment, rank_settings
from dejavu.runtime.process.failures import LaunchError, RankError, failures_path, read_failures
from dejavu.runtime.process.heartbeat import heartbeats
from dejavu.runtime.process.own_rank import ranks_on

POLL_SECONDS = 0.2
OnLoss = Callable[[int, float], None]


def launch(
    job: TrainingJob,
    client: Any = None,
    *,
    stall_seconds: float = STALL_SECONDS,
    needed_bytes: Sequence[float] | None = None,
    on_step: OnLoss = lambda step, loss: None,
    on_evaluation: OnLoss = lambda step, loss: None,
) -> TrainingResult:
    """Train the job's steps on its devices; a rank that is killed or stuck costs a restart from the last checkpoint.

    Args:
        client: a `distributed.Client` with a worker on every host of the plan; not needed where all is on this machine.
        stall_seconds: a rank without progress for so long counts as stuck and is killed.
        needed_bytes: predicted memory of each rank; more than is free is an error.
        on_step: (step, loss), as ranks report them.
        on_evaluation: (step, loss on what is held out), likewise.

    Raises:
        InputError: a host cannot be reached, or the scheme of the weights needs the whole model.
        LaunchError: the plan cannot run here, or the ranks failed more than `torchrun.MOST_RESTARTS` times.
    """
    check_job(job)
    names = _hosts(job)
    if client is None or all(map(is_here, names)):
        check_hosts(names)
        client = None
    pulse = Pulse(Path(job.folder))
    agents: _LocalAgent | HostAgents | None = None
    try:
        ask = {"gpu_memory": needed_bytes is not None}
        hosts = look_at_hosts(client, names, pulse.folder, **ask) if client else look_here(names, pulse.folder, **ask)
        check_devices(job, hosts, needed_bytes)
        path = job.write()
        for stale in (
            job.result_path,
            job.warnings_path,
            failures_path(job.folder),
            *Path(job.folder).glob("error-*-*"),
        ):
            stale.unlink(missing_ok=True)
        shutil.rmtree(heartbeats(job.folder), ignore_errors=True)
        read_bytes = job.progress_path.stat().st_size if job.progress_path.exists() else 0
        agents = _start(job, path, hosts, HostAgents(client, pulse) if client else None, stall_seconds)
        while (code := agents.poll()) is None:
            time.sleep(POLL_SECONDS)
            read_bytes = report(job.progress_path, read_bytes, on_step, on_evaluation)
        report(job.progress_path, read_bytes, on_step, on_evaluation)
    finally:
        if agents:
            agents.end()
            remove_unfinished(job)
        pulse.end()
    if code or not job.result_path.exists():
        raise _failed(job, code)
    result = TrainingResult.from_dict(json.loads(job.result_path.read_text()))
    result = replace(result, failures=tuple(map(str, read_failures(job.folder))), warnings=job.warnings())
    write_json(job.result_path, result.to_dict())
    return result


def _hosts(job: TrainingJob) -> list[str]:
    """Return the hosts of the plan, in the order of its ranks."""
    return list(dict.fromkeys(placement.device.host for placement in job.binding.placements))


class _LocalAgent:
    """The one agent of a launch on this machine."""

    def __init__(self, words: Sequence[str], watch: Watch, log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dejavu.launch.agent", *words],
                stdout=file,
                stderr=file,
                env={**rank_environment(), **watch.to_environment(), **named_parent()},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return the agent's exit code; None: it still runs."""
        return self.process.poll()

    def end(self) -> None:
        end_agent(self.process)


def _start(
    job: TrainingJob, path: Path, hosts: Sequence[Host], agents: HostAgents | None, stall_seconds: float
) -> _LocalAgent | HostAgents:
    """Start one agent on this machine, or one on each host."""
    size = len(job.binding.placements)
    if agents is None:
        words = torchrun_words(size, path)
        return _LocalAgent(words, _watch(job, list(range(size)), stall_seconds), log_path(job))
    for host, words in words_by_host(job.binding, hosts, path).items():
        watch = _watch(job, ranks_on(job.binding, host.name), stall_seconds)
        agents.start(host, words, watch.to_environment(), log_path(job, host.name))
    return agents


def _watch(job: TrainingJob, ranks: Sequence[int], stall_seconds: float) -> Watch:
    places = job.binding.placements
    own = tuple((rank, job.binding.stages_of(rank), places[rank].device.host) for rank in ranks)
    return Watch(job.folder, stall_seconds, len(places), own)


def log_path(job: TrainingJob, host: str | None = None) -> Path:
    """Return the log of all output of ranks and agents, on this machine or on one of several hosts."""
    return Path(job.folder) / ("ranks.log" if host is None else f"ranks-{host}.log")


def _failed(job: TrainingJob, code: int) -> LaunchError:
    """Return the error for a training that did not finish."""
    logs = [path for host in (None, *_hosts(job)) if (path := log_path(job, host)).exists()]
    what = f"the training did not finish (exit code {code}; the ranks' output is in {', '.join(map(str, logs))})"
    failures = read_failures(job.folder)
    told = "".join(f"\n{failure}" for failure in failures)
    by_itself = not failures or not failures[-1].by_signal
    if job.errors() and code > 0 and by_itself:  # a killed agent or rank does not mean that others failed
        return RankError(f"{what}; {first_said(job)}{told}")
    told_there = [path for failure in failures[-1:] if (path := log_path(job, failure.host)) in logs]
    end = _tail([*told_there, *logs][0]) if logs else ""
    return LaunchError(f"{what}{told}; " + (f"the end of it:\n{end}" if end else _unsaid(job)))


def first_said(job: TrainingJob) -> str:
    """Return the error of the first rank that failed and could write why, with the last checkpoint that there is."""
    said = next(filter(None, (path.read_text() for path in job.errors())), "") or _unsaid(job)
    return said if str(job.checkpoints) in said else f"{said}{_kept(job)}"


def _unsaid(job: TrainingJob) -> str:
    """Say what is known where nothing could be written: as a rule that the disk is full."""
    return f"no rank could write why: the disk of {job.folder} has {shutil.disk_usage(job.folder).free:,} bytes free"


def remove_unfinished(job: TrainingJob) -> None:
    """Delete the checkpoint that ranks were writing when they were ended."""
    from dejavu.runtime.state import remove_incomplete_checkpoints  # as in `_kept`

    remove_incomplete_checkpoints(job.checkpoints)


def _kept(job: TrainingJob) -> str:
    from dejavu.runtime.state import complete_checkpoints  # with torch's checkpoints: half a second to import

    complete = complete_checkpoints(job.checkpoints)
    return f"; the last checkpoint is {complete[-1]}" if complete else "; there is no checkpoint yet"


def torchrun_line(job: TrainingJob, client: Any = None) -> str:
    """Return the command that repeats this training in a new folder next to the job's; one for each of several hosts.

    Args:
        client: reaches the hosts; see `launch`.
    """
    names, arguments = _hosts(job), (Path(job.folder) / "job.json", Path(f"{job.folder}-again"))
    if client is None or all(map(is_here, names)):
        words = torchrun_words(len(job.binding.placements), *arguments)
        return shlex.join([*assignments(rank_settings()), "torchrun", *words])
    hosts = look_at_hosts(client, names, Path(job.folder), gpu_memory=False)
    return "\n".join(
        shlex.join([*assignments(several_hosts_settings(host.name, host.interface)), "torchrun", *words])
        for host, words in words_by_host(job.binding, hosts, *arguments).items()
    )


def report(progress: Path, read_bytes: int, on_step: OnLoss, on_evaluation: OnLoss) -> int:
    """Report the steps that ranks have written since; return how many bytes of the file are read now."""
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
            elif evaluation := parse_evaluation(line):
                on_evaluation(*evaluation)
    return read_bytes


def _tail(path: Path, characters: int = 2000) -> str:
    return path.read_text(errors="replace")[-characters:]
