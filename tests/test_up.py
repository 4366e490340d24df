"""What `dejavu up` runs, as people use it: deployments, cancelling, a server that dies, a cluster that changes.

First what a person sees of a run in a browser: Prefect's form and pages, MLflow's pages, and the report in MLflow's
frame. All tests share one `dejavu up`; each leaves it as it was.

`DEJAVU_SCREENSHOTS=docs/images python -m pytest tests/test_up.py` writes the pictures of the documentation.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import distributed
import psutil
import pytest
from matplotlib.image import imread
from mlflow.entities import Run

from benchmarks._processes import processes_of
from dejavu.plans.schedule import CHIMERA
from tests.browsing import browser as browser  # a fixture
from tests.browsing import check_figures, click, close_assistant, page, shoot, text_of, until, wait_for
from tests.ports import free_port
from tests.served import FINAL, Up, dask_cluster, eventually
from tests.test_flow import (
    WORKLOAD,
    check_records,
    children_of,
    client_of,
    command,
    needs_two_cores,
    plan_of,
    runs_of,
)
from tests.test_flow import project as project  # a fixture
from tests.test_report import figures_of

MEASURED_BEFORE = True  # what these runs measure is no matter
pytestmark = [pytest.mark.integration, needs_two_cores]
SMALL = "examples/workloads/small.yaml"  # of other sizes than what was measured before
MODE = "workflowType=machine_learning"  # of MLflow's pages
PARTS = ("initialize", "plan", "profile", "train")
ARTIFACTS = {  # what each of the run's artifacts shows
    "plans": "even split",
    "summary": "best baseline",
    "mlflow": "the run in MLflow",
    "measuring": "Progress: 100%",
    "trials": "Progress: 100%",
    "training": "Progress: 100%",
}
LONG = {**WORKLOAD, "num_steps": 3000, "compare": False, "trials": {"count": 0}}


@pytest.fixture(scope="module")
def up(project: Path) -> Iterator[Up]:
    (project / "examples" / "workloads").mkdir(parents=True)
    (project / SMALL).write_text(json.dumps({**WORKLOAD, "batch_size": 12}))
    started = command(project, "dejavu", "up", "--prefect-port", str(free_port()), "--mlflow-port", str(free_port()))
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield Up(project)
    finally:
        down = command(project, "dejavu", "down")
        assert down.returncode == 0, down.stdout + down.stderr


@pytest.fixture(scope="module")
def typed(up: Up) -> tuple[str, str]:
    """What `prefect deployment run dejavu/full --watch` prints, and the id of its run."""
    words = ["prefect", "deployment", "run", "dejavu/full", "--watch", "--params", json.dumps({"workload": SMALL})]
    ran = command(up.project, *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, str(up.runs("dejavu/full")[0]["id"])


@pytest.fixture(scope="module")
def submitted(typed: tuple[str, str]) -> str:
    """The id of a run that has ended."""
    return typed[1]


@pytest.fixture(scope="module")
def planned(up: Up) -> str:
    """The id of another run, which goes on while the first one's pages are looked at."""
    return up.submit("dejavu/plan", workload=SMALL)


@pytest.fixture(scope="module")
def tracked(up: Up, submitted: str) -> tuple[Run, dict[str, Run]]:
    """The same run as MLflow has it, and its children by name."""
    run = runs_of(up.project)[0][-1]
    assert run.data.tags["prefect.flow_run"] == submitted
    assert run.data.tags["mlflow.source.name"] == "prefect deployment run dejavu/full"
    return run, {child.info.run_name: child for child in children_of(up.project, run)}


def mlflow(up: Up, path: str) -> str:
    return f"{up.services.mlflow_url}/#/{path}{'&' if '?' in path else '?'}{MODE}"


def run_page(up: Up, run: Run, path: str = "") -> str:
    return mlflow(up, f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}{path}")


def comparison(up: Up, *runs: Run) -> str:
    ids = quote(json.dumps([run.info.run_id for run in runs]))
    return mlflow(up, f"compare-runs?runs={ids}&experiments={quote(json.dumps([runs[0].info.experiment_id]))}")


