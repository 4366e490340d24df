import errno
import json
import logging
import math
import os
import random
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure
from mlflow import MlflowClient
from prefect.exceptions import TerminationSignal as PrefectTerminationSignal

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.track import Metric, Tracker, report_of, runs, sweep_killed, tracking_uri
from dejavu.track.server import Server
from dejavu.track.spool import Recorder
from tests.waiting import PATIENCE_SECONDS


class TerminationSignal(Exception):
    """Named as Prefect's; a cancelled flow, whatever its base class is."""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TIMEOUT", "MAX_RETRIES", "BACKOFF_FACTOR"):  # the tracker sets them where they are not set
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory) -> Path:
    """Making a database takes seconds, copying one does not."""
    project = tmp_path_factory.mktemp("fresh")
    sweep_killed(project)  # nothing there: nothing made
    assert not (project / "mlflow.db").exists()
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    client.search_experiments()
    return project / "mlflow.db"


@pytest.fixture
def project(tmp_path, fresh_database) -> Path:
    (tmp_path / "mlflow.db").write_bytes(fresh_database.read_bytes())
    return tmp_path


@pytest.fixture
def silent_port():
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def client_of(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project / 'mlflow.db'}")


def all_runs(project: Path) -> dict[str, object]:
    client = client_of(project)
    experiment = client.get_experiment_by_name("dejavu")
    found = client.search_runs([experiment.experiment_id])
    assert len({run.info.run_name for run in found}) == len(found), "a run was made twice"
    return {run.info.run_name: run for run in found}


def spool(project: Path) -> list[Path]:
    return list((project / ".dejavu" / "mlflow-spool").glob("*/entries.jsonl"))


