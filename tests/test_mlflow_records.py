"""What MLflow has of a run, read as MLflow's own client reads it, and the commands that read it back."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import typer.main
from filelock import FileLock
from mlflow import MlflowClient
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import dejavu
from dejavu.binding import bind_in_order
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.hashing import stable_hash
from dejavu.foundation.processes.files import write_json
from dejavu.init._base import FACTORS
from dejavu.launch.launcher import launch
from dejavu.parallelism import Parallelism
from dejavu.planning import choice_to_dict
from dejavu.plans import Offload, Plan, Stage, StageConfiguration
from dejavu.plans.answers import BUDGET_SECONDS
from dejavu.report.charts import convergence_chart
from dejavu.report.note import DEGREES, command_of, left_out_of_command
from dejavu.runtime.single import trained_module
from dejavu.runtime.state import MARKER
from dejavu.track import (
    VERDICT_TAG,
    Curve,
    DatabaseError,
    DataSet,
    Metric,
    ModelError,
    Tracker,
    find_run,
    live,
    recorded,
    report_of,
    runs,
    sampled_ranks,
    save_model,
)
from dejavu.track.database import upgrade_database
from dejavu.track.old_runs import delete_old_runs
from dejavu.track.reading import RecordedRun, RunSummary
from dejavu.track.server import FAILURE_TAG
from dejavu.trials import TrialResult, Trials
from flows import service_record
from flows.__main__ import app
from flows.recorded.exporting import has_trained
from flows.recorded.naming import run_named
from flows.recorded.tables import compared
from flows.server_settings import MLFLOW_DATABASE, SECRETS
from flows.upkeep.backup import backup, restore
from tasks import recording
from tasks.recording import HELD_OUT_LOSS, record_model, record_training, record_trials
from tests.conftest import TINY
from tests.launching import DRAW, TOLERANCE, job_of, largest_difference

PLAN: dict[str, Any] = {
    "schedule": "1f1b",
    "num_microbatches": 4,
    "stages": [
        {
            "start": start,
            "stop": start + 2,
            "configuration": {
                "device_type": "core",
                "num_nodes": 1,
                "devices_per_node": 2,
                "data_parallel": 2,
                "tensor_parallel": 1,
                "recompute": start > 0,
                "zero_level": 0,
            },
        }
        for start in (0, 2)
    ],
}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: two that finished, and between them one that failed."""
    folder = tmp_path_factory.mktemp("project")
    with Tracker.open(folder, "gpt here, 1", question(4), {"prefect.flow_run": "0f0f0f0f-1"}) as run:
        run.metrics([Metric("predicted_step_seconds", 0.5), Metric("measured_step_seconds", 0.6)])
        run.metrics(Metric("loss", 5.0 - step, step) for step in range(3))
        run.artifact_json("plan/plan.json", PLAN)
        run.artifact_text("report/report.html", "<p>first</p>")
        run.tags({VERDICT_TAG: "as fast as the even split", "dejavu.folder": f"{folder}/.dejavu/runs/0f0f0f0f-1"})
    with pytest.raises(RuntimeError), Tracker.open(folder, "gpt here, 2", question(4)):
        raise RuntimeError("the disk is full\nand more")
    with Tracker.open(folder, "gpt here, 3", question(8), {"prefect.flow_run": "0f0f0f0f-3"}) as run:
        run.metrics([Metric("predicted_step_seconds", 0.25)])
        run.artifact_json("plan/plan.json", {**PLAN, "schedule": "gpipe"})
        run.artifact_text("report/report.html", "<p>third</p>")
    return folder


def question(num_microbatches: int) -> dict[str, Any]:
    return {"workload": {"model": "gpt", "num_microbatches": num_microbatches}, "cluster": "here"}


def client_of(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project / 'mlflow.db'}")


def children_of(project: Path, run_id: str | None) -> dict[str, Any]:
    client = client_of(project)
    experiment = client.get_experiment_by_name("dejavu").experiment_id
    found = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'")
    return {run.info.run_name: run for run in found}


# Writing


def test_the_experiment_is_one_of_model_development(project: Path) -> None:
    tags = client_of(project).get_experiment_by_name("dejavu").tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"


def test_an_experiment_of_before_gets_its_kind(tmp_path: Path) -> None:
    client_of(tmp_path).create_experiment("dejavu")
    with Tracker.open(tmp_path, "a run"):
        tags = client_of(tmp_path).get_experiment_by_name("dejavu").tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"


