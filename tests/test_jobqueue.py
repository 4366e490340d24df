"""Dask workers as jobs of SLURM: real clusters of dask-jobqueue, whose `sbatch` starts the script on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dask.config
import distributed
import psutil
import pytest
from pydantic import TypeAdapter, ValidationError
from rich.markup import render

from dejavu.cluster import Cluster, load_cluster
from dejavu.foundation.dask_workers import SYSTEMS, Queue, queue_of, workers_of
from dejavu.foundation.errors import InputError
from dejavu.init import Draw
from dejavu.trials import JobError, TrialSpec, check_queue, client_of, job_queue, run_trials, started_jobs
from dejavu.workload import Workload
from flows.inputs import check_dask_address
from flows.parameters import DaskAddress, DaskWorkers
from tests.conftest import TINY
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[1]
TINY_FILE = Path("tiny.yaml")
CORES = """
nodes: [{nodes}]
links: {{default: {{bandwidth: 1 GB/s, latency: 100 us}}}}
devices: {{core: {{kind: cpu, memory: 4 GiB, bandwidth: 10 GB/s, float32: 100 GFLOP/s}}}}
"""
TWO = "{name: cores, count: 2, devices: {type: core, count: 1}}"
NAMED = "{name: cores, hosts: [alpha, beta], devices: {type: core, count: 1}}"
SETTINGS = {"cores": 1, "memory": "2 GiB", "queue": "short", "account": "mine", "walltime": "00:10:00"}

# Each job is a process group whose number is in a file of its own.
SBATCH = """#!/bin/bash
jobs={jobs}
number=100
until mkdir $jobs/$number 2>/dev/null; do number=$((number + 1)); done
cp "$1" $jobs/$number/script
setsid bash $jobs/$number/script </dev/null >$jobs/$number/printed 2>&1 &
echo $! >$jobs/$number/pid
echo "Submitted batch job $number"
"""
SCANCEL = """#!/bin/bash
touch {jobs}/$1/cancelled
if [ -e {jobs}/$1/pid ]; then kill -TERM -- -$(cat {jobs}/$1/pid); fi
"""
WAITING = """#!/bin/bash
number=100
until mkdir {jobs}/$number 2>/dev/null; do number=$((number + 1)); done
echo "Submitted batch job $number"
"""
TAKES_ONE = """#!/bin/bash
mkdir {jobs}/100 2>/dev/null || {{ echo "Invalid account" >&2; exit 1; }}
echo "Submitted batch job 100"
"""


@dataclass
class Slurm:
    """Commands on PATH in SLURM's place, and what was submitted by them."""

    bin: Path
    jobs: Path

    def command(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text.format(jobs=self.jobs))
        path.chmod(0o755)

    def scripts(self) -> list[str]:
        return [(job / "script").read_text() for job in sorted(self.jobs.iterdir())]

    def cancelled(self) -> list[bool]:
        return [(job / "cancelled").exists() for job in sorted(self.jobs.iterdir())]

    def processes(self) -> list[psutil.Process]:
        groups = {int((job / "pid").read_text()) for job in self.jobs.iterdir() if (job / "pid").exists()}
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def has_ended(self) -> bool:
        _, left = psutil.wait_procs(self.processes(), timeout=PATIENCE_SECONDS)
        return not left


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A project's folder, SLURM's commands, and Dask's configuration of its jobs on loopback."""
    project = tmp_path / "a project"  # whose name the lines of a script would not quote
    found = Slurm(tmp_path / "bin", tmp_path / "jobs")
    for folder in (project, found.bin, found.jobs):
        folder.mkdir()
    found.command("sbatch", SBATCH)
    found.command("scancel", SCANCEL)
    found.command(
        "qsub", SBATCH.replace("setsid", "cd /\nsetsid").replace("Submitted batch job $number", "$number.head")
    )
    found.command("qdel", SCANCEL)
    monkeypatch.chdir(project)
    monkeypatch.setenv("PATH", f"{found.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(dask.config, "PATH", str(tmp_path / "config"))  # dask-jobqueue writes its defaults there
    job_queue._package()
    settings = {**SETTINGS, "interface": "lo"}
    with dask.config.set({f"jobqueue.{name}.{key}": value for name in SYSTEMS for key, value in settings.items()}):
        yield found
    left = found.processes()
    for process in left:
        process.kill()
    assert not left


@pytest.fixture
def cluster_of(tmp_path: Path) -> Callable[[str], Cluster]:
    def load(nodes: str) -> Cluster:
        path = tmp_path / "cores.yaml"
        path.write_text(CORES.format(nodes=nodes))
        return load_cluster(path)

    return load


@pytest.fixture
def two(cluster_of: Callable[[str], Cluster]) -> Cluster:
    return cluster_of(TWO)


def certificates(work: Path = Path(".dejavu")) -> list[Path]:
    return sorted((work / "jobs").rglob("*.pem"))


# What is asked for


@pytest.mark.parametrize(
    ("typed", "wanted"), [("slurm", Queue("slurm")), ("4xpbs", Queue("pbs", 4)), ("", None), ("tls://a:1", None)]
)
def test_a_batch_system_is_read(typed: str, wanted: Queue | None) -> None:
    assert queue_of(typed) == wanted
    assert wanted is None or str(wanted) == typed
    assert TypeAdapter(DaskWorkers).validate_python(typed) == typed


@pytest.mark.parametrize("typed", [DaskAddress, DaskWorkers, Workload])
def test_prefect_shows_whole_what_a_field_wants(typed: Any) -> None:
    """Its client prints patterns by rich, to which what is in brackets may be markup."""
    patterns = re.findall(r'"pattern": "(.*?)"[,}]', json.dumps(TypeAdapter(typed).json_schema()))
    assert patterns and all(render(each).plain == each for each in patterns)


@pytest.mark.parametrize(
    ("typed", "words"),
    [("slrum", "did you mean 'slurm'"), ("sge", "wanted slurm or pbs"), ("0xslurm", "is 0 jobs; wanted 1 or more")],
)
def test_another_word_is_no_batch_system(typed: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        queue_of(typed)
    with pytest.raises(ValidationError):
        TypeAdapter(DaskWorkers).validate_python(typed)


@pytest.mark.parametrize("address", ["localhost:8786", "10.0.0.1:8786", "slurm:8786"])
def test_an_address_is_none(address: str) -> None:
    assert queue_of(address) is None


def test_a_watch_wants_an_address() -> None:
    with pytest.raises(InputError, match="--dask slurm starts workers, and a watch looks at those that are there"):
        check_dask_address("slurm")


def test_the_package_is_wanted(slurm: Slurm, two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == job_queue.PACKAGE else find(name))
    with pytest.raises(InputError, match=r"need the package dask-jobqueue.*pipe-dejavu\[jobqueue\]"):
        check_queue(Queue("slurm"), two, trains=False)


@pytest.mark.parametrize("command", ["sbatch", "scancel"])
def test_commands_are_wanted(slurm: Slurm, two: Cluster, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm.bin / command).unlink()
    monkeypatch.setenv("PATH", str(slurm.bin))
    with pytest.raises(InputError, match=f"there is no {command} on PATH; wanted a machine from which SLURM"):
        check_queue(Queue("slurm"), two, trains=False)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("cores", None, r"jobqueue\.slurm\.cores is not set in Dask's configuration \(.*config/jobqueue\.yaml\)"),
        ("cores", "many", r"jobqueue\.slurm\.cores is 'many'"),
        ("cores", 0, r"jobqueue\.slurm\.cores is 0"),
        ("memory", None, r"jobqueue\.slurm\.memory is not set"),
        ("memory", "much", r"jobqueue\.slurm\.memory is 'much'"),
        ("processes", True, r"jobqueue\.slurm\.processes is True"),
    ],
)
def test_what_a_job_asks_for_is_wanted(slurm: Slurm, two: Cluster, key: str, value: object, words: str) -> None:
    with dask.config.set({f"jobqueue.slurm.{key}": value}), pytest.raises(InputError, match=words):
        check_queue(Queue("slurm"), two, trains=False)


