"""Backup, restore and gc of what a project keeps; a cost database and MLflow's records of older versions."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import random
import sqlite3
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from mlflow import MlflowClient
from typer.testing import CliRunner

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.processes.files import write_json
from dejavu.foundation.processes.start import start_seconds
from dejavu.launch.training_lock import BusyError
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.state import read_weights, save_checkpoint
from dejavu.track import Tracker
from dejavu.track.old_runs import delete_old_runs
from flows import service_record
from flows.__main__ import app
from flows.processes import RecordedProcess
from flows.server_settings import MLFLOW_DATABASE, PREFECT_DATABASE
from flows.upkeep.backup import backup, kept_elsewhere, restore
from flows.upkeep.cleaning import DAY_SECONDS, KEPT_DAYS, clean, leftovers
from tests.rows import row

DATABASES = (PREFECT_DATABASE, MLFLOW_DATABASE)
ROW = row(kind="layer", subject="a", direction="forward", microbatch_size=4, flops=1e9, seconds=1e-3)
HOLD = """
import sys
from pathlib import Path
from dejavu.launch.training_lock import alone_in
with alone_in(Path(sys.argv[1]), "gpt on desk"):
    print("holds", flush=True)
    sys.stdin.read()
"""


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def make_run(project: Path, name: str, age_days: float, start_from: str | None = None) -> Path:
    """A run's folder as a training of two steps leaves it."""
    run = project / ".dejavu" / "runs" / name
    state = str(project / ".dejavu" / "trials" / start_from) if start_from else None
    write_json(run / "job.json", {"start_from": state, "folder": str(run)})
    write(run / "progress.jsonl", '{"step": 0, "loss": 1.0}\n')
    write(run / "checkpoints" / "step-00000002" / "__0_0.distcp", os.urandom(2000))
    write(run / "checkpoints" / "step-00000002" / ".metadata", os.urandom(100))
    write(run / "checkpoints" / "step-00000002" / "COMPLETE.json", '{"step": 2}')
    then = time.time() - age_days * DAY_SECONDS
    for path in run.glob("*.json*"):
        os.utime(path, (then, then))
    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with something of everything that is kept, and of everything that is not."""
    folder = tmp_path / "project"
    state = folder / ".dejavu"
    ProfileDatabase(folder / "profiles_db").append([ROW, replace(ROW, subject="b"), replace(ROW, subject="c")])
    write(folder / "profiles_db" / "README.md", "of the repository")
    make_run(folder, "a", age_days=1, start_from="one-3.safetensors")
    write(state / "trials" / "one-3.safetensors", os.urandom(500))
    write(state / "trials" / "one-3.json", "{}")
    write(state / "watch" / "decisions.jsonl", '{"why": "first"}\n')
    (state / "prefect").mkdir()
    with contextlib.closing(sqlite3.connect(state / "prefect" / "prefect.db")) as prefect:
        prefect.execute("PRAGMA journal_mode=WAL")
        prefect.execute("CREATE TABLE flow_run (name TEXT)")
        prefect.execute("INSERT INTO flow_run VALUES ('gpt')")
        prefect.commit()
    for name in LEFT_OUT:
        write(folder / name, "not kept")
    return folder


LEFT_OUT = (
    *(".dejavu/prefect/storage/key", ".dejavu/prefect/temporary-1.db", ".dejavu/logs/mlflow.log"),
    *(".dejavu/runs/a/checkpoints/step-00000003.partial/__0_0.distcp", ".dejavu/runs/a/.job.json.17"),
    *(".dejavu/training.json", "profiles_db/.tmp-1", "profiles_db/set_aside/1.parquet"),
)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder but those that no backup has, and SQLite's, which are compared by what they hold."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if name not in (*LEFT_OUT, "profiles_db/README.md")
        and not name.endswith((".lock", ".db", ".db-wal", ".db-shm"))
    }


def loss(project: Path) -> float:
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dejavu")
    assert experiment is not None
    return float(client.search_runs([experiment.experiment_id])[0].data.metrics["loss"])


def test_what_was_saved_comes_back_in_an_empty_project(project: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "all.tar.gz", tmp_path / "elsewhere"
    other.mkdir()
    with Tracker.open(project, "a run") as run:
        run.metric("loss", 0.5)
        run.artifact_text("report.html", "<p>two stages</p>")
    saved = backup(project, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert restore(other, file).num_files == saved.num_files
    assert contents(other) == contents(project)
    assert not any((other / name).exists() for name in LEFT_OUT if not name.endswith("training.json"))
    assert loss(other) == 0.5
    assert len(ProfileDatabase(other / "profiles_db").read()) == 3
    with contextlib.closing(sqlite3.connect(other / ".dejavu" / "prefect" / "prefect.db")) as prefect:
        assert prefect.execute("SELECT name FROM flow_run").fetchall() == [("gpt",)]
    client = MlflowClient(f"sqlite:///{other / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dejavu")
    assert experiment is not None and experiment.artifact_location == (other / "mlartifacts").as_uri()
    run = client.search_runs([experiment.experiment_id])[0]
    project.rename(tmp_path / "gone")
    assert Path(client.download_artifacts(run.info.run_id, "report.html")).read_text() == "<p>two stages</p>"


def test_restoring_replaces_nothing_that_differs_unless_forced(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.tar"
    backup(project, file)
    job = project / ".dejavu" / "runs" / "a" / "job.json"
    before = job.read_text()
    job.write_text("{}")
    with pytest.raises(InputError, match=r"2 of \d+ files .* differ, \.dejavu/prefect/prefect\.db the first.* --force"):
        restore(project, file)
    assert job.read_text() == "{}"
    assert restore(project, file, force=True).num_files == 2  # a copy of a database never equals it, byte for byte
    assert job.read_text() == before


def test_a_forced_restore_leaves_no_journal_of_the_database_before(project: Path, tmp_path: Path) -> None:
    file, database = tmp_path / "all.tar", project / ".dejavu" / "prefect" / "prefect.db"
    backup(project, file)
    with contextlib.closing(sqlite3.connect(database)) as prefect:
        prefect.execute("INSERT INTO flow_run VALUES ('later')")
        prefect.commit()
        write(database.with_name("prefect.db-wal"), b"of another database")
    restore(project, file, force=True)
    with contextlib.closing(sqlite3.connect(database)) as prefect:
        assert prefect.execute("SELECT name FROM flow_run").fetchall() == [("gpt",)]


def packed(file: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), kind if name != "backup.json" else tarfile.REGTYPE
            member.linkname = "/etc/passwd" if kind == tarfile.SYMTYPE else ""
            archive.addfile(member, io.BytesIO(content))
    return file


GOOD = json.dumps({"format": 1, "project": "/somewhere"}).encode()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, tarfile.REGTYPE) for name in ("../x", "/etc/x", ".dejavu/../../x", "flows/full.py", "prefect.yaml")),
        *((name, tarfile.REGTYPE) for name in (".dejavu/prefect/storage/x", ".dejavu/services.json")),
        (".dejavu/x", tarfile.SYMTYPE),
        (".dejavu/x", tarfile.LNKTYPE),
        (".dejavu/x", tarfile.FIFOTYPE),
    ],
)
def test_a_backup_with_more_than_a_backup_has_is_refused(tmp_path: Path, name: str, kind: bytes) -> None:
    project = tmp_path / "project"
    project.mkdir()
    file = packed(tmp_path / "bad.tar", {"backup.json": GOOD, ".dejavu/runs/a/job.json": b"{}", name: b""}, kind)
    with pytest.raises(InputError, match="which no backup has; nothing was restored"):
        restore(project, file)
    assert not (project / ".dejavu" / "runs").exists()


@pytest.mark.parametrize("cut", ["nothing", "half", "other", "format"])
def test_a_file_that_is_no_whole_backup_is_refused(project: Path, tmp_path: Path, cut: str) -> None:
    whole, file, other = tmp_path / "all.tar.gz", tmp_path / "cut.tar.gz", tmp_path / "elsewhere"
    other.mkdir()
    backup(project, whole)
    made = whole.read_bytes()
    if cut == "format":
        packed(file, {"backup.json": b'{"format": 99, "project": "/"}'})
    else:
        file.write_bytes({"nothing": b"", "half": made[: len(made) // 2], "other": b"no archive at all"}[cut])
    with pytest.raises(InputError, match=r"is no whole backup|found format 99; wanted"):
        restore(other, file)
    assert contents(other) == {}


@pytest.mark.parametrize("end", [".tar", ".tar.gz"])
def test_a_damaged_backup_is_refused_wherever_that_is(end: str, project: Path, tmp_path: Path) -> None:
    """A compressed one has a checksum; of one that is not, what the headers say of its members is looked at."""
    whole, file = tmp_path / f"all{end}", tmp_path / f"damaged{end}"
    backup(project, whole)
    made, rng, expected = whole.read_bytes(), random.Random(0), contents(project)
    with tarfile.open(whole) as archive:
        headers = [member.offset for member in archive][1:]
    cuts = [*headers, *(offset + 512 for offset in headers)] if end == ".tar" else rng.sample(range(len(made)), 40)
    flipped = [offset + rng.randrange(156) for offset in headers] if end == ".tar" else rng.sample(range(len(made)), 80)
    for number, place in enumerate(cuts + flipped):
        damaged = bytearray(made if number >= len(cuts) else made[:place])
        if number >= len(cuts):
            damaged[place] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        other = tmp_path / str(number)
        other.mkdir()
        try:
            restore(other, file)
        except InputError as error:
            assert "nothing was restored" in str(error) or "found format" in str(error), error
            assert contents(other) == {}
        else:
            assert contents(other) == expected, f"byte {place} says nothing of what is in it"


def test_a_checkpoint_is_read_from_a_restored_backup(project: Path, tmp_path: Path) -> None:
    """As torch writes it: with a hidden file that says what is in it."""
    state = {f"model.{layer}.weight": torch.randn(3, 4) for layer in "abc"}
    folder = project / ".dejavu" / "runs" / "a" / "checkpoints"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        saved = save_checkpoint(folder, 7, state)
    finally:
        dist.destroy_process_group()
    other = tmp_path / "other"
    other.mkdir()
    backup(project, tmp_path / "all.tar")
    restore(other, tmp_path / "all.tar")
    found = read_weights(other / saved.relative_to(project))
    assert {f"model.{name}" for name in found} == set(state)
    assert all(torch.equal(state[f"model.{name}"], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("linked", [".dejavu/runs", ".dejavu/runs/a", "mlartifacts", ".dejavu", "profiles_db"])
def test_what_is_kept_on_another_disk_is_in_the_backup(linked: str, project: Path, tmp_path: Path) -> None:
    """A link leads to it. It may also lead back to where it is, and a file may have two names."""
    write(project / "mlartifacts" / "1" / "model" / ".gitattributes", "of a model")
    run = project / ".dejavu" / "runs" / "a"
    os.link(run / "checkpoints" / "step-00000002" / "__0_0.distcp", run / "again.distcp")
    (run / "link.json").symlink_to("job.json")
    expected = contents(project)
    (tmp_path / "disk").mkdir()
    (project / linked).rename(tmp_path / "disk" / "it")
    (project / linked).symlink_to(tmp_path / "disk" / "it")
    (project / ".dejavu" / "runs" / "loop").symlink_to(project / ".dejavu")
    other = tmp_path / "other"
    other.mkdir()
    backup(project, tmp_path / "all.tar")
    restore(other, tmp_path / "all.tar")
    assert contents(other) == expected
    assert not [path for path in other.rglob("*") if path.is_symlink()]


def test_a_restore_goes_across_disks(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of a project may be mounted."""
    backup(project, tmp_path / "all.tar")
    rename, other = Path.replace, tmp_path / "other"
    other.mkdir()

    def replace_(self: Path, target: Path) -> Path:
        if (".restore-" in str(self)) and ".restore-" not in str(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace_)
    restore(other, tmp_path / "all.tar")
    assert contents(other) == contents(project)
    left = [path.name for path in other.rglob(".*") if path.is_file() and path.name != ".metadata"]
    assert not left


