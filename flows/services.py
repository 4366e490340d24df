"""`dejavu up` and `dejavu down`: the Prefect server with a worker, and MLflow's pages; on this machine only."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.launch.training_lock import Holder, holder_in
from flows import server_settings
from flows.prefect_api import (
    HEARTBEAT_SECONDS,
    WORK_POOL,
    Watch,
    crash_lost_runs,
    ensure_automations,
    ensure_work_pool,
    start_watching,
    watching,
    worker_is_online,
)
from flows.processes import (
    TOKEN,
    child_environment,
    end,
    end_with_children,
    family,
    is_free,
    kill,
    listener,
    listens,
    runs_of,
    start,
)
from flows.room import check_room
from flows.server_settings import LOOPBACK, check_given, check_host, given
from flows.service_record import (
    SERVICES,
    Say,
    Services,
    answers_at,
    draws_runs_at,
    is_ours,
    record,
    record_path,
    recorded,
    write_toml,
)

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
READY_SECONDS = 180.0  # a loaded machine with a cold disk took 80
DEPLOY_SECONDS = 600.0  # beside measurements, which go first on their cores, 180 were not enough
LOCK_SECONDS = 5.0
TITLES = {"mlflow": "MLflow", "prefect": "Prefect"}


def up(
    project: Path,
    *,
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    host: str | None = None,
    watch: Watch | None = None,
    again: bool = False,
    say: Say = print,
) -> Services | None:
    """Start what is not running yet, deploy `prefect.yaml` if that is new, and wait until everything responds.

    Args:
        prefect_port, mlflow_port: if not given, 4200 and 5000 or the next free ones.
        host: the address that Prefect listens on; if not given, that of what runs already, or loopback.
        watch: also look at the cluster from now on, and plan again when it changes.
        again: only what was started before; None is returned where `dejavu down` has ended it, which is waited for.

    Raises:
        InputError: there is no prefect.yaml, or not what it deploys, no room, a port that was asked for is taken,
            others could reach `host` without a password, or what runs has another address, other ports or fewer secrets
            than are wanted.
        DejavuError: a service did not start; the message includes the end of its log, and nothing is left running.
    """
    project = project.resolve()
    if not (project / "prefect.yaml").is_file():
        raise InputError(f"{project} has no prefect.yaml; run `dejavu up` in the project's folder")
    host = check_host(host) if host else ""
    if host and not is_free(0, host):
        raise InputError(f"--host {host} is no address of this machine; wanted one that it has")
    wanted = Services(str(project), "", prefect_port or 0, mlflow_port or 0, host=host, needs=given())
    check_room(project)
    _check_flows(project)
    with _locked(project, READY_SECONDS + DEPLOY_SECONDS if again else LOCK_SECONDS):
        if again and recorded(project) is None:
            return None
        services = _up(project, wanted, say)
        if watch is not None:
            with services.api() as api:
                start_watching(api, watch)
            say(f"looking at the cluster every {watch.every_seconds:g} s; a change starts replan/on-change")
        else:
            _say_watching(services, say)
        return services


def _check_flows(project: Path) -> None:
    try:
        content = YAML(typ="safe", pure=True).load((project / "prefect.yaml").read_text(errors="replace"))
    except YAMLError:  # Prefect says what is wrong with it
        return
    rows = content.get("deployments") if isinstance(content, dict) else None
    entries = (str(row.get("entrypoint") or "") for row in rows or () if isinstance(row, dict))
    for path in (entry.partition(":")[0] for entry in entries):
        if path.endswith(".py") and not (project / path).is_file():
            raise InputError(
                f"{project}/prefect.yaml deploys a flow of {path}, which is not there; wanted the project's folder, "
                "with its flows"
            )


def _say_watching(services: Services, say: Say) -> None:
    """Say that a watch of an earlier `up` goes on, in Prefect's database also over `down`."""
    with suppress(InputError), services.api() as api:  # without its password nothing is asked of what runs already
        if (found := watching(api)) is not None:
            say(
                f"still looking at the cluster every {found.every_seconds:g} s; to end that, pause the schedule of "
                "replan/on-change on Prefect's page"
            )


def _up(project: Path, wanted: Services, say: Say) -> Services:
    found = recorded(project)
    if found and (found.dead != SERVICES or runs_of(found.token)):  # a training goes on without them
        _check_wanted(found, wanted)
        if missing := found.missing:
            say(f"starting again what is no longer there: {', '.join(missing)}; what else runs goes on")
            if "worker" in found.dead and runs_of(found.token):
                say("a run whose worker has ended cannot be cancelled on Prefect's page; `dejavu status` has its pid")
        elif found.deployed == _hash_of_deployments(project):
            say(f"already up: Prefect {found.prefect_url}, MLflow {found.mlflow_url}")
            return found
        return _start(project, found, say)
    if found:
        _stop(project, found, say)
    services = _with_ports(replace(wanted, host=wanted.host or LOOPBACK, token=uuid.uuid4().hex), say)
    try:
        return _start(project, services, say)
    except BaseException:
        _stop(project, recorded(project) or services, lambda line: None)
        raise


