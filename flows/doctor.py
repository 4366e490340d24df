"""`dejavu doctor`: check for what could stop a run on this machine, with a remedy for each. It changes nothing.

Checks import what they need themselves: a missing or broken package must not keep the other checks from running.
"""

from __future__ import annotations

import contextlib
import errno
import platform
import shlex
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.table import Table
from rich.text import Text

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.processes.files import largest_file_bytes
from dejavu.foundation.processes.parents import PARENT
from dejavu.foundation.processes.start import started_at
from dejavu.foundation.units import format_bytes, plural
from flows import service_record, services
from flows.processes import family, is_free, listener
from flows.room import (
    LEAST_FILE_BYTES,
    LEAST_FREE_BYTES,
    LEAST_SHARED_BYTES,
    SHARED_MEMORY,
    SHARED_REMEDY,
    open_to_others,
)
from flows.server_settings import LOOPBACK, MLFLOW_DATABASE

OLDEST_PYTHON = (3, 11, 4)  # as pyproject.toml says
PACKAGES = (
    *("torch", "numpy", "numba", "scikit-learn", "pyarrow"),
    *("prefect", "fastapi", "sqlalchemy", "dask", "distributed", "mlflow"),
)
GIB = 2**30
LEAST_DISK_BYTES = 5 * GIB
LEAST_MEMORY_BYTES = 2 * GIB
COMFORTABLE_SHARED_BYTES = 64 * 2**20
RANK_MODULES = ("dejavu.runtime.", "dejavu.launch.", "dejavu.profiling.")  # how those of agents and ranks begin
INSTALL = "pip install --constraint constraints.txt --editable ."


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        ok: False stops a run or `dejavu up`; None is a warning.
        remedy: a command or a sentence; empty if there is nothing to do.
    """

    name: str
    ok: bool | None
    found: str
    remedy: str = ""


def checks(project: Path) -> list[Check]:
    """Run every check; one that itself raises is reported as failed."""
    project = project.resolve()
    found = []
    for look in LOOKS:
        try:
            found += look(project)
        except Exception as error:  # the other checks still run
            name = look.__name__.strip("_").replace("_", " ")
            found.append(Check(name, False, f"{type(error).__name__}: {error}", "this check failed; please report it"))
    return found


def table(found: list[Check]) -> Table:
    """Return the checks as a table for the terminal."""
    result = Table("", "", box=None, pad_edge=False)
    for name in ("found", "what to do"):  # a path or a command that breaks is better than one that is cut off
        result.add_column(name, overflow="fold")
    for check in found:
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[yellow]![/]"}[check.ok]
        result.add_row(mark, *map(Text, (check.name, check.found, check.remedy)))
    return result


# What is installed


def _python(project: Path) -> list[Check]:
    wanted = ".".join(map(str, OLDEST_PYTHON))
    ok = sys.version_info >= OLDEST_PYTHON
    found = f"{platform.python_version()} ({sys.executable})"
    newer = f"Python {wanted} or newer: make clean run PYTHON=python{wanted.rpartition('.')[0]}"
    return [Check("Python", ok, found, "" if ok else newer)]


def _packages(project: Path) -> list[Check]:
    path = project / "constraints.txt"
    if not path.is_file():
        return [Check("packages", None, f"no {path}", "take constraints.txt from the repository")]
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pins = dict(line.split("==", 1) for line in lines if "==" in line)
    pins = {name.lower(): pin.strip() for name, pin in pins.items()}
    return [_package(name, pins.get(name)) for name in PACKAGES]


def _package(name: str, pin: str | None) -> Check:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Check(name, False, "not installed", INSTALL)
    if pin is None:
        return Check(name, None, f"{installed}; constraints.txt does not name it", f"add {name}=={installed} to it")
    if installed.split("+")[0] == pin.split("+")[0]:  # +cpu or +cu130 is the same version built for another device
        return Check(name, True, installed)
    return Check(name, False, f"{installed}, but the tests passed with {pin}", f'pip install "{name}=={pin}"')


def _tools(project: Path) -> list[Check]:
    places = {tool: shutil.which(tool) for tool in ("gcc", "make")}
    return [
        Check(tool, True if place else None, place or "not found", "" if place else f"apt-get install {tool}")
        for tool, place in places.items()
    ]


# What the machine has


def _devices(project: Path) -> list[Check]:
    from dejavu.cluster import this_machine

    counts = this_machine().device_counts
    return [Check("devices", True, ", ".join(f"{count} × {name}" for name, count in counts.items()))]


def _memory(project: Path) -> list[Check]:
    memory = psutil.virtual_memory()
    ok = None if memory.available < LEAST_MEMORY_BYTES else True
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    return [Check("memory", ok, found, "" if ok else "stop what uses it, or plan a smaller workload")]


def _disk(project: Path) -> list[Check]:
    free_bytes = shutil.disk_usage(project).free
    ok = False if free_bytes < LEAST_FREE_BYTES else None if free_bytes < LEAST_DISK_BYTES else True
    remedy = (
        "" if ok else f"free space: checkpoints and trials are in {project / '.dejavu'} and {project / 'mlartifacts'}"
    )
    return [Check("disk", ok, f"{format_bytes(free_bytes)} free at {project}", remedy)]


def _largest_file(project: Path) -> list[Check]:
    file_bytes = largest_file_bytes()
    if file_bytes is None:
        return []
    ok = False if file_bytes < LEAST_FILE_BYTES else None  # a checkpoint's files may be larger than any limit
    remedy = "`ulimit -f unlimited`: a run writes databases, pages and checkpoints"
    return [Check("largest file", ok, f"{format_bytes(file_bytes)} in this shell", remedy)]


def _shared_memory(project: Path) -> list[Check]:
    if not SHARED_MEMORY.is_dir():
        return []
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    ok = False if free_bytes < LEAST_SHARED_BYTES else None if free_bytes < COMFORTABLE_SHARED_BYTES else True
    remedy = "" if ok else SHARED_REMEDY
    return [Check("shared memory", ok, f"{format_bytes(free_bytes)} free at {SHARED_MEMORY}", remedy)]


# What runs


def _services(project: Path) -> list[Check]:
    found = service_record.recorded(project)
    if found is None:
        return [Check("services", True, "down (dejavu up starts them)")]
    remedy = "dejavu up starts again what is missing"
    if found.dead:
        return [Check("services", False, f"half-dead, no longer there: {', '.join(found.dead)}", remedy)]
    if found.missing:
        return [Check("services", False, f"up, without an answer: {', '.join(found.missing)}", remedy)]
    return [Check("services", True, f"up: Prefect {found.prefect_url}, MLflow {found.mlflow_url}")]


def _ports(project: Path) -> list[Check]:
    found = service_record.recorded(project)
    ours = found if found and found.dead != service_record.SERVICES else None  # of which a part may have ended
    return [
        _port("Prefect", ours.prefect_port if ours else services.PREFECT_PORT, ours, ours.host if ours else LOOPBACK),
        _port("MLflow", ours.mlflow_port if ours else services.MLFLOW_PORT, ours, LOOPBACK),
    ]


def _port(server: str, port: int, ours: service_record.Services | None, host: str) -> Check:
    name = f"port {port} ({server})"
    if is_free(port, host):
        return Check(name, True, "free")
    holder = listener(port)
    if ours and (holder is None or holder.pid in {one.pid for one in family(ours.processes, ours.token)}):
        return Check(name, True, "ours")
    by = f" by {holder.name()} (pid {holder.pid})" if holder else " by another process"
    first = "dejavu down, then " if ours else ""  # what has a port keeps it
    return Check(name, None, f"taken{by}", f"stop it, or {first}let dejavu up choose the next free port")


def _training(project: Path) -> list[Check]:
    from dejavu.launch.training_lock import holder_in

    holder = holder_in(project)
    if holder is None:
        return [Check("training", True, "none in this folder")]
    return [Check("training", None, f"{holder} {holder.does} here", "wait for it: only one dejavu run at a time")]


def _leftover_ranks(project: Path) -> list[Check]:
    left = [process.pid for process in psutil.process_iter(["cmdline", "ppid"]) if _is_left_over(process)]
    if not left:
        return [Check("ranks", True, "none left over")]
    pids = " ".join(map(str, left))
    return [Check("ranks", False, f"left over from a training whose launcher ended: {pids}", f"kill {pids}")]


def _is_left_over(process: psutil.Process) -> bool:
    """Return whether a rank or an agent has outlived its parent; in a container that may be process 1 itself."""
    words = process.info["cmdline"] or ()
    if process.info["ppid"] != 1 or not any(word.startswith(RANK_MODULES) for word in words):
        return False
    try:
        return bool(process.environ().get(PARENT) != "1")
    except (psutil.Error, OSError):
        return True


# What the project keeps


def _cost_database(project: Path) -> list[Check]:
    from dejavu.profiles import ProfileDatabase

    name, folder = "cost database", project / "profiles_db"
    if not folder.exists():
        return [Check(name, True, "none yet: the first run, profile or import makes it")]
    findings = ProfileDatabase(folder).check()
    if not findings:
        return [Check(name, True, f"{folder} is sound")]
    return [Check(name, False, f"{finding.path.name}: {finding.what}", finding.remedy) for finding in findings]


def _cluster(project: Path) -> list[Check]:
    from dejavu.cluster import load_cluster

    path = project / "cluster.yaml"
    if not path.is_file():
        return [Check("cluster.yaml", False, f"no {path}", "write one; `nodes: auto` means this machine")]
    try:
        cluster = load_cluster(path)
    except DejavuError as error:
        return [Check("cluster.yaml", False, str(error), "edit that line")]
    counts = ", ".join(f"{count} × {name}" for name, count in cluster.device_counts.items())
    return [Check("cluster.yaml", True, f"{cluster.name}: {counts}")]


def _mlflow(project: Path) -> list[Check]:
    """Check MLflow's database with sqlite3: MLflow itself would upgrade a database that it opens."""
    name, path = "MLflow database", project / "mlflow.db"
    if not path.exists():
        up = service_record.recorded(project)
        has_own = up is not None and MLFLOW_DATABASE in up.needs
        return [Check(name, True, f"that of {MLFLOW_DATABASE}" if has_own else "none yet: the first run makes it")]
    query = """SELECT runs.run_uuid, pid.value, start.value, boot.value FROM runs
               LEFT JOIN tags AS pid ON pid.run_uuid = runs.run_uuid AND pid.key = 'dejavu.pid'
               LEFT JOIN tags AS start ON start.run_uuid = runs.run_uuid AND start.key = 'dejavu.process_start_seconds'
               LEFT JOIN tags AS boot ON boot.run_uuid = runs.run_uuid AND boot.key = 'dejavu.boot'
               WHERE runs.status = 'RUNNING' AND runs.lifecycle_stage = 'active'"""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10)) as database:
            running = database.execute(query).fetchall()
    except sqlite3.Error as error:
        remedy = f"move {path} away (the next run makes a new one), or restore it from a copy"
        return [Check(name, False, f"{path} cannot be read: {error}", remedy)]
    dead = [run for run, *process in running if not _runs(*process)]
    if not dead:
        return [Check(name, True, f"readable; {plural(len(running), 'run')} in progress")]
    more = " …" if len(dead) > 3 else ""
    found = f"{plural(len(dead), 'run')} marked RUNNING, whose process has ended: {', '.join(dead[:3])}{more}"
    return [Check(name, None, found, "nothing: the next dejavu run marks those of this machine as KILLED")]


