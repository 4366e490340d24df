"""A Prefect server for one process, so that `dejavu run` needs no running services.

Prefect would start one too, but only if no URL is set anywhere (`prefect.toml`, a profile, the environment), it blocks
meanwhile, and its server outlives a flow whose process is killed. This one starts while the flow is being imported, on
a copy of an empty database, and ends when its standard input closes: with its parent, however that ends. If it is
killed itself, it is started again: its parent keeps the socket, so that requests wait meanwhile, and the database.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.gc_frozen import gc_frozen
from flows import server_settings, service_record
from flows.prefect_queues import forget_what_is_queued, send_what_is_queued
from flows.prefect_server import begin_immediately
from flows.processes import child_environment
from flows.room import PRIVATE_UMASK

READY_SECONDS = 180.0  # a loaded machine with a cold disk took 80
STOP_SECONDS = 5.0
MOST_STARTS = 4  # a server that is killed again and again has a reason
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
log = logging.getLogger("dejavu.server")


class TemporaryServer:
    """The server of this process, a context manager that stops it on exit.

    Attributes:
        api_url: also in this process's environment as PREFECT_API_URL.
    """

    def __init__(self, project: Path, listening: socket.socket, environment: dict[str, str], log: Path) -> None:
        self.api_url = environment["PREFECT_API_URL"]
        self._project, self._listening, self._environment, self._log = project, listening, environment, log
        self._database = _database_path(Path(environment["PREFECT_HOME"]), os.getpid())
        _remove(self._database)  # of a process that had the same number
        self._is_stopping = False
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        place = str(self._listening.fileno())
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.temporary_server", place, str(self._project)],  # the project: for people
                cwd=Path(__file__).parents[1],  # where `flows` is found, installed or not
                env=self._environment | _server_settings(self._project),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._listening.fileno()],
                umask=PRIVATE_UMASK,
                start_new_session=True,  # a Ctrl-C is for the flow, which still reports its end to the server
            )

    def _start_again(self) -> None:
        for _ in range(MOST_STARTS - 1):
            self._process.wait()
            if self._is_stopping:
                return
            log.warning("Prefect's server has ended (%s) and is started again", self._process.returncode)
            self._process = self._start()

    def wait(self) -> None:
        """Wait until it responds; flows can run from then on.

        Raises:
            DejavuError: it ended or did not respond; the message includes the end of its log.
        """
        began = time.monotonic()
        with httpx.Client(trust_env=False) as client:
            while (waited := time.monotonic() - began) < READY_SECONDS and self._process.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    # This process holds the socket, too: a request to a dead server connects, and is never answered.
                    if client.get(f"{self.api_url}/health", timeout=max(1.0, waited)).is_success:
                        threading.Thread(target=self._start_again, name="server-keeper", daemon=True).start()
                        return
                time.sleep(0.05)
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        code = self._process.poll()
        what = f"has not answered for {READY_SECONDS:g} s" if code is None else f"ended with exit code {code}"
        raise DejavuError(f"the temporary Prefect server {what}; the end of {self._log}:\n{end}")

    def stop(self) -> None:
        """Kill it and remove its files; what was still to be sent would be removed with them."""
        forget_what_is_queued()
        self._is_stopping = True
        self._process.kill()  # its database is discarded, so there is nothing to clean up
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        self._listening.close()
        _remove(self._database)

    def __enter__(self) -> TemporaryServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def use_temporary_server(project: Path) -> TemporaryServer:
    """Start a server for this process and make Prefect use it, whatever is configured elsewhere.

    Returns at once. Call it before anything imports Prefect, import the flow, then `wait()`:

        with use_temporary_server(project) as server:
            from flows.full import dejavu
            server.wait()
            dejavu(...)
    """
    if "prefect" in sys.modules:
        raise RuntimeError("Prefect was imported before use_temporary_server: it has already read its settings")
    project = project.resolve()
    path = project / ".dejavu" / "logs" / "temporary_server.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    listening = socket.create_server(("127.0.0.1", 0))
    api_url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
    environment = child_environment(project, {"PREFECT_API_URL": api_url})
    server = TemporaryServer(project, listening, environment, path)
    _use(environment)
    # It serves no pages, so Prefect's "View at" hint would mislead.
    logging.getLogger("prefect.flow_runs").addFilter(lambda record: not record.getMessage().startswith("View at "))
    return server


class RunningServer:
    """The server of `dejavu up`, in the place of a temporary one: nothing to start and nothing to stop."""

    def __init__(self, api_url: str) -> None:
        self.api_url = api_url

    def wait(self) -> None:
        """Return at once."""

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not send_what_is_queued() and not self._answers():
            forget_what_is_queued()

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{self.api_url}/health", timeout=STOP_SECONDS, trust_env=False)
            return True
        return False


def use_server(project: Path) -> TemporaryServer | RunningServer:
    """Make Prefect use the server of `dejavu up`, where that runs and answers, and else a temporary one."""
    up = service_record.status(project)
    if up is None or not up.answers:
        return use_temporary_server(project)
    if "prefect" in sys.modules:
        raise RuntimeError("Prefect was imported before use_server: it has already read its settings")
    server_settings.headers(up.needs)  # report a missing password before anything starts
    ours = server_settings.clients(up.needs, up.mlflow_url)
    _use(child_environment(project.resolve(), {"PREFECT_API_URL": up.prefect_api_url, **ours}))
    os.environ.update(ours)
    return RunningServer(up.prefect_api_url)


def _use(environment: dict[str, str]) -> None:
    """Replace this process's settings of Prefect by these."""
    for name in [name for name in os.environ if name.startswith("PREFECT_") and name not in environment]:
        del os.environ[name]
    ours = {name for name in environment if name.startswith("PREFECT_")} | {"DO_NOT_TRACK", "NO_PROXY", "no_proxy"}
    os.environ.update({name: environment[name] for name in ours})


