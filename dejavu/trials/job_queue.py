"""Dask workers as jobs of a batch system, by dask-jobqueue: submitted for a run, and ended with it.

What a job asks for (queue, account, cores, memory, walltime, …) stands in Dask's own configuration, under
`jobqueue.slurm` or `jobqueue.pbs`. The scheduler is in this process. What is said to it is encrypted with certificates
of this run alone; the workers read theirs in a folder that all hosts see and that is its owner's.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import distributed
from dask.utils import parse_bytes
from distributed import Status
from distributed.security import Security

from dejavu.cluster import Cluster
from dejavu.foundation.dask_workers import Queue, queue_of
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.units import plural
from dejavu.trials.clients import client_of
from dejavu.trials.spec import MOST_ATTEMPTS

PACKAGE, EXTRA = "dask_jobqueue", "jobqueue"
LIMIT = "DEJAVU_QUEUE_SECONDS"
MOST_QUEUE_SECONDS = 3600.0  # for a job to start, where the environment says nothing
LOOK_SECONDS, SAY_SECONDS = 0.2, 30.0
LOOPBACK_PAGES = "127.0.0.1:0"  # Dask's pages ask nobody for a password
HERE = "localhost"  # a cluster file's name for the machine that reads it, which is no node's name

Say = Callable[[str], None]


class JobError(DejavuError):
    """The batch system does not take the jobs, or they do not start."""


@dataclass(frozen=True)
class _System:
    """What dask-jobqueue calls a batch system, its commands, and how a job asks for a node by name.

    Attributes:
        by_name: the directive, before the node's name; empty: there is none that all versions know.
    """

    cluster: str
    commands: tuple[str, str]
    by_name: str


_SYSTEMS = {
    "slurm": _System("SLURMCluster", ("sbatch", "scancel"), "--nodelist="),
    "pbs": _System("PBSCluster", ("qsub", "qdel"), ""),
}


@dataclass(frozen=True)
class Jobs:
    """Jobs whose processes are the workers of a Dask scheduler in this process.

    Attributes:
        count: of the jobs.
        workers: of all jobs together.
        folder: what the jobs print.
        most_seconds: for a job to start.
    """

    queue: Queue
    count: int
    workers: int
    folder: Path
    most_seconds: float
    _cluster: Any

    @property
    def address(self) -> str:
        """Of the scheduler, for `client_of`."""
        return str(self._cluster.scheduler_address)

    def wait_for_all(self, say: Say) -> None:
        """Wait until every job's workers are there, as ranks on all hosts need them.

        Raises:
            JobError: not within the time limit.
        """
        self.wait(self.workers, say)

    def wait(self, wanted: int, say: Say) -> None:
        """Wait until at least so many workers are there, and tell how many have come.

        Raises:
            JobError: not within the time limit.
        """
        began = told = time.monotonic()
        jobs = f"{self.count} {self.queue.system.upper()} {'job' if self.count == 1 else 'jobs'}"
        limit = f"{self.most_seconds:g} s"
        while (found := len(self._cluster.scheduler.workers)) < wanted:
            now = time.monotonic()
            if now - began > self.most_seconds:
                raise JobError(
                    f"{jobs} started {plural(found, 'worker')} within {limit}; wanted {wanted}. What jobs print is in "
                    f"{self.folder}; {LIMIT} in the environment allows more seconds"
                )
            if told == began or now - told > SAY_SECONDS:
                told = now
                say(f"waiting for {jobs}: {found} of {plural(wanted, 'worker')}, for {limit} at most")
            time.sleep(LOOK_SECONDS)
        say(f"{plural(found, 'worker')} of {jobs} there")


def check_queue(queue: Queue, cluster: Cluster, *, trains: bool) -> None:
    """Check that jobs can be submitted from here, and that Dask's configuration says what a job asks for.

    Args:
        trains: ranks are to run in the jobs, so that there has to be one on each node of the cluster.

    Raises:
        InputError: the package, a command or an entry of the configuration is missing, an entry is wrong, or jobs
            cannot be on the cluster's nodes.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError(
            f"jobs of {queue.system.upper()} need the package dask-jobqueue: "
            f"`pip install --constraint constraints.txt pipe-dejavu[{EXTRA}]` brings it"
        )
    for command in _SYSTEMS[queue.system].commands:
        if shutil.which(command) is None:
            raise InputError(
                f"there is no {command} on PATH; wanted a machine from which {queue.system.upper()} takes jobs"
            )
    _limit_seconds()
    _settings(queue.system)
    _nodes(queue, cluster, trains)