@pytest.mark.parametrize("work", [backup, restore])
def test_a_folder_is_no_backup(project: Path, tmp_path: Path, work: Callable[[Path, Path], object]) -> None:
    before = contents(project)
    folder = tmp_path / "backups"
    folder.mkdir()
    with pytest.raises(InputError, match=r"backups is a folder; wanted a file"):
        work(project, folder)
    assert contents(project) == before and not list(folder.iterdir())


def test_a_backup_that_fails_keeps_the_one_before(project: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        backup(project, tmp_path / "none" / "all.tar")
    file = write(tmp_path / "all.tar", "the one before")
    (project / "mlflow.db").write_bytes(b"no database at all, of no version")
    with pytest.raises(DejavuError, match=r"mlflow\.db cannot be copied: file is not a database"):
        backup(project, file)
    assert file.read_text() == "the one before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["all.tar"]


@pytest.mark.integration
def test_nothing_is_touched_while_a_run_measures_or_trains(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.tar"
    backup(project, file)
    words = [sys.executable, "-c", HOLD, str(project)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        before = contents(project)
        commands: list[Callable[[], object]] = [lambda: backup(project, file), lambda: restore(project, file)]
        for command in [*commands, lambda: clean(project, 0)]:
            with pytest.raises(BusyError, match="gpt on desk"):
                command()
        assert contents(project) == before
        holder.communicate("")


@pytest.mark.parametrize("asked", [asked for n in range(3) for asked in itertools.combinations(DATABASES, n)])
@pytest.mark.parametrize("needs", [needs for n in range(3) for needs in itertools.combinations(DATABASES, n)])
def test_databases_that_a_backup_lacks_are_named(
    needs: tuple[str, ...], asked: tuple[str, ...], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are set now, and those that services were started with: another shell may not have them."""
    for name in DATABASES:
        monkeypatch.setenv(name, "postgresql://one:canary@db/kept" if name in asked else "")
    service_record.record(service_record.Services(str(project), "token", 1, 2, needs=needs))
    told = kept_elsewhere(project)
    assert [name for name in DATABASES if name in told] == [name for name in DATABASES if name in {*needs, *asked}]
    assert bool(told) == bool(needs or asked) and "canary" not in told


@pytest.mark.parametrize(
    ("records", "is_elsewhere"),
    [
        ("", False),
        ("sqlite:///{project}/mlflow.db", False),
        ("sqlite:///mlflow.db", False),  # a backup is made in the project's folder
        ("http://127.0.0.1:2", False),  # MLflow's server of `dejavu up`
        ("sqlite:///{project}/other/mlflow.db", True),
        ("https://one:canary@mlflow.example.com", True),
    ],
)
def test_records_that_a_backup_lacks_are_named(
    records: str, is_elsewhere: bool, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in DATABASES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", records.format(project=project))
    monkeypatch.chdir(project)
    service_record.record(service_record.Services(str(project), "token", 1, 2))
    done = CliRunner().invoke(app, ["backup", str(tmp_path / "saved.tar")])
    assert done.exit_code == 0, done.output
    told = "not in it: MLflow's records, which are where MLFLOW_TRACKING_URI says" in done.output
    assert told == is_elsewhere and "canary" not in done.output


def test_nothing_is_restored_under_running_services(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "all.tar"
    backup(project, file)
    me = RecordedProcess("mlflow", os.getpid(), start_seconds(psutil.Process()), "")
    running = service_record.Services(str(project), "token", 1, 2, (me,))
    write_json(project / ".dejavu" / "services.json", asdict(running))
    with pytest.raises(DejavuError, match="wanted `dejavu down`"):
        restore(project, file)


# gc


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Five runs, of which the newest starts from a trial that the oldest started from, too."""
    folder = tmp_path / "project"
    for number, start in enumerate(["x-3", "y-3", "z-3", "x-3", None]):
        make_run(folder, f"run{number}", number + 1, start and f"{start}.safetensors")
    for trial in "wxyz":
        write(folder / ".dejavu" / "trials" / f"{trial}-3.safetensors", os.urandom(1000))
        write(folder / ".dejavu" / "trials" / f"{trial}-3.json", "{}")
    then = time.time() - (KEPT_DAYS + 1) * DAY_SECONDS
    aside = write(folder / ".dejavu" / ".artifact-old" / "report.html", "x").parent
    os.utime(aside, (then, then))
    write(folder / ".dejavu" / ".artifact-new" / "report.html", "x")
    for name in ("prefect/storage/old", "logs/old.log"):
        os.utime(write(folder / ".dejavu" / name, "x" * 10), (then, then))
    for name in ("prefect/storage/new", "logs/new.log"):
        write(folder / ".dejavu" / name, "x" * 10)
    return folder


def names(project: Path, folder: str) -> set[str]:
    return {path.name for path in (project / ".dejavu" / folder).iterdir()}


def test_gc_keeps_the_newest_runs_and_what_they_start_from(old: Path) -> None:
    found = {one.what: one for one in clean(old, keep=2)}
    assert {what: len(one.paths) for what, one in found.items()} == {
        "run": 3,
        "trial state": 2,
        "cached result": 1,
        "old log": 1,
        "unfinished record": 1,
    }
    assert found["trial state"].size_bytes == 2000
    assert str(found["cached result"]) == "1 cached result, 10 B"
    assert names(old, "runs") == {"run0", "run1"}
    assert {name for name in names(old, "trials") if name.endswith(".safetensors")} == {
        *("x-3.safetensors", "y-3.safetensors"),
    }
    assert len([name for name in names(old, "trials") if name.endswith(".json")]) == 4, "results stay"
    assert (names(old, "prefect/storage"), names(old, "logs")) == ({"new"}, {"new.log"})
    assert clean(old, keep=2) == []


@pytest.mark.parametrize("linked", range(5))
def test_gc_leaves_a_run_that_is_kept_elsewhere(linked: int, old: Path, tmp_path: Path) -> None:
    """With the state that it starts from; the newest of the others stay as well."""
    link = old / ".dejavu" / "runs" / f"run{linked}"
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    (start,) = {json.loads((link / "job.json").read_text())["start_from"]}
    clean(old, keep=1)
    newest = min({*range(5)} - {linked})
    assert names(old, "runs") == {f"run{linked}", f"run{newest}"}
    assert (link / "checkpoints" / "step-00000002" / "COMPLETE.json").exists()
    assert start is None or Path(start).name in names(old, "trials")


def test_a_dry_run_deletes_nothing(old: Path) -> None:
    before = contents(old)
    found = clean(old, keep=0, dry_run=True)
    counts = {"run": 5, "trial state": 4, "cached result": 1, "old log": 1, "unfinished record": 1}
    assert {one.what: len(one.paths) for one in found} == counts
    assert contents(old) == before


def test_a_run_that_was_resumed_is_a_new_one(old: Path) -> None:
    (old / ".dejavu" / "runs" / "run4" / "progress.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    clean(old, keep=1)
    assert names(old, "runs") == {"run4"}


def test_gc_of_an_empty_project(tmp_path: Path) -> None:
    assert clean(tmp_path, keep=10) == []
    assert [one.paths for one in leftovers(tmp_path, 0)] == [()] * 5


@pytest.mark.integration
@pytest.mark.slow
def test_mlflow_s_older_runs_are_erased_with_their_artifacts(tmp_path: Path) -> None:
    for number in range(3):
        with Tracker.open(tmp_path, f"run {number}") as run:
            run.artifact_text("report.html", f"<p>{number}</p>")
            with run.child("trials") as child:
                child.metric("loss", number)
                child.add_child("trial 0", {}, (), {})
                with child.child("trial 1") as trial, trial.child("its part"):
                    pass
    assert delete_old_runs(tmp_path, 1, dry_run=True).erased == 10
    assert len(list((tmp_path / "mlartifacts").rglob("report.html"))) == 3
    assert delete_old_runs(tmp_path, 1).erased == 10
    assert [path.read_text() for path in (tmp_path / "mlartifacts").rglob("report.html")] == ["<p>2</p>"]
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert sorted(name for (name,) in database.execute("SELECT name FROM runs")) == [
            "its part",
            "run 2",
            "trial 0",
            "trial 1",
            "trials",
        ]
    assert delete_old_runs(tmp_path, 1).erased == 0
    with Tracker.open(tmp_path, "running") as run, run.child("trials") as child, child.child("trial 0"):
        found = delete_old_runs(tmp_path, 0, dry_run=True)
        assert str(found) == "5 of MLflow's runs; kept: 1 older run that may still run", "what runs is never erased"
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    client.create_registered_model("gpt")
    made = client.create_model_version("gpt", (tmp_path / "model").as_uri(), run_id=child.run_id)
    found = delete_old_runs(tmp_path, 0, dry_run=True)
    kept = "1 older run that registered models came from, until their versions are deleted"
    assert str(found) == f"5 of MLflow's runs; kept: {kept}", (
        "a registered model's run is kept with what it is a part of"
    )
    client.delete_model_version("gpt", made.version)
    assert str(delete_old_runs(tmp_path, 0, dry_run=True)) == "8 of MLflow's runs"
    assert delete_old_runs(tmp_path / "none", 0).erased == 0


# Older versions


def test_a_cost_database_of_the_first_version_goes_on(tmp_path: Path) -> None:
    """Its rows are read and held equal, what is added stands beside them, and the manifest is today's then."""
    database = ProfileDatabase(tmp_path, with_shipped=False)
    database.append([ROW])
    table = database.read().drop_columns(["disturbed_share"]).replace_schema_metadata({"dejavu_schema_version": "1"})
    for path in tmp_path.glob("*.parquet"):
        path.unlink()
    pq.write_table(table, tmp_path / "old")
    content = (tmp_path / "old").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "old").rename(tmp_path / f"{digest[:16]}.parquet")
    line = {
        "name": f"{digest[:16]}.parquet",
        "rows": 1,
        "bytes": len(content),
        "sha256": digest,
        "device_types": ["T4"],
    }
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 1, "files": [line]}))
    assert database.check() == []
    assert database.latest() == [ROW]
    assert database.append([ROW, replace(ROW, subject="b", disturbed_share=0.25)]) == 1
    assert json.loads((tmp_path / "manifest.json").read_text())["schema_version"] == 2
    assert sorted(one.subject for one in database.latest()) == ["a", "b"]
    assert database.check() == []
