"""What a run tells while it goes: pace and time left, events for programs, `dejavu status`, `--quiet` and `--json`."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dejavu.cluster import load_cluster
from dejavu.foundation.errors import InputError
from dejavu.foundation.processes.files import write_json
from dejavu.launch.running import status_of
from dejavu.launch.training_lock import Holder, alone_in, record_training
from dejavu.planning import Planner, PlanRequest
from dejavu.runtime.job import DIVERGED, TrainingResult, job_to_resume, prepared_job
from dejavu.runtime.job.resume import earlier_training
from dejavu.runtime.process.failures import Failure, write_failure
from dejavu.runtime.worker import tell as tell_step
from dejavu.timing.pace import Pace, in_words
from dejavu.workload import Workload
from flows import room
from flows.__main__ import app, run
from flows.inputs import local_training, workload_of
from flows.listening import printed_as_json
from flows.printing import print_in_any_locale
from flows.recorded.status import QUIET_SECONDS, status_lines, status_to_dict
from tasks.events import heard_by, tell
from tests.conftest import TINY
from tests.launching import job_of
from tests.test_flow import WORKLOAD, measured_by_a_project
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("step_seconds", [0.01, 0.7, 12.0])
@pytest.mark.parametrize("at_once", [1, 5])
def test_the_pace_is_the_steps_mean_and_says_what_is_left(step_seconds: float, at_once: int) -> None:
    """Also where several steps are read at once, as from a file that is looked at now and then."""
    clock = Clock()
    pace = Pace(1000, clock)
    assert pace.step_seconds is None and pace.left_seconds is None
    for step in range(0, 300, at_once):
        clock.seconds += at_once * step_seconds
        for k in range(at_once):
            pace.add(step + k)
    found = pace.step_seconds
    assert found == pytest.approx(step_seconds, rel=at_once / 90)
    assert pace.left_seconds == pytest.approx(700 * (found or 0.0))


def test_steps_that_are_trained_again_begin_a_new_pace() -> None:
    clock = Clock()
    pace = Pace(100, clock)
    for step in range(10):
        clock.seconds += 1.0
        pace.add(step)
    clock.seconds += 50.0  # a restart, from the checkpoint after step 4
    pace.add(5)
    assert pace.step_seconds is None
    clock.seconds += 2.0
    pace.add(6)
    assert (pace.step_seconds, pace.left_seconds) == (2.0, 93 * 2.0)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.2, "0 s"), (89.4, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (200_000, "2 days 7 h")],
)
def test_times_left_are_short(seconds: float, written: str) -> None:
    assert in_words(seconds) == written


def test_more_time_is_never_written_as_less() -> None:
    unit_seconds = {"s": 1, "min": 60, "h": 3600, "days": 86400}
    written = list(dict.fromkeys(in_words(0.3 * k) for k in range(900_000)))
    words = [one.split() for one in written]
    seconds = [sum(int(n) * unit_seconds[unit] for n, unit in zip(one[::2], one[1::2], strict=True)) for one in words]
    assert seconds == sorted(seconds) and len(seconds) > 2500


def test_events_reach_who_listens_from_any_thread_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[dict[str, Any]] = []
    tell("before")
    with caplog.at_level(logging.DEBUG), heard_by(heard.append):
        thread = threading.Thread(target=tell, args=("measuring",), kwargs={"done": 1})
        thread.start()
        thread.join()
        tell("training", loss=float("nan"))
    tell("after")
    assert [event["event"] for event in heard] == ["measuring", "training"] and heard[0]["done"] == 1
    assert not [one for one in caplog.records if one.name.startswith("dejavu")]


def test_each_event_is_a_line_of_json_and_a_failure_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="why"), printed_as_json():
        tell("training", step=1, loss=float("inf"), what="µ\n")
        raise ValueError("why")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["event"] for row in rows] == ["training", "failed"]
    assert rows[0]["loss"] is None and rows[0]["what"] == "µ\n" and rows[1]["error"] == "why"


def test_a_mistake_in_a_file_is_the_last_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        run(workload=tmp_path / "nowhere.yaml", as_json=True)
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["event"], row["type"]) == ("failed", "InputError") and "nowhere.yaml" in row["error"]


def test_a_planner_tells_its_best_and_its_bound(tmp_path: Path) -> None:
    heard: list[tuple[float | None, float | None]] = []
    said: list[str] = []
    planner = Planner(
        tell=lambda what, done, total: said.append(what), found=lambda best, bound: heard.append((best, bound))
    )
    cluster = load_cluster(ROOT / "examples" / "clusters" / "two-generations.yaml")
    choice = planner.plan(
        PlanRequest(Workload(batch_size=16), cluster, tmp_path, microbatches=(8, 16), budget_seconds=2.0)
    )
    bests, bounds = ([x for x in column if x is not None] for column in zip(*heard, strict=True))
    assert bests == sorted(bests, reverse=True) and bounds == sorted(bounds)
    assert bests[-1] >= choice.simulated_seconds * (1 - 1e-9) and bounds[-1] <= choice.simulated_seconds * (1 + 1e-9)
    assert any(" (best " in one for one in said)


def prepared(project: Path, steps: int = 0, name: str = "run") -> Path:
    """A training's folder with so many steps done, without any process."""
    folder = project / ".dejavu" / "runs" / name
    workload = TINY.model_copy(update={"num_steps": 40})
    job = replace(job_of(workload, folder, hosts=("alpha", "beta")), last_step=40)
    folder.mkdir(parents=True)
    job.write()
    rows = [json.dumps({"step": k, "loss": 5.0 - k / 100, "seconds": 0.5}) for k in range(steps)]
    job.progress_path.write_text("\n".join([*rows, '{"step": ']))  # the last is being written
    return folder


