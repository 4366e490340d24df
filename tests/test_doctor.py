"""`dejavu doctor` tells what is wrong and what to do about it."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shlex
import socket
import sqlite3
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import psutil
import pytest
from packaging.specifiers import SpecifierSet
from rich.console import Console

from dejavu.foundation.processes.parents import PARENT
from dejavu.foundation.processes.start import start_seconds
from flows import doctor, service_record, services
from flows.doctor import Check, checks, table
from flows.processes import RecordedProcess
from flows.server_settings import AUTH, MLFLOW_DATABASE, PREFECT_DATABASE, SECRETS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    (tmp_path / "cluster.yaml").write_text("nodes: auto\n")
    return tmp_path


def told(project: Path, name: str) -> Check:
    """The one check of this name that is not ok."""
    found = [check for check in checks(project) if check.name.startswith(name) and check.ok is not True]
    assert len(found) == 1, found
    assert found[0].remedy
    return found[0]


def test_a_sound_project_has_nothing_to_do(project: Path) -> None:
    wrong = [check for check in checks(project) if check.ok is False]
    assert wrong == []


def test_this_repository_is_installed_as_it_was_tested() -> None:
    assert [check for check in doctor._packages(ROOT) if not check.ok] == []


@pytest.mark.parametrize("found", [(3, 10, 14), (3, 11, 0), (3, 11, 3), (3, 11, 4), (3, 11, 9), (3, 12, 0), (3, 13, 1)])
def test_python_is_as_old_as_pip_takes(found: tuple[int, ...], project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12 has 3.11.2."""
    takes = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    monkeypatch.setattr(sys, "version_info", found)
    (check,) = doctor._python(project)
    assert check.ok == takes.contains(".".join(map(str, found)))
    assert check.ok or "Python 3.11.4 or newer" in check.remedy


def test_a_wrong_pin(project: Path) -> None:
    (project / "constraints.txt").write_text("fastapi==0.1.2  # by hand\n")
    check = next(check for check in checks(project) if check.name == "fastapi")
    assert check.ok is False
    assert "0.1.2" in check.found
    assert check.remedy == 'pip install "fastapi==0.1.2"'


def test_a_damaged_cost_database(project: Path) -> None:
    (project / "profiles_db").mkdir()
    (project / "profiles_db" / "manifest.json").write_text("{")
    assert "manifest" in told(project, "cost database").found


def test_a_mistake_in_the_cluster_file(project: Path) -> None:
    (project / "cluster.yaml").write_text("nodes: auto\nspeed: fast\n")
    check = told(project, "cluster.yaml")
    assert check.ok is False
    assert "cluster.yaml:2" in check.found