def test_full_as_it_is_typed(up: Up, typed: tuple[str, str]) -> None:
    """Losses in what it prints, four flows in its drawing, searches at the same time."""
    printed, identity = typed
    assert "Completed" in printed
    assert "step 16 of 16: loss" in " ".join(printed.split())
    check_records(up.project)
    flows = {flow["id"]: flow["name"] for flow in up.api.post("/flows/filter", json={}).json()}
    tasks = up.api.post("/task_runs/filter", json={"sort": "EXPECTED_START_TIME_DESC"}).raise_for_status().json()
    parts = [run for run in up.api.post("/flow_runs/filter", json={}).json() if run["parent_task_run_id"]]
    callers = {task["id"] for task in tasks if task["flow_run_id"] == identity}
    assert sorted(flows[p["flow_id"]] for p in parts if p["parent_task_run_id"] in callers) == [
        *("initialize", "plan", "profile", "train")
    ]
    own = {part["id"] for part in parts if part["parent_task_run_id"] in callers}
    searches = [task for task in tasks if task["flow_run_id"] in own and task["name"].startswith("search: ")]
    spans = sorted((task["start_time"], task["end_time"]) for task in searches)
    assert len(spans) > 2
    assert any(later < end for (_, end), (later, _) in pairwise(spans)), "no two searches at the same time"


def greens(png: bytes) -> float:
    """The share of a picture that is as green as what has succeeded."""
    red, green, blue = imread(io.BytesIO(png), format="png")[..., :3].transpose(2, 0, 1)
    return float(((green > 0.5) & (green > 1.5 * red) & (green > 1.5 * blue)).mean())


def test_the_page_of_a_run_has_its_graph_its_log_and_its_parts(
    up: Up, browser: Any, submitted: str, planned: str
) -> None:
    nodes = [node for _, node in up.api.get(f"/flow_runs/{submitted}/graph-v2").raise_for_status().json()["nodes"]]
    flows = sorted(node["label"].partition(" / ")[0] for node in nodes if node["kind"] == "flow-run")
    assert flows == sorted(PARTS)
    url = f"{up.services.prefect_url}/v2/runs/flow-run/{submitted}"
    with page(browser, url, "gpt on cluster.yaml", "Completed", "Beginning flow run"):
        graph = until(browser, lambda: browser.find_element("css selector", "canvas"), "graph")
        until(browser, lambda: greens(graph.screenshot_as_png) > 0.01, "bar in the graph")
        shoot(browser, "prefect-run")
        click(browser, "Task Runs", "button")
        wait_for(browser, "compare-with-baseline", "report")
        click(browser, "Subflow Runs", "button")
        wait_for(browser, *PARTS)
        click(browser, "Artifacts", "button")
        wait_for(browser, "mlflow", "summary")


def test_every_artifact_can_be_read_and_one_leads_to_mlflow(
    up: Up, browser: Any, submitted: str, tracked: tuple[Run, dict[str, Run]]
) -> None:
    with page(browser, f"{up.services.prefect_url}/v2/artifacts", *ARTIFACTS):
        pass
    found = {one["key"]: one["id"] for one in up.api.post("/artifacts/filter", json={}).raise_for_status().json()}
    assert set(found) == set(ARTIFACTS)
    for key, says in ARTIFACTS.items():
        with page(browser, f"{up.services.prefect_url}/v2/artifacts/artifact/{found[key]}", key, says):
            if key == "mlflow":
                found_link = partial(browser.find_element, "link text", says)  # the words are there before the link
                link = until(browser, lambda find=found_link: find().get_attribute("href"), "link to the run")
    with page(browser, link, tracked[0].info.run_name, "Description"):
        pass


def test_mlflow_lists_the_run_and_its_page_begins_with_the_verdict(
    up: Up, browser: Any, tracked: tuple[Run, dict[str, Run]]
) -> None:
    run, children = tracked
    with page(browser, mlflow(up, f"experiments/{run.info.experiment_id}/runs"), run.info.run_name):
        close_assistant(browser)
    note = run.data.tags["mlflow.note.content"]
    verdict = note.splitlines()[0].strip("*")
    strip = "img[src*='report/strip.png']"
    says = (run.info.run_name, verdict, "A step takes", "measured_step_seconds", "text (")
    with page(browser, run_page(up, run), *says):
        loaded = "return document.querySelector(arguments[0])?.naturalWidth"
        until(browser, lambda: browser.execute_script(loaded, strip), "strip of the plan")
        below = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
        more = browser.find_element("xpath", "//button[normalize-space(.)='Show more']")
        assert browser.execute_script(below, strip) <= more.rect["y"], "the strip is folded away"
        shoot(browser, "mlflow-run")
        click(browser, "Show more")
        wait_for(browser, "Repeat it with", "dejavu run")
    with page(browser, run_page(up, children["training"], "/model-metrics"), "loss", "measured_step_seconds"):
        lines = "return document.querySelectorAll('svg.main-svg path.js-line').length"
        until(browser, lambda: browser.execute_script(lines), "curve of the loss")