@contextmanager
def started_jobs(queue: Queue, cluster: Cluster, work: Path, *, trains: bool, say: Say) -> Iterator[Jobs]:
    """Submit the jobs, and wait for the first worker; whatever happens, they are cancelled at the end.

    In the block, clients find the certificates in Dask's configuration. If this process is killed, workers end as soon
    as they miss the scheduler; jobs that still wait start, miss it for Dask's `death-timeout`, and end.

    Args:
        cluster: whose nodes the jobs stand for: one for each, unless the queue says how many.
        work: a folder that all hosts see and nobody else may read, for certificates and what jobs print.
        trains: see `check_queue`.
        say: told how the waiting goes.

    Raises:
        InputError: see `check_queue`.
        JobError: the batch system does not take the jobs, or none starts within the time limit.
    """
    check_queue(queue, cluster, trains=trains)
    nodes, settings = _nodes(queue, cluster, trains), _settings(queue.system)
    project = Path.cwd()
    work = Path(os.path.relpath(work, project))  # dask-jobqueue quotes no spaces in its lines, and jobs start there
    log = Path(settings.get("log-directory") or work / "logs" / "jobs")
    shared = Path(os.path.expandvars(settings.get("shared-temp-directory") or work / "jobs")).expanduser()
    with _certificates(shared) as security, dask.config.set(_configuration(security)):
        own = getattr(_package(), _SYSTEMS[queue.system].cluster)
        started = own(
            job_cls=_that_says_when_it_ends(own.job_cls),
            security=security,
            protocol="tls://",
            silence_logs="CRITICAL",
            log_directory=str(log),
            processes=settings["processes"],
            python=settings.get("python") or shlex.quote(sys.executable),
            scheduler_options={"dashboard_address": LOOPBACK_PAGES, **(settings.get("scheduler-options") or {})},
            worker_extra_args=["--dashboard-address", LOOPBACK_PAGES, *settings["worker-extra-args"]],
            job_script_prologue=[*settings["job-script-prologue"], f"cd {shlex.quote(str(project))}"],
        )
        try:
            _submit(started, queue, nodes, settings["job-extra-directives"])
            jobs = Jobs(queue, len(nodes), len(nodes) * settings["processes"], log, _limit_seconds(), started)
            jobs.wait(1, say)
            yield jobs
        finally:
            started.close()


def _package() -> Any:
    """Import dask-jobqueue, and take back what it takes as it is imported: Ctrl-C would end this process with code 0.

    Python lets only the main thread say what a signal does, so that is where it has to be imported first.
    """
    before = signal.getsignal(signal.SIGINT)
    import dask_jobqueue

    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)
    return dask_jobqueue


def _that_says_when_it_ends(job: Any) -> Any:
    """Return that kind of job, with a status that says when it has ended: Dask checks it, dask-jobqueue leaves it."""

    async def close(self: Any) -> None:
        await job.close(self)
        self.status = Status.closed

    return type(job.__name__, (job,), {"close": close})


@contextmanager
def _certificates(shared: Path) -> Iterator[Security]:
    """Make certificates of this run; what workers need of them is in files there, until the end of the block."""
    made = Security.temporary()
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tls-", dir=shared) as folder:  # its owner's alone
        for name in ("tls_ca_file", "tls_worker_cert", "tls_worker_key"):
            path = shared / Path(folder).name / f"{name}.pem"
            path.write_text(getattr(made, name))
            setattr(made, name, str(path))
        yield made


def _configuration(security: Security) -> dict[str, object]:
    """Return Dask's configuration of this process: how the scheduler takes losses, and clients' certificates."""
    own = security.get_tls_config_for_role("client")
    return {
        "distributed.scheduler.allowed-failures": MOST_ATTEMPTS - 1,
        "distributed.deploy.lost-worker-timeout": "1 day",  # a nanny restarts its worker; the job stays
        "distributed.comm.tls.ca-file": own["ca_file"],
        "distributed.comm.tls.client.cert": own["cert"],
        "distributed.comm.tls.client.key": own["key"],
    }


@contextmanager
def searching_client(dask_workers: str, cluster: Cluster, work: Path, say: Say) -> Iterator[distributed.Client]:
    """Connect to the scheduler that `--dask` names, or start jobs and connect to theirs; no rank runs there.

    Raises:
        InputError, JobError, TrialError: see `started_jobs` and `client_of`.
    """
    queue = queue_of(dask_workers)
    if queue is None:
        with client_of(dask_workers) as client:
            yield client
        return
    with started_jobs(queue, cluster, work, trains=False, say=say) as jobs, client_of(jobs.address) as client:
        yield client


