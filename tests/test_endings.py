"""How commands end: in one sentence that names what is at fault, with nothing started and no traceback."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prefect.states import State

from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.profiling import measuring
from dejavu.profiling.links import measure_link
from dejavu.runtime.process.failures import LaunchError, what_failed
from dejavu.workload import OptimizerSettings
from flows.endings import FAILURE, INPUT_ERROR, INTERRUPTED, Sentences, ending, trains_in, without_tracebacks
from flows.inputs import read_inputs
from flows.room import check_room, check_room_for_checkpoints
from tests.conftest import TINY
from tests.launching import job_of
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[1]
Remount = Callable[[str], object]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Remount]]:
    """A file system of 3 MiB with a project's files on it, and a function that mounts it anew with other options."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.decode().strip()}")
    (disk / "cluster.yaml").write_bytes((ROOT / "cluster.yaml").read_bytes())
    (disk / "prefect.yaml").write_bytes((ROOT / "prefect.yaml").read_bytes())
    yield disk, lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_folder_without_room_is_refused_before_anything_starts(small_disk: tuple[Path, Remount]) -> None:
    disk, remount = small_disk
    with pytest.raises(InputError, match=r"\.dejavu is on a disk with .* MiB free; wanted 100 MiB or more"):
        check_room(disk)
    remount("ro")
    for command in ("run", "up"):
        done = subprocess.run(
            [sys.executable, "-m", "flows", command],
            cwd=disk,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == INPUT_ERROR
        said = f"{disk}/.dejavu cannot be written: Read-only file system; wanted a project folder that can\n"
        assert done.stderr == said and not done.stdout
    remount("rw,size=300m")
    check_room(disk)


@pytest.mark.parametrize("name", ["plain", "my project", "it's", "a%20b#c", "🚀", "what?", "a?mode=ro/project"])
def test_a_folder_in_which_no_database_can_be_is_said(name: str, tmp_path: Path) -> None:
    """SQLite's addresses end at a question mark: databases were made beside the folder."""
    project = tmp_path / name
    project.mkdir(parents=True)
    if "?" in name:
        with pytest.raises(InputError, match="end at a question mark; wanted a folder without one"):
            check_room(project)
        assert not list(project.iterdir())
    else:
        check_room(project)


def test_a_disk_without_room_for_the_checkpoints_is_refused(small_disk: tuple[Path, Remount]) -> None:
    """Three are there at once, two that are kept and the new one; of AdamW each has the weights and two moments."""
    disk, _ = small_disk
    graph, ballast = capture(TINY), disk / "ballast"
    plain = TINY.model_copy(update={"optimizer": OptimizerSettings(name="sgd")})
    free_bytes, page_bytes = shutil.disk_usage(disk).free, 2**14
    for workload, weights in ((TINY, 9), (plain, 3), (plain.model_copy(update={"num_steps": 6}), 2)):
        needed = weights * graph.parameter_bytes
        ballast.write_bytes(bytes(free_bytes - needed + page_bytes))
        with pytest.raises(InputError, match=r"disk is on a disk with .* free; wanted .* for [23] checkpoints of"):
            check_room_for_checkpoints(workload, graph, disk)
        ballast.write_bytes(bytes(free_bytes - needed - page_bytes))
        check_room_for_checkpoints(workload, graph, disk)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_fails_on_the_way_is_a_sentence(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "mlflow.db"))

    with pytest.raises(SystemExit) as ended:
        ending(command, tmp_path)
    assert ended.value.code == FAILURE
    assert capsys.readouterr().err == f"{tmp_path}/mlflow.db: {os.strerror(number)}; what was written before is kept\n"


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    def command() -> None:
        raise OSError(errno.ECONNREFUSED, "refused")

    with pytest.raises(ConnectionRefusedError):
        ending(command, tmp_path)