def test_the_weights_are_a_model_with_a_description(up: Up, browser: Any, tracked: tuple[Run, dict[str, Run]]) -> None:
    with page(browser, run_page(up, tracked[1]["training"]), "registered model gpt version 1", "Registered models"):
        pass
    with page(browser, mlflow(up, "models/gpt"), "Version 1", "Trained for 16 steps"):
        pass
    with page(browser, mlflow(up, "models/gpt/versions/1"), "training", "dejavu.draw", "Inputs (1)", "Outputs (1)"):
        pass


def test_runs_and_trials_can_be_compared(
    up: Up, browser: Any, planned: str, tracked: tuple[Run, dict[str, Run]]
) -> None:
    children = tracked[1]
    assert up.end_of(planned) == "COMPLETED", up.logs(planned)
    two = runs_of(up.project)[0]
    assert len(two) == 2
    names = [one.info.run_name for one in two]
    with page(browser, comparison(up, *two), "Comparing 2 Runs", *names, "predicted_step_seconds"):
        pass
    trials = children_of(up.project, children["trials"])
    with page(browser, comparison(up, *trials), f"Comparing {len(trials)} Runs", "trial 0", "gain", "loss"):
        axes = "return document.querySelectorAll('.parcoords .axis-title').length"
        until(browser, lambda: browser.execute_script(axes) >= 3, "parallel coordinates")
        shoot(browser, "mlflow-compare")


def test_the_report_draws_its_figures_in_mlflow_s_frame(
    up: Up, browser: Any, tracked: tuple[Run, dict[str, Run]]
) -> None:
    run, _ = tracked
    report = Path(client_of(up.project).download_artifacts(run.info.run_id, "report/report.html")).read_text()
    with page(browser, run_page(up, run, "/artifacts/report/report.html"), "report.html"):
        frame = until(browser, lambda: browser.find_element("css selector", "iframe[sandbox]"), "frame")
        browser.switch_to.frame(frame)
        try:
            done = "return document.querySelectorAll('.figure svg.main-svg').length >= arguments[0]"
            until(browser, lambda: browser.execute_script(done, len(figures_of(report))), "figures")
            check_figures(browser, set(figures_of(report)))
            assert "measured" in text_of(browser) and "proved" in text_of(browser)
            fits = browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
            assert fits, "the report is wider than its frame"
            browser.execute_script("document.getElementById('timeline').scrollIntoView({block: 'center'})")
        finally:
            browser.switch_to.default_content()
        shoot(browser, "report-in-mlflow")


@pytest.mark.slow
def test_a_workload_may_be_a_file_and_plan_is_the_command_s(up: Up, planned: str) -> None:
    assert up.end_of(planned) == "COMPLETED", up.logs(planned)
    planned = command(up.project, "dejavu", "plan", "--workload", SMALL, "--json")
    assert planned.returncode == 0, planned.stderr
    parents, _ = runs_of(up.project)
    ours, theirs = plan_of(up.project, parents[0]), json.loads(planned.stdout)
    schedule = CHIMERA if ours.get("both_ways") else ours["schedule"]
    assert (len(ours["stages"]), schedule, ours["num_microbatches"]) == (
        *(len(theirs["stages"]), theirs["schedule"], theirs["microbatches"]),
    )


@pytest.mark.slow
def test_a_run_from_the_form_has_what_was_typed(up: Up, browser: Any) -> None:
    """Of Prefect's pages; the run itself is cancelled, since others go the whole way."""
    with page(browser, up.services.prefect_url, "Deployments"):  # its first page sends on to the rest
        click(browser, "Deployments")
        click(browser, "full", "a")
        click(browser, "Run", "button")
        click(browser, "Custom run")
        wait_for(browser, "Parameters", "what to train", "cluster file", "Dask scheduler")
        click(browser, "a file, an example or a model")
        field = until(
            browser,
            lambda: next((one for one in browser.find_elements("css selector", "textarea") if not one.text), None),
            "field for the workload",
        )
        field.send_keys(SMALL)
        shoot(browser, "prefect-form")
        click(browser, "Submit", "button")
        link = until(browser, lambda: browser.find_element("partial link text", "View run"), "link to the run")
        identity = str(re.search(r"[0-9a-f-]{36}", link.get_attribute("href")).group())  # type: ignore[union-attr]
    assert up.run(identity)["parameters"]["workload"] == SMALL
    eventually(lambda: up.run(identity)["name"] == "gpt on cluster.yaml", "begin of the run")
    up.cancel(identity)
    assert up.end_of(identity) == "CANCELLED"


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


@pytest.mark.slow
def test_run_shows_up_in_the_server_that_is_there(up: Up) -> None:
    before = len(up.api.post("/flow_runs/filter", json={}).json())
    ran = command(up.project, "dejavu", "run", "--no-train", "--workload", SMALL)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(up.api.post("/flow_runs/filter", json={}).json()) > before
    assert not list((up.project / ".dejavu" / "prefect").glob("temporary-*"))


