"""Our server processes: starting them, recognising them again, and ending them with all their descendants."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from dejavu.foundation.processes.start import boot_id, start_seconds, started_at
from flows.room import PRIVATE_UMASK
from flows.server_settings import LOOPBACK, SECRETS

TOKEN = "DEJAVU_SERVICES"  # an environment variable that all processes of one `dejavu up` inherit
RUN = "PREFECT__FLOW_RUN_ID"  # Prefect sets it for the process of a deployment's run
TERMINATE_SECONDS = 15.0  # from SIGTERM to SIGKILL: what a flow run needs to report that it was ended


@dataclass(frozen=True)
class RecordedProcess:
    """A process that we started, by pid and start, in seconds from the boot: a pid alone may have been reused.

    Attributes:
        boot: the machine's, as after another one a process may have both numbers; empty: not known.
    """

    name: str
    pid: int
    start_seconds: float
    log: str
    boot: str = ""

    def find(self) -> psutil.Process | None:
        """Return the process, if it still runs."""
        try:
            process = psutil.Process(self.pid)
            is_it = started_at(process, self.start_seconds, self.boot) and not has_ended(process)
            return process if is_it else None
        except psutil.NoSuchProcess:
            return None

    def log_end(self, num_lines: int = 20) -> str:
        """Return the last lines of its log."""
        try:
            return "\n".join(Path(self.log).read_text(errors="replace").splitlines()[-num_lines:])
        except FileNotFoundError:
            return "(no log)"


def child_environment(project: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's environment with these settings replacing all of its own about Prefect and MLflow.

    Settings for some other server (a URL, a key, a run id) must not reach ours, and ours must not write to the user's
    home or the network.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith(("PREFECT_", "MLFLOW_")) and name not in SECRETS) or name.startswith("PREFECT_LOGGING_")
    }
    server = urlsplit(settings.get("PREFECT_API_URL", "")).hostname or LOOPBACK
    loopback = ",".join(dict.fromkeys((LOOPBACK, "localhost", server)))
    others = [kept[name] for name in ("no_proxy", "NO_PROXY") if kept.get(name)]
    no_proxy = ",".join([loopback, *others[:1]])
    home = project / ".dejavu" / "prefect"
    return {
        **kept,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        **settings,
    }


def start(
    name: str, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], log: Path
) -> RecordedProcess:
    """Start a process in a session of its own, so that a Ctrl-C in the terminal does not reach it.

    The log of the one before, which may say why that ended, is kept beside its own until the next start.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(f"{log.name}.before"))
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=PRIVATE_UMASK,
        )
    return RecordedProcess(name, child.pid, start_seconds(psutil.Process(child.pid)), str(log), boot_id())


def family(parents: Iterable[RecordedProcess], token: str | None = None) -> list[psutil.Process]:
    """Return these processes and all their descendants; with a token, also those whose parent ended before them.

    Sessions do not matter: torchrun's ranks have their own.
    """
    found: dict[int, psutil.Process] = {}
    for parent in parents:
        process = parent.find()
        if process:
            found |= {one.pid: one for one in [process, *_descendants(process)]}
    if token:
        found |= {one.pid: one for one in psutil.process_iter() if _carries(one, token)}
    found.pop(os.getpid(), None)
    return [process for process in found.values() if not has_ended(process)]


def runs_of(token: str) -> set[str]:
    """Return the ids of the flow runs that have a process of this `dejavu up`."""
    environments = [_environment(process) for process in psutil.process_iter() if not has_ended(process)]
    return {one[RUN] for one in environments if one.get(TOKEN) == token and RUN in one}


def end(processes: Sequence[psutil.Process], *, terminate_seconds: float = TERMINATE_SECONDS) -> None:
    """Send SIGTERM, wait `terminate_seconds`, then send SIGKILL."""
    for process in processes:
        _signal(process, kill=False)
    kill(_wait(processes, terminate_seconds), seconds=terminate_seconds)


def kill(processes: Sequence[psutil.Process], *, seconds: float = TERMINATE_SECONDS) -> None:
    """Send SIGKILL, and wait so long at most."""
    for process in processes:
        _signal(process, kill=True)
    _wait(processes, seconds)


def end_with_children(processes: Sequence[psutil.Process]) -> None:
    """End first those that are no child of another of them: they end their children and say how. Then the others."""
    pids = {process.pid for process in processes}
    end([process for process in processes if _parent_of(process) not in pids])
    end(processes)


def has_ended(process: psutil.Process) -> bool:
    """Return whether it has ended; a zombie has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether a server could listen on this port of an address of this machine; 0: on any."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended server do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def listener(port: int) -> psutil.Process | None:
    """Return the process listening on this port, where the system tells."""
    try:
        for connection in psutil.net_connections("tcp"):
            if _is_listening(connection, port) and connection.pid:
                return psutil.Process(connection.pid)
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        pass
    return None


def listens(parent: RecordedProcess, port: int) -> bool:
    """Return whether the process or a descendant listens on this port; where the system tells of no listener, True."""
    try:
        found = [one.pid for one in psutil.net_connections("tcp") if _is_listening(one, port)]
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return True
    return not found or any(process.pid in found for process in family([parent]))


def _is_listening(connection: Any, port: int) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port)


def _parent_of(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children


def _carries(process: psutil.Process, token: str) -> bool:
    return _environment(process).get(TOKEN) == token


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment that it started with; nothing where it has ended or is somebody else's."""
    try:
        found: dict[str, str] = process.environ()
    except (psutil.Error, OSError):
        return {}
    return found


def _signal(process: psutil.Process, *, kill: bool) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.kill() if kill else process.terminate()  # psutil checks that the pid was not reused


def _wait(processes: Sequence[psutil.Process], timeout_seconds: float) -> list[psutil.Process]:
    """Wait, and return those still running; psutil's `wait_procs` would wait for zombies that others must reap."""
    deadline = time.monotonic() + timeout_seconds
    left = list(processes)
    while left and time.monotonic() < deadline:
        left = [process for process in psutil.wait_procs(left, timeout=0.05)[1] if not has_ended(process)]
    return left
