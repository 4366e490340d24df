"""`dejavu up` and `dejavu down`: the Prefect server with a worker, and MLflow's pages; on this machine only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
from filelock import FileLock, Timeout

from dejavu.foundation.errors import DejavuError, InputError
from flows import server_settings
from flows.prefect_api import (
    HEARTBEAT_SECONDS,
    WORK_POOL,
    Watch,
    connect,
    crash_lost_runs,
    ensure_automation,
    ensure_work_pool,
    start_watching,
    worker_is_online,
)
from flows.processes import TOKEN, RecordedProcess, child_environment, end, family, is_free, listener, runs_of, start
from flows.room import check_room
from flows.server_settings import LOOPBACK, check_given, check_host, given

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
READY_SECONDS = 180.0  # a loaded machine with a cold disk took 80
TITLES = {"mlflow": "MLflow", "prefect": "Prefect"}
SERVICES = ("mlflow", "prefect", "worker")
TOML_MARK = "# Written by `dejavu up`, removed by `dejavu down`"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Services:
    """The running services of one project, as kept in `.dejavu/services.json`.

    Attributes:
        token: the value of DEJAVU_SERVICES in the environment of all their processes.
        processes: in the order in which they were started.
        host: the address that Prefect listens on; MLflow's is loopback.
        needs: names of the variables of `server_settings.SECRETS` that they were started with.
    """

    project: str
    token: str
    prefect_port: int
    mlflow_port: int
    processes: tuple[RecordedProcess, ...] = ()
    host: str = LOOPBACK
    needs: tuple[str, ...] = ()

    @property
    def prefect_url(self) -> str:
        return f"http://{self.host}:{self.prefect_port}"

    @property
    def prefect_api_url(self) -> str:
        return f"{self.prefect_url}/api"

    @property
    def mlflow_url(self) -> str:
        return f"http://{LOOPBACK}:{self.mlflow_port}"

    def api(self) -> httpx.Client:
        """Open a connection to Prefect's server.

        Raises:
            InputError: it wants a password, and the environment has none.
        """
        return connect(self.prefect_api_url, server_settings.headers(self.needs))

    @property
    def mlflow_page(self) -> str:
        """MLflow's experiments in its mode for model training; without being told, a browser gets that for GenAI."""
        return f"{self.mlflow_url}/#/experiments?workflowType=machine_learning"

    @property
    def health_urls(self) -> tuple[str, str]:
        return f"{self.prefect_api_url}/health", f"{self.mlflow_url}/health"

    @property
    def dead(self) -> tuple[str, ...]:
        """Names of services that should run and do not."""
        alive = {process.name for process in self.processes if process.find()}
        return tuple(name for name in SERVICES if name not in alive)

    @property
    def answers(self) -> bool:
        """Whether both servers answer."""
        return all(map(_answers, self.health_urls))

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of services that do not run, or run and do not answer."""
        silent = {name for name, url in zip(("prefect", "mlflow"), self.health_urls, strict=True) if not _answers(url)}
        return tuple(name for name in SERVICES if name in silent or name in self.dead)

    def with_process(self, process: RecordedProcess) -> Services:
        others = [one for one in self.processes if one.name != process.name]
        return replace(self, processes=(*others, process))


def up(
    project: Path,
    *,
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    host: str | None = None,
    watch: Watch | None = None,
    say: Say = print,
) -> Services:
    """Start what is not running yet, deploy `prefect.yaml`, and wait until everything responds.

    Args:
        prefect_port, mlflow_port: if not given, 4200 and 5000 or the next free ones.
        host: the address that Prefect listens on; if not given, that of what runs already, or loopback.
        watch: also look at the cluster from now on, and plan again when it changes.

    Raises:
        InputError: there is no prefect.yaml, no room, a port that was asked for is taken, or others could reach `host`
            without a password.
        DejavuError: a service did not start; the message includes the end of its log, and nothing is left running.
    """
    project = project.resolve()
    if not (project / "prefect.yaml").is_file():
        raise InputError(f"{project} has no prefect.yaml; run `dejavu up` in the project's folder")
    host = check_host(host) if host else ""
    wanted = Services(str(project), "", prefect_port or 0, mlflow_port or 0, host=host, needs=given())
    check_room(project)
    with _locked(project):
        services = _up(project, wanted, say)
        if watch is not None:
            with services.api() as api:
                start_watching(api, watch)
            say(f"looking at the cluster every {watch.every_seconds:g} s; a change starts replan/on-change")
        return services


def _up(project: Path, wanted: Services, say: Say) -> Services:
    found = recorded(project)
    if found and found.dead != SERVICES and wanted.host not in ("", found.host):
        raise InputError(f"these services run on {found.host}, not on {wanted.host}; `dejavu down` ends them")
    if found and not found.dead and found.answers:
        say(f"already up: Prefect {found.prefect_url}, MLflow {found.mlflow_url}")
        return found
    if found and found.dead != SERVICES:
        say(f"starting again what is no longer there: {', '.join(found.missing)}; what else runs goes on")
        return _start(project, found, say)
    if found:
        _stop(found, say)
    services = replace(
        wanted,
        host=wanted.host or LOOPBACK,
        token=uuid.uuid4().hex,
        prefect_port=_choose_port("Prefect", wanted.prefect_port, PREFECT_PORT, say),
        mlflow_port=_choose_port("MLflow", wanted.mlflow_port, MLFLOW_PORT, say),
    )
    try:
        return _start(project, services, say)
    except BaseException:
        _stop(recorded(project) or services, lambda line: None)
        raise


def down(project: Path, *, say: Say = print) -> None:
    """End exactly what `up` started and all its descendants, flow runs included."""
    project = project.resolve()
    with _locked(project):
        found = recorded(project)
        if found is None:
            say("nothing is running")
            return
        _stop(found, say)


def recorded(project: Path) -> Services | None:
    """Return what `up` recorded, whether or not it still runs."""
    try:
        content = json.loads(_record_path(project).read_text())
        processes = tuple(RecordedProcess(**one) for one in content["processes"])
        return Services(**content | {"processes": processes, "needs": tuple(content.get("needs", ()))})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise DejavuError(
            f"{_record_path(project)} is not a record of services ({error}); end what it names, then delete it"
        ) from error


def status(project: Path) -> Services | None:
    """Return the services, if all their processes run."""
    found = recorded(project)
    return found if found and not found.dead else None


def _start(project: Path, services: Services, say: Say) -> Services:
    began = datetime.now(UTC)
    check_given(services.needs)
    environment = child_environment(project, _settings(services))
    prefect_health, mlflow_health = services.health_urls
    missing = services.missing
    end([process for one in services.processes if one.name in missing and (process := one.find())])  # it was silent
    servers = [name for name in ("mlflow", "prefect") if name in missing]
    if servers:
        say(f"starting {' and '.join(TITLES[name] for name in reversed(servers))}")
    if "mlflow" in missing and (project / "mlflow.db").exists():
        from dejavu.track.database import upgrade_database  # with MLflow: a second

        upgrade_database(project / "mlflow.db")
    with _held(project / "mlflow.db.lock", 60, "is recording to mlflow.db"):  # two processes would corrupt a new one
        if "mlflow" in missing:
            own = environment | server_settings.mlflow_server(services.needs, project)
            services = _launch(services, own, "mlflow", _mlflow_command(project, services.mlflow_port))
        if "prefect" in missing:
            own = environment | server_settings.prefect_server(services.needs)
            services = _launch(services, own, "prefect", _prefect_command(services))
        _wait_for(services, "mlflow", lambda: _answers(mlflow_health))
    _wait_for(services, "prefect", lambda: _answers(prefect_health))
    with services.api() as api:
        crash_lost_runs(
            api,
            "its process had ended before `dejavu up`",
            runs_of(services.token),
            worker_lives="worker" not in missing,
        )
        ensure_work_pool(api)
        ensure_automation(api)
        if "worker" in missing:
            services = _launch(services, environment, "worker", _worker_command())
        if missing == SERVICES:
            say("deploying prefect.yaml")
            _deploy(project, environment)
        if "worker" in missing:
            _wait_for(services, "worker", lambda: worker_is_online(api, began))
    _write_toml(project, services, say)
    say(f"Prefect {services.prefect_url}   runs, schedules, logs")
    say(f"MLflow  {services.mlflow_page}   what each run found")
    return services


def _stop(services: Services, say: Say) -> None:
    """Stop flow runs and their worker first, while the server can still record how they end; then the servers."""
    servers = [process for process in services.processes if process.name != "worker"]
    keep = {process.pid for process in family(servers)}
    ended = {process.name for process in services.processes if process.find()}
    for _ in range(3):  # a run may start another process while it is being stopped
        runs = [process for process in family(services.processes, services.token) if process.pid not in keep]
        if not runs:
            break
        end(runs)
    prefect_runs = any(process.name == "prefect" and process.find() for process in servers)
    if prefect_runs and _answers(services.health_urls[0]):  # the port may be another project's by now
        try:
            with services.api() as api:
                crash_lost_runs(api, "ended by `dejavu down`", alive=())
        except InputError as error:
            say(f"{error}; without it, runs that were ended are shown as running until the next `dejavu up`")
    end(family(services.processes, services.token))
    project = Path(services.project)
    toml = project / "prefect.toml"
    if _is_ours(toml):
        toml.unlink()
    _record_path(project).unlink(missing_ok=True)
    say(f"stopped: {', '.join(sorted(ended))}" if ended else "what was recorded had already ended")


# Commands and settings


def _settings(services: Services) -> dict[str, str]:
    return {
        TOKEN: services.token,
        "DEJAVU_MLFLOW_URL": services.mlflow_url,
        "PREFECT_CLIENT_MAX_RETRIES": "12",  # a run goes on while its server is started again
        "PREFECT_API_URL": services.prefect_api_url,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # at most, from a command to the start of its run
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "15",  # until a new schedule has its runs
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",  # for `prefect deployment run … --watch`
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        # On disk, leases outlive the server: else runs are cancelled minutes after it was started again.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **server_settings.clients(services.needs, services.mlflow_url),
    }


def _prefect(words: str) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *words.split()]


def _prefect_command(services: Services) -> list[str]:
    server = str(Path(__file__).with_name("prefect_server.py"))
    words = f"--no-prompt server start --host {services.host} --port {services.prefect_port}"
    return [sys.executable, "-P", server, *words.split()]


def _worker_command() -> list[str]:
    name = f"dejavu-{socket.gethostname()}"
    return _prefect(f"worker start --type process --pool {WORK_POOL} --name {name} --install-policy never")


def _mlflow_command(project: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"),
        *("--artifacts-destination", (project / "mlartifacts").as_uri()),
    ]


def _launch(services: Services, environment: dict[str, str], name: str, command: Sequence[str]) -> Services:
    project = Path(services.project)
    log = project / ".dejavu" / "logs" / f"{name}.log"
    services = services.with_process(start(name, command, cwd=project, environment=environment, log=log))
    _write_atomically(_record_path(project), json.dumps(asdict(services), indent=2) + "\n")
    return services


def _deploy(project: Path, environment: dict[str, str]) -> None:
    result = subprocess.run(
        _prefect("deploy --all"),
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
    )
    if result.returncode:
        raise DejavuError(f"`prefect deploy --all` failed:\n{(result.stdout + result.stderr)[-3000:]}")


def _choose_port(name: str, wanted: int | None, default: int, say: Say) -> int:
    port = wanted or default
    if is_free(port):
        return port
    holder = listener(port)
    by = f" by {holder.name()} (pid {holder.pid})" if holder else ""
    if wanted:
        raise InputError(f"port {wanted} for {name} is taken{by}; give a free one, or none")
    free = next((one for one in range(port + 1, port + 100) if is_free(one)), None)
    if free is None:
        raise DejavuError(f"no port from {port} to {port + 99} is free for {name}")
    say(f"port {port} is taken{by}; {name} gets {free}")
    return free


# Waiting


def _wait_for(services: Services, name: str, is_ready: Callable[[], bool]) -> None:
    process = next(one for one in services.processes if one.name == name)
    deadline = time.monotonic() + READY_SECONDS
    while True:
        if process.find() is None:
            _check_port(services, name)
            raise DejavuError(f"{name} ended while starting; the end of {process.log}:\n{process.log_end()}")
        if is_ready():
            return
        if time.monotonic() > deadline:
            raise DejavuError(
                f"{name} did not answer within {READY_SECONDS:g} s; the end of {process.log}:\n{process.log_end()}"
            )
        time.sleep(0.1)


def _check_port(services: Services, name: str) -> None:
    """Check that the port of a server that ended while starting was not taken meanwhile.

    Raises:
        DejavuError: it was.
    """
    port = {"prefect": services.prefect_port, "mlflow": services.mlflow_port}.get(name)
    if port is not None and not is_free(port):
        holder = listener(port)
        by = f" by {holder.name()} (pid {holder.pid})" if holder else ""
        raise DejavuError(
            f"port {port} was taken{by} while {TITLES[name]} was starting; start `dejavu up` again, which chooses a "
            "free one"
        )


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10, trust_env=False).is_success  # no proxy for loopback
    except httpx.HTTPError:
        return False


# Files


def _write_toml(project: Path, services: Services, say: Say) -> None:
    """Write `prefect.toml`, so that `prefect …` in this folder talks to this server, whatever the user's profile."""
    path = project / "prefect.toml"
    home = project / ".dejavu" / "prefect"
    if path.exists() and not _is_ours(path):
        say(f"{path} is not ours and is left as it is; for `prefect …` set PREFECT_API_URL={services.prefect_api_url}")
        return
    lines = [
        f"{TOML_MARK}: `prefect` typed in this folder talks to the server of this project.",
        f"home = {json.dumps(str(home))}",
        f"profiles_path = {json.dumps(str(home / 'profiles.toml'))}",
        "",
        "[api]",
        f"url = {json.dumps(services.prefect_api_url)}",
        "",
        "[server]",
        "analytics_enabled = false",
    ]
    _write_atomically(path, "\n".join(lines) + "\n")


def _is_ours(path: Path) -> bool:
    return path.is_file() and path.read_text(errors="replace").startswith(TOML_MARK)


def _record_path(project: Path) -> Path:
    return project.resolve() / ".dejavu" / "services.json"


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def _locked(project: Path) -> AbstractContextManager[None]:
    folder = project / ".dejavu"
    folder.mkdir(parents=True, exist_ok=True)
    return _held(folder / "services.lock", 5, "is working: another `dejavu up` or `dejavu down`")


@contextmanager
def _held(lock: Path, timeout_seconds: float, holder: str) -> Iterator[None]:
    try:
        with FileLock(lock, timeout=timeout_seconds):
            yield
    except Timeout:
        raise DejavuError(f"some other process {holder} ({lock} is held); try again when it is done") from None
