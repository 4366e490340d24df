"""`dejavu up`, `dejavu down` and the temporary server, with a trivial flow in a temporary project (fault 24)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import httpx
import psutil
import pytest

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.processes.start import start_seconds
from flows import service_record, services
from flows.prefect_api import HEARTBEAT_SECONDS, SILENCE_SECONDS
from flows.processes import RecordedProcess, family, has_ended, is_free
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
FLOW = """
import subprocess, sys, time
from pathlib import Path
from prefect import flow

@flow(name="dejavu", log_prints=True)
def dejavu(workload: str = "short", train: bool = True):
    import flows.beside
    Path(f"{workload}.txt").write_text(f"{Path.cwd()} {flows.beside.__file__} {train}")
    if workload == "long":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(600)
"""
RUN_WITH_TEMPORARY_SERVER = """
import os, sys, time
from pathlib import Path
from flows.temporary_server import use_temporary_server

with use_temporary_server(Path.cwd()) as server:
    from prefect import flow

    @flow
    def where():
        from prefect.client.orchestration import get_client
        return str(get_client(sync_client=True).api_url)

    server.wait()
    assert where().rstrip("/") == server.api_url, where()
    print(server.api_url, flush=True)
    time.sleep(float(sys.argv[1]))
"""

LEAVES_EVENTS = """
import os, signal, sys
from pathlib import Path
from flows.temporary_server import use_temporary_server

with use_temporary_server(Path.cwd()) as server:
    from prefect import flow
    from prefect.events import emit_event

    @flow
    def tells():
        emit_event("told", {"prefect.resource.id": "number"})

    server.wait()
    tells()
    os.kill(server._process.pid, signal.SIGSTOP)
    for number in range(int(sys.argv[1])):
        emit_event("told", {"prefect.resource.id": f"number.{number}"})
"""


PARTS = """
from pathlib import Path
from prefect import flow

@flow(name="dejavu")
def profile():
    pass

@flow(name="dejavu")
def plan(workload: str = "short"):
    Path(f"{workload}.txt").write_text("planned")

@flow(name="dejavu")
def initialize():
    pass

@flow(name="dejavu")
def train():
    pass
"""
REPLAN = """
from prefect import flow

@flow
def replan(reason: str = ""):
    pass
