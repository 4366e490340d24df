"""A project of its own whose services run, what its servers take, and what is left of it when they have ended."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks._processes import processes_of

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("flows", "tasks", "prefect.yaml", "constraints.txt", "pyproject.toml")
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
POLL_SECONDS = 0.2
END_SECONDS = 900.0  # of a run on a machine that others use too
PAGE = 200  # Prefect's most rows of one answer
LOCKED = "database is locked"
SHARED_MEMORY = Path("/dev/shm")
OTHERS = {"torchinductor_root", "runner_storage"}  # empty: torch's, one for each user, and Prefect's for workers


@dataclass
class Served:
    """A project whose services run.

    Attributes:
        folder: of the project; nothing else is in it.
        temporary: where all that its processes start puts temporary files.
        shared_before: names in /dev/shm before anything was started.
        processor_seconds: of the last flow's own process, when it was last seen; its ranks and the servers not counted.
    """

    folder: Path
    temporary: Path
    environment: Mapping[str, str]
    shared_before: frozenset[str]
    processor_seconds: float = 0.0

    @property
    def ports(self) -> tuple[int, int]:
        """Prefect's and MLflow's."""
        return self._record["prefect_port"], self._record["mlflow_port"]

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """The services that `dejavu up` recorded and that run, by name."""
        recorded = {one["name"]: one["pid"] for one in self._record["processes"]}
        return {name: psutil.Process(pid) for name, pid in recorded.items() if psutil.pid_exists(pid)}

    @property
    def _record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / ".dejavu" / "services.json").read_text())
        return found

    def _api(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.ports[0]}/api", trust_env=False, timeout=60)

    def command(self, *words: str, timeout: float = END_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run `dejavu` with these words."""
        with tempfile.TemporaryFile("w+") as output:
            process = psutil.Popen(
                [sys.executable, "-m", "flows", *words],
                cwd=self.folder,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            stop = time.monotonic() + timeout
            while process.poll() is None and time.monotonic() < stop:
                self.processor_seconds = processor_seconds(process) or self.processor_seconds
                time.sleep(POLL_SECONDS)
            if process.poll() is None:
                process.kill()
            code = int(process.wait())
            output.seek(0)
            return subprocess.CompletedProcess(words, code, output.read())

    def get(self, path: str) -> Any:
        with self._api() as api:
            return api.get(path).raise_for_status().json()

    def ask(self, path: str, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return all rows that a filter of Prefect's finds, page after page."""
        rows: list[dict[str, Any]] = []
        with self._api() as api:
            while True:
                page = {**wanted, "limit": PAGE, "offset": len(rows)}
                found = api.post(path, json=page).raise_for_status().json()
                rows += found
                if len(found) < PAGE:
                    return rows

    def submit(self, deployment: str, **parameters: Any) -> str:
        """Start a run of a deployment, as its page does; return its id."""
        identity = self.get(f"/deployments/name/{deployment}")["id"]
        with self._api() as api:
            made = api.post(f"/deployments/{identity}/create_flow_run", json={"parameters": parameters})
            return str(made.raise_for_status().json()["id"])

    def ends(self, runs: Sequence[str]) -> dict[str, str]:
        """Wait for the ends of these runs; return their states, of one that does not end the last."""
        stop = time.monotonic() + END_SECONDS * len(runs)
        states = dict.fromkeys(runs, "")
        while not set(states.values()) <= FINAL and time.monotonic() < stop:
            time.sleep(POLL_SECONDS)
            for process in self.run_processes(recursive=False):
                self.processor_seconds = processor_seconds(process) or self.processor_seconds
            for run in (run for run, state in states.items() if state not in FINAL):
                states[run] = str(self.get(f"/flow_runs/{run}")["state"]["type"])
        return states

    def run_processes(self, *, recursive: bool = True) -> list[psutil.Process]:
        """Return the processes of runs, which are the worker's; or only the flows' own, without their ranks."""
        worker = self.processes.get("worker")
        return worker.children(recursive=recursive) if worker else []

    def server_bytes(self) -> dict[str, int]:
        """Return the resident memory of each service and its descendants."""
        found = {}
        for name, process in self.processes.items():
            found[name] = sum(_resident_bytes(part) for part in [process, *process.children(recursive=True)])
        return found

    def locked_messages(self) -> int:
        """Count the lines about a locked database in all that a user could read: logs, and what runs logged."""
        files = (self.folder / ".dejavu" / "logs").glob("*.log")
        lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
        lines += [row["message"] for row in self.ask("/logs/filter", {})]
        lines += [str(run["state"]["message"]) for run in self.ask("/flow_runs/filter", {}) if run["state"]]
        return sum(LOCKED in line for line in lines)

    def down(self) -> None:
        """Stop the services.

        Raises:
            RuntimeError: they did not stop.
        """
        _must(self.command("down"))

    def left(self, ports: Sequence[int]) -> list[str]:
        """Name what is left after `dejavu down`: processes, ports, temporary files, runs called running."""
        found = [f"process {one.pid}: {' '.join(one.cmdline())[:80]}" for one in processes_of(self.folder)]
        found += [f"port {port}" for port in ports if _answers(port)]
        found += [f"{path}" for path in sorted(self.temporary.iterdir()) if path.name not in OTHERS]
        found += [f"{path}" for path in sorted((self.folder / ".dejavu").rglob("*")) if _is_temporary(path)]
        if (self.folder / ".dejavu" / "mlflow-spool").exists():
            found += [f"{path}" for path in (self.folder / ".dejavu" / "mlflow-spool").iterdir()]
        return found + [f"shared memory {name}" for name in sorted(_unused_shared_memory() - self.shared_before)]


@contextmanager
def served() -> Iterator[Served]:
    """A project whose services run until the block ends.

    Raises:
        RuntimeError: they did not start, or did not end.
    """
    with tempfile.TemporaryDirectory(prefix="dejavu-served-") as outer:
        folder, temporary = Path(outer).resolve() / "project", Path(outer).resolve() / "tmp"
        folder.mkdir()
        temporary.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)
        (folder / "cluster.yaml").write_text("nodes: auto\n")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW"))}
        environment = {**kept, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
        project = Served(folder, temporary, environment, frozenset(_shared_memory()))
        ports = ("--prefect-port", str(_free_port()), "--mlflow-port", str(_free_port()))
        try:
            _must(project.command("up", *ports))
            yield project
        finally:
            project.down()


def _must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stdout}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time that a process has taken; 0: it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _is_temporary(path: Path) -> bool:
    """Whether a file or folder is named as those that are written aside, or that stand for a running launch."""
    return path.name.startswith((".launch-", ".tmp-", "temporary-", "model-")) or path.suffix == ".tmp"


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def _unused_shared_memory() -> set[str]:
    """Names of shared memory that no process has mapped: other work on this machine uses its own."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(path.read_text())
        except OSError:
            continue
    used = "\n".join(maps)
    return {name for name in _shared_memory() if f"{SHARED_MEMORY}/{name}" not in used}
