"""Several hosts: find the Dask worker on each, inspect the host, and run one elastic agent there.

The hosts are reached through the Dask client that is passed in. All files go through the job's folder, which every host
sees.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dejavu.foundation.dask_workers import workers_of
from dejavu.foundation.errors import InputError
from dejavu.runtime.process import GRACE_SECONDS, end_agent, named_parent, rank_environment
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.process.own_rank import HOST

PULSE_SECONDS = 1.0
LAUNCHER_LOST_SECONDS = 60.0  # without a pulse of the launcher; a shared file system may show it late
WORKERS_SECONDS = 2.0  # between two queries of Dask's workers
_LAUNCHES = ".launch-"
_PULSE = "pulse"
_NOT_FROM_DASK = "MALLOC_TRIM_THRESHOLD_"  # Dask sets it; it makes training 1.5 × slower


@dataclass(frozen=True)
class Host:
    """A host of the plan, and what it has now.

    Attributes:
        name: as in the plan.
        address: IP address by which other hosts reach it.
        worker: the Dask worker on it; empty for this machine.
        interface: the network interface that has the address.
        num_gpus: as torch sees them.
        free_bytes: available memory; `free_gpu_bytes`: of each GPU, where it was asked for.
        free_port: a port that nobody listened on.
        sees_folder: the job's folder is the same there.
    """

    name: str
    address: str
    worker: str
    interface: str
    num_gpus: int
    free_bytes: int
    free_gpu_bytes: tuple[int, ...]
    free_port: int
    sees_folder: bool


def is_here(host: str) -> bool:
    """Return whether the name is this machine's."""
    return host in {"localhost", "127.0.0.1", os.uname().nodename}