def test_a_folder_without_trainings_says_so(tmp_path: Path) -> None:
    assert status_lines(status_of(tmp_path)) == [
        "no training runs in this folder",
        "none is kept here; `dejavu run` starts one",
    ]
    assert status_to_dict(status_of(tmp_path)) == {
        "state": "idle",
        "holder": None,
        "since": None,
        "training": None,
        "unread": "",
    }


@pytest.mark.parametrize("steps", [0, 1, 25])
def test_a_running_training_says_how_far_it_is(steps: int, tmp_path: Path) -> None:
    with alone_in(tmp_path, "gpt on desk"):
        assert "its training has not begun" in status_lines(status_of(tmp_path))[0]
        folder = prepared(tmp_path, steps)
        found = status_of(tmp_path)
        assert found.is_training and found.training is not None
        lines = status_lines(found)
        assert lines[0].startswith("gpt on desk is training since ") and str(os.getpid()) in lines[0]
        assert lines[1].startswith(f"step {steps} of 40")
        assert ("loss 4.76" in lines[1] and "500 ms a step" in lines[1] and "8 s left" in lines[1]) == (steps == 25)
        assert "rank on alpha" in lines[2] and "on beta" in lines[2] and lines[3] == f"folder: {folder}"
        assert status_to_dict(found)["state"] == "training"
        late = status_lines(found, time.time() + 1000)
        assert any("nothing was heard of it for 17 min" in line for line in late)
        (folder / "result.json").write_text("{}")
        assert "has trained, and records it" in status_lines(status_of(tmp_path))[0]
    assert status_of(tmp_path).holder is None


def test_a_training_that_has_ended_has_the_step_of_its_page(tmp_path: Path) -> None:
    """That is of undisturbed steps where there are enough, and its last steps were not."""
    result = TrainingResult(0, (4.0,) * 40, 0.25, (), restarts=0, resumed_from_step=None, final_checkpoint="")
    folder = prepared(tmp_path, 40)
    write_json(folder / "result.json", result.to_dict())
    assert "250 ms a step" in status_lines(status_of(tmp_path))[2]
    write_json(folder / "result.json", replace(result, was_slowed=True).to_dict())
    assert "500 ms a step" in status_lines(status_of(tmp_path))[2], "its page has none"


@pytest.mark.parametrize("steps", [0, 25])
@pytest.mark.parametrize("place", ["job", ".dejavu/runs/older", "jobs of mine/a", "../elsewhere"])
def test_a_training_of_an_older_job_is_seen_wherever_it_is(place: str, steps: int, tmp_path: Path) -> None:
    """As the deployment `dejavu/train` trains them: status said that no training had begun."""
    project = tmp_path / "project"
    newest = prepared(project, 3)
    folder = (project / place).resolve()
    shutil.copytree(prepared(tmp_path / "other", steps), folder)
    os.utime(folder / "job.json", (1.7e9, 1.7e9))
    with alone_in(project, "gpt on desk"):
        record_training(project, project / place)
        found = status_of(project)
        assert found.is_training and found.training is not None and found.training.folder.resolve() == folder
        lines = status_lines(found)
        assert " is training since " in lines[0] and lines[1].startswith(f"step {steps} of 40")
        (folder / "result.json").write_text("{}")
        assert "has trained, and records it" in status_lines(status_of(project))[0]
    last = status_of(project).training
    assert last is not None and last.folder == newest, "what the process held ends with it"