def test_every_run_says_who_started_it_and_from_which_commit(project: Path) -> None:
    run = client_of(project).get_run(runs(project)[0].run_id)
    assert {"mlflow.user", "mlflow.source.name", "mlflow.source.type"} <= set(run.data.tags)
    assert "mlflow.source.git.commit" not in run.data.tags  # the folder is in no repository
    with Tracker.open(project, "of a repository", tags={}) as tracker:
        pass
    assert tracker.run_id is not None
    client_of(project).delete_run(tracker.run_id)


def test_data_sets_are_inputs_and_equal_ones_are_one(project: Path) -> None:
    data = DataSet("text", "0123456789abcdef", "/data/text", "training", {"rows": 3})
    with Tracker.open(project, "reads") as run:
        run.data_sets([data, DataSet("costs", "fedcba", "cost/costs.parquet", "planning")])
        run.data_sets([data])
    found = client_of(project).get_run(run.run_id).inputs.dataset_inputs
    client_of(project).delete_run(run.run_id)
    assert {(one.dataset.name, one.dataset.digest, one.tags[0].value) for one in found} == {
        ("text", "0123456789abcdef", "training"),
        ("costs", "fedcba", "planning"),
    }
    assert len(found) == 2
    assert json.loads(found[0].dataset.source)["uri"] in ("/data/text", "cost/costs.parquet")


def test_trials_are_runs_with_factors_and_losses(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = [replace(DRAW, seed=seed, head=1.0 + seed) for seed in range(4)]
    results = tuple(
        TrialResult(
            draw, tuple(5.0 - step / (1 + n) for step in range(3)), 4.0 + n, "", 1, 2.0, first_gradient_norm=1.0
        )
        for n, draw in enumerate(draws)
    )
    second = "trial 1: xavier × 1.00, seed 1"
    monkeypatch.setattr(recording, "MOST_TRIAL_RUNS", 3)
    trials = Trials(results=results, winner=results[0], rungs=(), total_steps=12, seconds=2.0, bought=None)
    with Tracker.open(project, "tries") as run, run.child("trials") as child:
        record_trials(child, trials)
    found = children_of(project, child.run_id)
    client = client_of(project)
    history = [row.value for row in client.get_metric_history(found[second].info.run_id, "loss")]
    totals = client.get_run(child.run_id).data.metrics
    client.delete_run(run.run_id)
    assert list(found) == [f"trial {n}: xavier × 1.00, seed {n}" for n in (2, 1, 0)], "the best three"
    for n, draw in enumerate(draws[:3]):
        one = found[f"trial {n}: xavier × 1.00, seed {n}"]
        assert set(one.data.params) == {"scheme", "seed", *FACTORS}
        assert float(one.data.params["head"]) == draw.head
        assert one.data.tags["dejavu.winner"] == str(n == 0)
        assert one.info.status == "FINISHED"
        assert one.info.end_time - one.info.start_time >= 2000
    assert history == [5.0, 4.5, 4.0]
    assert totals["score"] == found["trial 0: xavier × 1.00, seed 0"].data.metrics["score"] and "loss" not in totals


def test_a_curve_counts_a_repeated_step_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FLUSH_SECONDS", 0.0)  # every step is sent
    with Tracker.open(project, "a curve") as run:
        curve = Curve(run, "loss")
        for step in (0, 1, 2, 1, 2, 3):
            curve.add(step, float(step))
        sent = client_of(project).get_metric_history(run.run_id, "loss")
        curve.flush()
    client_of(project).delete_run(run.run_id)
    assert [(row.step, row.value) for row in sent] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.integration
def test_a_training_leaves_its_weights_as_a_registered_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model after 8 steps has, on the ninth step's batch, the loss that one process has in its ninth step."""
    import mlflow.pytorch

    monkeypatch.setattr(live, "SAMPLE_SECONDS", 0.05)
    held_out = {"held_out": 0.2, "evaluate_every": 5}
    job = job_of(TINY.model_copy(update=held_out), tmp_path / "job")
    with Tracker.open(tmp_path, "a flow") as flow, flow.child("training") as run:
        with sampled_ranks(run, len(job.binding.placements)):
            result = launch(job)
        record_training(run, Curve(run, "loss"), Curve(run, HELD_OUT_LOSS), result)
        said = record_model(run, job, result)
        monkeypatch.setattr(recording, "MOST_MODEL_BYTES", 1000)
        with flow.child("too large") as other:
            linked = record_model(other, job, result)
        marker = json.loads((job.checkpoints / "step-00000006" / MARKER).read_text())
        write_json(job.checkpoints / "step-00000006" / MARKER, {**marker, "held_out_loss": 0.5})
        monkeypatch.setattr(recording, "MOST_MODEL_BYTES", 2**29)
        with flow.child("best before the last") as two:
            both = record_model(two, job, result)
    assert "registered model gpt version 1" in said
    assert "the registered model gpt version 3: `ml" in both and "held out, after step 6, is gpt version 2." in both
    assert "not registered" in linked and "at most 1000 B are copied" in linked and result.final_checkpoint in linked
    client = client_of(tmp_path)
    best, last = sorted(client.search_model_versions(f"run_id = '{two.run_id}'"), key=lambda one: int(one.version))
    for one, step, loss in ((best, 6, 0.5), (last, TINY.num_steps, result.evaluations[-1].loss)):
        assert (one.tags["dejavu.step"], one.tags["dejavu.held_out_loss"]) == (str(step), str(loss))
        assert one.tags["dejavu.best"] == str(step == 6)
        assert one.tags["dejavu.loss"] == str(result.losses[step - 1])
    outputs = client.get_run(two.run_id).outputs.model_outputs
    assert sorted(output.step for output in outputs) == [6, TINY.num_steps]
    (version,) = client.search_model_versions(f"run_id = '{run.run_id}'")
    tags = version.tags
    assert (tags["dejavu.step"], tags["dejavu.loss"]) == (str(TINY.num_steps), str(result.losses[-1]))
    assert tags["dejavu.plan"] == stable_hash(job.binding.plan.to_dict())
    assert tags["dejavu.data"] == f"text {recording.dataset_of(job.workload).fingerprint}"
    assert {"dejavu.checkpoint", "dejavu.training", "dejavu.model", "dejavu.draw"} <= set(tags)
    (output,) = client.get_run(run.run_id).outputs.model_outputs
    assert output.step == TINY.num_steps
    shown = json.loads(client.get_logged_model(output.model_id).tags["mlflow.modelVersions"])
    assert shown == [{"name": "gpt", "version": version.version}]
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    try:
        model = mlflow.pytorch.load_model("models:/gpt/1")
        files = Path(mlflow.artifacts.download_artifacts("models:/gpt/1"))
    finally:
        mlflow.set_tracking_uri(None)
    plain, _ = trained_module(job, Path(result.final_checkpoint))
    saved = load_file(files / "extra_files" / "model.safetensors")
    assert saved.keys() == plain.state_dict().keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in plain.state_dict().items())
    assert (files / "input_example.json").is_file()
    assert not list((tmp_path / "job").glob("model-*")), "the copy on the way is gone"
    rows = client.get_metric_history(run.run_id, HELD_OUT_LOSS)
    assert [(row.step, row.value) for row in rows] == list(result.evaluations)
    longer = job.workload.model_copy(update={"num_steps": TINY.num_steps + 1})
    inputs, targets = recording.dataset_of(longer).batch(TINY.num_steps, TINY.batch_size, seed=TINY.seed)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    assert largest_difference(longer, [*result.losses, loss]) < TOLERANCE
    metrics = client.get_run(run.run_id).data.metrics
    assert {"system/cpu_percent", "system/rank_0/memory_bytes", "system/rank_1/cpu_percent"} <= set(metrics)
    assert metrics["system/rank_0/memory_bytes"] < psutil.virtual_memory().total
    assert len(client.get_metric_history(run.run_id, "loss")) == TINY.num_steps