def test_a_flow_has_a_parent_and_children(project):
    with Tracker.open(project, "full", {"search": {"name": "exact", "seeds": [1, 2]}}, {"reason": "test"}) as tracker:
        with tracker.child("search", {"budget_seconds": 3.5}, {"kind": "part"}) as run:
            run.metric("step_seconds", 0.25)
        assert tracker.artifact_folder.is_relative_to(project / "mlartifacts")
        parent_id = tracker.run_id
    assert tracker.address == tracking_uri(project) == f"sqlite:///{project}/mlflow.db"
    found = all_runs(project)
    assert set(found) == {"full", "search"}
    assert found["full"].info.run_id == parent_id
    assert found["full"].data.params == {"search.name": "exact", "search.seeds": "[1, 2]"}
    assert found["full"].data.tags["reason"] == "test"
    assert found["search"].data.tags["mlflow.parentRunId"] == parent_id
    assert found["search"].data.metrics == {"step_seconds": 0.25}
    assert {run.info.status for run in found.values()} == {"FINISHED"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("the layer is 3; wanted 2"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(3), "KILLED"),
        (TerminationSignal("cancelled"), "KILLED"),
        (TerminationSignal(), "KILLED"),
        (RuntimeError(), "FAILED"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_an_error_decides_the_status_of_the_run_and_its_parent(project, error, status):
    with pytest.raises(type(error)), Tracker.open(project, "full") as tracker, tracker.child("training"):
        raise error
    for run in all_runs(project).values():
        assert run.info.status == status
        unsaid = "it was ended from outside" if status == "KILLED" else type(error).__name__
        said = {KeyboardInterrupt: "it was interrupted", SystemExit: "its process exited with code 3"}.get(
            type(error), str(error)
        )
        assert run.data.tags["dejavu.failure"] == (said or unsaid)


@pytest.mark.parametrize("fails_at_it", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_a_signal_ended_says_by_which(project, number, fails_at_it):
    """As the screen does; it said that it was ended from outside, or the number alone, or a library's words."""
    ended = PrefectTerminationSignal(number)
    with pytest.raises(ValueError if fails_at_it else PrefectTerminationSignal), Tracker.open(project, "full"):
        try:
            raise ended
        finally:
            if fails_at_it:
                raise ValueError("Task run is not set")
    (run,) = all_runs(project).values()
    assert run.info.status == "KILLED"
    assert run.data.tags["dejavu.failure"] == f"it was ended by {number.name}"


def test_a_run_that_fails_at_an_interrupt_was_interrupted(project):
    with pytest.raises(ValueError), Tracker.open(project, "full") as tracker, tracker.child("search"):
        try:
            raise KeyboardInterrupt
        finally:
            raise ValueError("Task run is not set")  # a library that ends what it has not begun
    for run in all_runs(project).values():
        assert run.info.status == "KILLED"
        assert run.data.tags["dejavu.failure"] == "it was interrupted"


def test_artifacts_of_each_form(project, tmp_path):
    (tmp_path / "plan.yaml").write_text("stages: 2\n")
    figure = Figure()
    figure.subplots().plot([1, 2])
    with Tracker.open(project, "full") as tracker:
        tracker.artifact_json(
            "search/plan.json", {"stages": 2, "of": ((1.5, math.inf), {"them": [math.nan, -math.inf]})}
        )
        tracker.artifact_text("log.txt", "é")
        tracker.artifact_file(tmp_path / "plan.yaml")
        tracker.artifact_file(tmp_path / "plan.yaml", "again/other.yaml")
        tracker.artifact_table("costs.parquet", pa.table({"layer": ["a"], "seconds": [0.5]}))
        tracker.figure("figures/plan.png", figure)
        folder = tracker.artifact_folder
        with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
            tracker.artifact_file(tmp_path / "nothing.txt")
    written = json.loads((folder / "search/plan.json").read_text(), parse_constant=pytest.fail)
    assert written == {"stages": 2, "of": [[1.5, None], {"them": [None, None]}]}, "JSON has no NaN and no Infinity"
    assert (folder / "log.txt").read_text(encoding="utf-8") == "é"
    assert (folder / "plan.yaml").read_text() == (folder / "again/other.yaml").read_text() == "stages: 2\n"
    assert pq.read_table(folder / "costs.parquet").to_pylist() == [{"layer": "a", "seconds": 0.5}]
    assert (folder / "figures/plan.png").read_bytes().startswith(b"\x89PNG")


def test_artifacts_need_no_room_among_the_temporary_files(project, monkeypatch):
    """A figure's or a page's file is made where the project is, which has room, or the run would not have begun."""
    nowhere = project / "no-folder"
    nowhere.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(nowhere))
    with Tracker.open(project, "flow") as tracker:
        tracker.artifact_text("report/report.html", "the page")
        assert (tracker.artifact_folder / "report/report.html").read_text() == "the page"
    assert not list(project.glob("**/.artifact-*"))


def test_an_artifact_that_the_disk_does_not_take_is_named_and_the_run_goes_on(project, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Tracker.open(project, "flow") as tracker:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 2**20, before[1]))  # MLflow's database fits
        try:
            tracker.artifact_text("report/report.html", "x" * 9 * 2**20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        tracker.metric("loss", 1.0)
    assert "report/report.html is not recorded" in caplog.text and "File too large" in caplog.text
    found = all_runs(project)["flow"]
    assert found.info.status == "FINISHED" and found.data.metrics == {"loss": 1.0}
    assert not list(project.glob("**/.artifact-*"))


def test_many_metrics_odd_names_and_numbers_that_are_not_finite(project):
    with Tracker.open(project, "full") as tracker:
        tracker.metrics(Metric("loss", 1.0 / (step + 1), step) for step in range(2500))
        tracker.metrics([Metric("stage[0] seconds", 2.0), Metric("../up", 3.0), Metric("a//b%", 4.0)])
        tracker.metrics([Metric("score", math.inf, 4), Metric("score", math.nan, 5), Metric("score", 1.5, 6)])
    run = all_runs(project)["full"]
    history = client_of(project).get_metric_history(run.info.run_id, "loss")
    assert [(row.step, row.value) for row in history] == [(step, 1.0 / (step + 1)) for step in range(2500)]
    named = {name: value for name, value in run.data.metrics.items() if name != "loss"}
    assert named == {"stage_0_ seconds": 2.0, "up": 3.0, "a/b_": 4.0, "score": 1.5}
    assert run.data.tags["dejavu.not_finite.score"] == "inf at first at step 4"


def test_a_long_parameter_is_cut_visibly_and_kept_whole(project):
    with Tracker.open(project, "full", {"text": "x" * 7000, "many": {str(n): n for n in range(250)}}) as tracker:
        folder = tracker.artifact_folder
    parameters = all_runs(project)["full"].data.params
    assert len(parameters) == 251
    assert len(parameters["text"]) == 6000
    assert parameters["text"].endswith("… cut, 7,000 characters in all")
    assert json.loads((folder / "parameters.json").read_text())["text"] == "x" * 7000


def test_what_mlflow_refuses_does_not_stop_the_flow(project, caplog):
    with Tracker.open(project, "full", {"seed": 1}) as tracker:
        tracker.parameters({"seed": 2})  # parameters are immutable
        tracker.metric("loss", 1.0)
    run = all_runs(project)["full"]
    assert (run.data.params, run.data.metrics, run.info.status) == ({"seed": "1"}, {"loss": 1.0}, "FINISHED")
    assert "refused" in caplog.text
    assert not spool(project)


def test_another_run_id_in_the_environment_is_ignored(project, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with Tracker.open(project, "full") as tracker:
        assert tracker.run_id != "0" * 32
        assert "MLFLOW_RUN_ID" not in os.environ


HANGS = """
    import sys, time
    from pathlib import Path
    from dejavu.track import Tracker
    with Tracker.open(Path(sys.argv[1]), "killed") as tracker, tracker.child("training"):
        print("open", flush=True)
        time.sleep(60)
"""


def start(script: str, *arguments: object) -> subprocess.Popen:
    words = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


def test_a_killed_process_leaves_no_run_open(project):
    process = start(HANGS, project)
    try:
        assert process.stdout.readline() == "open\n"
        assert sweep_killed(project) == []  # it lives
        assert {run.info.status for run in all_runs(project).values()} == {"RUNNING"}
        assert [run.status for run in runs(project)] == ["RUNNING"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (told,) = runs(project)  # `dejavu runs` says so before the next run does
    assert told.status == "KILLED" and "ended without closing" in told.verdict
    assert {run.info.status for run in all_runs(project).values()} == {"RUNNING"}, "reading changes nothing"
    with Tracker.open(project, "next"):
        statuses = {name: run.info.status for name, run in all_runs(project).items()}
    assert statuses == {"killed": "KILLED", "training": "KILLED", "next": "RUNNING"}
    assert "ended without closing" in all_runs(project)["killed"].data.tags["dejavu.failure"]


@pytest.mark.integration
@pytest.mark.slow
def test_processes_that_open_a_fresh_database_together(tmp_path):
    script = """
        import sys, time
        from pathlib import Path
        from dejavu.track import Tracker
        time.sleep(max(0.0, float(sys.argv[3]) - time.time()))
        with Tracker.open(Path(sys.argv[1]), sys.argv[2]) as tracker:
            tracker.metric("loss", 1.0)
    """
    processes = [start(script, tmp_path, f"run-{n}", time.time() + 5) for n in range(3)]
    assert [process.wait(timeout=PATIENCE_SECONDS) for process in processes] == [0, 0, 0]
    found = all_runs(tmp_path)
    assert set(found) == {"run-0", "run-1", "run-2"}
    assert all(run.data.metrics == {"loss": 1.0} and run.info.status == "FINISHED" for run in found.values())
    assert not spool(tmp_path)


def record_all(project: Path, name: str) -> None:
    with Tracker.open(project, name, {"seed": 7}) as tracker, tracker.child(f"{name} training") as run:
        run.metrics([Metric("loss", float(10 - step), step) for step in range(5)])
        run.metric("seconds", 3.0)
        run.artifact_json("result/result.json", {"losses": 5})


def assert_all_recorded(project: Path, name: str) -> None:
    found = all_runs(project)
    parent, training = found[name], found[f"{name} training"]
    assert parent.data.params == {"seed": "7"}
    assert training.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {parent.info.status, training.info.status} == {"FINISHED"}
    history = client_of(project).get_metric_history(training.info.run_id, "loss")
    assert [(row.step, row.value) for row in history] == [(step, float(10 - step)) for step in range(5)]
    artifacts = client_of(project).download_artifacts(training.info.run_id, "result/result.json")
    assert json.loads(Path(artifacts).read_text()) == {"losses": 5}
    assert parent.info.end_time >= training.info.end_time >= training.info.start_time >= parent.info.start_time


@pytest.mark.parametrize("port", ["closed_port", "silent_port"])
def test_an_unreachable_server_spools_and_the_next_open_replays(project, port, request, monkeypatch, caplog):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{request.getfixturevalue(port)}")
    started = time.monotonic()
    record_all(project, "away")
    assert time.monotonic() - started < 30  # no hang
    warnings = [
        row.getMessage() for row in caplog.records if row.levelno == logging.WARNING and row.name == "dejavu.track"
    ]
    assert "the run continues" in warnings[0] and "\n" not in warnings[0]
    assert len(warnings) == 2  # at the first failure and at the end
    assert len(spool(project)) == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    record_all(project, "here")
    assert_all_recorded(project, "away")
    assert_all_recorded(project, "here")
    assert not spool(project)


LOGINS = ["me:canary", "canary", "me:can/canary", "me:canary@home", "me%40here:canary%2F"]
PLACES = [
    "http://{}h:5000/a@b",
    "https://{}h.example",
    "postgresql://{}h:5432/mlflow",
    "postgresql+psycopg2://{}h/kept",
]


@pytest.mark.parametrize("login", LOGINS)
@pytest.mark.parametrize("place", PLACES)
def test_a_tracking_uri_is_told_without_its_password(place, login, project, monkeypatch):
    if place.startswith("http") and "/canary" in login:
        pytest.skip("no address: a host ends there")
    uri = place.format(f"{login}@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    server = Server(project)
    assert server.uri == uri and server.address == place.format("")
    assert server.without_login(f"request to {uri}/api failed") == f"request to {place.format('')}/api failed"


@pytest.mark.parametrize("uri", ["sqlite:////home/me@work/mlflow.db", "http://h/a@b", "databricks", "file:///a@b"])
def test_a_tracking_uri_without_a_password_is_told_whole(uri, project, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert Server(project).address == uri and Server(project).without_login("an error@") == "an error@"


def test_a_password_of_mlflow_is_in_no_log_and_no_record(project, closed_port, monkeypatch, caplog, capfd):
    """MLflow repeats the whole address in its own errors."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:canary-5ecret@127.0.0.1:{closed_port}")
    record_all(project, "away")
    with pytest.raises(DejavuError, match=f"MLflow at http://127.0.0.1:{closed_port} does not answer") as caught:
        runs(project)
    told = [row.getMessage() for row in caplog.records if row.name.startswith("dejavu")]
    assert any("the run continues" in text for text in told)
    for text in (*told, str(caught.value), *capfd.readouterr()):
        assert "-5ecret" not in text
    files = [path for path in project.rglob("*") if path.is_file()]
    assert spool(project) and not [path for path in files if b"-5ecret" in path.read_bytes()]


def test_mlflow_prints_nothing_where_a_run_ends(closed_port, monkeypatch, capfd):
    """With a server it would ask that for the run's page and print it, between the lines of `dejavu run --json`."""
    client = MlflowClient(f"http://127.0.0.1:{closed_port}")
    run = SimpleNamespace(data=SimpleNamespace(tags={}), info=SimpleNamespace(experiment_id="1", run_name="a run"))
    monkeypatch.setattr(type(client._tracking_client.store), "get_run", lambda store, run_id: run)
    client._tracking_client._log_url("some-run")
    assert capfd.readouterr() == ("", "")


def test_a_database_that_fails_in_mid_run_gets_the_rest_at_the_end(project, monkeypatch):
    """The outage begins after some records arrived and ends before the run does; a lost answer doubles nothing."""
    apply, outage = Server.apply, {"on": False, "applied": 0}

    def failing(self, entry, **options):
        if outage["on"]:
            if outage["applied"] == 0:
                apply(self, entry, **options)  # carried out, but the answer is lost
                outage["applied"] += 1
            raise sqlite3.OperationalError("database is locked")
        apply(self, entry, **options)

    monkeypatch.setattr(Server, "apply", failing)
    with Tracker.open(project, "flow", {"seed": 7}) as tracker:
        tracker.metric("loss", 10.0, 0)
        outage["on"] = True
        with tracker.child("part") as run:
            run.metric("inner", 1.0)
        tracker.metrics([Metric("loss", 9.0, 1)])
        assert len(spool(project)) == 1
        outage["on"] = False
        tracker.metrics([Metric("loss", 8.0, 2)])
    found = all_runs(project)
    history = client_of(project).get_metric_history(found["flow"].info.run_id, "loss")
    assert [(row.step, row.value) for row in history] == [(0, 10.0), (1, 9.0), (2, 8.0)]
    assert found["part"].data.metrics == {"inner": 1.0}
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert not spool(project)


def test_a_replay_that_is_cut_off_starts_over_without_duplicates(project, closed_port, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    record_all(project, "away")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    apply, left = Server.apply, [4]

    def failing(self, entry, **options):
        if not left[0]:
            raise ConnectionError("gone again")
        left[0] -= 1
        apply(self, entry, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "apply", failing)
        with Tracker.open(project, "second"):
            pass
    assert len(spool(project)) == 2
    with Tracker.open(project, "third"):
        pass
    assert set(all_runs(project)) == {"away", "away training", "second", "third"}
    assert_all_recorded(project, "away")
    assert not spool(project)


@pytest.mark.parametrize("missing", [1, 2, 40])
def test_a_record_that_a_full_disk_cut_off_takes_no_other_with_it(project, closed_port, monkeypatch, caplog, missing):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    with Tracker.open(project, "away") as tracker:
        for step in range(6):
            tracker.metric(f"loss_{step}", step)
            if step in (2, 3):
                (file,) = spool(project)
                os.truncate(file, file.stat().st_size - missing)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with Tracker.open(project, "here"):
        pass
    run = all_runs(project)["away"]
    lost = () if missing == 1 else (2, 3)  # without the end of its line alone a record is whole
    assert run.data.metrics == {f"loss_{step}": step for step in range(6) if step not in lost}
    assert run.info.status == "FINISHED"
    assert ("2 of the 8 MLflow records" in caplog.text) == bool(lost)
    assert not spool(project)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_recorded_after_a_full_disk_has_room_again_is_there(project, monkeypatch, caplog, seed):
    """While MLflow fails and the disk is full records are lost, each with a warning; none before, and none after."""
    apply, rng, fails = Server.apply, random.Random(seed), {"mlflow": False, "disk": False}

    def failing(self, entry, **options):
        if fails.get("mlflow"):
            raise sqlite3.OperationalError("database or disk is full")
        apply(self, entry, **options)

    def on_disk(real):
        def called(path, *words, **options):
            reads = "r" in (*words, options.get("mode")) or "rb" in words
            if fails.get("disk") and "mlflow-spool" in str(path) and not reads:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return real(path, *words, **options)

        return called

    monkeypatch.setattr(Server, "apply", failing)
    monkeypatch.setattr("dejavu.track.spool.RETRY_SECONDS", 0.0)
    for name in ("mkdir", "open"):
        monkeypatch.setattr(Path, name, on_disk(getattr(Path, name)))
    wanted = {}
    fails.update(mlflow=seed % 2 == 0, disk=seed % 4 == 0)  # also from the beginning
    with Tracker.open(project, "flow") as tracker:
        for number in range(12):
            with tracker.child(f"part {number}") as run:
                run.metric("before", 1.0)
                fails.update(mlflow=rng.random() < 0.6, disk=rng.random() < 0.6)
                run.metric("after", float(number))
                wanted[run.name] = None if fails["mlflow"] and fails["disk"] else number
                if rng.random() < 0.5:
                    fails.update(mlflow=False, disk=False)
        fails.update(mlflow=False, disk=False)
        tracker.metric("last", 1.0)
        fails.update(mlflow=True, disk=True)  # when the flow ends, but for the last try
        monkeypatch.setattr(Recorder, "close", lambda recorder, real=Recorder.close: (fails.clear(), real(recorder)))
    found = all_runs(project)
    assert found["flow"].data.metrics == {"last": 1.0} and found["flow"].info.status == "FINISHED"
    for name, number in wanted.items():
        assert name in found and found[name].data.metrics.get("after") == number, name
        assert found[name].info.status == "FINISHED"
    assert not spool(project) and "they are left" not in caplog.text and "refused" not in caplog.text


def test_a_run_whose_end_waits_in_a_spool_is_not_called_killed(project):
    """It ended as it did: its process is gone, and what MLflow did not take is sent by the next run."""
    script = """
        import sqlite3, sys
        from pathlib import Path
        from dejavu.track import Tracker
        from dejavu.track.server import Server

        def failing(self, entry, **options):
            raise sqlite3.OperationalError("database or disk is full")

        with Tracker.open(Path(sys.argv[1]), "flow") as tracker:
            tracker.tags({"dejavu.verdict": "of the plan alone"})
            Server.apply = failing
    """
    ended = start(script, project)
    ended.communicate(timeout=PATIENCE_SECONDS)
    assert ended.returncode == 0
    (listed,) = runs(project)
    assert (listed.status, listed.is_waiting) == ("FINISHED", True)
    assert listed.verdict == "its last records wait in .dejavu/mlflow-spool: the next run sends them"
    with pytest.raises(InputError, match=r"has no report: its last records wait in \.dejavu/mlflow-spool"):
        report_of(project, listed)
    with Tracker.open(project, "next"):
        pass
    sent = next(run for run in runs(project) if run.name == "flow")
    assert (sent.status, sent.is_waiting, sent.verdict) == ("FINISHED", False, "of the plan alone")


def test_records_of_another_server_are_left(project, monkeypatch):
    folder = project / ".dejavu" / "mlflow-spool" / "1-other"
    folder.mkdir(parents=True)
    entry = {"kind": "end", "run": "0" * 32, "status": "FINISHED", "end_milliseconds": 1}
    (folder / "entries.jsonl").write_text(json.dumps(entry) + "\n")
    with Tracker.open(project, "full"):
        pass
    assert (folder / "entries.jsonl").exists()
    assert all_runs(project)["full"].info.status == "FINISHED"


def test_a_file_that_is_no_database_is_an_outage_at_once(tmp_path, caplog):
    (tmp_path / "mlflow.db").write_text("this is not a database, but is long enough to be taken for one " * 20)
    started = time.monotonic()
    record_all(tmp_path, "away")
    assert time.monotonic() - started < 10
    assert "not a database" in caplog.text
    (tmp_path / "mlflow.db").unlink()
    record_all(tmp_path, "here")
    assert_all_recorded(tmp_path, "away")


def test_runs_are_listed_in_short(project):
    assert runs(project / "nothing") == []
    with Tracker.open(project, "first") as tracker:
        tracker.metrics([Metric("predicted_step_seconds", 0.25), Metric("measured_step_seconds", 0.3)])
        with tracker.child("search"):
            pass
    with Tracker.open(project, "second"):
        listed = runs(project)
    assert [(run.name, run.status) for run in listed] == [("second", "RUNNING"), ("first", "FINISHED")]
    assert (listed[1].predicted_step_seconds, listed[1].measured_step_seconds) == (0.25, 0.3)
    assert listed[0].predicted_step_seconds is None
    assert abs(listed[0].start_seconds - time.time()) < 60