def _submit(started: Any, queue: Queue, nodes: list[tuple[str, str]], directives: list[str]) -> None:
    """Submit a job for each node, whose worker has the node's name.

    Raises:
        JobError: the batch system does not take them; those that it took are left to be cancelled.
    """
    by_name = _SYSTEMS[queue.system].by_name
    for name, host in nodes:
        options = dict(started.new_spec["options"])
        if host:
            options["job_extra_directives"] = [*directives, f"{by_name}{host}"]
        started.worker_spec[name] = {**started.new_spec, "options": options}

    async def submitted() -> None:
        await started

    try:
        started.sync(submitted)
    except (RuntimeError, ValueError, OSError) as error:  # dask-jobqueue's, of the command's exit code or its answer
        raise JobError(
            f"{_SYSTEMS[queue.system].commands[0]} did not take {plural(len(nodes), 'job')}: "
            f"{' '.join(str(error).split())}"
        ) from error


def _nodes(queue: Queue, cluster: Cluster, trains: bool) -> list[tuple[str, str]]:
    """Return the name of each job's worker, and the node that it asks for; empty: any.

    Raises:
        InputError: ranks need a job on every node, and there are fewer jobs, or no way to ask for these nodes.
    """
    nodes = [(group, group.host(k)) for group in cluster.groups for k in range(group.count)]
    count = queue.num_jobs or len(nodes)
    others = [(f"{queue.system}-{k}", "") for k in range(count)]
    if not trains:
        return others
    if count < len(nodes):
        raise InputError(
            f"Dask at {queue} is {plural(count, 'job')}, and {cluster.name} has {plural(len(nodes), 'node')}; "
            "wanted one on each, for its ranks"
        )
    named = [host for group, host in nodes if group.hosts and host != HERE]
    if named and not _SYSTEMS[queue.system].by_name:
        raise InputError(
            f"{cluster.name} names its nodes ({named[0]}), which jobs of {queue.system.upper()} cannot ask for; wanted "
            "`count:` in place of `hosts:` in the cluster file, or the address of a scheduler of your own"
        )
    if len(cluster.groups) > 1 and not all(group.hosts for group in cluster.groups):
        counted = next(group.name for group in cluster.groups if not group.hosts)
        raise InputError(
            f"{cluster.name} has several groups, and the nodes of {counted} are only counted; wanted `hosts:` with "
            "their names, so that each group's jobs are on its own"
        )
    return [(host, host if host in named else "") for _, host in nodes] + others[len(nodes) :]


def _settings(system: str) -> dict[str, Any]:
    """Return Dask's configuration of a batch system's jobs, with one process in each where it does not say how many.

    Names that dask-jobqueue has given up, which it still reads, are read as those that they have now.

    Raises:
        InputError: an entry that every job needs is missing, or no such value.
    """
    _package()  # brings the defaults
    entry = f"jobqueue.{system}"
    found = dict(dask.config.get(entry))
    for now, before in {
        "worker-extra-args": "extra",
        "job-script-prologue": "env-extra",
        "job-extra-directives": "job-extra",
    }.items():
        found[now] = list(found.get(now) or found.get(before) or ())
    found["cores"] = _whole(entry, "cores", found.get("cores"), "8")
    found["processes"] = _whole(entry, "processes", 1 if found.get("processes") is None else found["processes"], "1")
    try:
        parse_bytes(str(found.get("memory")))
    except ValueError:
        raise _wrong(entry, "memory", found.get("memory"), "32 GiB") from None
    return found


def _whole(entry: str, key: str, value: object, example: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise _wrong(entry, key, value, example)


def _wrong(entry: str, key: str, value: object, example: str) -> InputError:
    file = Path(dask.config.PATH) / "jobqueue.yaml"
    said = "is not set" if value is None else f"is {value!r}"
    return InputError(
        f"{entry}.{key} {said} in Dask's configuration ({file}); wanted what a job asks for, as {example}"
    )


def _limit_seconds() -> float:
    """Return for how long to wait for jobs.

    Raises:
        InputError: the environment has no number of seconds there.
    """
    told = os.environ.get(LIMIT)
    try:
        seconds = MOST_QUEUE_SECONDS if told is None else float(told)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"{LIMIT}={told} in the environment; wanted a number of seconds above 0")
    return seconds