def _check_wanted(found: Services, wanted: Services) -> None:
    """Check that what runs is as it is wanted.

    Raises:
        InputError: it is not; only a new start would make it so.
    """
    if found.project != wanted.project:
        raise InputError(
            f"these services run for {found.project}, from where this folder was moved; `dejavu down` ends them, and "
            "the next `dejavu up` starts them here"
        )
    places = {
        "on": (found.host, wanted.host),
        "with Prefect's port": (found.prefect_port, wanted.prefect_port),
        "with MLflow's port": (found.mlflow_port, wanted.mlflow_port),
    }
    for what, (has, wants) in places.items():
        if wants and wants != has:
            raise InputError(f"these services run {what} {has}, not {wants}; `dejavu down` ends them")
    if new := [name for name in wanted.needs if name not in found.needs]:
        raise InputError(
            f"these services were started without {new[0]}, which is set now; `dejavu down` ends them, and the next "
            "`dejavu up` uses it"
        )


def down(project: Path, *, say: Say = print) -> None:
    """End exactly what `up` started and all its descendants, flow runs included."""
    project = project.resolve()
    with _locked(project, LOCK_SECONDS):
        found = recorded(project)
        if found is None:
            say("nothing is running")
            return
        _stop(project, found, say)


def _start(project: Path, services: Services, say: Say) -> Services:
    began = datetime.now(UTC)
    check_given(services.needs)
    environment = child_environment(project, _settings(services))
    prefect_health, mlflow_health = services.health_urls
    missing = services.missing
    end([process for one in services.processes if one.name in missing and (process := one.find())])  # it was silent
    _end_left_over(services, missing)
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
        _wait_for(services, "mlflow", lambda: answers_at(mlflow_health) and draws_runs_at(services.mlflow_url))
    _wait_for(services, "prefect", lambda: answers_at(prefect_health))
    with services.api() as api:
        crash_lost_runs(
            api,
            "its process had ended before `dejavu up`",
            runs_of(services.token),
            worker_lives="worker" not in missing,
        )
        ensure_work_pool(api)
        ensure_automations(api)
        if "worker" in missing:
            services = _launch(services, environment, "worker", _worker_command())
        if services.deployed != (new := _hash_of_deployments(project)):
            say("deploying prefect.yaml" if missing == SERVICES else "deploying prefect.yaml, which has changed")
            before = watching(api)
            _deploy(project, environment)
            services = replace(services, deployed=new)
            record(services)
            if before is not None and watching(api) is None:  # the file says that it is not active by itself
                start_watching(api, before)
        if "worker" in missing:
            _wait_for(services, "worker", lambda: worker_is_online(api, began))
    write_toml(project, services, say)
    say(f"Prefect {services.prefect_url}   runs, schedules, logs")
    say(f"MLflow  {services.mlflow_page}   what each run found")
    return services


def _stop(project: Path, services: Services, say: Say) -> None:
    """Stop flow runs first, while the server can still record how they end; then the servers.

    The worker is killed before them: by SIGTERM it ends and kills its runs, which then record nothing.

    Args:
        project: the folder where they are recorded; they may have been started before it was moved to there.
    """
    servers = [process for process in services.processes if process.name != "worker"]
    keep = {process.pid for process in family(servers)}
    ended = {process.name for process in services.processes if process.find()}
    holder, stopped = holder_in(project), set[int]()
    for _ in range(3):  # a run may start another process while it is being stopped
        runs = [process for process in family(services.processes, services.token) if process.pid not in keep]
        if not runs:
            break
        stopped |= {process.pid for process in runs}
        worker = {process.pid for one in services.processes if one.name == "worker" and (process := one.find())}
        kill([process for process in runs if process.pid in worker])
        end_with_children([process for process in runs if process.pid not in worker])
    prefect_runs = any(process.name == "prefect" and process.find() for process in servers)
    if prefect_runs and answers_at(services.health_urls[0]):  # the port may be another project's by now
        try:
            with services.api() as api:
                crash_lost_runs(api, "ended by `dejavu down`", alive=())
        except InputError as error:
            say(f"{error}; without it, runs that were ended are shown as running until the next `dejavu up`")
    end(family(services.processes, services.token))
    toml = project / "prefect.toml"
    if is_ours(toml):
        toml.unlink()
    record_path(project).unlink(missing_ok=True)
    say(f"stopped: {', '.join(sorted(ended))}" if ended else "what was recorded had already ended")
    if holder is not None and holder.pid in stopped:
        _say_ended(project, holder, say)


def _say_ended(project: Path, holder: Holder, say: Say) -> None:
    """Say which run was ended with the services and, of a training, how it goes on."""
    from dejavu.launch.running import status_of  # with torch
    from flows.recorded.status import status_lines

    say(f"ended with them: {holder}")
    if holder.training:
        for line in status_lines(status_of(project))[1:3]:
            say(line)