def _runs(pid: str | None, start_seconds: str | None, boot: str | None) -> bool:
    """Return whether the process that opened an MLflow run is alive; `start_seconds` counts from the machine's boot."""
    try:
        return started_at(psutil.Process(int(pid or "")), float(start_seconds or ""), boot or "")
    except (ValueError, psutil.NoSuchProcess):
        return False


def _private(project: Path) -> list[Check]:
    name, found = "private", open_to_others(project)
    if not found:
        return [Check(name, True, "only you can read what is kept here")]
    words = shlex.join(["chmod", "-R", "go=", *map(str, found)])
    return [Check(name, None, f"others may read or enter {', '.join(map(str, found))}", words)]


def _prefect_home(project: Path) -> list[Check]:
    home = project / ".dejavu" / "prefect"
    exists = next(folder for folder in (home, *home.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=exists):
            return [Check("Prefect home", True, f"{home} is writable")]
    except OSError as error:
        read_only = error.errno == errno.EROFS
        remedy = (
            "copy the project to a disk that can be written"
            if read_only
            else f"chown -R $USER {shlex.quote(str(exists))}"
        )
        return [Check("Prefect home", False, f"{exists}: {error.strerror}", remedy)]


LOOKS: tuple[Callable[[Path], list[Check]], ...] = (
    *(_python, _packages, _tools),
    *(_devices, _memory, _disk, _largest_file, _shared_memory),
    *(_services, _ports, _training, _leftover_ranks),
    *(_cost_database, _cluster, _mlflow, _prefect_home, _private),
)
