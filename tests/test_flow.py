"""The whole way as a user goes it: the command, the deployment, and what happens when parts are killed."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psutil
import pyarrow.parquet as pq
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from benchmarks._processes import processes_of
from dejavu.cluster import load_cluster
from dejavu.cost.priced_problem import SPLIT_MARGIN
from dejavu.plans import Plan
from dejavu.track import sweep_killed
from dejavu.trials import TrialError
from flows.__main__ import _with_json_target, app
from tasks.pricing import read_cluster
from tests.canaries import CANARIES, check_nothing_is_given_away
from tests.launching import dask_workers, is_rank
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
WORKLOAD: dict[str, Any] = {
    "model_options": {"num_blocks": 4, "width": 64, "num_heads": 2},
    "sequence_length": 64,
    "batch_size": 16,
    "num_microbatches": 4,
    "num_steps": 16,
    "checkpoint_every": 4,
    "trials": {"count": 4, "steps": 4},
}
ONE_SIZE = ("--microbatches", str(WORKLOAD["num_microbatches"]))  # no other is measured: the plan does not matter


def measured_by_a_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first project that has measured leaves it, for all processes of these tests."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "measured-by-a-project"


@pytest.fixture(scope="module")
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project of its own: what the repository has, without its environment, its records or its git.

    Modules with `MEASURED_BEFORE` get what another one has measured meanwhile, if any has.
    """
    folder = tmp_path_factory.mktemp("project")
    measured = measured_by_a_project(tmp_path_factory)
    if getattr(request.module, "MEASURED_BEFORE", False) and measured.is_dir():
        shutil.copytree(measured, folder / "profiles_db")
    for name in ("flows", "tasks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("prefect.yaml", "cluster.yaml", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    yield folder
    assert not processes_of(folder), "processes are left behind"
    leave_measured(folder, tmp_path_factory)


def leave_measured(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Leave what a project has measured to the next ones; no flow of it may run."""
    measured = measured_by_a_project(tmp_path_factory)
    if (project / "profiles_db").is_dir() and not measured.exists():
        kept = shutil.copytree(project / "profiles_db", project / "measured")
        with suppress(OSError):  # another process of the tests was first
            kept.rename(measured)


def environment() -> dict[str, str]:
    """What a shell with the virtual environment active has, and nothing of Prefect's or MLflow's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW", "PYTEST"))}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def write_workload(project: Path, **change: Any) -> Path:
    path = project / f"workload-{time.time_ns()}.yaml"
    path.write_text(json.dumps({**WORKLOAD, **change}))  # JSON is YAML
    return path


def command(project: Path, *words: str | Path, settings: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    """A command of the project, by a user whose umask lets others read; `settings`: in the environment."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=project,
        env=environment() | settings,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        stdin=subprocess.DEVNULL,
        umask=0o022,
    )


def said(project: Path, *words: str) -> str:
    """What the command prints; it runs in this process, which has imported all that it needs."""
    with chdir(project):
        done = CliRunner().invoke(app, _with_json_target([*words]))
    assert done.exit_code == 0, done.output
    return done.stdout


def client_of(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project}/mlflow.db")


def runs_of(project: Path) -> tuple[list[Run], dict[str, Run]]:
    """The flows' runs, the newest first, and the newest one's children by name."""
    client = client_of(project)
    experiment = client.get_experiment_by_name("dejavu")
    assert experiment is not None
    every = list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"]))
    parents = [run for run in every if "mlflow.parentRunId" not in run.data.tags]
    children = {
        run.info.run_name: run for run in every if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id
    }
    return parents, children


def check_records(project: Path) -> Run:
    """Check that the newest flow left all its records, and that its training was right."""
    parents, children = runs_of(project)
    run = parents[0]
    assert run.info.status == "FINISHED"
    assert {"search: auto", "search: even split", "search: split by speed", "search: balanced split"} < set(children)
    assert {"trials", "training"} < set(children)
    assert all(child.info.status == "FINISHED" for child in children.values())
    found = run.data.metrics
    assert 0 < found["simulated_lower_bound_seconds"] <= found["simulated_step_seconds"]
    assert found["predicted_step_seconds"] > 0
    assert found["measured_step_seconds"] > 0
    assert found["reference_difference"] < 1e-5
    client = client_of(project)
    history = client.get_metric_history(children["training"].info.run_id, "loss")
    losses = sorted(history, key=lambda row: row.step)  # MLflow sorts by the time of day, which may have been set
    assert [row.step for row in losses] == list(range(4, 16))
    trials = children_of(project, children["trials"])
    assert len(trials) >= WORKLOAD["trials"]["count"]
    for trial in trials:
        history = client.get_metric_history(trial.info.run_id, "loss")
        assert [row.step for row in history] == list(range(WORKLOAD["trials"]["steps"]))
        assert {"scheme", "gain", "seed"} <= set(trial.data.params)
        assert losses[-1].value < history[0].value
    check_page(project, run)
    check_model(project, children["training"])
    binding = json.loads(Path(client.download_artifacts(run.info.run_id, "plan/binding.json")).read_text())
    assert {row["pipeline_rank"] for row in binding["placements"]} == set(
        range(len(Plan.from_dict(plan_of(project, run)).ranks))
    )
    (costs,) = [one.dataset for one in run.inputs.dataset_inputs if one.dataset.name == "costs"]
    table = pq.read_table(client.download_artifacts(run.info.run_id, "cost/costs.parquet"))
    profile = json.loads(costs.profile)
    assert profile["costs"] == profile["measured"] == 3 * table.num_rows
    return run


def children_of(project: Path, run: Run) -> list[Run]:
    client = client_of(project)
    return list(client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"))


def check_page(project: Path, run: Run) -> None:
    """Check what MLflow shows first: the name, the note, the order of the figures, data sets, tags and folders."""
    client, first = client_of(project), ["predicted_step_seconds", "simulated_gap_percent", "measured_step_seconds"]
    assert client.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"
    assert re.fullmatch(r"gpt on this-machine, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", run.info.run_name)
    assert list(run.data.metrics)[:5] == [*first, "loss", "tokens_per_second"]
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("**") and "roved" in note.splitlines()[0]
    assert f"run_uuid={run.info.run_id}" in note and "    dejavu run" in note
    assert run.data.tags["dejavu.verdict"][1:] in note
    assert {"dejavu.plan", "dejavu.cluster_fingerprint", "dejavu.attempt", "prefect.flow_run"} <= set(run.data.tags)
    assert {one.dataset.name for one in run.inputs.dataset_inputs} == {"text", "costs"}
    folders = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert folders == {"plan", "cost", "report", "trace", "logs"}
    for path in ("plan/cluster.yaml", "report/report.html", "report/strip.png", "trace/trace.json"):
        assert Path(client.download_artifacts(run.info.run_id, path)).stat().st_size > 0
    log = Path(client.download_artifacts(run.info.run_id, "logs/flow.log")).read_text()
    assert "Proved: " in log and "step 16 of 16: loss" in log


def check_model(project: Path, training: Run) -> None:
    """Check that the trained weights are the newest version of the registered model, and what it says of itself."""
    versions = client_of(project).search_model_versions("name = 'gpt'")
    version = max(versions, key=lambda one: int(one.version))
    assert version.run_id == training.info.run_id
    assert f"registered model gpt version {version.version}" in training.data.tags["mlflow.note.content"]
    assert (Path(unquote(urlsplit(version.source).path)) / "data" / "model.pt2").stat().st_size > 0
    assert "system/rank_0/memory_bytes" in training.data.metrics


def check_commands(project: Path, printed: str) -> None:
    """Check that the commands find what a run left, and that the note's command repeats it."""
    listed = json.loads(said(project, "runs", "--json"))
    assert [row["status"] for row in listed[:2]] == ["FINISHED"] * 2
    found = said(project, "report", listed[0]["run_id"][:10]).strip()
    assert f"report: {found}" in printed.replace("\n", "")
    folder = Path(listed[0]["folder"]).relative_to(project)
    assert said(project, "report", str(folder)).strip() == found
    compared = json.loads(said(project, "compare", "last", listed[1]["run_id"], "--json"))
    assert not any(row["differs"] for row in compared["parameters"].values())
    assert "schedule" in compared["plan"]
    note = client_of(project).get_run(listed[0]["run_id"]).data.tags["mlflow.note.content"]
    repeated = note.partition("    dejavu run")[2].partition("\n\n")[0]
    words = shlex.split(repeated.replace("\\\n", " "))  # as a shell reads a line that goes on
    planned = command(project, "dejavu", "plan", *words, "--json", "-")
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout[planned.stdout.index("{") :])
    # How many microbatches there are lies with what was measured meanwhile.
    assert found["samples_per_second"] * found["predicted_step_seconds"] == pytest.approx(WORKLOAD["batch_size"])
    assert found["stages"][-1]["layers"]["stop"] == WORKLOAD["model_options"]["num_blocks"] + 2


def plan_of(project: Path, run: Run) -> Any:
    return json.loads(Path(client_of(project).download_artifacts(run.info.run_id, "plan/plan.json")).read_text())


def new_measurements(run: Run) -> int:
    return int(run.data.tags["dejavu.measurements_new"])


needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the plan needs two cores")


@needs_two_cores
def test_run_goes_the_whole_way_and_remembers(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    workload = write_workload(project)
    before = [path for path in project.rglob("*") if path.is_file()]
    first = command(project, "dejavu", "run", "--workload", workload, settings=CANARIES)
    assert first.returncode == 0, first.stdout + first.stderr
    leave_measured(project, tmp_path_factory)
    check_nothing_is_given_away(project, before, [first.stdout, first.stderr])
    assert "step, predicted" in first.stdout and "step, measured" in first.stdout
    run = check_records(project)
    assert new_measurements(run) > 0
    # Nothing was trained before, so nothing keeps a plan that is slower by more than both directions have to gain.
    most = (1 + SPLIT_MARGIN) * run.data.metrics["baseline_step_seconds"]
    assert run.data.metrics["predicted_step_seconds"] <= most * (1 + 1e-9)
    measured = new_measurements(run)
    trained = plan_of(project, run)
    second = command(project, "dejavu", "run", "--workload", workload)
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stderr.count("remembered)") >= WORKLOAD["trials"]["count"]
    check_commands(project, second.stdout)
    for done in (first, second):
        assert "the median of 3 default draws" in done.stderr
    assert "déjà vu: " in second.stderr  # what the training measured corrects the prices
    run = check_records(project)
    assert new_measurements(run) <= measured  # those that other work had disturbed
    # By corrected prices another plan may be the better one.
    if "déjà vu: this plan was trained before" in second.stderr:  # not of a training that other work disturbed
        assert plan_of(project, run) == trained


@pytest.mark.parametrize("train", [True, False])
def test_a_scheduler_that_does_not_answer_is_said_before_anything_starts(
    train: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And that it is tried, as that may take a while; without a training the search's tasks would run there."""
    caplog.set_level(logging.INFO, "run")
    monkeypatch.setattr("tasks.pricing.get_run_logger", lambda: logging.getLogger("run"))
    monkeypatch.setattr("dejavu.trials.clients.CONNECT_SECONDS", 0.5)
    with pytest.raises(TrialError, match=r"no Dask scheduler answers at tcp://127.0.0.1:1: "):
        read_cluster.fn(ROOT / "cluster.yaml", train, "tcp://127.0.0.1:1")
    assert caplog.messages == ["connecting to Dask at tcp://127.0.0.1:1, for at most 20 s"]


def _hear_interrupts() -> None:
    """As in a terminal: what a shell starts in the background ignores them, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Watched:
    """A `dejavu run` in the background, whose output is read as it comes; it does not outlive its block."""

    def __init__(self, project: Path, *options: str, settings: Mapping[str, str] = {}, **change: Any) -> None:
        self.workload = write_workload(project, **change)
        self.project, self.log = project, project / f"run-{time.time_ns()}.log"
        with self.log.open("w") as output:
            words = [str(BIN / "dejavu"), "run", *ONE_SIZE, "--workload", str(self.workload), *options]
            self.process = psutil.Popen(
                words,
                cwd=project,
                env={**environment(), **settings},
                stdout=output,
                stderr=output,
                preexec_fn=_hear_interrupts,
                start_new_session=True,
            )

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:  # a test failed; what the flow started ends with it
            self.process.kill()
            self.process.wait()

    def wait_for(self, text: str, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        self.poll(lambda: text in self.log.read_text(), timeout_seconds, text)

    def poll(self, is_true: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        stop = time.monotonic() + timeout_seconds
        while not is_true():
            assert self.process.poll() is None, f"ended before {what!r}:\n{self.log.read_text()}"
            assert time.monotonic() < stop, f"no {what!r} in:\n{self.log.read_text()}"
            time.sleep(0.05)

    def interrupt(self) -> None:
        """As Ctrl-C in a terminal does: to the command and to all it started that is in its group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def children(self, word: str) -> list[psutil.Process]:
        found = []
        for child in self.process.children(recursive=True):
            try:
                if any(word in part for part in child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
        return found


@needs_two_cores
@pytest.mark.slow  # of the trials and of the launcher alone: test_trials.py, test_launcher.py
def test_a_killed_worker_and_a_killed_rank_do_not_stop_the_flow_of_a_model_of_one_s_own(project: Path) -> None:
    """The model's file is beside the cluster file."""
    shutil.copy(ROOT / "examples" / "perceptron.py", project / "mine.py")
    model = {"model": "mine:make", "model_options": {"depth": 3, "width": 256}, "data": "digits", "seed": 1}
    trials = {"count": 6, "steps": 200, "default_draws": 0}
    with Watched(project, **model, num_steps=1500, checkpoint_every=100, compare=False, trials=trials) as run:
        run.wait_for("loss")  # the first trial is done, others run
        dask_workers(run.children("forkserver"))[0].send_signal(signal.SIGKILL)
        run.wait_for("step 500 of")
        ranks = [child for child in run.children("dejavu.runtime.worker") if is_rank(child)]
        ranks[-1].send_signal(signal.SIGKILL)
        assert run.process.wait(timeout=PATIENCE_SECONDS) == 0, run.log.read_text()
    assert "mine:make on this-machine" in run.log.read_text()
    parents, children = runs_of(project)
    assert parents[0].info.status == "FINISHED"
    assert children["training"].data.metrics["restarts"] == 1
    assert parents[0].data.metrics["reference_difference"] < 1e-5


@needs_two_cores
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGTERM))],
    ids=lambda number: number.name,
)
def test_a_flow_that_is_killed_takes_all_with_it_and_is_not_left_running(project: Path, number: signal.Signals) -> None:
    with Watched(project, num_steps=4000, compare=False, trials={"count": 0}) as run:
        run.wait_for("step 20 of")
        run.process.send_signal(number)
        assert run.process.wait(timeout=PATIENCE_SECONDS) != 0
    stop = time.monotonic() + 30  # far less than its steps would take: what goes on is no end
    while processes_of(project) and time.monotonic() < stop:
        time.sleep(0.1)
    assert not processes_of(project)
    sweep_killed(project)  # as the next command does
    parents, children = runs_of(project)
    assert parents[0].info.status == "KILLED"
    assert children["training"].info.status == "KILLED"


CORES = """
nodes: [{{name: cores, hosts: [{hosts}], devices: {{type: core, count: 1}}}}]
links: {{default: {{bandwidth: 1 GB/s, latency: 100 us}}}}
devices: {{core: {{kind: cpu, memory: 4 GiB, bandwidth: 10 GB/s, float32: 1 GFLOP/s}}}}
"""


@pytest.mark.slow
def test_a_cluster_file_that_is_edited_meanwhile_is_another_run_s(project: Path) -> None:
    """Fault 25: from the moment it was read, through the search, to the records: the cluster of this run is pinned."""
    file, before, after = project / "cores.yaml", CORES.format(hosts="w0, w1, w2"), CORES.format(hosts="other")
    file.write_text(before)
    expected = load_cluster(file)
    with Watched(project, "--no-train", "--cluster", "cores.yaml") as run:
        run.wait_for("cluster cores: 3 × core")  # it was read; nothing is recorded or searched yet
        file.write_text(after)
        run.wait_for("for flow 'plan'")
        file.write_text(f"{after}nonsense: {{")
        assert run.process.wait(timeout=PATIENCE_SECONDS) == 0, run.log.read_text()
    found = runs_of(project)[0][0]
    assert found.data.tags["dejavu.cluster_fingerprint"] == expected.fingerprint
    client = client_of(project)
    recorded = Path(client.download_artifacts(found.info.run_id, "plan/cluster.yaml"))
    assert recorded.read_text() == before and load_cluster(recorded).fingerprint == expected.fingerprint
    binding = json.loads(Path(client.download_artifacts(found.info.run_id, "plan/binding.json")).read_text())
    hosts = {row["device"]["host"] for row in binding["placements"]}
    assert hosts and hosts <= {"w0", "w1", "w2"}
    assert "other" not in Path(client.download_artifacts(found.info.run_id, "plan/cluster.json")).read_text()


MISTAKES = [
    (
        "nodes: [{name: a, hosts: [localhost], devices: {type: T4, count: 8}}]\n",
        "{}",
        "this machine has 8 × T4; it has",
    ),
    ("nodes:\n- {name: a, devices: {type: H10O, count: 8}}\n", "{}", "cluster.yaml:2:29: unknown device 'H10O'"),
    ("nodes: auto\n", "model: gpt\nbatch_size: no\n", "workload.yaml:2:13: batch_size: found 'no'"),
]


@pytest.mark.parametrize(
    ("cluster", "workload", "message"),
    [MISTAKES[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in MISTAKES[1:])],
)
def test_mistakes_end_before_anything_starts(tmp_path: Path, cluster: str, workload: str, message: str) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster)
    (tmp_path / "workload.yaml").write_text(workload)
    done = command(tmp_path, "dejavu", "run", "--workload", "workload.yaml")
    assert done.returncode == 2
    assert message in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "workload.yaml"]
