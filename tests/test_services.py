"""`dejavu up`, `dejavu down` and the temporary server, with a trivial flow in a temporary project (fault 24)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.processes.start import start_seconds
from dejavu.launch.training_lock import holder_in
from flows import foreground, server_settings, service_record, services
from flows.__main__ import app
from flows.prefect_api import CANCEL_SECONDS, HEARTBEAT_SECONDS, SILENCE_SECONDS, Watch, start_watching, watching
from flows.processes import RUN, TOKEN, RecordedProcess, end, family, has_ended, is_free
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
def test_an_edited_prefect_yaml_is_deployed_and_the_watch_goes_on(running: Project) -> None:
    path, said = running.folder / "prefect.yaml", list[str]()
    watch = Watch(3600.0, {"reason": ""})
    with found(running).api() as api:
        assert watching(api) is None
        start_watching(api, watch)
        path.write_text(path.read_text().replace("description: Try initial", "description: Edited. Try initial"))
        services.up(running.folder, say=said.append)
        assert "deploying prefect.yaml, which has changed" in said
        deployment = api.get("/deployments/name/dejavu/initialize").raise_for_status().json()
        assert deployment["description"].startswith("Edited. ")
        assert watching(api) == watch
        deployment = api.get("/deployments/name/replan/on-change").raise_for_status().json()
        for schedule in deployment["schedules"]:
            api.patch(f"/deployments/{deployment['id']}/schedules/{schedule['id']}", json={"active": False})
        assert watching(api) is None


@pytest.mark.integration
def test_a_silent_run_will_be_called_crashed(running: Project) -> None:
    api = found(running).prefect_api_url
    automations = httpx.post(f"{api}/automations/filter", json={}, trust_env=False).json()
    assert all(one["enabled"] for one in automations)
    triggers = {one["name"]: one["trigger"] for one in automations if one["trigger"]["posture"] == "Proactive"}
    assert len(triggers) == 2
    assert triggers["dejavu: a silent run has crashed"]["within"] >= 3 * HEARTBEAT_SECONDS


@pytest.mark.integration
@pytest.mark.slow
def test_a_run_that_is_cancelled_before_its_process_began_ends(running: Project) -> None:
    """Its worker has nothing to end: it stayed Cancelling for minutes, and kept the deployment's slot."""
    with httpx.Client(base_url=found(running).prefect_api_url, trust_env=False) as api:
        full = api.get("/deployments/name/dejavu/full").raise_for_status().json()["id"]
        begun = {"state": {"type": "PENDING"}}  # as between Pending and Running
        run = api.post(f"/deployments/{full}/create_flow_run", json=begun).raise_for_status().json()["id"]
        cancel = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        api.post(f"/flow_runs/{run}/set_state", json=cancel).raise_for_status()
        state = lambda: api.get(f"/flow_runs/{run}").json()["state"]["name"]  # noqa: E731
        assert eventually(lambda: state() != "Cancelling", 3 * CANCEL_SECONDS) and state() == "Cancelled"


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
    api = service_record.recorded(running.folder).prefect_api_url  # type: ignore[union-attr]
    result = running.typed("prefect", "deployment", "run", "dejavu/full", "--param", "workload=long")
    assert result.returncode == 0, result.stdout + result.stderr
    assert eventually((running.folder / "long.txt").exists)
    runs = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    (run,) = httpx.post(f"{api}/flow_runs/filter", json=runs, trust_env=False).json()
    own = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{run['id']}"]}}

    def has_a_heartbeat() -> bool:  # sent as the run begins; of one that was killed before nothing can be missed
        return httpx.post(f"{api}/events/filter", json={"filter": own}, trust_env=False).json()["total"] > 0

    assert eventually(has_a_heartbeat)
    for process in family([worker]):
        process.kill()
    assert eventually(lambda: service_record.status(running.folder) is None)
    wanted = {"flow_runs": {"state": {"type": {"any_": ["CRASHED"]}}}}

    def has_crashed() -> bool:
        return len(httpx.post(f"{api}/flow_runs/filter", json=wanted, trust_env=False).json()) == 1

    assert eventually(has_crashed, patience_seconds=SILENCE_SECONDS + PATIENCE_SECONDS)
    services.up(running.folder, say=running.said.append)
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
    assert "Crashed" in states <= {"Completed", "Crashed", "Scheduled"}  # none stays Running; a watch above is hourly
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