@pytest.mark.integration
def test_a_model_waits_for_mlflow_and_is_registered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(nn.Linear(3, 2), torch.ones(2, 3), tmp_path / "model")
    for name in ("TIMEOUT", "MAX_RETRIES", "BACKOFF_FACTOR"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with Tracker.open(tmp_path, "away") as run:
        run.model(tmp_path / "model", "package.module:make", 5, {})
        assert run.registered_models == {}
    shutil.rmtree(tmp_path / "model")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    for _ in range(2):
        with Tracker.open(tmp_path, "here"):
            pass
    (version,) = client_of(tmp_path).search_model_versions()
    assert (version.name, int(version.version)) == ("package-module-make", 1)
    assert client_of(tmp_path).get_run(version.run_id).info.run_name == "away"


def test_weights_do_not_go_by_way_of_the_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These may be on a disk that is small or full, or in memory."""
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"weights")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    save_model(nn.Linear(3, 2), torch.ones(2, 3), tmp_path / "model", [weights])
    assert (tmp_path / "model" / "extra_files" / weights.name).read_bytes() == b"weights"


def test_a_model_that_cannot_be_traced_is_told(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(ModelError, match=r"the model cannot be saved for MLflow \("):
        save_model(Branches(), torch.ones(2, 3), tmp_path / "model")


# Databases of other versions of MLflow


def schema_of(database: Path) -> str:
    with closing(sqlite3.connect(database)) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def make_older(database: Path) -> tuple[str, str]:
    """Make a database as an earlier MLflow did; return its schema and today's."""
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils
    from mlflow.store.db.base_sql_model import Base  # noqa: F401
    from mlflow.store.tracking.dbmodels.initial_models import Base as InitialBase
    from sqlalchemy import create_engine

    engine = create_engine(f"sqlite:///{database}")
    config = utils._get_alembic_config("")
    revisions = [row.revision for row in ScriptDirectory.from_config(config).walk_revisions()]
    InitialBase.metadata.create_all(engine)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revisions[8])
    engine.dispose()
    assert schema_of(database) == revisions[8]
    return revisions[8], revisions[0]