def test_the_last_training_is_resumed_by_that_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"--resume last: no training is kept in .*; `dejavu run` starts one"):
        local_training("last")
    for name in ("a", "it's ü [b]", "c"):
        prepared(tmp_path, 3, name)
        assert local_training("last") == f".dejavu/runs/{name}"
    with pytest.raises(InputError, match="--no-train trains nothing"):
        local_training("last", train=False)
    shutil.copytree(tmp_path / ".dejavu" / "runs" / "a", tmp_path / "last")
    assert local_training("last") == "last", "a folder of that name is that folder"


def test_what_ended_before_its_last_step_can_be_resumed(tmp_path: Path) -> None:
    prepared(tmp_path, 25)
    lines = status_lines(status_of(tmp_path), time.time() + 1000)
    assert lines[0] == "no training runs in this folder" and "left" not in lines[2]
    assert "ended before its last step" in lines[1] and "dejavu run --resume " in lines[1]


@pytest.mark.parametrize(
    "planned", [{}, {"both_ways": True}, {"slices": 4}, {"schedule": "chimera", "both_ways": True}]
)
def test_what_status_says_of_resuming_is_a_whole_command(
    planned: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the training's own workload, whatever ways the plan added to it; here until a server starts."""
    folder = prepared(tmp_path, 25)
    job = json.loads((folder / "job.json").read_text())
    job["workload"] |= planned
    (folder / "job.json").write_text(json.dumps(job))
    (tmp_path / "cluster.yaml").write_text("nodes: auto\n")
    monkeypatch.chdir(tmp_path)
    said = status_lines(status_of(Path()))[1]
    command = next(part for part in said.split("`") if part.startswith("dejavu run --resume "))

    def stop(folder: Path) -> None:
        raise FileNotFoundError("looked at the room")

    monkeypatch.setattr(room, "check_room", stop)
    done = CliRunner().invoke(app, command.split()[1:])
    assert isinstance(done.exception, FileNotFoundError), done.exception
    goes_both_ways = planned.get("schedule") == "chimera"
    as_it_was = TINY.model_copy(update={"num_steps": 40, **planned, "slices": "auto", "both_ways": goes_both_ways})
    assert workload_of(str(folder)) == as_it_was


@pytest.mark.parametrize("steps", [0, 1, 25, 40])
@pytest.mark.parametrize("later", [0.0, 30.0, 1000.0])
def test_a_training_that_no_command_holds_may_run(later: float, steps: int, tmp_path: Path) -> None:
    """As `dejavu launch` starts them: what was just heard of is not said to have ended."""
    folder = prepared(tmp_path, steps)
    now = (folder / "progress.jsonl").stat().st_mtime + later
    said = "\n".join(status_lines(status_of(tmp_path), now))
    may_run = steps > 0 and later < QUIET_SECONDS
    assert ("it runs if `dejavu launch` started it, else `dejavu run --resume " in said) == may_run
    assert ("no training runs in this folder" in said) == ("ended before its last step" in said) == (not may_run)
    (folder / "result.json").write_text("{}")
    assert status_lines(status_of(tmp_path), now)[0] == "no training runs in this folder"


@pytest.mark.parametrize("ends", [None, KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.parametrize("steps", [1, 25])
def test_a_training_whose_command_has_ended_is_not_said_to_run(
    steps: int, ends: type[BaseException] | None, tmp_path: Path
) -> None:
    """Cancelled seconds ago it was said to run if `dejavu launch` started it; which may go on with it later."""
    folder = prepared(tmp_path, steps)
    with suppress(KeyboardInterrupt, SystemExit, RuntimeError), alone_in(tmp_path, "gpt on desk"):
        record_training(tmp_path, folder)
        if ends is not None:
            raise ends
    said = status_lines(status_of(tmp_path))
    assert said[0] == "no training runs in this folder"
    assert "ended before its last step" in said[1] and "dejavu run --resume " in said[1]
    with alone_in(tmp_path, "dejavu backup", is_upkeep=True):
        pass
    assert status_lines(status_of(tmp_path)) == said
    later = (folder / "stopped").stat().st_mtime + 1
    os.utime(folder / "progress.jsonl", (later, later))  # by ranks of `dejavu launch`
    assert "it runs if `dejavu launch` started it" in status_lines(status_of(tmp_path))[1]


@pytest.mark.parametrize("exit_code", [1, -9])
@pytest.mark.parametrize("attempts", [0, 2])
@pytest.mark.parametrize("error", ["DivergedError: the loss of step 3 is nan", "CheckpointError: no space left"])
def test_a_training_that_failed_by_itself_says_at_what(
    error: str, attempts: int, exit_code: int, tmp_path: Path
) -> None:
    """Resumed, one that diverged would end at the same; the advice stood beside an error that says so."""
    folder = prepared(tmp_path, 5)
    beat = folder / "heartbeats" / "0.beat"
    beat.parent.mkdir()
    beat.write_text(f"{attempts} 4 1")
    said = folder / f"error-{attempts}-1.txt"
    said.write_text("rank 1 has lost rank 0" if exit_code < 0 else f"rank 1: {error}")
    if exit_code > 0 and "Diverged" in error:
        said.with_suffix(DIVERGED).touch()
    write_failure(folder, Failure(attempts, 0 if exit_code < 0 else 1, (0,), "alpha", exit_code))
    (folder / "stopped").touch()
    failed = status_lines(status_of(tmp_path))[1]
    assert (f": rank 1: {error}" in failed) == (exit_code == 1) == (" failed at " in failed)
    assert ("`dejavu run --resume " in failed) == (exit_code < 0 or "Diverged" not in error)
    beat.write_text(f"{attempts + 1} 5 2")  # it went on, and was then interrupted
    later = status_lines(status_of(tmp_path))[1]
    assert "ended before its last step" in later and later.endswith(f"`dejavu run --resume {folder}` continues it")


@pytest.mark.parametrize("kind", ["text", "images", "image_folder", "parquet", "tokenizer"])
def test_a_training_whose_data_are_gone_names_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job.json was said to be none that a training of this version wrote."""
    folder, there = prepared(tmp_path, 3), tmp_path / "there"
    gone = str(tmp_path / "gone")
    there.write_text("a text")
    fields: dict[str, dict[str, object]] = {
        "images": {"data": "cifar10", "images": gone},
        "image_folder": {"data": "images", "image_folder": {"path": gone, "shape": [1, 2, 2]}},
        "parquet": {"data": "parquet", "parquet": {"path": gone, "tokens": "t", "vocabulary": 9}},
        "tokenizer": {"text": str(there), "tokenizer": {"path": gone}},
    }
    job = json.loads((folder / "job.json").read_text())
    job["workload"] |= fields.get(kind, {kind: gone})
    (folder / "job.json").write_text(json.dumps(job))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as found:
        local_training("last")
    assert f"{folder} is trained on is not there: {kind}" in str(found.value), found.value
    assert f" {gone}" in str(found.value) and str(found.value).endswith("; wanted where it was when the training began")


@pytest.mark.parametrize("has_another", [True, False])
def test_a_training_whose_files_are_damaged_is_passed_over_and_told(
    has_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--resume last` goes on with none before it, as if that were the last."""
    whole = prepared(tmp_path, 3) if has_another else None
    broken = prepared(tmp_path, 3, "broken")
    (broken / "job.json").write_text('{"workload": ')
    os.utime(broken / "job.json", (time.time() + 10, time.time() + 10))
    found = status_of(tmp_path)
    assert (found.training and found.training.folder) == whole
    assert (
        f"{'a later one' if has_another else 'the last'}: {broken}/job.json cannot be read" in status_lines(found)[-1]
    )
    assert f"{broken}/job.json cannot be read" in status_to_dict(found)["unread"]
    with alone_in(tmp_path, "gpt on desk"):
        record_training(tmp_path, broken)
        assert status_lines(status_of(tmp_path))[0].endswith(") trains")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"--resume last: .*broken/job.json cannot be read"):
        local_training("last")


@pytest.mark.parametrize("name", ["job.json", "progress.jsonl", "result.json", "warnings.txt"])
def test_a_folder_in_the_place_of_a_training_s_file_is_said(name: str, tmp_path: Path) -> None:
    """Without its job there is no training; each other is said before one begins, and `dejavu status` reads on."""
    folder = prepared(tmp_path, 3)
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    (tmp_path / ".dejavu" / "runs" / "elsewhere").mkdir()
    (tmp_path / ".dejavu" / "runs" / "elsewhere" / "job.json").symlink_to("nowhere")
    found = status_of(tmp_path).training
    assert (found is None) == (name == "job.json")
    assert found is None or (found.done, found.ended) == (0 if name == "progress.jsonl" else 3, False)
    workload = TINY.model_copy(update={"num_steps": 40})
    says = "job.json is not there" if found is None else f"{name} is a folder; wanted a file"
    for begin in (prepared_job, job_to_resume, partial(earlier_training, workload=workload)):
        with pytest.raises(InputError, match=says):
            begin(folder)


def test_a_holder_that_has_gone_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / ".dejavu"
    folder.mkdir()
    gone = replace(Holder.here("gpt on desk"), start_seconds=1.0)
    (folder / "training.json").write_text(json.dumps(vars(gone)))
    assert status_of(tmp_path).holder is None


def test_the_command_prints_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepared(tmp_path, 25)
    said = CliRunner().invoke(app, ["status"])
    assert said.exit_code == 0 and "step 25 of 40, loss 4.7600" in said.output
    found = json.loads(CliRunner().invoke(app, ["status", "--json"]).output)
    assert found["training"]["step"] == 25 and found["training"]["ranks_by_host"] == {"alpha": 1, "beta": 1}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1.5])
