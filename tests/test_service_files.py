"""`dejavu up` as a service: in the foreground, with a password, on Postgres; the unit files and the compose file."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from pydantic import BaseModel, ConfigDict

from dejavu.foundation import strict_yaml
from dejavu.foundation.errors import InputError
from dejavu.track import Tracker
from flows import server_settings, service_record, services
from flows.prefect_api import connect
from tests.ports import free_port
from tests.test_services import Project, eventually, make_project
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PASSWORD = "admin:canary-5ecret"
POSTGRES = ("initdb", "pg_ctl", "psql")


# Files


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    units = [path for path in DEPLOY.iterdir() if path.suffix in (".service", ".timer")]
    for unit in units:
        text = unit.read_text().replace("/srv/dejavu/.venv/bin/dejavu", sys.executable)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / unit.name for unit in units)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["dejavu.service", "dejavu-upkeep.service"])
def test_units_get_no_more_than_they_need(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    for wanted in (
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "UMask=0077",
        "User=dejavu",
    ):
        assert wanted in lines


def test_systemd_waits_as_long_as_services_may_take_to_start() -> None:
    settings = dict(line.split("=", 1) for line in (DEPLOY / "dejavu.service").read_text().splitlines() if "=" in line)
    each = len(service_record.SERVICES) * services.READY_SECONDS
    assert float(settings["TimeoutStartSec"]) >= each + services.DEPLOY_SECONDS


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Service(Strict):
    image: str = ""
    build: dict[str, str] = {}
    profiles: list[str] = []
    depends_on: dict[str, dict[str, str]] = {}
    environment: dict[str, str] = {}
    env_file: list[str] = []
    secrets: list[str] = []
    ports: list[str] = []
    volumes: list[str] = []
    healthcheck: dict[str, Any] = {}
    restart: str = "no"
    network_mode: str = ""
    ipc: str = ""
    read_only: bool = False
    tmpfs: list[str] = []
    cap_drop: list[str] = []
    security_opt: list[str] = []
    stop_grace_period: str = ""


class Compose(Strict):
    """The part of the Compose specification that our file uses."""

    name: str
    services: dict[str, Service]
    secrets: dict[str, dict[str, str]]
    volumes: dict[str, dict[str, str]]


def test_the_compose_file_is_well_formed_and_has_no_secret() -> None:
    compose = strict_yaml.load(DEPLOY / "compose.yaml", Compose).value
    for service in compose.services.values():
        assert set(service.secrets) <= set(compose.secrets)
        assert set(service.depends_on) <= set(compose.services)
        assert all(port.startswith("127.0.0.1:") for port in service.ports), "reachable from other machines"
        assert not any("PASSWORD" in name and not name.endswith("_FILE") for name in service.environment)
        for mounted in service.volumes:
            source = mounted.split(":")[0]
            assert source in compose.volumes or (DEPLOY / source).exists()
        if service.build:
            assert (ROOT / service.build["dockerfile"]).is_file()
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    secret = [one["file"] for one in compose.secrets.values()]
    secret += [file for service in compose.services.values() for file in service.env_file]
    assert {f"deploy/{Path(file).name}" for file in secret} <= set(ignored)


def test_compose_itself_takes_the_file() -> None:
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True) if shutil.which("docker") else None
    if plugin is None or plugin.returncode:
        pytest.skip("there is no `docker compose` here")
    words = ["docker", "compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# In the foreground, with a password


def typed(project: Project, *words: str, **more: str) -> subprocess.Popen[str]:
    environment = {**project.environment, "PYTHONPATH": str(ROOT), **more}
    return subprocess.Popen(
        [sys.executable, "-m", "flows", *words],
        cwd=project.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.integration
@pytest.mark.slow
def test_in_the_foreground_what_ends_is_started_again_and_all_ends_with_it(tmp_path: Path) -> None:
    """As systemd runs it: readiness by its socket, a dead worker started again, SIGTERM ends everything; a password."""
    project = make_project(tmp_path)
    secret = {server_settings.AUTH: PASSWORD}
    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(PATIENCE_SECONDS)
        foreground = typed(project, "up", "--foreground", *ports, NOTIFY_SOCKET=str(tmp_path / "notify"), **secret)
        try:
            assert told.recv(100) == b"READY=1"
            found = service_record.status(project.folder)
            assert found is not None and found.needs == (server_settings.AUTH,)

            api = connect(found.prefect_api_url)
            assert api.post("/flows/filter", json={}).status_code == httpx.codes.UNAUTHORIZED
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(server_settings.AUTH, PASSWORD)
                with found.api() as ours:
                    assert len(ours.post("/deployments/filter", json={}).raise_for_status().json()) == 6
            with pytest.raises(InputError, match="wants a password; wanted PREFECT_API_AUTH_STRING"):
                found.api()

            worker = next(process for process in found.processes if process.name == "worker").find()
            assert worker is not None
            worker.kill()
            assert eventually(lambda: (now := service_record.status(project.folder)) is not None and now != found)
            foreground.send_signal(signal.SIGTERM)
            assert foreground.wait(120) == 0, foreground.stdout and foreground.stdout.read()
            assert told.recv(100) == b"STOPPING=1"
        finally:
            foreground.kill()
            services.down(project.folder, say=project.said.append)
    assert service_record.recorded(project.folder) is None
    assert not [one for process in found.processes if (one := process.find())]
    for path in project.folder.rglob("*"):
        assert not path.is_file() or b"-5ecret" not in path.read_bytes(), path


# Postgres


def as_owner() -> dict[str, Any]:
    """Postgres does not run as root: then as nobody."""
    return {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Postgres of this distribution on a loopback port, with our two databases; ends with the tests."""
    bins = [Path(found).resolve().parent for name in POSTGRES[:2] if (found := shutil.which(name))]
    bins += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    here = next((folder for folder in bins if all((folder / name).exists() for name in POSTGRES[:2])), None)
    if here is None or shutil.which("psql") is None:
        pytest.skip("there is no Postgres here (apt-get install postgresql)")
    if find_spec("psycopg2") is None:
        pytest.skip('there is no psycopg2 here (pip install ".[postgres]")')
    folder = tmp_path_factory.mktemp("postgres")
    for path in (folder, *folder.parents[:2]):  # pytest's own folders are private
        path.chmod(0o755)
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody", "nogroup")
    (folder / "password").write_text("canary-5ecret")
    port, data = free_port(), folder / "data"
    words = [here / "initdb", "-D", data, "-U", "dejavu", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}"]
    subprocess.run([str(word) for word in words], check=True, capture_output=True, cwd=folder, **as_owner())
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off"
    control = [str(here / "pg_ctl"), "-D", str(data), "-w", "-t", "120", "-l", str(folder / "log")]
    subprocess.run([*control, "-o", options, "start"], check=True, cwd=folder, stdout=subprocess.DEVNULL, **as_owner())
    try:
        url = f"postgresql://dejavu:canary-5ecret@127.0.0.1:{port}"
        psql = ["psql", "--quiet", f"{url}/postgres", "--set=ON_ERROR_STOP=1", f"--file={DEPLOY / 'databases.sql'}"]
        subprocess.run(psql, check=True)
        yield url
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=True, cwd=folder, capture_output=True, **as_owner())