def make_newer(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('fromthefuture')")
        connection.commit()


def test_an_older_database_is_upgraded_and_a_copy_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = tmp_path / "mlflow.db"
    old, newest = make_older(database)
    with Tracker.open(tmp_path, "after") as run:
        run.metric("loss", 1.0)
    assert [one.name for one in runs(tmp_path)] == ["after"]
    assert schema_of(database) == newest
    assert schema_of(tmp_path / f"mlflow.db.before-{newest}") == old
    assert "is upgraded" in caplog.text
    assert not list((tmp_path / ".dejavu").glob("mlflow-spool/*"))


def test_a_newer_database_is_refused_in_a_sentence_and_the_run_goes_on(tmp_path: Path) -> None:
    make_newer(tmp_path / "mlflow.db")
    with pytest.raises(DatabaseError, match=r"mlflow\.db has schema fromthefuture, which MLflow .* does not know"):
        runs(tmp_path)
    with Tracker.open(tmp_path, "kept for later") as run:
        run.metric("loss", 1.0)
    assert schema_of(tmp_path / "mlflow.db") == "fromthefuture"


def test_gc_keeps_a_copy_of_an_older_database(tmp_path: Path) -> None:
    old, newest = make_older(tmp_path / "mlflow.db")
    assert delete_old_runs(tmp_path, 1).erased == 0
    assert schema_of(tmp_path / "mlflow.db") == newest
    assert schema_of(tmp_path / f"mlflow.db.before-{newest}") == old


@pytest.mark.parametrize("dry_run", [False, True])
def test_gc_says_in_a_sentence_what_it_cannot_open(dry_run: bool, tmp_path: Path) -> None:
    make_newer(tmp_path / "mlflow.db")
    with pytest.raises(DatabaseError, match="has schema fromthefuture, which MLflow"):
        delete_old_runs(tmp_path, 1, dry_run=dry_run)
    (tmp_path / "mlflow.db").write_text("not a database, but a longer text" * 100)
    with pytest.raises(DatabaseError, match="cannot be opened: file is not a database; wanted MLflow's database"):
        delete_old_runs(tmp_path, 1, dry_run=dry_run)


def test_a_database_that_another_process_makes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejavu.track.database.LOCK_SECONDS", 0.2)
    with (
        FileLock(tmp_path / "mlflow.db.lock"),
        pytest.raises(DatabaseError, match=r"mlflow\.db\.lock: another process has held it for 0\.2 s; wait"),
    ):
        upgrade_database(tmp_path / "mlflow.db")


# Reading


def test_runs_are_listed_with_what_people_ask_first(project: Path) -> None:
    third, second, first = runs(project)
    assert (first.model, first.cluster, first.verdict) == ("gpt", "here", "as fast as the even split")
    assert (first.predicted_step_seconds, first.measured_step_seconds, first.loss) == (0.5, 0.6, 3.0)
    assert (second.status, second.verdict) == ("FAILED", "the disk is full\nand more")
    assert (third.loss, third.status) == (None, "FINISHED")
    assert first.start_seconds <= second.start_seconds <= third.start_seconds <= time.time()
    assert [run.name for run in runs(project, most=1)] == ["gpt here, 3"]


def test_a_run_is_found_by_what_people_have_of_it(project: Path) -> None:
    third, _, first = runs(project)
    for wanted in (
        *(first.run_id, first.run_id[:8], "gpt here, 1", "0f0f0f0f-1"),
        *(".dejavu/runs/0f0f0f0f-1", f"{project}/.dejavu/runs/0f0f0f0f-1/"),
    ):
        assert find_run(project, wanted) == first, wanted
    assert find_run(project, "last") == third
    with Tracker.open(project, "resumed", {}, {"dejavu.folder": f"{project}/.dejavu/runs/0f0f0f0f-1"}) as resumed:
        assert find_run(project, ".dejavu/runs/0f0f0f0f-1").run_id == resumed.run_id, "the last one in the folder"
    client_of(project).delete_run(resumed.run_id)


def test_a_beginning_of_a_resumed_folder_is_its_last_run_as_the_whole_name_is(tmp_path: Path) -> None:
    name, started = "zz5477ad93-997a", list[str]()  # no id of MLflow's begins with z
    for flow_run in (name, "zz91c0", "zz77"):
        tags = {"prefect.flow_run": flow_run, "dejavu.folder": f"{tmp_path}/.dejavu/runs/{name}"}
        with Tracker.open(tmp_path, "gpt here", {}, tags) as run:
            started.append(str(run.run_id))
    with Tracker.open(tmp_path, "another", {}, {"dejavu.folder": f"{tmp_path}/.dejavu/runs/zz9"}):
        pass
    for end in range(3, len(name) + 1):
        for wanted in (name[:end], f".dejavu/runs/{name[:end]}"):
            assert find_run(tmp_path, wanted).run_id == started[-1], wanted
    for begun in started:
        assert find_run(tmp_path, begun[:12]).run_id == begun
    assert find_run(tmp_path, "zz91").run_id == started[1]
    with pytest.raises(InputError, match="'zz' is the beginning of 4 runs"):
        find_run(tmp_path, "zz")


@pytest.mark.parametrize("model", ["hf:models/tiny", "own.module:factory", "hf:/a folder/it's ü", "hf:../tiny/"])
def test_a_run_is_found_by_its_whole_name_whatever_the_model_is_called(model: str, tmp_path: Path) -> None:
    for number in range(2):
        with Tracker.open(tmp_path, f"{model} on two nodes, {number}") as run:
            found = find_run(tmp_path, run.name)
            assert (found.run_id, found.name) == (run.run_id, run.name)
    assert find_run(tmp_path, f"{model} on two nodes, 0").run_id != find_run(tmp_path, "last").run_id


def test_a_run_that_is_not_there_is_answered_with_the_likest(project: Path, tmp_path: Path) -> None:
    first = runs(project)[-1]
    changed = first.run_id[:11] + ("0" if first.run_id[11] != "0" else "1")
    with pytest.raises(InputError, match=f"unknown run '{changed}'; did you mean '{first.run_id[:12]}'"):
        find_run(project, changed)
    with pytest.raises(
        InputError, match=r"unknown run 'zzz'; wanted 'last', or the beginning of an id, as \w{8} \(gpt h"
    ):
        find_run(project, "zzz")
    for nothing in ("", "/", ".", "./"):  # as a variable that is not set
        with pytest.raises(InputError, match="unknown run"):
            find_run(project, nothing)
    with pytest.raises(InputError, match=r"'0f0f' is the beginning of 2 runs: "):
        find_run(project, "0f0f")
    with pytest.raises(InputError, match=r"no run is recorded for .*`dejavu run` makes one"):
        find_run(tmp_path, "last")
    assert not (tmp_path / "mlflow.db").exists()


def test_the_report_is_found_or_it_is_said_why_there_is_none(project: Path) -> None:
    third, second, _ = runs(project)
    assert report_of(project, third).read_text() == "<p>third</p>"
    with pytest.raises(InputError, match=rf"run {second.run_id[:8]} \(gpt here, 2\) has no report: it ended as FAILED"):
        report_of(project, second)


def with_records(folder: Path) -> None:
    """Write a run with a report and a registered model, of which MLflow has whole paths."""
    write_json(folder / ".dejavu" / "runs" / "0f0f0f0f-1" / "job.json", {})
    with Tracker.open(folder, "one", tags={"dejavu.folder": f"{folder}/.dejavu/runs/0f0f0f0f-1"}) as run:
        run.artifact_text("report/report.html", "<p>one</p>")
    client, run_id = client_of(folder), str(run.run_id)
    experiment = client.get_experiment_by_name("dejavu").experiment_id
    logged = client.create_logged_model(experiment, name="gpt", source_run_id=run_id, model_type="pytorch")
    (folder / "weights").write_text("1 2 3")
    client.log_model_artifact(logged.model_id, str(folder / "weights"))
    client.create_registered_model("gpt")
    client.create_model_version("gpt", logged.artifact_location, run_id, model_id=logged.model_id)


def check_records(folder: Path) -> None:
    """Check that all of it is read where the folder is now, and that new runs are recorded there."""
    (one,) = runs(folder)
    assert report_of(folder, one) == folder / "mlartifacts" / one.run_id / "artifacts" / "report" / "report.html"
    assert one.folder == str(folder / ".dejavu" / "runs" / "0f0f0f0f-1")
    client = client_of(folder)
    (version,) = client.search_model_versions()
    (output,) = client.search_logged_models([client.get_experiment_by_name("dejavu").experiment_id])
    places = {version.source, client.get_model_version_download_uri("gpt", "1"), output.artifact_location}
    assert places == {f"{(folder / 'mlartifacts').as_uri()}/models/{output.model_id}/artifacts"}
    with Tracker.open(folder, "two") as run:
        run.artifact_text("report/report.html", "<p>two</p>")
    assert run.artifact_folder == folder / "mlartifacts" / str(run.run_id) / "artifacts"
    assert report_of(folder, find_run(folder, "last")).read_text() == "<p>two</p>"


@pytest.mark.parametrize("how", ["moved", "copied", "restored"])
def test_a_project_s_records_follow_its_folder(how: str, tmp_path: Path) -> None:
    old, new = tmp_path / "it's 50% ü #1", tmp_path / "a new" / "place"
    with_records(old)
    if how == "restored":
        backup(old, tmp_path / "all.tar")
        new.mkdir(parents=True)
        old.rename(tmp_path / "gone")
        restore(new, tmp_path / "all.tar")
    else:
        new.parent.mkdir()
        (shutil.copytree if how == "copied" else shutil.move)(old, new)
    upgrade_database(new / "mlflow.db")  # as `dejavu up` does before its server opens it
    check_records(new)
    assert old.exists() == (how == "copied")
    if old.exists():
        check_records(old)


@pytest.mark.parametrize("has_a_folder", [False, True])
def test_records_that_projects_share_stay_where_they_are(
    has_a_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after there is an artifact, also where artifacts of another database are beside theirs."""
    shared, first, second = (tmp_path / name for name in ("shared", "first", "second"))
    for folder in (shared, first, second):
        folder.mkdir()
    if has_a_folder:
        (shared / "mlartifacts").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shared / 'mlflow.db'}")
    for number, project in enumerate((first, second, first)):
        with Tracker.open(project, f"run {number}") as run:
            assert run.artifact_folder == first / "mlartifacts" / str(run.run_id) / "artifacts"
            if number:
                run.artifact_text("report/report.html", f"<p>{number}</p>")
        assert find_run(project, "last").run_id == run.run_id
    assert report_of(second, find_run(second, "run 1")).read_text() == "<p>1</p>"


def test_a_server_that_does_not_answer_is_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    for name in ("TIMEOUT", "MAX_RETRIES", "BACKOFF_FACTOR"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")
    with pytest.raises(DejavuError, match=r"MLflow at http://127.0.0.1:1 does not answer \("):
        runs(project)


# Commands


def invoke(project: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.chdir(project)
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_commands_show_the_same_as_tables_and_as_json(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third, second, first = runs(project)
    listed = invoke(project, monkeypatch, "runs")
    for wanted in (first.run_id[:8], "500 ms", "600 ms", "as fast as the even split", "failed", "the disk is full"):
        assert wanted in listed
    assert "and more" not in listed, "the first line of a failure"
    assert [row["name"] for row in json.loads(invoke(project, monkeypatch, "runs", "--json", "--most", "2"))] == [
        "gpt here, 3",
        "gpt here, 2",
    ]
    compared = json.loads(invoke(project, monkeypatch, "compare", first.run_id[:8], "last", "--json"))
    assert compared["figures"]["predicted_step_seconds"] == {"values": [0.5, 0.25], "differs": True, "ratio": 0.5}
    assert compared["figures"]["loss"] == {"values": [3.0, None], "differs": True, "ratio": None}
    assert compared["plan"]["schedule"] == {"values": ["1f1b", "gpipe"], "differs": True}
    assert compared["plan"]["stage 1"]["values"] == ["layers 2–3 on 2 × core, dp 2, recompute"] * 2
    assert compared["parameters"]["workload.num_microbatches"] == {"values": ["4", "8"], "differs": True}
    table = invoke(project, monkeypatch, "compare", first.run_id[:8], "last")
    assert "workload.num_microbatches" in table and "workload.model" not in table
    assert "parameters; 2 are the same (--all shows them)" in table
    assert "workload.model" in invoke(project, monkeypatch, "compare", first.run_id[:8], "last", "--all")
    table = invoke(project, monkeypatch, "compare", second.run_id[:8], "last")
    assert re.search(r"^state +failed +finished *$", table, re.MULTILINE), "why a run lacks figures"
    assert "the disk is full" in table and "and more" not in table
    page = project / "mlartifacts" / third.run_id / "artifacts" / "report" / "report.html"
    assert invoke(project, monkeypatch, "report") == f"{page}\n"
    assert json.loads(invoke(project, monkeypatch, "report", "last", "--json"))["report"] == str(page)


def test_last_is_the_last_run_that_has_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan alone, or what the watch planned meanwhile, has no weights, and the latter no page."""
    folder = tmp_path / ".dejavu" / "runs" / "0f0f"
    folder.mkdir(parents=True)
    (folder / "job.json").touch()
    with Tracker.open(tmp_path, "gpt here, 1", {}, {"dejavu.folder": str(folder)}) as run:
        run.artifact_text("report/report.html", "<p>trained</p>")
    assert run_named(tmp_path, "last", has_trained, "trains").name == "gpt here, 1"
    with Tracker.open(tmp_path, "gpt here, 2") as run:
        run.artifact_text("report/report.html", "<p>planned</p>")
    with Tracker.open(tmp_path, "gpt here, 3"):
        pass
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["report"], catch_exceptions=False)
    assert Path(shown.stdout.strip()).read_text() == "<p>planned</p>"
    assert re.fullmatch(
        r"the last that writes a page is \w{8} \(gpt here, 2\); after it came \w{8} \(gpt here, 3\)\n", shown.stderr
    )
    capsys.readouterr()
    assert run_named(tmp_path, "last", has_trained, "trains").name == "gpt here, 1"
    assert "the last that trains is " in capsys.readouterr().err
    with pytest.raises(RuntimeError), Tracker.open(tmp_path, "gpt here, 4"):
        raise RuntimeError("the disk is full")
    with pytest.raises(InputError, match=r"gpt here, 4\) has no report: it ended as FAILED"):
        CliRunner().invoke(app, ["report"], catch_exceptions=False)


@pytest.mark.parametrize("needs", [needs for n in range(4) for needs in itertools.combinations(SECRETS, n)])
@pytest.mark.parametrize("words", [("runs",), ("report",), ("compare", "last", "last"), ("export",)])
def test_the_commands_read_where_services_keep_records(
    words: tuple[str, ...], needs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mlflow.db; or, of services on Postgres, by their server, which has ended here."""
    for name in ("TIMEOUT", "MAX_RETRIES", "BACKOFF_FACTOR"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # what a command sets ends with the test
    monkeypatch.chdir(tmp_path)
    service_record.record(service_record.Services(str(tmp_path), "token", 1, 2, needs=needs))
    done = CliRunner().invoke(app, list(words))
    told = done.output + str(done.exception)
    assert ("MLflow at http://127.0.0.1:2 does not answer" in told) == (MLFLOW_DATABASE in needs)
    assert ("no run is recorded" in told) == (MLFLOW_DATABASE not in needs)


def test_plans_that_differ_have_a_row_that_differs() -> None:
    """Whatever it is that differs: a slice, the nodes that a stage is spread over."""
    on = StageConfiguration("core", 1, 4, 4, 1)
    one = Plan((Stage(0, 2, on), Stage(2, 4, on)), "1f1b", 4, (), (4, 4))
    spread = [StageConfiguration("core", nodes, 4 // nodes, 4, 1) for nodes in (2, 4)]
    stages = [replace(on, recompute=True), replace(on, zero_level=1), replace(on, device_type="other"), *spread]
    others = [
        *(replace(one, slices=slices) for slices in ((), (5, 3), (3, 5), (2, 2, 2, 2))),
        *(replace(one, stages=(one.stages[0], Stage(2, 4, its))) for its in stages),
        replace(one, schedule="gpipe"),
        replace(one, num_microbatches=8),
        replace(one, slices=(), both_ways=True),
    ]
    summary = RunSummary("1", "a", "FINISHED", 0.0, "gpt", "here", "", None, None, None, "", "")
    for first, second in itertools.combinations_with_replacement([one, *others], 2):
        rows = compared(*(RecordedRun(summary, {}, {}, json.loads(json.dumps(x.to_dict()))) for x in (first, second)))
        assert any(row["differs"] for row in rows["plan"].values()) == (first != second), (first, second)


def test_a_folder_without_runs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no run is recorded" in invoke(tmp_path, monkeypatch, "runs")
    assert json.loads(invoke(tmp_path, monkeypatch, "runs", "--json")) == []


def test_a_failure_of_before_is_a_verdict(project: Path) -> None:
    assert FAILURE_TAG in client_of(project).get_run(runs(project)[1].run_id).data.tags
    assert recorded(project, runs(project)[1]).plan is None


# The note


def test_the_command_of_a_note_is_one_that_dejavu_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {
        "train": False,
        "searches": ["exact", "mcmc"],
        "schedules": [],
        "microbatches": [4, 8],
        "dask": "",
        "parallelism": Parallelism(max_data_parallel=2),
        "budget_seconds": 3.0,
        "resume": "",
        "wait": False,
    }
    command = command_of(asked, tmp_path / "mlartifacts" / "a" / "artifacts")
    assert command == (
        "dejavu run --workload mlartifacts/a/artifacts/plan/workload.json "
        "--cluster mlartifacts/a/artifacts/plan/cluster.yaml "
        "--search exact,mcmc --microbatches 4,8 --budget-seconds 3.0 --data-parallel 2 --no-train"
    )
    known = {option for one in typer.main.get_command(app).commands["run"].params for option in one.opts}
    known |= {option for one in typer.main.get_command(app).commands["run"].params for option in one.secondary_opts}
    assert {word for word in command.split() if word.startswith("--")} <= known
    assert command_of({"budget_seconds": BUDGET_SECONDS, "train": True}, None) == (
        "dejavu run --workload plan/workload.json --cluster plan/cluster.yaml"
    )


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("one", sorted({field.name for field in dataclasses.fields(Parallelism)} - DEGREES.keys()))
def test_a_note_says_each_setting_that_its_command_leaves_out(one: str, as_json: bool) -> None:
    """What the command has an option for, and what is as usual, is not said."""
    other = {
        "recompute": (False,),
        "zero_levels": (0, 1),
        "sequence_parallel": (False,),
        "expert_parallel": (False,),
        "context_parallel": False,
        "also_unsplit": True,
        "offload": (Offload(),),
        "only": (StageConfiguration("T4"),),
        "min_tensor_parallel": 2,
    }[one]
    for degrees in ({"max_data_parallel": 2}, {"max_tensor_parallel": 1}):
        asked: Any = Parallelism(**degrees, **{one: other})  # type: ignore[arg-type]
        usual: Any = Parallelism(**degrees)  # type: ignore[arg-type]
        if as_json:
            asked, usual = (json.loads(json.dumps(dataclasses.asdict(spread))) for spread in (asked, usual))
        said = left_out_of_command({"parallelism": asked})
        assert f"`{one}: " in said and said.count("`") == 4, "one setting, and the word parallelism"
        assert left_out_of_command({"parallelism": usual}) == "" == left_out_of_command({})
    assert "`max_data_parallel: null`" in left_out_of_command({"parallelism": Parallelism()})


def test_the_figures_of_a_choice_are_those_of_the_plan_as_bound() -> None:
    """Binding may move stages to other devices than the search named; the page's figures are of the bound plan, too."""
    choice = dejavu.plan("mlp", "examples/clusters/h100-and-l4.yaml", searches=("exact", "uniform"), microbatches=(8,))
    others = [row.best for row in choice.considered if row.best is not None]
    assert len({one.step_seconds for one in others}) > 1
    for bound in others:
        run = MagicMock()
        binding = bind_in_order(bound.plan, choice.request.cluster)
        recording.record_choice.fn(run, choice, binding, bound)
        told = dict(call.args for call in run.metric.call_args_list)
        gap = 1.0 - choice.simulated_lower_bound_seconds / bound.simulated_seconds
        assert told == pytest.approx(
            {"predicted_step_seconds": bound.step_seconds, "simulated_gap_percent": 100.0 * max(0.0, gap)}
        )


def test_each_way_of_a_search_is_a_run_of_its_own_named_as_the_page_names_it() -> None:
    """Two sites of one type: a search is asked for the whole type and for its islands, with one number beside."""
    options = {"schedules": ("1f1b",), "microbatches": (4,), "budget_seconds": 2.0}
    choice = dejavu.plan("mlp", "examples/clusters/two-sites.yaml", searches=("uniform",), **options)
    run = MagicMock()
    recording.record_choice.fn(run, choice, choice.binding, choice.chosen)
    names = [call.args[0].removeprefix("search: ") for call in run.child.call_args_list]
    assert len(names) == len(set(names)) and any("in left" in name for name in names)
    assert set(names) == {curve.name for curve in convergence_chart(choice).data}
    written = [(row["search"], str(row["of_devices"])) for row in choice_to_dict(choice)["considered"]]
    assert len(written) == len(set(written)), "as the rows of `dejavu plan --json` tell them apart"


def test_the_gap_of_an_older_run_is_read_by_its_name_now(tmp_path: Path) -> None:
    """So that `dejavu compare` shows it beside that of a new run: MLflow's `optimality_gap_percent` was the same."""
    for name, gap in (("optimality_gap_percent", 7.5), ("simulated_gap_percent", 2.5)):
        with Tracker.open(tmp_path, name) as run:
            run.metric(name, gap)
    new, old = (recorded(tmp_path, one) for one in runs(tmp_path))
    figures = compared(old, new)["figures"]
    assert [name for name in figures if "gap" in name] == ["simulated_gap_percent"]
    assert figures["simulated_gap_percent"]["values"] == [7.5, 2.5]
