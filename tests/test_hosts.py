"""One training on several hosts, reached by Dask: two names of this machine, and two network namespaces."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import distributed
import psutil
import pytest

from benchmarks.pipeline.emulation import BURST, CABLE, QUEUE, EmulationError, apart, own_name
from dejavu.foundation.dask_workers import workers_of
from dejavu.foundation.errors import InputError
from dejavu.launch.launcher import LaunchError, launch, torchrun_line
from dejavu.launch.rendezvous import Pulse
from dejavu.migration.launching import launch_changing
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.process.own_rank import HOST, own_rank, ranks_on
from dejavu.watching import fastest, slow_links
from dejavu.watching.links import Messages, Tried
from dejavu.workload import ReplanSettings, Workload
from dejavu.workload.models import layers_of
from tests.changing import running_problem
from tests.conftest import TINY
from tests.launching import TOLERANCE, job_of, largest_difference, once, ranks, runtime_processes
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[1]
TWO_AND_ONE = ("alpha", "beta", "alpha")  # hosts of ranks 0, 1, 2: torchrun would number them otherwise


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process of a launch outlives it."""
    yield
    psutil.wait_procs(runtime_processes(), timeout=PATIENCE_SECONDS)
    assert not runtime_processes()


def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@contextmanager
def dask_process(*words: str, before: tuple[str, ...] = (), folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`dask scheduler` or `dask worker`, perhaps inside a network namespace."""
    with (folder / f"{words[0]}-{time.monotonic_ns()}.log").open("wb") as log:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "distributed.cli." + words[0], *words[1:]],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The file of a scheduler on loopback."""
    folder = tmp_path_factory.mktemp("scheduler")
    file = folder / "scheduler.json"
    words = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    with dask_process("dask_scheduler", *words, folder=folder):
        wait_until(file.exists, "the scheduler did not start")
        yield str(file)


@contextmanager
def worker(name: str, scheduler: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = ("--scheduler-file", scheduler, "--name", name, "--no-nanny", "--nthreads", "1", "--no-dashboard")
    with dask_process(
        "dask_worker", *words, "--host", "127.0.0.1", "--local-directory", str(folder), folder=folder
    ) as process:
        yield process


@pytest.fixture
def client(scheduler: str) -> Iterator[distributed.Client]:
    with distributed.Client(scheduler_file=scheduler) as client:
        yield client


@pytest.fixture(scope="module")
def start_worker(
    scheduler: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts workers that end with the last of these tests."""
    folder = tmp_path_factory.mktemp("dask")
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(worker(name, scheduler, folder))


@pytest.fixture(scope="module")
def running() -> dict[str, subprocess.Popen[bytes]]:
    return {}


@pytest.fixture
def two_workers(
    client: distributed.Client,
    start_worker: Callable[[str], subprocess.Popen[bytes]],
    running: dict[str, subprocess.Popen[bytes]],
) -> dict[str, subprocess.Popen[bytes]]:
    """Workers named alpha and beta, which stand for hosts; one that an earlier test killed is started again."""
    for name in ("alpha", "beta"):
        if name not in running or running[name].poll() is not None:
            running[name] = start_worker(name)
    client.wait_for_workers(2, timeout=PATIENCE_SECONDS)
    return running


def test_each_rank_takes_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(TINY, tmp_path, (1, 2, 3, 4), ("b", "a", "a", "c"))
    found = []
    for host in ("a", "b", "c"):
        for local_rank in range(len(ranks_on(job.binding, host))):
            monkeypatch.setenv(HOST, host)
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
            monkeypatch.setenv("RANK", str(len(found)))  # torchrun's own, which says nothing of the plan
            rank = own_rank(job.binding)
            assert job.binding.placements[rank].device.host == host
            found.append(rank)
    assert sorted(found) == list(range(5))
    monkeypatch.delenv(HOST)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    with pytest.raises(InputError, match=f"{HOST} is not set"):
        own_rank(job.binding)


def test_the_pulse_of_an_earlier_launcher_is_removed(tmp_path: Path) -> None:
    first = Pulse(tmp_path)
    second = Pulse(tmp_path)
    assert not first.folder.exists() and second.folder.exists()
    first.end()
    second.end()
    assert not list(tmp_path.iterdir())


def test_hosts_that_cannot_be_reached_are_refused(
    tmp_path: Path, client: distributed.Client, two_workers: dict[str, subprocess.Popen[bytes]]
) -> None:
    job = job_of(TINY, tmp_path / "run", (1, 2), ("alpha", "gamma", "beta"))
    with pytest.raises(InputError, match=r"no Dask worker on gamma; there are workers on alpha \(127.*\), beta \(127"):
        launch(job, client)
    with pytest.raises(InputError, match="on alpha, beta, gamma; without a Dask client"):
        launch(job)
    assert not (tmp_path / "run" / "job.json").exists()


def test_no_worker_is_missed_while_the_client_s_own_copy_is_written_anew(
    client: distributed.Client, two_workers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """As Dask's timer does every few seconds; here as often as it can."""
    end, names = threading.Event(), set(two_workers)

    def overwrite() -> None:
        while not end.is_set():
            client.sync(client._update_scheduler_info)

    other = threading.Thread(target=overwrite)
    other.start()
    try:
        for _ in range(300):
            assert {about["name"] for about in workers_of(client).values()} == names
    finally:
        end.set()
        other.join()


@pytest.mark.slow
def test_two_hosts_train_as_one_process_and_survive_a_killed_rank(
    tmp_path: Path, client: distributed.Client, two_workers: dict[str, subprocess.Popen[bytes]]
) -> None:
    workload = TINY.model_copy(update={"num_steps": 60, "checkpoint_every": 10})
    job = job_of(workload, tmp_path / "run", (2, 3), TWO_AND_ONE)

    def kill() -> None:
        (of_beta,) = (rank for rank in ranks() if rank.environ()[HOST] == "beta")
        of_beta.kill()

    result = launch(job, client, on_step=once(kill, 25))
    assert result.failures == ("attempt 0: rank 1 (stage 1 on beta) was ended by SIGKILL",)
    assert result.restarts == 1 and result.resumed_from_step in (20, 30)
    assert largest_difference(workload, result.losses) < 10 * TOLERANCE


@pytest.mark.slow
def test_the_lines_for_several_hosts_train_by_hand(
    tmp_path: Path, client: distributed.Client, two_workers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """One in a shell for each host."""
    job = job_of(TINY, tmp_path / "run", (2, 3), TWO_AND_ONE)
    job.write()
    lines = torchrun_line(job, client).splitlines()
    assert len(lines) == 2 and all("--nnodes=2" in line for line in lines)
    torchrun = shlex.join([sys.executable, "-m", "torch.distributed.run"])
    shells = [subprocess.Popen(line.replace(" torchrun ", f" {torchrun} "), shell=True, cwd=ROOT) for line in lines]
    assert [shell.wait(120) for shell in shells] == [0, 0]
    result = TrainingResult.from_dict(json.loads(Path(f"{job.folder}-again/result.json").read_text()))
    assert largest_difference(TINY, result.losses) < TOLERANCE


@pytest.mark.slow
def test_a_killed_dask_worker_takes_its_ranks_with_it_and_is_named(
    tmp_path: Path, client: distributed.Client, two_workers: dict[str, subprocess.Popen[bytes]]
) -> None:
    job = job_of(TINY.model_copy(update={"num_steps": 2000}), tmp_path / "run", (2,), ("alpha", "beta"))
    with pytest.raises(LaunchError, match=r"Dask worker on beta .* has gone"):
        launch(job, client, on_step=once(two_workers["beta"].kill, 5))
    assert not list((tmp_path / "run").glob(".launch-*"))


@pytest.mark.slow
def test_a_killed_dask_worker_costs_a_training_that_may_migrate_its_host_only(
    tmp_path: Path, client: distributed.Client, two_workers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """Its stage goes on from the copy in the other host's memory."""
    migrate = TINY.model_copy(update={"num_steps": 120, "replan": ReplanSettings(action="migrate")})
    job = job_of(migrate, tmp_path / "run", (2,), ("alpha", "beta"))
    names = [builder.name for builder in layers_of(migrate)]
    running = running_problem(names, ("alpha", "beta"), migrate.num_microbatches, per_host=2)
    result = launch_changing(job, running, client, on_step=once(two_workers["beta"].kill, 15))
    first = result.migrations[0]
    assert "host beta is lost; " in first.reason and first.steps_lost <= 1
    assert result.failures == ("attempt 0: host beta is lost",)
    assert largest_difference(migrate, result.losses) < TOLERANCE


@pytest.mark.slow
def test_agents_end_when_their_launcher_is_killed(
    tmp_path: Path, scheduler: str, two_workers: dict[str, subprocess.Popen[bytes]]
) -> None:
    job = job_of(TINY.model_copy(update={"num_steps": 5000}), tmp_path / "run", (2,), ("alpha", "beta"))
    launcher = launched_elsewhere(job, ("--scheduler-file", scheduler))
    try:
        wait_until(job.progress_path.exists, "no step was done")
    finally:
        launcher.kill()
        launcher.wait()
    next_one = Pulse(Path(job.folder))  # as the next launch does; without it, they end after a while without a pulse
    wait_until(lambda: not runtime_processes(), "agents without a launcher go on")
    next_one.end()


LAUNCH = """
import sys
from pathlib import Path
from distributed import Client
from dejavu.runtime.job import TrainingJob
from dejavu.launch.launcher import launch

where = {"scheduler_file": sys.argv[2]} if sys.argv[1] == "--scheduler-file" else {"address": sys.argv[2]}
with Client(**where, timeout=300) as client:
    client.wait_for_workers(2, timeout=300)
    launch(TrainingJob.read(Path(sys.argv[3])), client)
"""


def launched_elsewhere(
    job: TrainingJob, where: tuple[str, str], before: tuple[str, ...] = (), stderr: IO[str] | None = None
) -> subprocess.Popen[bytes]:
    """A launch in a process of its own, perhaps inside a network namespace."""
    path = job.write()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [*before, sys.executable, "-c", LAUNCH, *where, str(path)]
    return subprocess.Popen(words, cwd=ROOT, env=environment, stderr=stderr)


RATE = "400mbit"


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """Two network namespaces, alpha at 10.77.0.1 and beta at 10.77.0.2, joined by a bridge in a third; each sends at
    `RATE` at most. The machine's own network, its loopback included, is not touched.
    """
    names = {name: f"dejavu-{os.getpid()}-{name}" for name in ("switch", "alpha", "beta")}

    def ip(where: str, *words: str) -> None:
        subprocess.run(["ip", "-n", names[where], *words], check=True, capture_output=True)

    try:
        for name in names.values():
            done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")
        ip("switch", "link", "add", "bridge", "type", "bridge")
        ip("switch", "link", "set", "bridge", "up")
        for number, host in enumerate(("alpha", "beta"), start=1):
            ip(host, "link", "add", "cable", "type", "veth", "peer", "name", host, "netns", names["switch"])
            ip("switch", "link", "set", host, "master", "bridge", "up")
            ip(host, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip(host, "link", "set", "cable", "up")
            ip(host, "link", "set", "lo", "up")
            limit = ["qdisc", "add", "dev", "cable", "root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms"]
            done = subprocess.run(["tc", "-n", names[host], *limit], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"limiting bandwidth is not permitted here: {done.stderr.strip()}")
        yield {name: names[name] for name in ("alpha", "beta")}
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be set up here: {error}")
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_two_hosts_with_a_network_between_them(namespaces: dict[str, str], tmp_path: Path) -> None:
    """Two ranks on one host and one on the other, by way of a real network; losses as of one process."""
    workload = TINY
    job = job_of(workload, tmp_path / "run", (1, 3), TWO_AND_ONE)
    inside = {name: ("ip", "netns", "exec", namespace) for name, namespace in namespaces.items()}
    folder, address = tmp_path / "dask", "tcp://10.77.0.1:8786"
    folder.mkdir()
    with ExitStack() as stack:
        words = ("--host", "10.77.0.1", "--port", "8786", "--no-dashboard")
        stack.enter_context(dask_process("dask_scheduler", *words, before=inside["alpha"], folder=folder))
        for name in ("alpha", "beta"):
            words = (address, "--name", name, "--no-nanny", "--nthreads", "1", "--no-dashboard")
            words = (*words, "--local-directory", str(folder))
            stack.enter_context(dask_process("dask_worker", *words, before=inside[name], folder=folder))
        launcher = launched_elsewhere(job, ("--address", address), before=inside["alpha"])
        try:
            assert launcher.wait(180) == 0
        finally:
            launcher.kill()
    result = TrainingResult.from_dict(json.loads(job.result_path.read_text()))
    assert result.restarts == 0 and len(result.losses) == workload.num_steps
    assert largest_difference(workload, result.losses) < TOLERANCE
    for host in ("alpha", "beta"):
        sent = bytes_sent(namespaces[host])
        least = workload.num_steps * len(job.binding.plan.cuts) * sum_of_a_cut(workload)
        assert sent > least, "the ranks did not talk by way of the cable"


@pytest.mark.slow
def test_a_cable_that_is_cut_is_named_and_nothing_goes_on(namespaces: dict[str, str], tmp_path: Path) -> None:
    """Fault 34: no byte arrives any more, and no connection is closed. Dask's own time for a silent worker is 5 min."""
    job = job_of(TINY.model_copy(update={"num_steps": 5000}), tmp_path / "run", (1, 3), TWO_AND_ONE)
    inside = {name: ("ip", "netns", "exec", namespace) for name, namespace in namespaces.items()}
    folder, address, said = tmp_path / "dask", "tcp://10.77.0.1:8786", tmp_path / "said"
    folder.mkdir()
    with ExitStack() as stack:
        impatient = (*inside["alpha"], "env", "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL=15s")
        words = ("--host", "10.77.0.1", "--port", "8786", "--no-dashboard")
        stack.enter_context(dask_process("dask_scheduler", *words, before=impatient, folder=folder))
        for name in ("alpha", "beta"):
            words = (address, "--name", name, "--no-nanny", "--nthreads", "1", "--no-dashboard")
            words = (*words, "--local-directory", str(folder))
            stack.enter_context(dask_process("dask_worker", *words, before=inside[name], folder=folder))
        with said.open("w") as log:
            launcher = launched_elsewhere(job, ("--address", address), before=inside["alpha"], stderr=log)
        try:
            wait_until(job.progress_path.exists, "no step was done")
            subprocess.run(["ip", "-n", namespaces["beta"], "link", "set", "cable", "down"], check=True)
            assert launcher.wait(PATIENCE_SECONDS) == 1
        finally:
            launcher.kill()
        # Beta's agent ends when it sees no pulse of the launcher.
        psutil.wait_procs(runtime_processes(), timeout=PATIENCE_SECONDS)
        assert not runtime_processes()
    assert "LaunchError: the Dask worker on beta" in said.read_text().splitlines()[-1]


TRY = """
import json, sys
from distributed import Client
from dejavu.foundation.dask_workers import workers_of
from dejavu.watching import try_links

with Client(sys.argv[1], timeout=300) as client:
    client.wait_for_workers(2, timeout=300)
    workers = {about["name"]: address for address, about in workers_of(client).items()}
    for _ in sys.stdin:
        print(json.dumps(try_links(client, workers)), flush=True)
"""


@pytest.mark.slow
def test_a_link_at_a_tenth_is_found_by_messages_between_workers(namespaces: dict[str, str], tmp_path: Path) -> None:
    """And nothing while it is as usual; and again when it has recovered."""
    inside = {name: ("ip", "netns", "exec", namespace) for name, namespace in namespaces.items()}

    def limit(rate: str) -> None:
        words = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(["tc", "-n", namespaces["beta"], "qdisc", "change", "dev", "cable", "root", *words], check=True)

    with ExitStack() as stack:
        enter = stack.enter_context
        place = ("--host", "10.77.0.1", "--port", "8786", "--no-dashboard")
        enter(dask_process("dask_scheduler", *place, before=inside["alpha"], folder=tmp_path))
        for number, host in enumerate(("alpha", "beta"), start=1):
            words = ("tcp://10.77.0.1:8786", "--name", host, "--host", f"10.77.0.{number}", "--nthreads", "1")
            more = ("--no-nanny", "--no-dashboard", "--local-directory", str(tmp_path / host))
            enter(dask_process("dask_worker", *words, *more, before=inside[host], folder=tmp_path))
        script = [*inside["alpha"], sys.executable, "-c", TRY, "tcp://10.77.0.1:8786"]
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        asked = enter(
            subprocess.Popen(script, env=own, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        question, answer = asked.stdin, asked.stdout
        assert question and answer

        def messages() -> Messages:
            print(file=question, flush=True)
            return Messages(*json.loads(answer.readline()))

        def tried() -> Tried:
            return messages().moved

        usual = fastest({}, messages().took)
        assert {(host, other) for host in usual for other in usual[host]} == {("alpha", "beta"), ("beta", "alpha")}
        assert slow_links(usual, tried(), {}) == {}
        limit("40mbit")  # what beta sends
        slow = slow_links(usual, tried(), {})
        assert slow.keys() == {"alpha"}, "who hears slowly, of two"
        assert 5 <= slow["alpha"] <= 20
        assert slow_links(usual, tried(), slow) == {}, "known already"
        limit(RATE)
        assert slow_links(usual, tried(), slow) == {"alpha": 1.0}
        question.close()
        assert asked.wait(60) == 0


def bytes_sent(namespace: str) -> int:
    """What the host has sent over its cable."""
    shown = subprocess.run(["ip", "-n", namespace, "-json", "-s", "link"], capture_output=True, check=True).stdout
    return next(link["stats64"]["tx"]["bytes"] for link in json.loads(shown) if link["ifname"] == "cable")


def sum_of_a_cut(workload: Workload) -> int:
    """Bytes of a step's activations (or their gradients) across one cut, float32."""
    return workload.batch_size * workload.sequence_length * int(workload.model_options["width"]) * 4


SLOW_CORES = """
nodes: [{name: cores, hosts: [alpha, beta, gamma], devices: {type: slow-core, count: 1}}]
links: {default: {bandwidth: 200 Mbit/s, latency: 1 ms}}
devices: {slow-core: {kind: cpu, memory: 2 GiB, bandwidth: 2 GB/s, float32: 1 GFLOP/s}}
"""
BITS_PER_SECOND, A_TENTH = 200e6, 0.1


def limit(host: str, namespaces: dict[str, str], share: float) -> None:
    """Let a host's cable pass this share of what it usually does, both ways."""
    rate = ("rate", f"{BITS_PER_SECOND * share:.0f}bit", "burst", BURST, "latency", QUEUE)
    for namespace, device in ((namespaces[host], CABLE), (own_name("switch"), host)):
        words = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate]
        subprocess.run(words, check=True, capture_output=True)


@pytest.mark.slow
def test_a_link_that_drops_to_a_tenth_in_a_whole_flow_is_named_and_the_training_goes_on(tmp_path: Path) -> None:
    """Fault 34: from the cluster file to the page, with three hosts whose traffic is limited by the kernel."""
    (tmp_path / "hosts.yaml").write_text(SLOW_CORES)
    workload = {
        "model_options": {"num_blocks": 4, "width": 64, "num_heads": 2},
        "sequence_length": 64,
        "batch_size": 16,
        "num_microbatches": 4,
        "num_steps": 300,
        "checkpoint_every": 100,
        "compare": False,
        "trials": {"count": 0},
        "replan": {"action": "migrate"},
    }
    (tmp_path / "workload.yaml").write_text(json.dumps(workload))
    hosts, log, address = ("alpha", "beta", "gamma"), tmp_path / "log", "tcp://10.78.0.1:8786"
    with ExitStack() as stack:
        try:
            namespaces = stack.enter_context(apart(hosts, BITS_PER_SECOND))
        except EmulationError as error:
            pytest.skip(str(error))
        inside = {name: ("nsenter", f"--net=/run/netns/{namespace}") for name, namespace in namespaces.items()}
        words = ("--host", "10.78.0.1", "--port", "8786", "--no-dashboard")
        stack.enter_context(dask_process("dask_scheduler", *words, before=inside["alpha"], folder=tmp_path))
        for name in hosts:
            words = (address, "--name", name, "--no-nanny", "--nthreads", "1", "--no-dashboard")
            words = (*words, "--local-directory", str(tmp_path))
            stack.enter_context(dask_process("dask_worker", *words, before=inside[name], folder=tmp_path))
        words = (
            "run",
            "--cluster",
            "hosts.yaml",
            "--workload",
            "workload.yaml",
            "--microbatches",
            "4",
            "--dask",
            address,
        )
        with log.open("w") as output:
            flow = subprocess.Popen(
                [*inside["alpha"], sys.executable, "-m", "flows", *words],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DEJAVU_ALLOW_PLAIN_DASK": "1"},
                stdout=output,
                stderr=output,
            )
        try:
            wait_until(lambda: "step 50 of 300" in log.read_text() or flow.poll() is not None, "no training")
            assert flow.poll() is None, log.read_text()
            limit("beta", namespaces, A_TENTH)
            assert flow.wait(600) == 0, log.read_text()
        finally:
            flow.kill()
            flow.wait()
    said = " ".join(log.read_text().split())
    assert re.search(r"the link of beta takes [\d.]+ × as long", said), said
    assert "step 300 of 300: loss" in said and "Traceback" not in said
    (result,) = (tmp_path / ".dejavu" / "runs").glob("*/result.json")
    assert len(TrainingResult.from_dict(json.loads(result.read_text())).losses) == 300