def find_workers(client: Any, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Find each host's Dask worker and address: by the worker's name, its address, or its machine's name.

    Args:
        client: a `distributed.Client`.

    Raises:
        InputError: a host has no worker.
    """
    workers = workers_of(client)
    machines = client.run(socket.gethostname) if workers else {}
    chosen = match_workers(names, workers, machines)
    found = {name: (worker, workers[worker]["host"]) for name, worker in chosen.items()}
    if missing := [name for name in names if name not in found]:
        have = ", ".join(sorted(f"{about['name']} ({about['host']})" for about in workers.values()))
        raise InputError(
            f"no Dask worker on {', '.join(missing)}; there are workers on {have or 'no host'}: start one on each host "
            "of the plan (`dask worker SCHEDULER --name HOST`)"
        )
    return found


def match_workers(
    names: Iterable[str], workers: Mapping[str, Mapping[str, Any]], machines: Mapping[str, str]
) -> dict[str, str]:
    """Return the worker of each host that has one, each of another: by its name, its address, or its machine's name.

    Args:
        workers: by their addresses, as `workers_of` tells of them.
        machines: the name of each worker's machine.
    """
    found: dict[str, str] = {}
    names = list(names)
    for known in (
        {worker: str(about["name"]) for worker, about in workers.items()},
        {worker: str(about["host"]) for worker, about in workers.items()},
        machines,
    ):  # what names a worker best is asked of all hosts first
        for name in names:
            if name not in found:
                free = (worker for worker, other in known.items() if other == name and worker not in found.values())
                if (worker := min(free, default=None)) is not None:
                    found[name] = worker
    return {name: found[name] for name in names if name in found}


def look_at_hosts(client: Any, names: Sequence[str], launch_folder: Path, *, gpu_memory: bool) -> tuple[Host, ...]:
    """Inspect all hosts as they are now; see `find_workers`."""
    found = find_workers(client, names)
    return tuple(
        look_at_host(client, name, *place, launch_folder, gpu_memory=gpu_memory) for name, place in found.items()
    )


def look_at_host(client: Any, name: str, worker: str, address: str, launch_folder: Path, *, gpu_memory: bool) -> Host:
    """Inspect the host of a worker as it is now."""
    facts = client.run(look, address, str(launch_folder), gpu_memory, workers=[worker])[worker]
    return Host(name, address, worker, **facts)


def look_here(names: Sequence[str], launch_folder: Path, *, gpu_memory: bool) -> tuple[Host, ...]:
    """Inspect this machine, under all its names."""
    facts = look("127.0.0.1", str(launch_folder), gpu_memory)
    return tuple(Host(name, "localhost", "", **facts) for name in names)


def look(address: str, launch_folder: str, gpu_memory: bool) -> dict[str, Any]:
    """Inspect the host that this runs on."""
    import torch  # a Dask worker may never have needed it

    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    count = torch.cuda.device_count()
    return {
        "interface": _interface(address),
        "num_gpus": count,
        "free_bytes": psutil.virtual_memory().available,
        "free_gpu_bytes": _free_gpu_bytes() if gpu_memory and count else (),
        "free_port": port,
        "sees_folder": (Path(launch_folder) / _PULSE).exists(),
    }


def _interface(address: str) -> str:
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        if any(entry.address == address for entry in entries):
            return name
    raise LaunchError(f"no network interface of {socket.gethostname()} has the address {address}")


def _free_gpu_bytes() -> tuple[int, ...]:
    """Ask in a child process: asking creates a CUDA context, which this process should not have."""
    code = "import torch; print(*(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.split()))


class Pulse:
    """A folder for one launch inside the job's, with the launcher's heartbeat; without it other hosts' agents end."""

    def __init__(self, job_folder: Path) -> None:
        job_folder.mkdir(parents=True, exist_ok=True)
        for stale in job_folder.glob(f"{_LAUNCHES}*"):  # of a killed launcher: its agents, if any, end now
            shutil.rmtree(stale, ignore_errors=True)
        self.id = uuid.uuid4().hex[:12]
        self.folder = job_folder / f"{_LAUNCHES}{self.id}"
        self.folder.mkdir()
        self._end = threading.Event()
        self._beat(0)
        threading.Thread(target=self._go_on, name="pulse", daemon=True).start()

    def _beat(self, count: int) -> None:
        with suppress(OSError):  # on a full disk the ranks fail, not this thread
            (self.folder / _PULSE).write_text(str(count))

    def _go_on(self) -> None:
        count = 0
        while not self._end.wait(PULSE_SECONDS):
            count += 1
            self._beat(count)

    def end(self) -> None:
        """Stop the heartbeat, upon which all agents of this launch end."""
        self._end.set()
        shutil.rmtree(self.folder, ignore_errors=True)


class HostAgents:
    """One agent on each of several hosts, each a task of the host's Dask worker."""

    def __init__(self, client: Any, pulse: Pulse) -> None:
        self.client, self.pulse = client, pulse
        self.futures: dict[Host, Any] = {}
        self._asked = time.monotonic()

    def start(self, host: Host, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the agent of a host; it takes one of the worker's threads until it ends."""
        self.futures[host] = self.client.submit(
            run_agent,
            list(words),
            {**environment, HOST: host.name},
            host.interface,
            str(log),
            str(self.pulse.folder / host.name),
            key=f"agent-{host.name}-{self.pulse.id}",
            workers=[host.worker],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )

    def poll(self) -> int | None:
        """Return the exit code of the first agent that failed, or 0 when all have succeeded; None: they still run.

        Raises:
            LaunchError: a host's Dask worker, and so its agent, is gone.
        """
        codes: list[int | None] = []
        for host, future in self.futures.items():
            if future.status in ("error", "cancelled", "lost"):
                raise LaunchError(f"the agent on {host.name} ended: {_why(future)}")
            codes.append(future.result() if future.status == "finished" else None)
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        if time.monotonic() - self._asked > WORKERS_SECONDS:
            for host, code in zip(self.futures, codes, strict=True):
                if code is None and self._has_gone(host):
                    raise LaunchError(f"the Dask worker on {host.name} ({host.worker}) has gone, and its ranks with it")
            self._asked = time.monotonic()
        return None

    def _has_gone(self, host: Host) -> bool:
        """Return whether the scheduler has lost the host's worker; if it does not respond, this is unknown: False."""
        try:
            return host.worker not in workers_of(self.client)
        except OSError:
            return False

    def end(self) -> None:
        """End all agents, and wait for those that can still be reached."""
        self.pulse.end()
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        while time.monotonic() < deadline and any(self._ends(*entry) for entry in self.futures.items()):
            time.sleep(0.1)
        self.client.cancel(list(self.futures.values()), force=True)

    def _ends(self, host: Host, future: Any) -> bool:
        """Return whether the agent is still ending, on a worker that is alive."""
        return future.status == "pending" and not self._has_gone(host)


def _why(future: Any) -> str:
    return str(future.exception()) if future.status == "error" else future.status


def run_agent(
    words: list[str],
    environment: dict[str, str],
    interface: str,
    log: str,
    launch_host: str,
    module: str = "dejavu.launch.agent",
) -> int:
    """Run an agent on a Dask worker until it or its launcher ends; return its exit code.

    Args:
        environment: in addition to the worker's own.
        launch_host: a path in the launch's folder for this agent alone.
        module: the agent's; torch's elastic one without it.

    Raises:
        LaunchError: Dask runs this a second time, because the worker that ran it died.
    """
    mine, pulse = Path(launch_host), Path(launch_host).with_name(_PULSE)
    try:
        mine.touch(exist_ok=False)
    except FileExistsError:
        raise LaunchError("its Dask worker died") from None
    kept = {name: value for name, value in rank_environment(interface).items() if name != _NOT_FROM_DASK}
    with Path(log).open("ab") as file:
        agent = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdout=file,
            stderr=file,
            env={**kept, "NCCL_SOCKET_IFNAME": interface, **environment, **named_parent()},
            start_new_session=True,
        )
    try:
        seen, since = "", time.monotonic()
        while agent.poll() is None and time.monotonic() - since < LAUNCHER_LOST_SECONDS:
            time.sleep(PULSE_SECONDS / 5)
            try:
                content = pulse.read_text()
            except FileNotFoundError:
                break
            if content != seen:
                seen, since = content, time.monotonic()
    finally:
        end_agent(agent)
    return int(agent.returncode)