MODELS = """
from torch import nn
def between(): return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 32)), nn.Linear(16, 10))
def first(): return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
def last(): return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 32)), nn.Linear(32, 5))
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("between", r"mine\.yaml:1:8: layer '1' cannot be traced on \(16, 32\): .*\[16, 32\] X \[16, 10\]"),
        ("first", r"mine\.yaml:1:8: layer '0' cannot be traced on \(16, 1, 8, 8\): .*\[64, 32\]"),
        ("last", r"mine\.yaml:1:8: the last layer, '1', gives \(16, 5\): scores of 5 classes, and data digits has 10"),
    ],
)
def test_shapes_that_do_not_match_are_a_sentence_and_nothing_else(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shapes_of_mine.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: shapes_of_mine:{name}\ndata: digits\nbatch_size: 64\nnum_microbatches: 4\n")
    with pytest.raises(InputError, match=said):
        read_inputs(ROOT / "cluster.yaml", file, train=False)
    assert capfd.readouterr() == ("", "")


def record(error: BaseException | None, message: str = "Encountered exception during execution") -> logging.LogRecord:
    return logging.LogRecord("prefect", 40, "", 0, message, (), (type(error), error, None) if error else None)


def test_an_error_is_logged_once_and_in_a_sentence() -> None:
    sentences, error = Sentences(), InputError("digits has 10 classes")
    first = record(error)
    assert sentences.filter(first) and first.getMessage() == "failed: digits has 10 classes" and not first.exc_info
    assert not sentences.filter(record(error)), "a flow around the task that failed says it again"
    assert not sentences.filter(record(None, "Finished in state Failed('digits has 10 classes')"))
    assert not sentences.filter(record(None, "Finished in state Completed()")), "the next line says as much"
    defect = record(ValueError("not ours"))
    assert sentences.filter(defect) and defect.exc_info, "a defect keeps its traceback"


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("Traceback (most recent call last):\n  File ...\nIndexError: Target 5 is out of bounds.\n", "IndexError: Tar"),
        ("a warning\nRuntimeError: no\ntorch.x.ChildFailedError: rank 1\n=====\n", "RuntimeError: no"),
        ("[rank1]: ValueError: mine\n[rank0]: RuntimeError: peer closed\n[rank1]: KeyError: 1\n", "[rank1]: KeyError"),
        ("[rank0]: [rank0]: KeyError: 2\n[rank1]: [rank1]: OSError: gone\n=====\n", "[rank0]: [rank0]: KeyError: 2"),
        ("Killed\n", "Killed"),
        ("", "no output"),
    ],
)
def test_what_a_failed_process_said_is_kept_and_its_error_named(said: str, sentence: str) -> None:
    found = what_failed("measuring", said)
    assert found.startswith(f"measuring failed: {sentence}") and "\n" not in found
    kept = Path(found.rpartition("full output: ")[2].removesuffix(")"))
    assert kept.read_text() == said
    kept.unlink()


def test_ranks_that_measure_for_too_long_are_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(LaunchError, match=r"^measuring transfers between two ranks did not end within 0\.2 s; .*less"):
        list(measure_link("core"))


def test_a_flow_looks_at_the_training_to_resume_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow itself, as a deployment runs it; without a server, which only a run of it needs."""
    from flows.full import dejavu

    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no training to resume"):
        dejavu.fn(TINY, resume="absent")
    replace(job_of(TINY, tmp_path / "run"), first_step=TINY.num_steps).write()
    ended = dejavu.fn(TINY, resume="run")
    assert isinstance(ended, State) and ended.is_completed()
    assert "run is complete: 8 steps are trained" in ended.message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "client", ["prefect.events.clients", "prefect._internal.concurrency", "websockets.client", "distributed.scheduler"]
)
def test_a_connection_that_is_lost_and_opened_again_is_no_traceback(
    client: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back after the test, as the level is
    logger = logging.getLogger(client)
    level = logger.level
    try:
        without_tracebacks()
        try:
            raise ConnectionResetError(errno.ECONNRESET, "the server was killed")
        except ConnectionResetError:
            logger.exception("keepalive ping failed")
    finally:
        logger.setLevel(level)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("own", ["", "a", "it's ü"])
@pytest.mark.parametrize("others", [(), ("b",), ("b", "c")])
def test_an_interrupt_names_the_training_that_it_ended_and_no_other_s(
    own: str,
    others: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Others prepare trainings in the same folder while this one waits for it, or only plans."""
    monkeypatch.setattr("flows.endings._trainings", [])
    monkeypatch.setattr(sys, "argv", ["flows", "run", "--wait", "--resume", "before", "--workload", "mine.yaml"])
    runs = tmp_path / ".dejavu" / "runs"

    def command() -> None:
        if own:
            job_of(TINY, runs / own).write()
            trains_in(runs / own)
        for name in others:
            job_of(TINY, runs / name).write()
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        ending(command, tmp_path)
    assert ended.value.code == INTERRUPTED
    *_, last = capsys.readouterr().err.splitlines()
    if not own:
        assert last == "the same command goes on from there"
    else:
        words = shlex.split(last.removeprefix("to resume the training: "))
        assert words == ["dejavu", "run", "--wait", "--workload", "mine.yaml", "--resume", f".dejavu/runs/{own}"]


PLACES_IN_THE_ENGINE = (  # of Prefect's, where an interrupt may come
    "task_engine._create_task_run_locally",
    "task_engine.emit_task_run_state_change_event",
    "task_engine.SyncTaskRunEngine.begin_run",
    "task_engine.call_with_parameters",
    "task_engine.SyncTaskRunEngine.handle_success",
    "flow_engine.call_with_parameters",
    "flow_engine.FlowRunEngine.handle_success",
)
INTERRUPTED_IN_TURN = """
import os, signal, sys
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch
from flows import endings
from flows.temporary_server import use_temporary_server

with use_temporary_server(Path.cwd()) as server:
    server.wait()
    from prefect import flow, task

    @task
    def inner():
        return 1

    @flow
    def outer():
        with endings.interrupts_as_such():
            return inner()

    @flow
    def whole():
        with endings.interrupts_as_such():
            return outer()

    endings.without_tracebacks()
    for place in sys.argv[1:]:
        endings._interrupts = endings._Interrupts()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        endings.end_at_once_when_interrupted_again()
        owner, _, name = ("prefect." + place).rpartition(".")
        owner = resolve_name(owner)
        real = getattr(owner, name)

        def interrupted(*arguments, **named):
            with patch.object(owner, name, real):
                if not endings._interrupts.came:
                    os.kill(os.getpid(), signal.SIGINT)
                return real(*arguments, **named)

        with patch.object(owner, name, interrupted), suppress(SystemExit):
            print(place, file=sys.stderr, flush=True)
            endings.ending(whole, Path.cwd())
            print("not interrupted", file=sys.stderr)
    from prefect.client.orchestration import get_client
    states = {run.state_name for run in get_client(sync_client=True).read_flow_runs()}
    print(*states)
"""


@pytest.mark.integration
def test_an_interrupt_anywhere_in_prefect_s_engine_ends_the_command(tmp_path: Path) -> None:
    """The engine fails in its own words at some of these places; neither they nor a traceback are shown."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_TURN)
    done = subprocess.run(
        [sys.executable, "interrupted.py", *PLACES_IN_THE_ENGINE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Crashed"]
    said = [line for line in done.stderr.splitlines() if "INFO" not in line]
    ends = ["interrupted; what was measured, tried and saved is kept", "the same command goes on from there"]
    assert [line for line in said if "| ERROR" not in line] == [
        line for place in PLACES_IN_THE_ENGINE for line in (place, *ends)
    ]
    assert {line.rpartition(" - ")[2] for line in said if "| ERROR" in line} <= {"interrupted"}


AFTER_THE_CALLBACK = {
    "the callback's caller goes on": "time.sleep(60)",
    "and fails in its own words": 'raise RuntimeError("no compiled object yet")',
    "and fails after a while": 'time.sleep(0.05); raise RuntimeError("no compiled object yet")',
}


@pytest.mark.parametrize("after", AFTER_THE_CALLBACK)
def test_an_interrupt_inside_a_library_s_callback_ends_the_command(after: str, tmp_path: Path) -> None:
    """Python drops what a callback raises: the command ends as on any interrupt, at once and without a traceback."""
    (tmp_path / "interrupted.py").write_text(
        f"""
import ctypes, os, signal, time
from pathlib import Path
from flows.endings import end_at_once_when_interrupted_again, ending

def command():
    @ctypes.CFUNCTYPE(None)
    def callback():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    callback()
    {AFTER_THE_CALLBACK[after]}

end_at_once_when_interrupted_again()
ending(command, Path.cwd())
"""
    )
    done = subprocess.run(
        [sys.executable, "interrupted.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == INTERRUPTED
    assert done.stderr == (
        "interrupted; what was measured, tried and saved is kept\nthe same command goes on from there\n"
    )