def asked(url: str, database: str, query: str) -> str:
    done = subprocess.run(
        ["psql", f"{url}/{database}", "--no-align", "--tuples-only", f"--command={query}"],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.mark.integration
def test_both_servers_keep_their_records_in_postgres(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path)
    for name in list(project.environment):
        monkeypatch.setenv(name, project.environment[name])
    monkeypatch.setenv(server_settings.PREFECT_DATABASE, f"{postgres}/prefect")
    monkeypatch.setenv(server_settings.MLFLOW_DATABASE, f"{postgres}/mlflow")
    try:
        up = services.up(project.folder, prefect_port=free_port(), mlflow_port=free_port(), say=project.said.append)
        ran = project.typed("prefect", "deployment", "run", "dejavu/full", "--watch")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert asked(postgres, "prefect", "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'") == "1"

        monkeypatch.setenv("MLFLOW_TRACKING_URI", up.mlflow_url)  # as runs of its worker have it
        with Tracker.open(project.folder, "a run") as run:
            run.metric("loss", 0.5)
            run.artifact_text("plan.txt", "two stages")
            run_id = run.run_id
        assert asked(postgres, "mlflow", "SELECT value FROM metrics WHERE key = 'loss'") == "0.5"
        answer = httpx.get(
            f"{up.mlflow_url}/get-artifact", params={"path": "plan.txt", "run_id": run_id}, trust_env=False
        )
        assert answer.text == "two stages"
        assert not (project.folder / "mlflow.db").exists()
        assert not (project.folder / ".dejavu" / "prefect" / "prefect.db").exists()

        lines = [" ".join(one.cmdline()) for process in up.processes if (one := process.find())]
        assert len(lines) == 3 and not any("5ecret" in line for line in lines)
        worker = next(process for process in up.processes if process.name == "worker").find()
        assert worker is not None and "5ecret" not in str(worker.environ())
        assert worker.environ()["MLFLOW_TRACKING_URI"] == up.mlflow_url

        monkeypatch.delenv(server_settings.PREFECT_DATABASE)
        worker.kill()
        psutil.wait_procs([worker], timeout=PATIENCE_SECONDS)
        with pytest.raises(InputError, match="started with DEJAVU_PREFECT_DATABASE_URL in the environment"):
            services.up(project.folder, say=project.said.append)
    finally:
        services.down(project.folder, say=project.said.append)
    written = [path for path in project.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if b"5ecret" in path.read_bytes()]
    assert urlsplit(postgres).password not in "".join(project.said)