@pytest.mark.parametrize("told", ["soon", "0", "-1", "nan", "inf"])
def test_the_limit_is_a_number_of_seconds(
    slurm: Slurm, two: Cluster, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(job_queue.LIMIT, told)
    with pytest.raises(InputError, match=f"DEJAVU_QUEUE_SECONDS={told} .*wanted a number of seconds above 0"):
        check_queue(Queue("slurm"), two, trains=False)


def test_ranks_want_a_job_on_every_node(slurm: Slurm, cluster_of: Callable[[str], Cluster]) -> None:
    check_queue(Queue("slurm", 1), cluster_of(TWO), trains=False)
    with pytest.raises(InputError, match="Dask at 1xslurm is 1 job, and cores has 2 nodes; wanted one on each"):
        check_queue(Queue("slurm", 1), cluster_of(TWO), trains=True)
    mixed = f"{NAMED}, {{name: more, count: 1, devices: {{type: core}}}}"
    with pytest.raises(InputError, match="the nodes of more are only counted; wanted `hosts:`"):
        check_queue(Queue("slurm"), cluster_of(mixed), trains=True)
    check_queue(Queue("pbs"), cluster_of(TWO), trains=True)
    with pytest.raises(InputError, match=r"names its nodes \(alpha\), which jobs of PBS cannot ask for"):
        check_queue(Queue("pbs"), cluster_of(NAMED), trains=True)


# What runs


@pytest.mark.integration
def test_trials_run_in_jobs_by_tls(slurm: Slurm, two: Cluster, tiny: Workload, tmp_path: Path) -> None:
    said: list[str] = []
    specs = [TrialSpec(tiny, Draw(seed=seed), 2) for seed in range(4)]
    before, interrupted = dict(dask.config.get("distributed.comm.tls")), signal.getsignal(signal.SIGINT)
    with started_jobs(Queue("slurm"), two, Path.cwd() / ".dejavu", trains=True, say=said.append) as jobs:
        jobs.wait_for_all(said.append)
        assert jobs.address.startswith("tls://127.0.0.1:")
        assert [stat.S_IMODE(path.parent.stat().st_mode) for path in certificates()] == [0o700] * 3
        with client_of(jobs.address) as client:
            workers = workers_of(client)
            assert all(address.startswith("tls://") for address in workers)
            assert {about["name"] for about in workers.values()} == {"cores-0", "cores-1"}
            assert set(client.run(os.getcwd).values()) == {str(Path.cwd())}
            results = run_trials(client, specs, tmp_path / "trials")
        with pytest.raises(OSError), distributed.Client(jobs.address.replace("tls", "tcp"), timeout=2):
            pass
    assert [result.failure for result in results] == [""] * 4
    assert said[0] == "waiting for 2 SLURM jobs: 0 of 1 worker, for 3600 s at most"
    assert said[-1] == "2 workers of 2 SLURM jobs there"
    for script in slurm.scripts():
        assert {"#SBATCH -p short", "#SBATCH -A mine", "#SBATCH -t 00:10:00"} <= set(script.splitlines())
        assert "BEGIN" not in script  # nobody else can read a key there
    assert slurm.cancelled() == [True, True] and slurm.has_ended()
    assert not certificates() and dask.config.get("distributed.comm.tls") == before
    assert signal.getsignal(signal.SIGINT) is interrupted


@pytest.mark.integration
@pytest.mark.parametrize(("system", "ending"), [("slurm", KeyboardInterrupt), ("pbs", ValueError)])
def test_jobs_end_whatever_happens(slurm: Slurm, two: Cluster, system: str, ending: type[BaseException]) -> None:
    """Those of PBS start in another folder, as the user's own is."""
    with (
        pytest.raises(ending),
        started_jobs(Queue(system, 1), two, Path(".dejavu"), trains=False, say=lambda said: None) as jobs,
    ):
        with client_of(jobs.address) as client:
            assert list(client.run(os.getcwd).values()) == [str(Path.cwd())]
        raise ending
    assert slurm.cancelled() == [True] and slurm.has_ended() and not certificates()


@pytest.mark.integration
def test_jobs_that_do_not_start_are_said_and_cancelled(
    slurm: Slurm, two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.command("sbatch", WAITING)
    monkeypatch.setenv(job_queue.LIMIT, "0.5")
    words = r"^3 SLURM jobs started 0 workers within 0\.5 s; wanted 1\. What jobs print is in .dejavu/logs/jobs; "
    with (
        pytest.raises(JobError, match=words),
        started_jobs(Queue("slurm", 3), two, Path(".dejavu"), trains=False, say=lambda said: None),
    ):
        pass
    assert slurm.cancelled() == [True] * 3 and not certificates()


@pytest.mark.integration
def test_a_job_that_is_not_taken_is_said_and_the_others_cancelled(slurm: Slurm, two: Cluster) -> None:
    slurm.command("sbatch", TAKES_ONE)
    with (
        pytest.raises(JobError, match=r"^sbatch did not take 2 jobs: .*Invalid account"),
        started_jobs(Queue("slurm"), two, Path(".dejavu"), trains=False, say=lambda said: None),
    ):
        pass
    assert slurm.cancelled() == [True] and not certificates()


@pytest.mark.integration
def test_nodes_with_names_are_asked_for(slurm: Slurm, cluster_of: Callable[[str], Cluster]) -> None:
    slurm.command("sbatch", SBATCH.replace("setsid bash $jobs", "setsid true $jobs"))
    options: dict[str, Any] = {"jobqueue.slurm.job-extra-directives": ["--exclusive"]}
    cluster = cluster_of(NAMED)
    with dask.config.set(options), pytest.MonkeyPatch.context() as patch, pytest.raises(JobError):
        patch.setenv(job_queue.LIMIT, "0.5")
        with started_jobs(Queue("slurm", 3), cluster, Path(".dejavu"), trains=True, say=lambda said: None):
            pass
    scripts = slurm.scripts()
    assert all("#SBATCH --exclusive" in script for script in scripts)
    asked = {
        name: [line for line in script.splitlines() if "--nodelist" in line]
        for script in scripts
        for name in ("alpha", "beta", "slurm-2")
        if f"--name {name} " in script
    }
    assert asked == {"alpha": ["#SBATCH --nodelist=alpha"], "beta": ["#SBATCH --nodelist=beta"], "slurm-2": []}


def words_of(*words: str, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """A command of a project, with Dask's configuration in a file."""
    folder = tmp_path / "config"
    folder.mkdir(exist_ok=True)
    settings = {"jobqueue": {"slurm": {**SETTINGS, "interface": "lo"}}}
    (folder / "jobqueue.yaml").write_text(json.dumps(settings))
    Path("cores.yaml").write_text(CORES.format(nodes=TWO))
    TINY_FILE.write_text(json.dumps(TINY.model_dump(mode="json", exclude_defaults=True)))
    command = [sys.executable, "-m", "flows", *words, "--cluster", "cores.yaml", "--workload", str(TINY_FILE)]
    return command, {**os.environ, "DASK_CONFIG": str(folder)}


@pytest.mark.integration
@pytest.mark.parametrize(
    "words", [("plan",), pytest.param(("run", "--no-train"), marks=pytest.mark.slow)], ids=" ".join
)
def test_a_command_searches_in_jobs(slurm: Slurm, tmp_path: Path, words: tuple[str, ...]) -> None:
    few = ("--search", "uniform", "--microbatches", "4", "--dask", "1xslurm")
    command, environment = words_of(*words, *few, tmp_path=tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 worker of 1 SLURM job there" in done.stderr
    assert slurm.cancelled() == [True] and slurm.has_ended() and not certificates()


@pytest.mark.integration
@pytest.mark.slow
def test_a_command_that_is_interrupted_ends_its_jobs(slurm: Slurm, tmp_path: Path) -> None:
    slurm.command("sbatch", WAITING)
    command, environment = words_of("plan", "--dask", "2xslurm", tmp_path=tmp_path)
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what runs in a shell's background does not
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heeding) as running:
        assert running.stderr is not None
        said = []
        for line in running.stderr:
            said.append(line)
            if "waiting for 2 SLURM jobs" in line:
                break
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        said += running.stderr.readlines()
    assert running.returncode == 130, "".join(said)
    assert "Traceback" not in "".join(said)
    assert slurm.cancelled() == [True, True] and not certificates()