def _end_left_over(services: Services, missing: Sequence[str]) -> None:
    """End children of servers that have ended: one that still listens would answer in place of the next server."""
    ports = {"mlflow": services.mlflow_port, "prefect": services.prefect_port}
    ours = {process.pid for process in family([], services.token)}
    left = [process for name, port in ports.items() if name in missing and (process := listener(port))]
    end([process for process in left if process.pid in ours])


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
    record(services)
    return services


def _hash_of_deployments(project: Path) -> str:
    return hashlib.sha256((project / "prefect.yaml").read_bytes()).hexdigest()


def _deploy(project: Path, environment: dict[str, str]) -> None:
    try:
        result = subprocess.run(
            _prefect("deploy --all"),
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEPLOY_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        # Bytes, though text was asked for.
        said = b"".join(filter(None, (error.stdout, error.stderr))).decode(errors="replace")
        raise DejavuError(
            f"`prefect deploy --all` did not end within {DEPLOY_SECONDS:g} s, and was ended; try again when less runs "
            f"on this machine. {f'It said: {said[-3000:]}' if said else 'It had said nothing'}"
        ) from None
    if result.returncode:
        raise DejavuError(f"`prefect deploy --all` failed:\n{(result.stdout + result.stderr)[-3000:]}")


def _with_ports(services: Services, say: Say) -> Services:
    """Choose the ports that were not asked for.

    Raises:
        InputError: one that was asked for is taken, or both are the same.
        DejavuError: none is free.
    """
    prefect, mlflow = services.prefect_port, services.mlflow_port
    if prefect and prefect == mlflow:
        raise InputError(f"Prefect and MLflow are both to listen on port {prefect}; wanted two ports")
    prefect = _choose_port("Prefect", prefect, PREFECT_PORT, say, host=services.host, other=("MLflow", mlflow))
    mlflow = _choose_port("MLflow", mlflow, MLFLOW_PORT, say, other=("Prefect", prefect))
    return replace(services, prefect_port=prefect, mlflow_port=mlflow)


def _choose_port(
    name: str,
    wanted: int | None,
    default: int,
    say: Say,
    *,
    host: str = LOOPBACK,
    other: tuple[str, int] = ("", 0),
) -> int:
    """Return a free port of an address.

    Args:
        other: the other server, and its port; 0: it has none yet.
    """
    port = wanted or default
    if port != other[1] and is_free(port, host):
        return port
    holder = listener(port)
    by = f" by {holder.name()} (pid {holder.pid})" if holder else f" by {other[0]}" if port == other[1] else ""
    if wanted:
        raise InputError(f"port {wanted} for {name} is taken{by}; give a free one, or none")
    free = next((one for one in range(port + 1, port + 100) if one != other[1] and is_free(one, host)), None)
    if free is None:
        raise DejavuError(f"no port from {port} to {port + 99} is free for {name}")
    say(f"port {port} is taken{by}; {name} gets {free}")
    return free


# Waiting


def _wait_for(services: Services, name: str, is_ready: Callable[[], bool]) -> None:
    process = next(one for one in services.processes if one.name == name)
    port = _place(services, name)[0]
    deadline = time.monotonic() + READY_SECONDS
    while True:
        if process.find() is None:
            _check_port(services, name)
            raise DejavuError(f"{name} ended while starting; the end of {process.log}:\n{process.log_end()}")
        if is_ready() and (port is None or listens(process, port)):  # else another's answers, and ours will end
            return
        if time.monotonic() > deadline:
            raise DejavuError(
                f"{name} did not answer within {READY_SECONDS:g} s; the end of {process.log}:\n{process.log_end()}"
            )
        time.sleep(0.1)


def _place(services: Services, name: str) -> tuple[int | None, str]:
    """Return the port and the address that a server listens on; None: the worker listens on none."""
    places = {"prefect": (services.prefect_port, services.host), "mlflow": (services.mlflow_port, LOOPBACK)}
    return places.get(name, (None, LOOPBACK))


def _check_port(services: Services, name: str) -> None:
    """Check that the port of a server that ended while starting was not taken meanwhile.

    Raises:
        DejavuError: it was.
    """
    port, host = _place(services, name)
    if port is not None and not is_free(port, host):
        holder = listener(port)
        by = f" by {holder.name()} (pid {holder.pid})" if holder else ""
        raise DejavuError(
            f"port {port} was taken{by} while {TITLES[name]} was starting; start `dejavu up` again, which chooses a "
            "free one"
        )


def _locked(project: Path, timeout_seconds: float) -> AbstractContextManager[None]:
    folder = project / ".dejavu"
    folder.mkdir(parents=True, exist_ok=True)
    return _held(folder / "services.lock", timeout_seconds, "is working: another `dejavu up` or `dejavu down`")


@contextmanager
def _held(lock: Path, timeout_seconds: float, holder: str) -> Iterator[None]:
    try:
        with FileLock(lock, timeout=timeout_seconds):
            yield
    except Timeout:
        raise DejavuError(f"some other process {holder} ({lock} is held); try again when it is done") from None
