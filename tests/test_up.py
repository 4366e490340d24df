"""What `dejavu up` runs, as people use it: deployments, cancelling, a server that dies, a cluster that changes.

All tests share one `dejavu up`; each leaves it as it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import distributed
import psutil
import pytest

from benchmarks._processes import processes_of
from flows import service_record
from flows.prefect_api import connect
from tests.test_flow import (
    BIN,
    WORKLOAD,
    check_records,
    command,
    environment,
    free_port,
    needs_two_cores,
    plan_of,
    runs_of,
)
from tests.test_flow import project as project  # a fixture
from tests.waiting import PATIENCE_SECONDS

MEASURED_BEFORE = True  # what these runs measure is no matter
pytestmark = [pytest.mark.integration, needs_two_cores]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
LONG = {**WORKLOAD, "num_steps": 3000, "compare": False, "trials": {"count": 0}}


class Up:
    """A project whose services run, and its server's answers."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.api = connect(self.services.prefect_api_url)

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


@pytest.fixture(scope="module")
def up(project: Path) -> Iterator[Up]:
    (project / "examples" / "workloads").mkdir(parents=True)
    (project / "examples" / "workloads" / "small.yaml").write_text(json.dumps(WORKLOAD))
    started = command(project, "dejavu", "up", "--prefect-port", free_port(), "--mlflow-port", free_port())
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield Up(project)
    finally:
        down = command(project, "dejavu", "down")
        assert down.returncode == 0, down.stdout + down.stderr