@pytest.mark.parametrize("prefect, mlflow", [(0, 0), (5000, 0), (0, 4200), (4201, 0), (0, 4201), (5000, 4200)])
def test_two_servers_get_two_ports(prefect: int, mlflow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one is asked to listen where the other does by default; what was asked for is kept to."""
    taken, said = {4200, 5001}, list[str]()
    monkeypatch.setattr(services, "is_free", lambda port, host: port not in taken)
    monkeypatch.setattr(services, "listener", lambda port: None)
    wanted = service_record.Services(str(tmp_path), "", prefect, mlflow)
    if mlflow == 4200:
        with pytest.raises(InputError, match="port 4200 for MLflow is taken"):
            services._with_ports(wanted, said.append)
        return
    chosen = services._with_ports(wanted, said.append)
    ports = {chosen.prefect_port, chosen.mlflow_port}
    assert len(ports) == 2 and not ports & taken
    assert prefect in (0, chosen.prefect_port) and mlflow in (0, chosen.mlflow_port)
    with pytest.raises(InputError, match="are both to listen on port 4300"):
        services._with_ports(replace(wanted, prefect_port=4300, mlflow_port=4300), said.append)


def test_a_port_is_free_where_the_server_will_listen(tmp_path: Path) -> None:
    """Prefect may listen on an address whose ports are taken though those of loopback are not, and the reverse."""
    for one, other in (("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")):
        with socket.create_server((one, 0)) as server:
            port = server.getsockname()[1]
            assert not is_free(port, one) and is_free(port, other)
            chosen = services._choose_port("Prefect", None, port, lambda line: None, host=one)
            assert chosen > port
            assert services._choose_port("Prefect", port, 1, pytest.fail, host=other) == port
            kept = service_record.Services(str(tmp_path), "", port, 0, host=other)
            services._check_port(kept, "prefect")
            with pytest.raises(DejavuError, match=f"port {port} was taken"):
                services._check_port(replace(kept, host=one), "prefect")
    assert not is_free(0, "192.0.2.1")


def test_an_address_of_another_machine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server_settings.AUTH, "admin:canary")
    with pytest.raises(InputError, match=r"--host 192\.0\.2\.1 is no address of this machine"):
        services.up(make_project(tmp_path).folder, host="192.0.2.1", say=print)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    """A project whose services are processes that sleep; and the deployments that were made, by prefect.yaml."""
    project, deployed = make_project(tmp_path).folder, list[str]()
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    for name in ("_mlflow_command", "_prefect_command", "_worker_command"):
        monkeypatch.setattr(services, name, lambda *_: waits)
    for name in ("answers_at", "draws_runs_at", "worker_is_online", "listens"):
        monkeypatch.setattr(services, name, lambda *_: True)
    monkeypatch.setattr(service_record, "answers_at", lambda url: True)
    for name in ("crash_lost_runs", "ensure_work_pool", "ensure_automations", "watching"):
        monkeypatch.setattr(services, name, lambda *_, **__: None)
    deploy = lambda project, environment: deployed.append((project / "prefect.yaml").read_text())  # noqa: E731
    monkeypatch.setattr(services, "_deploy", deploy)
    yield project, deployed
    services.down(project, say=lambda line: None)


def up(project: Path, said: list[str] | None = None, **options: Any) -> service_record.Services:
    found = services.up(project, say=(said if said is not None else list[str]()).append, **options)
    assert found is not None
    return found


def kill(services_now: service_record.Services, *names: str) -> None:
    for one in services_now.processes:
        if one.name in names and (process := one.find()) is not None:
            process.kill()
            assert eventually(lambda one=one: one.find() is None)  # type: ignore[misc]


@pytest.mark.parametrize("dead", [(), ("worker",), ("prefect", "mlflow"), service_record.SERVICES])
def test_what_changed_in_prefect_yaml_is_deployed_by_the_next_up(
    dead: tuple[str, ...], stand_ins: tuple[Path, list[str]]
) -> None:
    """Whether or not something has to be started for it; and nothing else is deployed again."""
    project, deployed = stand_ins
    ports = {"prefect_port": free_port(), "mlflow_port": free_port()}
    now, said = up(project, **ports), list[str]()
    first = (project / "prefect.yaml").read_text()
    kill(now, *dead)
    up(project)
    assert deployed == [first] * (2 if dead == service_record.SERVICES else 1)
    (project / "prefect.yaml").write_text(f"{first}# edited\n")
    up(project, said)
    assert "deploying prefect.yaml, which has changed" in said and not any("starting again" in line for line in said)
    assert deployed[-1] == f"{first}# edited\n" and deployed.count(deployed[-1]) == 1
    said.clear()
    again = up(project, said)
    assert deployed.count(deployed[-1]) == 1 and [line for line in said if line.startswith("already up: ")] == said
    assert not again.dead and service_record.recorded(project) == again


def test_what_a_service_said_before_it_ended_is_kept(
    stand_ins: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the foreground it is started again within seconds."""
    project, _ = stand_ins
    says = [sys.executable, "-c", "import os, time; print('I am', os.getpid(), flush=True); time.sleep(600)"]
    monkeypatch.setattr(services, "_worker_command", lambda: says)
    log, pids = project / ".dejavu" / "logs" / "worker.log", list[int]()
    now = up(project, prefect_port=free_port(), mlflow_port=free_port())
    for _ in range(3):
        pids.append(next(one.pid for one in now.processes if one.name == "worker"))
        assert eventually(lambda: f"I am {pids[-1]}" in log.read_text())
        kill(now, "worker")
        now = up(project)
        assert f"I am {pids[-1]}" in log.with_name("worker.log.before").read_text()
    assert {path.name for path in log.parent.iterdir() if "worker" in path.name} == {"worker.log", "worker.log.before"}


LISTENS = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("name", ["mlflow", "prefect"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_what_a_killed_server_left_listening_is_ended(
    name: str, is_ours: bool, stand_ins: tuple[Path, list[str]]
) -> None:
    """MLflow's server has a child that listens: it answered, so that the next server ended and was taken to run."""
    project, _ = stand_ins
    ports = {"prefect_port": free_port(), "mlflow_port": free_port()}
    now = up(project, **ports)
    environment = {**os.environ, **({TOKEN: now.token} if is_ours else {})}
    words = [sys.executable, "-c", LISTENS, str(ports[f"{name}_port"])]
    child = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        kill(now, "worker")
        up(project)
        assert child.poll() is None, "its server runs"
        kill(now, name)
        up(project)
        assert (child.poll() is not None) == is_ours
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("name", ["mlflow", "prefect", "worker"])
@pytest.mark.parametrize("who", ["another", "itself", "a child", "nobody"])
def test_what_answers_in_place_of_our_server_is_not_taken_for_it(who: str, name: str, tmp_path: Path) -> None:
    """Two `dejavu up` at once find the same ports free: the second's server ends after the first's has answered."""
    port = free_port()
    listens, sleeps = [sys.executable, "-c", LISTENS, str(port)], [sys.executable, "-c", "import time; time.sleep(2)"]
    nested = f"import subprocess; subprocess.run({listens})"
    words = {"itself": listens, "a child": [sys.executable, "-c", nested]}.get(who, sleeps)
    other = subprocess.Popen(listens, stdout=subprocess.PIPE) if who == "another" else None
    if other is not None:
        assert other.stdout is not None and other.stdout.readline()
    kept = service_record.Services(str(tmp_path), "t", port, port)
    kept = services._launch(kept, dict(os.environ), name, words)
    log = tmp_path / ".dejavu" / "logs" / f"{name}.log"
    try:
        if who == "another" and name != "worker":
            with pytest.raises(DejavuError, match=f"port {port} was taken by .* while .* was starting"):
                services._wait_for(kept, name, lambda: True)
        else:
            services._wait_for(kept, name, lambda: who in ("another", "nobody") or bool(log.read_text()))
            assert kept.processes[0].find() is not None
    finally:
        end(family(kept.processes))
        if other is not None:
            other.kill()
            other.communicate()


@pytest.mark.parametrize("runs", [set(), {"a"}])
@pytest.mark.parametrize("dead", ["worker", "mlflow"])
def test_runs_without_a_worker_are_said(
    dead: str, runs: set[str], stand_ins: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on, but only their own worker could cancel them."""
    project, _ = stand_ins
    monkeypatch.setattr(services, "runs_of", lambda token: runs)
    kill(up(project, prefect_port=free_port(), mlflow_port=free_port()), dead)
    said: list[str] = []
    up(project, said)
    assert any("cannot be cancelled" in line for line in said) == (dead == "worker" and bool(runs))


@pytest.mark.parametrize("trains", [True, False])
def test_a_run_goes_on_where_all_services_have_ended(trains: bool, stand_ins: tuple[Path, list[str]]) -> None:
    """`dejavu up` ended it, and said that what was recorded had already ended."""
    project, _ = stand_ins
    now, said = up(project, prefect_port=free_port(), mlflow_port=free_port()), list[str]()
    own = {TOKEN: now.token, RUN: "a"} if trains else {}
    run = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, **own})
    try:
        for name in service_record.SERVICES:
            kill(now, name)
        again = up(project, said)
        assert run.poll() is None
        assert (again.token == now.token) == trains
        assert ("what was recorded had already ended" in said) != trains
        assert any("cannot be cancelled" in line for line in said) == trains
    finally:
        run.kill()
        run.wait()


KILLS_ITS_RUN = """
import signal, subprocess, sys, time
run = subprocess.Popen([sys.executable, "-c", sys.argv[1]])

def end(*_):
    run.kill()
    sys.exit()

signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""
TRAINS = """
import signal, subprocess, sys, time
from pathlib import Path
from dejavu.launch.training_lock import alone_in
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

def end(*_):
    time.sleep(0.5)
    Path("rank").write_text(str(rank.poll()))
    sys.exit()

signal.signal(signal.SIGTERM, end)
with alone_in(Path.cwd(), "gpt on desk"):
    time.sleep(600)
"""


def test_down_leaves_a_run_the_time_to_record_its_end_and_says_what_it_ended(
    stand_ins: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's worker kills its runs when it is asked to end; `down` said nothing of a training that it ended."""
    project, _ = stand_ins
    monkeypatch.setattr(services, "_worker_command", lambda: [sys.executable, "-c", KILLS_ITS_RUN, TRAINS])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    up(project, prefect_port=free_port(), mlflow_port=free_port())
    assert eventually(lambda: holder_in(project) is not None)
    holder, said = holder_in(project), list[str]()
    services.down(project, say=said.append)
    assert (project / "rank").read_text() == "None"  # it still had its ranks when it was asked to end
    assert said == ["stopped: mlflow, prefect, worker", f"ended with them: {holder}"]
    said.clear()
    services.down(project, say=said.append)
    assert said == ["nothing is running"]


def test_a_watch_goes_on_when_deployments_are_made_again(
    stand_ins: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """prefect.yaml has its schedule, which is not active by itself."""
    project, _ = stand_ins
    active: list[Watch] = []
    monkeypatch.setattr(services, "watching", lambda api: active[0] if active else None)
    monkeypatch.setattr(services, "start_watching", lambda api, watch: active.append(watch))
    monkeypatch.setattr(services, "_deploy", lambda project, environment: active.clear())
    watch = Watch(30.0, {"cluster": "cluster.yaml"})
    ports = {"prefect_port": free_port(), "mlflow_port": free_port()}
    up(project, **ports)
    up(project, watch=watch)
    for again in ("edited", "already up", "killed"):
        said: list[str] = []
        if again == "edited":
            (project / "prefect.yaml").write_text((project / "prefect.yaml").read_text() + "# edited\n")
        elif again == "killed":
            found = service_record.recorded(project)
            assert found is not None
            kill(found, *service_record.SERVICES)
        up(project, said, **ports)
        assert active == [watch]
        assert [line.startswith("still looking at the cluster every 30 s; to end") for line in said].count(True) == 1
    active.clear()
    up(project, said)
    assert "looking" not in said[-1]


@pytest.mark.parametrize("dead", [(), ("worker",), ("prefect", "mlflow")])
def test_services_that_run_are_said_to_be_others_than_wanted(
    dead: tuple[str, ...], stand_ins: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would go on as they are, without the password for one."""
    project, _ = stand_ins
    now = up(project, prefect_port=free_port(), mlflow_port=free_port())
    kill(now, *dead)
    for option, said in (
        ({"prefect_port": now.prefect_port + 1}, f"with Prefect's port {now.prefect_port}, not {now.prefect_port + 1}"),
        ({"mlflow_port": now.prefect_port}, f"with MLflow's port {now.mlflow_port}, not {now.prefect_port}"),
        ({"host": "127.0.0.2"}, "on 127.0.0.1, not 127.0.0.2"),
    ):
        with pytest.raises(InputError, match=f"these services run {said}; `dejavu down` ends them"):
            up(project, **option)
    with monkeypatch.context() as patch:
        patch.setenv(server_settings.AUTH, "admin:canary")
        with pytest.raises(
            InputError, match=f"were started without {server_settings.AUTH}, which is set now"
        ) as caught:
            up(project)
    assert "canary" not in str(caught.value)
    assert not up(project, prefect_port=now.prefect_port, host="localhost").dead


def test_in_the_foreground_nothing_is_started_again_after_down(
    stand_ins: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dejavu down` takes seconds, in which its services are seen to have ended; it holds the lock meanwhile."""
    project, deployed = stand_ins
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(services, "LOCK_SECONDS", 0.1)
    start, said, downs = partial(services.up, project, prefect_port=free_port(), mlflow_port=free_port()), [], []

    def stop_slowly(where: Path, found: service_record.Services, say: service_record.Say) -> None:
        kill(found, "worker")
        time.sleep(1.0)
        stop(where, found, say)

    def started(**options: Any) -> service_record.Services | None:
        found = start(**options)
        if not downs:
            downs.append(threading.Thread(target=services.down, args=[project], kwargs={"say": said.append}))
            downs[0].start()
        return found

    stop = services._stop
    monkeypatch.setattr(services, "_stop", stop_slowly)
    foreground.stay_up(project, started, None, said.append)
    downs[0].join()
    assert said[-2:] == ["stopped: mlflow, prefect", "nothing is running"]
    assert len(deployed) == 1 and service_record.recorded(project) is None


OF_WATCH = {"--every-seconds": "30", "--workload": "w.yaml", "--cluster": "cluster.yaml", "--dask": "tls://a:1"}


@pytest.mark.parametrize("words", [*OF_WATCH.items(), ("--links",)])
def test_options_of_the_watch_are_none_without_it(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["up", *words])
    assert isinstance(done.exception, InputError) and f"{words[0]} is of --watch" in str(done.exception)


@pytest.mark.parametrize("option", ["--prefect-port", "--mlflow-port"])
@pytest.mark.parametrize("port", ["-1", "0", "65536", "70000"])
def test_a_port_that_is_none_is_said(option: str, port: str) -> None:
    done = CliRunner().invoke(app, ["up", option, port])
    assert done.exit_code == 2 and option in done.output and "than or equal to" in done.output


@pytest.mark.parametrize("seconds", ["-1", "0", "4.9", "1e30", "inf", "-inf", "nan"])
def test_a_time_between_looks_that_is_none_is_said_before_anything_starts(
    seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect has no schedule of it: services had started when it ended in a traceback of JSON."""
    monkeypatch.setattr(services, "up", lambda *arguments, **options: pytest.fail("it starts"))
    done = CliRunner().invoke(app, ["up", "--watch", "--every-seconds", seconds])
    assert done.exit_code == 2 and "--every-seconds" in done.output and "than or equal to" in done.output


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


@pytest.mark.parametrize("dead", [(), ("worker",), service_record.SERVICES])
def test_services_of_a_folder_that_was_moved_are_ended_where_it_is_now(
    dead: tuple[str, ...], stand_ins: tuple[Path, list[str]]
) -> None:
    """Nothing of them stays; with what still runs of them `up` starts nothing."""
    project, _ = stand_ins
    now, said = up(project, prefect_port=free_port(), mlflow_port=free_port()), list[str]()
    kill(now, *dead)
    moved = project.rename(project.with_name(f"{project.name} moved"))
    if dead != service_record.SERVICES:
        with pytest.raises(InputError, match=f"these services run for {project}, from where this folder was moved"):
            services.up(moved, say=said.append)
        services.down(moved, say=said.append)
        assert not (moved / "prefect.toml").exists() and said[-1].startswith("stopped: ")
    assert up(moved).project == str(moved)
    assert tomllib.loads((moved / "prefect.toml").read_text())["home"].startswith(str(moved))
    for says in ("stopped: mlflow, prefect, worker", "nothing is running"):
        services.down(moved, say=said.append)
        assert said[-1] == says and not (moved / "prefect.toml").exists()
    assert set(now.dead) == set(service_record.SERVICES) and not project.exists()


def test_services_of_a_folder_that_was_copied_are_left_to_it(stand_ins: tuple[Path, list[str]]) -> None:
    project, _ = stand_ins
    now, said = up(project, prefect_port=free_port(), mlflow_port=free_port()), list[str]()
    copy = shutil.copytree(project, project.with_name(f"{project.name} copied"))
    services.down(copy, say=said.append)
    assert said == ["nothing is running"] and not now.dead
    own = up(copy, prefect_port=free_port(), mlflow_port=free_port())
    services.down(copy, say=said.append)
    assert own.dead and not now.dead and service_record.recorded(project) == now


def test_a_project_without_deployments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prefect\.yaml"):
        services.up(tmp_path, say=print)


@pytest.mark.parametrize("name", ["full.py", "deployed.py", "replan.py"])
def test_a_flow_s_file_that_is_missing_is_said_before_anything_starts(name: str, tmp_path: Path) -> None:
    """Prefect met it when its server ran, and told it in a traceback."""
    project = make_project(tmp_path).folder
    (project / "flows" / name).unlink()
    with pytest.raises(InputError, match=rf"prefect\.yaml deploys a flow of flows/{name}, which is not there"):
        services.up(project, say=pytest.fail)
    assert not (project / ".dejavu" / "logs").exists()


def test_a_pid_that_was_given_to_another_process_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record = RecordedProcess("worker", other.pid, start_seconds(psutil.Process(other.pid)) - 1000, "none.log")
    kept = service_record.Services(str(tmp_path), "a token", free_port(), free_port(), (record,))
    services._stop(tmp_path, kept, say=print)
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize("name", ["plain", "my project", "it's", 'a "b"', "a\\b", "ü", "🚀", "a\tb", "a\x7fb", "a#b"])
def test_prefect_toml_is_read_whatever_the_folder_is_called(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    kept = service_record.Services(str(tmp_path / name), "a token", 4200, 5000)
    service_record.write_toml(tmp_path / name, kept, pytest.fail)
    content = tomllib.loads((tmp_path / name / "prefect.toml").read_text(encoding="utf-8"))
    assert content["home"] == str(tmp_path / name / ".dejavu" / "prefect")
    assert content["api"]["url"] == kept.prefect_api_url and service_record.is_ours(tmp_path / name / "prefect.toml")
    service_record.record(kept)
    assert service_record.recorded(tmp_path / name) == kept


def test_a_prefect_toml_of_the_user_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "prefect.toml"
    path.write_text("[api]\n")
    said: list[str] = []
    kept = service_record.Services(str(tmp_path), "a token", free_port(), free_port())
    service_record.write_toml(tmp_path, kept, said.append)
    services._stop(tmp_path, kept, say=print)
    assert path.read_text() == "[api]\n"
    assert kept.prefect_api_url in said[0]