def is_training(up: Up, run: str) -> bool:
    return any(line.startswith("step ") and "loss" in line for line in up.logs(run))


@pytest.mark.slow
def test_a_run_cancelled_while_it_trains_leaves_nothing(up: Up) -> None:
    """Fault 7: by Prefect's API, as its page does."""
    run = up.submit("dejavu/full", workload=LONG, microbatches=[4])  # no other size is measured
    eventually(lambda: is_training(up, run), "loss")
    before = {process.pid for process in processes_of(up.project)}
    up.cancel(run)
    assert up.end_of(run) == "CANCELLED"
    servers = {one.pid for one in up.services.processes}
    tree = {pid for server in servers for pid in (server, *(c.pid for c in psutil.Process(server).children(True)))}
    eventually(lambda: {p.pid for p in processes_of(up.project)} <= tree, f"end of what it started, {before - tree}")
    command(up.project, "dejavu", "plan", "--workload", SMALL)
    parents, children = runs_of(up.project)
    assert parents[0].info.status == "KILLED"
    assert children["training"].info.status == "KILLED"


@pytest.mark.slow
def test_a_training_survives_the_death_of_prefect_s_server(up: Up) -> None:
    """Fault 27: `dejavu up` starts the dead part alone, and the run ends as it would have."""
    shutil.copy(Path(__file__).with_name("patient.py"), up.project / "patient.py")
    (up.project / "wait").touch()
    workload = {**LONG, "model": "patient:Patient", "num_steps": 200}
    run = up.submit("dejavu/full", workload=workload, microbatches=[4])
    eventually(lambda: is_training(up, run), "loss")
    worker = up.process("worker")
    for process in [up.process("prefect"), *up.process("prefect").children(recursive=True)]:
        process.kill()
    again = command(up.project, "dejavu", "up")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "prefect" in again.stdout and "worker" not in again.stdout.partition(";")[0]
    assert up.process("worker") == worker
    assert up.state(run) == "RUNNING"
    (up.project / "wait").unlink()
    assert up.end_of(run) == "COMPLETED", up.logs(run)
    assert {one["state"]["type"] for one in up.api.post("/flow_runs/filter", json={}).json()} <= FINAL
    parents, children = runs_of(up.project)
    assert (parents[0].info.status, children["training"].info.status) == ("FINISHED", "FINISHED")


CORES = """
nodes:
- {{name: cores, hosts: [{hosts}], devices: {{type: core, count: 1}}}}
links: {{default: {{bandwidth: {bandwidth}, latency: 100 us}}}}
devices: {{core: {{kind: cpu, memory: 4 GiB, bandwidth: 10 GB/s, float32: 100 GFLOP/s}}}}
"""


def decisions(project: Path) -> list[dict[str, Any]]:
    path = project / ".dejavu" / "watch" / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.slow
def test_a_cluster_that_changes_is_planned_for_again(up: Up) -> None:
    """A worker killed; one added, and the file edited: each an event, a re-plan and its reason; else nothing."""
    file, begun = up.project / "cores.yaml", len(decisions(up.project))
    file.write_text(CORES.format(hosts="w0, w1", bandwidth="1 GB/s"))
    options = ["--cluster", "cores.yaml", "--workload", SMALL, "--every-seconds", "3600"]
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
            eventually(lambda: len(decisions(up.project)) == begun + 1, "first plan")
            assert look() == "nothing changed since the last plan"
            assert len(decisions(up.project)) == begun + 1, "nothing had changed"

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


@pytest.mark.slow
def test_deploying_again_leaves_one_schedule(up: Up) -> None:
    deployed = command(up.project, sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    deployment = up.api.get("/deployments/name/replan/on-change").raise_for_status().json()
    assert [(one["slug"], one["active"]) for one in deployment["schedules"]] == [("look-at-the-cluster", False)]


@pytest.mark.slow
def test_of_two_runs_that_overlap_one_is_cancelled_with_the_reason(up: Up) -> None:
    """Fault 25: a look at the cluster that is due while one still goes on."""
    given = {"cluster": "cluster.yaml", "workload": SMALL}
    runs = [up.submit("replan/on-change", **given) for _ in range(2)]
    ends = {run: up.end_of(run) for run in runs}
    assert sorted(ends.values()) == ["CANCELLED", "COMPLETED"]
    cancelled = next(run for run in runs if ends[run] == "CANCELLED")
    assert "concurrency limit" in up.run(cancelled)["state"]["message"]