def test_a_taken_port(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(services, "PREFECT_PORT", other.getsockname()[1])
        check = told(project, f"port {services.PREFECT_PORT}")
    assert str(os.getpid()) in check.found


def test_services_of_which_one_has_died(project: Path) -> None:
    record = {"project": str(project), "token": "t", "prefect_port": 1, "mlflow_port": 2, "processes": []}
    (project / ".dejavu").mkdir()
    (project / ".dejavu" / "services.json").write_text(json.dumps(record))
    check = told(project, "services")
    assert "worker" in check.found
    assert "dejavu up" in check.remedy


LISTEN = """
import socket, sys
both = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in both), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "alive", [alive for n in range(4) for alive in itertools.combinations(("mlflow", "prefect", "worker"), n)]
)
def test_ports_are_ours_while_any_of_our_services_listens_there(
    alive: tuple[str, ...], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told to stop a server of this project because its worker has ended; and another's is not ours."""
    words = [sys.executable, "-c", LISTEN]
    with Popen(words, stdin=PIPE, stdout=PIPE, text=True) as server, Popen(words, stdin=PIPE, stdout=PIPE) as other:
        assert server.stdout is not None
        ports = [int(port) for port in server.stdout.readline().split()]
        monkeypatch.setattr(services, "PREFECT_PORT", ports[0])
        monkeypatch.setattr(services, "MLFLOW_PORT", ports[1])
        found = service_record.Services(str(project), "t", *ports)
        for name in alive:
            pid = other.pid if name == "worker" else server.pid
            found = found.with_process(RecordedProcess(name, pid, start_seconds(psutil.Process(pid)), ""))
        service_record.record(found)
        told = doctor._ports(project)
        server.kill()
        other.kill()
    is_ours = bool({"mlflow", "prefect"} & {*alive})
    assert [check.found == "ours" for check in told] == [is_ours] * 2
    assert all(check.ok or str(server.pid) in check.found for check in told)
    assert all(
        bool(check.remedy) != is_ours and ("dejavu down" in check.remedy) == (alive == ("worker",)) for check in told
    )


@pytest.mark.parametrize("silent", [(), ("prefect",), ("mlflow",), ("prefect", "mlflow")])
def test_services_that_do_not_answer(silent: tuple[str, ...], project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes run, as of a server that hangs."""
    here = RecordedProcess("", os.getpid(), start_seconds(psutil.Process()), "")
    found = service_record.Services(str(project), "t", 4200, 5000)
    for name in service_record.SERVICES:
        found = found.with_process(replace(here, name=name))
    service_record.record(found)
    urls = dict(zip(found.health_urls, ("prefect", "mlflow"), strict=True))
    monkeypatch.setattr(service_record, "answers_at", lambda url: urls[url] not in silent)
    (check,) = doctor._services(project)
    assert check.ok is (not silent) and all(name in check.found for name in silent)
    assert ("without an answer" in check.found) == bool(silent) == bool(check.remedy)


@pytest.mark.parametrize("name", ["plain", "my project", "it's", 'a "b"', "$HOME", "ü n;x", "🚀"])
def test_what_to_do_is_a_line_for_a_shell(name: str, tmp_path: Path) -> None:
    project = tmp_path / name
    for kept in (".dejavu", "profiles_db"):
        (project / kept).mkdir(parents=True)
        (project / kept).chmod(0o755)
    (private,) = doctor._private(project)
    assert shlex.split(private.remedy) == ["chmod", "-R", "go=", str(project / ".dejavu"), str(project / "profiles_db")]
    subprocess.run(private.remedy, shell=True, check=True)
    assert doctor._private(project)[0].ok


MODULES = ["dejavu.runtime.worker", "dejavu.launch.agent", "dejavu.launch.warm.agent", "dejavu.launch.comparison"]


@pytest.mark.parametrize("module", [*MODULES, "dejavu.profiling.layers", "flows", "dejavu"])
@pytest.mark.parametrize("parent", [1, 77])
@pytest.mark.parametrize("named", ["1", "77", None])
def test_ranks_that_outlived_their_launcher_are_named_and_no_others(
    module: str, parent: int, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind of launch; in a container process 1 may be the launcher."""
    words, own = [sys.executable, "-m", module, "job.json"], {PARENT: named} if named else {}
    process = SimpleNamespace(info={"cmdline": words, "ppid": parent}, pid=4711, environ=lambda: own)
    monkeypatch.setattr(psutil, "process_iter", lambda what: [process])
    (check,) = doctor._leftover_ranks(tmp_path)
    is_ours = module in MODULES or "profiling" in module
    assert (check.remedy == "kill 4711") == (is_ours and parent == 1 and named != "1")


def test_a_run_of_a_killed_process(project: Path) -> None:
    from dejavu.track.identity import PID_TAG, START_TAG

    with sqlite3.connect(project / "mlflow.db") as database:
        database.execute("CREATE TABLE runs (run_uuid, status, lifecycle_stage)")
        database.execute("CREATE TABLE tags (run_uuid, key, value)")
        database.execute("INSERT INTO runs VALUES ('a1', 'RUNNING', 'active'), ('b2', 'FINISHED', 'active')")
        database.executemany("INSERT INTO tags VALUES ('a1', ?, ?)", [(PID_TAG, str(os.getpid())), (START_TAG, "1.5")])
    assert "a1" in told(project, "MLflow database").found


@pytest.mark.parametrize("needs", [(), (AUTH,), (MLFLOW_DATABASE,), (AUTH, PREFECT_DATABASE), SECRETS])
def test_services_with_a_database_of_their_own_lack_none(needs: tuple[str, ...], project: Path) -> None:
    service_record.record(service_record.Services(str(project), "t", 1, 2, needs=needs))
    (check,) = doctor._mlflow(project)
    assert check.ok and (MLFLOW_DATABASE in check.found) == (MLFLOW_DATABASE in needs) == ("none" not in check.found)


def test_an_mlflow_database_that_is_none(project: Path) -> None:
    (project / "mlflow.db").write_text("not a database, but a longer text" * 100)
    assert told(project, "MLflow database").ok is False


def test_a_check_that_fails_does_not_hide_the_others(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken(project: Path) -> list[Check]:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "LOOKS", (_broken, doctor._python))
    assert [(check.name, check.ok) for check in checks(project)] == [("broken", False), ("Python", True)]


def test_the_table_shows_text_as_it_is() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table([Check("a [b]", None, "found [red]", "do /this [1]")]))
    assert "a [b]" in capture.get()
    assert "do /this [1]" in capture.get()


@pytest.mark.parametrize("width", [50, 60, 80, 100, 200])
def test_the_table_cuts_nothing_off_however_narrow_the_terminal(width: int) -> None:
    """What is found and what to do are often longer than a line, and a path that ends in dots helps nobody."""
    found, remedy = "/a/long/path/" + "x" * 90, "rm /another/" + "y" * 70 + " && dejavu up"
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table([Check("packages", False, found, remedy), Check("Python", True, "3.11.7", "")]))
    shown = capture.get()
    assert "…" not in shown
    assert (shown.count("x"), shown.count("y")) == (90 + found[:13].count("x"), 70 + remedy[:12].count("y") + 1)


def test_a_database_that_is_not_there_is_not_called_sound(tmp_path: Path) -> None:
    (check,) = doctor._cost_database(tmp_path)
    assert check.ok and check.found.startswith("none yet")
    assert not (tmp_path / "profiles_db").exists()


@pytest.mark.parametrize(("mebibytes", "ok"), [(4, False), (512, None)])
def test_the_doctor_says_that_files_may_not_be_large(mebibytes: int, ok: bool | None, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (mebibytes * 2**20, limits[1]))
    try:
        (found,) = doctor._largest_file(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (found.ok, found.found) == (ok, f"{mebibytes} MiB in this shell") and "ulimit -f" in found.remedy
    assert bool(doctor._largest_file(tmp_path)) == (limits[0] != resource.RLIM_INFINITY)
    assert doctor._largest_file in doctor.LOOKS