def test_full_as_it_is_typed(up: Up) -> None:
    """`prefect deployment run dejavu/full --watch`: losses in its log, four flows in its drawing, parallel searches."""
    words = ["prefect", "deployment", "run", "dejavu/full", "--watch", "--params", json.dumps({"workload": WORKLOAD})]
    ran = command(up.project, *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Completed" in ran.stdout
    assert "step 16 of 16: loss" in " ".join(ran.stdout.split())
    check_records(up.project)
    flows = {flow["id"]: flow["name"] for flow in up.api.post("/flows/filter", json={}).json()}
    newest = up.runs("dejavu/full")[0]
    tasks = up.api.post("/task_runs/filter", json={}).raise_for_status().json()
    parts = [run for run in up.api.post("/flow_runs/filter", json={}).json() if run["parent_task_run_id"]]
    callers = {task["id"] for task in tasks if task["flow_run_id"] == newest["id"]}
    assert sorted(flows[p["flow_id"]] for p in parts if p["parent_task_run_id"] in callers) == [
        *("initialize", "plan", "profile", "train")
    ]
    spans = sorted((task["start_time"], task["end_time"]) for task in tasks if task["name"].startswith("search: "))
    assert len(spans) > 2
    assert any(later < end for (_, end), (later, _) in pairwise(spans)), "no two searches at the same time"


def test_a_workload_may_be_a_file_and_plan_is_the_command_s(up: Up) -> None:
    workload = "examples/workloads/small.yaml"
    run = up.submit("dejavu/plan", workload=workload)
    assert up.end_of(run) == "COMPLETED", up.logs(run)
    planned = command(up.project, "dejavu", "plan", "--workload", workload, "--json")
    assert planned.returncode == 0, planned.stderr
    parents, _ = runs_of(up.project)
    ours, theirs = plan_of(up.project, parents[0]), json.loads(planned.stdout)
    assert (len(ours["stages"]), ours["schedule"], ours["num_microbatches"]) == (
        *(len(theirs["stages"]), theirs["schedule"], theirs["microbatches"]),
    )


def test_the_form_has_titles_texts_and_choices(up: Up) -> None:
    for name in ("full", "plan", "profile", "initialize", "train"):
        form = up.api.get(f"/deployments/name/dejavu/{name}").raise_for_status().json()["parameter_openapi_schema"]
        assert all(field.get("title") and field.get("description") for field in form["properties"].values())
    form = up.api.get("/deployments/name/dejavu/full").json()["parameter_openapi_schema"]
    workload = form["definitions"]["Workload"]["properties"]
    assert "zbv" in workload["schedule"]["enum"]
    assert "bayesian" in form["definitions"]["TrialSettings"]["properties"]["proposer"]["enum"]
    assert "gpt" in workload["model"]["examples"]
    assert all("`dejavu" not in field.get("title", "") and field["description"] for field in workload.values())


def test_a_wrong_workload_is_said_in_one_sentence(up: Up) -> None:
    run = up.submit("dejavu/plan", workload="examples/workloads/none.yaml")
    assert up.end_of(run) == "FAILED"
    assert "there is no examples/workloads/none.yaml" in " ".join([up.run(run)["state"]["message"], *up.logs(run)])


def test_run_shows_up_in_the_server_that_is_there(up: Up) -> None:
    before = len(up.api.post("/flow_runs/filter", json={}).json())
    ran = command(up.project, "dejavu", "run", "--no-train", "--workload", "examples/workloads/small.yaml")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(up.api.post("/flow_runs/filter", json={}).json()) > before
    assert not list((up.project / ".dejavu" / "prefect").glob("temporary-*"))


def is_training(up: Up, run: str) -> bool:
    return any(line.startswith("step ") and "loss" in line for line in up.logs(run))


def test_a_run_cancelled_while_it_trains_leaves_nothing(up: Up) -> None:
    """Fault 7: by Prefect's API, as its page does."""
    run = up.submit("dejavu/full", workload=LONG)
    eventually(lambda: is_training(up, run), "loss")
    before = {process.pid for process in processes_of(up.project)}
    up.api.post(f"/flow_runs/{run}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()
    assert up.end_of(run) == "CANCELLED"
    servers = {one.pid for one in up.services.processes}
    tree = {pid for server in servers for pid in (server, *(c.pid for c in psutil.Process(server).children(True)))}
    eventually(lambda: {p.pid for p in processes_of(up.project)} <= tree, f"end of what it started, {before - tree}")
    command(up.project, "dejavu", "plan", "--workload", "examples/workloads/small.yaml")
    parents, children = runs_of(up.project)
    assert parents[0].info.status == "KILLED"
    assert children["training"].info.status == "KILLED"


def test_a_training_survives_the_death_of_prefect_s_server(up: Up) -> None:
    """Fault 27: `dejavu up` starts the dead part alone, and the run ends as it would have."""
    run = up.submit("dejavu/full", workload={**LONG, "num_steps": 1500})
    eventually(lambda: is_training(up, run), "loss")
    worker = up.process("worker")
    for process in [up.process("prefect"), *up.process("prefect").children(recursive=True)]:
        process.kill()
    again = command(up.project, "dejavu", "up")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "prefect" in again.stdout and "worker" not in again.stdout.partition(";")[0]
    assert up.process("worker") == worker
    assert up.state(run) == "RUNNING"
    assert up.end_of(run) == "COMPLETED", up.logs(run)
    assert {one["state"]["type"] for one in up.api.post("/flow_runs/filter", json={}).json()} <= FINAL
    parents, children = runs_of(up.project)
    assert (parents[0].info.status, children["training"].info.status) == ("FINISHED", "FINISHED")


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

    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    start("scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
    try:
        yield address, worker
    finally:
        for one in reversed(started):
            one.kill()
            one.wait()


CORES = """
nodes:
- {{name: cores, hosts: [{hosts}], devices: {{type: core, count: 1}}}}
links: {{default: {{bandwidth: {bandwidth}, latency: 100 us}}}}
devices: {{core: {{kind: cpu, memory: 4 GiB, bandwidth: 10 GB/s, float32: 100 GFLOP/s}}}}
"""


def decisions(project: Path) -> list[dict[str, Any]]:
    path = project / ".dejavu" / "watch" / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_a_cluster_that_changes_is_planned_for_again(up: Up) -> None:
    """A worker killed, one added, the file edited: each an event, a re-plan and its reason; else nothing."""
    file = up.project / "cores.yaml"
    file.write_text(CORES.format(hosts="w0, w1", bandwidth="1 GB/s"))
    options = ["--cluster", "cores.yaml", "--workload", "examples/workloads/small.yaml", "--every-seconds", "3600"]
    with dask_cluster(up.project) as (address, worker), distributed.Client(address) as client:

        def hosts() -> set[str]:
            return {str(one["name"]) for one in client.scheduler_info(n_workers=-1)["workers"].values()}

        workers = [worker(f"w{k}") for k in range(2)]
        eventually(lambda: hosts() == {"w0", "w1"}, "workers")
        started = command(up.project, "dejavu", "up", "--watch", *options, "--dask", address)
        assert started.returncode == 0, started.stdout + started.stderr

        def look() -> str:
            """As the schedule does once an hour here; returns what the look says."""
            run = up.submit("replan/on-change")
            assert up.end_of(run) in ("COMPLETED", "CANCELLED"), up.logs(run)
            return str(up.run(run)["state"]["message"])

        try:
            look()
            eventually(lambda: len(decisions(up.project)) == 1, "first plan")
            assert look() == "nothing changed since the last plan"
            assert len(decisions(up.project)) == 1, "nothing had changed"

            def after(change: Callable[[], object], said: str, present: set[str]) -> None:
                number = len(decisions(up.project))
                change()
                eventually(lambda: hosts() == present, f"scheduler that has {present}")
                eventually(lambda: look().startswith("changed: "), "look that sees it")
                eventually(lambda: len(decisions(up.project)) > number, said)
                last = decisions(up.project)[-1]
                assert said in last["change"]
                assert last["why"]
                assert last["old_fingerprint"] != last["new_fingerprint"]

            after(workers[1].kill, "host w1 is gone", {"w0"})
            after(lambda: worker("w2"), "host w2 is new", {"w0", "w2"})
            faster = CORES.format(hosts="w0, w1", bandwidth="2 GB/s")
            after(lambda: file.write_text(faster), "link between two nodes of cores: 1 GB/s one way", {"w0", "w2"})
            states = [run["state"] for run in up.runs("replan/on-change")]
            assert {state["type"] for state in states} <= {"COMPLETED", "CANCELLED", "RUNNING", "PENDING"}
            events = {"filter": {"event": {"name": ["dejavu.cluster.changed"]}}}
            found = up.api.post("/events/filter", json=events).raise_for_status().json()["events"]
            assert len(found) >= 4
            assert {"old_fingerprint", "new_fingerprint", "change"} <= set(found[0]["payload"])
        finally:
            deployment = up.api.get("/deployments/name/replan/on-change").raise_for_status().json()
            path = f"/deployments/{deployment['id']}/schedules"
            schedules = up.api.get(path).raise_for_status().json()
            for schedule in schedules:
                up.api.patch(f"{path}/{schedule['id']}", json={"active": False}).raise_for_status()
            eventually(lambda: {run["state"]["type"] for run in up.runs("replan/on-change")} <= FINAL, "end")
    assert len(schedules) == 1


def test_deploying_again_leaves_one_schedule(up: Up) -> None:
    deployed = command(up.project, sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    deployment = up.api.get("/deployments/name/replan/on-change").raise_for_status().json()
    assert [(one["slug"], one["active"]) for one in deployment["schedules"]] == [("look-at-the-cluster", False)]


def test_of_two_runs_that_overlap_one_is_cancelled_with_the_reason(up: Up) -> None:
    """Fault 25: a look at the cluster that is due while one still goes on."""
    given = {"cluster": "cluster.yaml", "workload": "examples/workloads/small.yaml"}
    runs = [up.submit("replan/on-change", **given) for _ in range(2)]
    ends = {run: up.end_of(run) for run in runs}
    assert sorted(ends.values()) == ["CANCELLED", "COMPLETED"]
    cancelled = next(run for run in runs if ends[run] == "CANCELLED")
    assert "concurrency limit" in up.run(cancelled)["state"]["message"]