def _server_settings(project: Path) -> dict[str, str]:
    return {
        "PREFECT__SERVER_EPHEMERAL": "1",  # no schedules, no late runs, no pages
        "PREFECT__SERVER_FINAL": "1",
        "PREFECT_UI_ENABLED": "false",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
        "PREFECT_SERVER_MEMO_STORE_PATH": str(project / ".dejavu" / "prefect" / "temporary_memo.toml"),
    }


def _database_path(home: Path, flow_pid: int) -> Path:
    return home / f"temporary-{flow_pid}.db"


# The server's side


def main(listening_fd: int) -> None:
    """Serve until standard input closes."""
    home = Path(os.environ["PREFECT_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    _sweep(home)
    template = home / f"empty-{version('prefect')}.db"
    database = _database_path(home, os.getppid())
    if template.exists() and not database.exists():  # it exists where an earlier server of the same flow was killed
        shutil.copyfile(template, database)  # has the tables: creating them takes seconds
    os.environ[DATABASE] = f"sqlite+aiosqlite:///{database}"

    with gc_frozen():  # only now that the environment is complete
        import prefect.server.api.server  # noqa: F401
        import uvicorn

    begin_immediately()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not template.exists():
                _keep_as(template, database)

    config = uvicorn.Config("prefect.server.api.server:create_app", factory=True, log_level="error", lifespan="on")
    server = Server(config)
    threading.Thread(target=_stop_with_parent, args=[server], daemon=True).start()
    try:
        server.run(sockets=[socket.socket(fileno=listening_fd)])
    finally:
        _remove(database)
        os._exit(0)  # a thread that still answers would make it again


def _stop_with_parent(server: object) -> None:
    sys.stdin.buffer.read()
    server.should_exit = True  # type: ignore[attr-defined]
    time.sleep(STOP_SECONDS)
    _remove(Path(os.environ[DATABASE].removeprefix("sqlite+aiosqlite:///")))
    os._exit(1)  # it was still starting, or a connection stays open


def _keep_as(template: Path, database: Path) -> None:
    temporary = template.with_suffix(f".{os.getpid()}")
    with (
        contextlib.closing(sqlite3.connect(database)) as source,
        contextlib.closing(sqlite3.connect(temporary)) as copy,
    ):
        source.backup(copy)
    temporary.replace(template)


def _sweep(home: Path) -> None:
    """Remove the databases of flows that were killed together with their servers."""
    for path in home.glob("temporary-*.db"):
        pid = path.stem.removeprefix("temporary-")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _remove(path)


def _remove(database: Path) -> None:
    for path in (database, *(database.with_name(database.name + end) for end in ("-wal", "-shm"))):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