def test_what_programs_read_is_json_where_a_training_has_diverged(
    loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has neither NaN nor infinities, and other languages' readers take none."""
    monkeypatch.chdir(tmp_path)
    tell_step(prepared(tmp_path, 3) / "progress.jsonl", step=3, loss=loss, seconds=0.5)
    text = CliRunner().invoke(app, ["status", "--json"]).output
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["training"]["step"] == 4
    assert found["training"]["loss"] == (loss if math.isfinite(loss) else None)


@pytest.mark.integration
@pytest.mark.slow  # a whole run; tests/test_flow.py has two others
def test_a_run_tells_programs_everything_and_people_who_want_quiet_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if (measured := measured_by_a_project(tmp_path_factory)).is_dir():  # what it would measure for a while
        shutil.copytree(measured, tmp_path / "profiles_db")
    (tmp_path / "cluster.yaml").write_text("nodes: auto\n")
    (tmp_path / "prefect.yaml").write_bytes((ROOT / "prefect.yaml").read_bytes())
    workload = {**WORKLOAD, "num_steps": 12, "compare": False, "trials": {"count": 2, "steps": 3}}
    (tmp_path / "w.yaml").write_text(json.dumps(workload))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW", "PYTEST"))}
    words = ["run", "--workload", "w.yaml", "--microbatches", "4", "--budget-seconds", "1", "--quiet", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "flows", *words],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    order = list(dict.fromkeys(row["event"] for row in rows))
    assert order in (
        ["searching", "trying", "training", "end"],
        ["measuring", "searching", "trying", "training", "end"],
    )
    steps = [row for row in rows if row["event"] == "training"]
    assert steps[-1]["step"] == steps[-1]["of"] == 12 and rows[-1]["loss"] == pytest.approx(steps[-1]["loss"])
    best = [row["best_step_seconds"] for row in rows if row["event"] == "searching" and row["best_step_seconds"]]
    assert best and rows[-1]["predicted_step_seconds"] > 0
    assert rows[-1]["simulated_gap_percent"] >= 0 and "gap_percent" not in rows[-1], "that is the cost model's"
    assert "INFO" not in done.stderr and "starting Prefect" not in done.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["plan", "--budget-seconds", "-1"], "greater than or equal to 0; found '-1'"),
        (["runs", "--most", "x"], "found 'x'"),
        (["import", "nccl-tests", "all_reduce.txt", "--num-ranks", "two"], "found 'two'"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_told(words: list[str], found: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and f"Invalid value for '{words[-2]}': " in done.stderr and found in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "iso8859-15", "cp1252", "koi8-r", "utf-8", "UTF8"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "replace"])
def test_an_answer_is_printed_in_any_locale(encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """POSIX's locale has `surrogateescape`, others are strict; a file's name need not be text in any of them."""
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", out)
    print_in_any_locale()
    said = "✔ layers 0–3 → T4 × 2, 5 µs ┏━┓ ≥ 1"
    print(said)
    print(os.fsdecode(b"w\xf6rk.yaml"))
    out.flush()
    lines = written.getvalue().decode(encoding, "replace").splitlines()
    assert len(lines) == 2 and len(lines[0]) == len(said) and lines[0].isprintable()
    if encoding.lower().startswith("utf"):
        assert lines[0] == said