"""


@dataclass
class Project:
    folder: Path
    environment: dict[str, str]  # as of a user's shell with the virtual environment active
    said: list[str] = field(default_factory=list)

    def typed(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )


def make_project(folder: Path) -> Project:
    (folder / "project" / "flows").mkdir(parents=True)
    project = folder / "project"
    (project / "flows" / "__init__.py").touch()
    (project / "flows" / "beside.py").touch()
    (project / "flows" / "full.py").write_text(FLOW)
    (project / "flows" / "deployed.py").write_text(PARTS)
    (project / "flows" / "replan.py").write_text(REPLAN)
    (project / "prefect.yaml").write_text((ROOT / "prefect.yaml").read_text())
    profile = folder / "home" / ".prefect" / "profiles.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text('active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n')
    path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
    return Project(project, {"PATH": path, "HOME": str(folder / "home")})


def eventually(is_so: Callable[[], bool], patience_seconds: float = PATIENCE_SECONDS) -> bool:
    deadline = time.monotonic() + patience_seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose services are up, started by a user whose own Prefect and MLflow are elsewhere."""
    project = make_project(tmp_path_factory.mktemp("services"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", project.environment["HOME"])
        patch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        try:
            services.up(project.folder, prefect_port=free_port(), mlflow_port=free_port(), say=project.said.append)
            yield project
        finally:
            services.down(project.folder, say=project.said.append)


def found(project: Project) -> service_record.Services:
    result = service_record.status(project.folder)
    assert result is not None
    return result


@pytest.mark.integration
@pytest.mark.slow
def test_a_deployment_runs_as_a_user_types_it(running: Project) -> None:
    result = running.typed("prefect", "deployment", "run", "dejavu/full", "--watch")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Completed" in result.stdout
    beside = running.folder / "flows" / "beside.py"
    assert (running.folder / "short.txt").read_text() == f"{running.folder} {beside} True"
    home = Path(running.environment["HOME"])
    assert [path.name for path in home.rglob("*")] == [".prefect", "profiles.toml"]  # nothing was written there


@pytest.mark.integration
@pytest.mark.slow
def test_the_plan_deployment_does_not_train(running: Project) -> None:
    result = running.typed("prefect", "deployment", "run", "dejavu/plan", "--param", "workload=plan", "--watch")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (running.folder / "plan.txt").read_text() == "planned"


@pytest.mark.integration
def test_nobody_asks_mlflow_for_a_run_before_it_has_imported_what_that_needs(running: Project) -> None:
    """Else the first two requests of a run's page may leave every such page broken until the server ends."""
    log = next(one.log for one in found(running).processes if one.name == "mlflow")
    asked = re.findall(r'"(GET|POST) (/\S*) HTTP[^"]*" (\d+)', Path(log).read_text())
    others = [path for _, path, _ in asked if path != "/health"]
    assert others[0] == "/graphql"
    assert ("POST", "/graphql", "200") in asked


@pytest.mark.integration
def test_up_again_changes_nothing(running: Project) -> None:
    before = found(running)
    running.said.clear()
    assert services.up(running.folder, say=running.said.append) == before
    assert len(running.said) == 1
    assert running.said[0].startswith("already up")


@pytest.mark.integration
def test_a_silent_run_will_be_called_crashed(running: Project) -> None:
    api = found(running).prefect_api_url
    automations = httpx.post(f"{api}/automations/filter", json={}, trust_env=False).json()
    assert all(one["enabled"] for one in automations)
    (silent,) = (one["trigger"] for one in automations if one["trigger"]["posture"] == "Proactive")
    assert silent["within"] >= 3 * HEARTBEAT_SECONDS


@pytest.mark.integration
def test_a_schedule_makes_runs(running: Project) -> None:
    """With SQLAlchemy 2.1 all else works, and no scheduled run is ever made."""
    with httpx.Client(base_url=found(running).prefect_api_url, trust_env=False) as api:
        plan = api.get("/deployments/name/dejavu/plan").raise_for_status().json()["id"]
        wanted = {"flow_runs": {"deployment_id": {"any_": [plan]}, "state": {"type": {"any_": ["SCHEDULED"]}}}}
        hourly = [{"schedule": {"interval": 3600}, "active": True}]
        schedule = api.post(f"/deployments/{plan}/schedules", json=hourly).raise_for_status().json()[0]["id"]
        assert eventually(lambda: len(api.post("/flow_runs/filter", json=wanted).json()) > 0)
        api.delete(f"/deployments/{plan}/schedules/{schedule}").raise_for_status()  # and its runs with it


@pytest.mark.integration
@pytest.mark.slow
def test_a_run_that_was_killed_with_its_worker_becomes_crashed(running: Project) -> None:
    worker = next(process for process in found(running).processes if process.name == "worker")
    result = running.typed("prefect", "deployment", "run", "dejavu/full", "--param", "workload=long")
    assert result.returncode == 0, result.stdout + result.stderr
    assert eventually((running.folder / "long.txt").exists)
    for process in family([worker]):
        process.kill()
    assert eventually(lambda: service_record.status(running.folder) is None)
    api = service_record.recorded(running.folder).prefect_api_url  # type: ignore[union-attr]
    wanted = {"flow_runs": {"state": {"type": {"any_": ["CRASHED"]}}}}

    def has_crashed() -> bool:
        return len(httpx.post(f"{api}/flow_runs/filter", json=wanted, trust_env=False).json()) == 1

    assert eventually(has_crashed, patience_seconds=SILENCE_SECONDS + PATIENCE_SECONDS)
    services.up(running.folder, prefect_port=free_port(), mlflow_port=free_port(), say=running.said.append)
    (running.folder / "long.txt").unlink()


@pytest.mark.integration
def test_mlflow_shows_what_a_flow_recorded(running: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from dejavu.track import Tracker

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with Tracker.open(running.folder, "a run") as run:
        run.artifact_text("plan.txt", "two stages")
        run_id = run.run_id
    url = f"{found(running).mlflow_url}/get-artifact"
    answer = httpx.get(url, params={"path": "plan.txt", "run_id": run_id}, trust_env=False)
    assert answer.text == "two stages"


@pytest.mark.integration
def test_a_temporary_server_is_used_whatever_else_is_configured_and_ends(running: Project) -> None:
    environment = running.environment | {"PREFECT_API_URL": found(running).prefect_api_url, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", RUN_WITH_TEMPORARY_SERVER, "0"],
        cwd=running.folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert is_free(httpx.URL(result.stdout.splitlines()[-1]).port or 0)
    assert "Error" not in result.stderr
    assert not list((running.folder.parent / ".dejavu" / "prefect").glob("temporary-*"))


def run_script(script: str, word: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, word],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.integration
@pytest.mark.slow
def test_what_a_temporary_server_was_not_sent_is_forgotten_with_it(tmp_path: Path) -> None:
    """One that is busy, or has been killed a moment ago: Prefect would try each event for 7 s, and complain."""
    result = run_script(LEAVES_EVENTS, "1000", tmp_path)  # sent one by one, 14 of them take 100 s
    assert result.returncode == 0, result.stderr
    assert "Finished in state Completed" in result.stderr
    assert not {"Error", "failed", "Still", "pending"} & {*re.findall(r"\w+", result.stderr)}, result.stderr


@pytest.mark.integration
def test_a_temporary_server_that_cannot_start_is_not_waited_for(tmp_path: Path) -> None:
    """It is said how it ended: a socket that still takes calls for it is no sign of life."""
    (tmp_path / ".dejavu" / "prefect" / f"empty-{version('prefect')}.db").mkdir(parents=True)  # a file is wanted there
    result = run_script(RUN_WITH_TEMPORARY_SERVER, "0", tmp_path)
    assert result.returncode == 1
    assert "the temporary Prefect server ended with exit code 1; the end of" in result.stderr


@pytest.mark.integration
def test_a_temporary_server_ends_when_its_flow_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN_WITH_TEMPORARY_SERVER, "600"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        port = httpx.URL(process.stdout.readline().strip()).port or 0
        assert not is_free(port)
        process.send_signal(signal.SIGKILL)
    assert eventually(lambda: is_free(port))


@pytest.mark.integration
def test_down_ends_all_that_up_started_and_nothing_else(running: Project) -> None:
    """The last test of the services: a run is in progress, and a process in a session of its own belongs to it."""
    now = found(running)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    result = running.typed("prefect", "deployment", "run", "dejavu/full", "--param", "workload=long")
    assert result.returncode == 0, result.stdout + result.stderr
    assert eventually((running.folder / "long.txt").exists)
    worker = next(process for process in now.processes if process.name == "worker")
    assert eventually(lambda: len(family([worker])) >= 3)  # the worker, the run, the run's own process
    everything = family(now.processes)

    services.down(running.folder, say=running.said.append)
    assert all(has_ended(process) for process in everything)
    assert is_free(now.prefect_port)
    assert is_free(now.mlflow_port)
    assert service_record.recorded(running.folder) is None
    assert not (running.folder / "prefect.toml").exists()
    with contextlib.closing(sqlite3.connect(running.folder / ".dejavu" / "prefect" / "prefect.db")) as database:
        states = {name for (name,) in database.execute("SELECT state_name FROM flow_run")}
    assert "Crashed" in states <= {"Completed", "Crashed"}  # none stays Running
    assert not has_ended(psutil.Process(bystander.pid))
    bystander.kill()
    bystander.wait()

    running.said.clear()
    services.down(running.folder, say=running.said.append)
    assert running.said == ["nothing is running"]


def test_a_port_that_was_asked_for_and_is_taken_is_refused(tmp_path: Path) -> None:
    project = make_project(tmp_path).folder
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} for Prefect is taken by .*pid {os.getpid()}"):
            services.up(project, prefect_port=port, say=print)
    assert service_record.recorded(project) is None


def test_the_next_free_port_is_chosen_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        chosen = services._choose_port("Prefect", None, port, said.append)
    assert chosen > port
    assert str(port) in said[0]
    assert str(chosen) in said[0]


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project(tmp_path).folder
    fails = [sys.executable, "-c", "raise SystemExit('the disk is full')"]
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(services, "_mlflow_command", lambda project, port: fails)
    monkeypatch.setattr(services, "_prefect_command", lambda port: waits)
    with pytest.raises(DejavuError, match=r"(?s)mlflow ended while starting.*the disk is full"):
        services.up(project, prefect_port=free_port(), mlflow_port=free_port(), say=print)
    assert service_record.recorded(project) is None
    children = [child for child in psutil.Process().children(recursive=True) if not has_ended(child)]
    assert not [child for child in children if child.cmdline() == waits]


def test_a_deployment_that_takes_too_long_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [sys.executable, "-c", "import time; print('three of six', flush=True); time.sleep(600)"]
    monkeypatch.setattr(services, "_prefect", lambda words: waits)
    monkeypatch.setattr(services, "DEPLOY_SECONDS", 5.0)
    with pytest.raises(DejavuError, match=r"(?s)^`prefect deploy --all` did not end within 5 s.*said: three of six"):
        services._deploy(tmp_path, dict(os.environ))
    children = [child for child in psutil.Process().children(recursive=True) if not has_ended(child)]
    assert not [child for child in children if child.cmdline() == waits]


def test_a_project_without_deployments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prefect\.yaml"):
        services.up(tmp_path, say=print)


def test_a_pid_that_was_given_to_another_process_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record = RecordedProcess("worker", other.pid, start_seconds(psutil.Process(other.pid)) - 1000, "none.log")
    kept = service_record.Services(str(tmp_path), "a token", free_port(), free_port(), (record,))
    services._stop(kept, say=print)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_prefect_toml_of_the_user_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "prefect.toml"
    path.write_text("[api]\n")
    said: list[str] = []
    kept = service_record.Services(str(tmp_path), "a token", free_port(), free_port())
    service_record.write_toml(tmp_path, kept, said.append)
    services._stop(kept, say=print)
    assert path.read_text() == "[api]\n"
    assert kept.prefect_api_url in said[0]
