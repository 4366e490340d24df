"""A project whose services run, for tests of them: its server's answers, and waiting for what they do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flows import service_record
from flows.prefect_api import connect
from tests.ports import free_port
from tests.test_flow import BIN, environment
from tests.waiting import PATIENCE_SECONDS

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Up:
    """A project whose services run, and its server's answers."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.api = connect(self.services.prefect_api_url)
        self.api.timeout = PATIENCE_SECONDS  # a server whose cores are all taken may take minutes for one answer

    @property
    def services(self) -> service_record.Services:
        found = service_record.recorded(self.project)
        assert found is not None
        return found

    def process(self, name: str) -> psutil.Process:
        found = next(one for one in self.services.processes if one.name == name).find()
        assert found is not None
        return found

    def submit(self, deployment: str, **parameters: Any) -> str:
        """Start a run as Prefect's page does; its command is as good, and takes seconds to start."""
        identity = self.api.get(f"/deployments/name/{deployment}").raise_for_status().json()["id"]
        wanted = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        made = self.api.post(f"/deployments/{identity}/create_flow_run", json=wanted).raise_for_status()
        return str(made.json()["id"])

    def run(self, identity: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/flow_runs/{identity}").raise_for_status().json()
        return found

    def cancel(self, identity: str) -> None:
        """As Prefect's page does."""
        wanted = {"state": {"type": "CANCELLING"}}
        self.api.post(f"/flow_runs/{identity}/set_state", json=wanted).raise_for_status()

    def state(self, identity: str) -> str:
        return str(self.run(identity)["state"]["type"])

    def end_of(self, identity: str) -> str:
        eventually(lambda: self.state(identity) in FINAL, f"end of {identity}")
        return self.state(identity)

    def logs(self, identity: str) -> list[str]:
        wanted = {"logs": {"flow_run_id": {"any_": [identity]}}, "sort": "TIMESTAMP_ASC"}
        return [line["message"] for line in self.api.post("/logs/filter", json=wanted).raise_for_status().json()]

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        """The deployment's runs that have begun, the newest first."""
        identity = self.api.get(f"/deployments/name/{deployment}").raise_for_status().json()["id"]
        wanted = {"flow_runs": {"deployment_id": {"any_": [identity]}}, "sort": "START_TIME_DESC"}
        found: list[dict[str, Any]] = self.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()
        return [run for run in found if run["start_time"]]


def eventually(is_so: Callable[[], Any], what: str) -> None:
    stop = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < stop, f"no {what} within {PATIENCE_SECONDS} s"
        time.sleep(0.5)  # each look costs the server, which shares these cores


@contextmanager
def dask_cluster(project: Path) -> Iterator[tuple[str, Callable[[str], subprocess.Popen[bytes]]]]:
    """A scheduler, and a way to start a worker of one thread by name; all end with the block."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        log = (project / f"dask-{len(started)}.log").open("wb")
        one = subprocess.Popen([BIN / "dask", *words], cwd=project, env=environment(), stdout=log, stderr=log)
        started.append(one)
        return one

    def worker(name: str) -> subprocess.Popen[bytes]:
        return start("worker", address, "--name", name, "--nthreads", "1", "--no-nanny", "--no-dashboard")

    port = str(free_port())
    address = f"tcp://127.0.0.1:{port}"
    start("scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
    try:
        yield address, worker
    finally:
        for one in reversed(started):
            one.kill()
            one.wait()
