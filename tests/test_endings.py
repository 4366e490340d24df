"""How commands end: in one sentence that names what is at fault, with nothing started and no traceback."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import httpx
import pytest
from prefect import Flow
from prefect.exceptions import (
    ObjectNotFound,
    ParameterTypeError,
    PrefectHTTPStatusError,
    SignatureMismatchError,
    TerminationSignal,
)
from prefect.states import State
from typer.testing import CliRunner

from dejavu.cluster import this_machine
from dejavu.foundation.errors import InputError
from dejavu.foundation.processes.files import write_json
from dejavu.graphs.capture import capture
from dejavu.parallelism import Parallelism
from dejavu.planning import write_answer
from dejavu.profiling import measuring
from dejavu.profiling.links import measure_link
from dejavu.runtime.job.resume import tell_of_page
from dejavu.runtime.process.failures import LaunchError, what_failed
from dejavu.runtime.state import MARKER
from dejavu.workload import OptimizerSettings, Workload
from flows import endings, full, plan, services, session
from flows.__main__ import app
from flows.endings import FAILURE, INPUT_ERROR, INTERRUPTED, Sentences, ending, trains_in, without_tracebacks
from flows.inputs import read_inputs
from flows.processes import RUN
from flows.room import FOLDERS, check_room, check_room_for_checkpoints
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


def test_a_full_disk_leaves_the_plan_that_was_written_before(small_disk: tuple[Path, Remount]) -> None:
    """The file was cut off, or a new one empty."""
    disk, _ = small_disk
    (disk / "plan.json").write_text('{"old": 1}')
    (disk / "plan.json").chmod(0o640)
    (disk / "link.json").symlink_to("plan.json")
    with suppress(OSError), (disk / "full").open("wb") as file:
        file.write(bytes(2**22))
    for name in ("plan.json", "link.json", "new.json"):
        with pytest.raises(InputError, match=rf"--json .*{name}: No space left on device"):
            write_answer({"plan": "x" * 2**16}, disk / name)
    assert (disk / "plan.json").read_text() == '{"old": 1}'
    assert sorted(path.name for path in disk.glob("*.json*")) == ["link.json", "plan.json"]
    assert not list(disk.glob(".*json*"))
    (disk / "full").unlink()
    write_answer({"plan": 2}, disk / "link.json")
    assert (disk / "link.json").is_symlink() and json.loads((disk / "plan.json").read_text()) == {"plan": 2}
    assert (disk / "plan.json").stat().st_mode & 0o777 == 0o640
    write_answer({"plan": 3}, Path(os.devnull))


def test_what_is_recorded_is_read_on_a_disk_that_cannot_be_written(
    small_disk: tuple[Path, Remount], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command that only reads: MLflow's database was locked first, for which a file is made beside it."""
    disk, remount = small_disk
    remount("rw,size=300m")
    record = """from pathlib import Path
from dejavu.track import Tracker
with Tracker.open(Path(), "mine") as run:
    run.artifact_text("report/report.html", "a page")
"""  # by a process that ends: a disk with a database that is open stays as it is
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment |= {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", record], cwd=disk, env=environment, check=True)
    (disk / "mlflow.db.lock").unlink(missing_ok=True)
    remount("ro")
    monkeypatch.chdir(disk)
    for command, wanted in (
        ("runs", "finished"),
        ("runs --json", '"name": "mine"'),
        ("report last", "report/report.html"),
        ("compare last last", "parameters"),
    ):
        found = CliRunner().invoke(app, command.split())
        assert found.exit_code == 0 and wanted in found.output, (command, found.output, found.exception)


@pytest.mark.parametrize("limit_bytes", [0, 2**20, 2**24 - 1, 2**24, resource.RLIM_INFINITY])
def test_a_limit_on_files_that_is_too_small_is_said_before_anything_starts(
    limit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's server ended in a traceback of SQLite's at one."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit_bytes, resource.RLIM_INFINITY))
    if limit_bytes in (2**24, resource.RLIM_INFINITY):
        check_room(tmp_path)
    else:
        with pytest.raises(InputError, match=r"no file of this process may be larger than .*; wanted 16 MiB or more"):
            check_room(tmp_path)


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


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_in_the_place_of_a_kept_folder_is_said_before_anything_starts(
    name: str, is_link: bool, tmp_path: Path
) -> None:
    """A link to a folder is one, as of runs on a larger disk."""
    (tmp_path / "cluster.yaml").write_bytes((ROOT / "cluster.yaml").read_bytes())
    (tmp_path / "prefect.yaml").write_bytes((ROOT / "prefect.yaml").read_bytes())
    (tmp_path / ".dejavu").mkdir()
    place = tmp_path / ".dejavu" / name
    place.symlink_to(tmp_path / "elsewhere") if is_link else place.touch()
    for begin in (check_room, partial(services.up, say=pytest.fail)):
        with pytest.raises(InputError, match=rf"{name} is a .*; wanted a folder"):
            begin(tmp_path)
    (tmp_path / "elsewhere").mkdir() if is_link else place.unlink()
    check_room(tmp_path)


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


@pytest.mark.parametrize("number", sorted(endings.DISK))
def test_a_disk_that_fails_on_the_way_is_a_sentence(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "mlflow.db"))

    with pytest.raises(SystemExit) as ended:
        ending(command, tmp_path)
    assert ended.value.code == FAILURE
    assert capsys.readouterr().err == f"{tmp_path}/mlflow.db: {os.strerror(number)}; what was written before is kept\n"


@pytest.mark.parametrize("number", sorted(endings.DISK))
def test_a_disk_that_fails_in_a_flow_is_logged_in_the_same_sentence(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, as what `dejavu` itself raises: Prefect's log had a traceback of it, above the sentence."""
    monkeypatch.chdir(tmp_path)
    for error in (OSError(number, os.strerror(number), "mlflow.db"), OSError(number, os.strerror(number))):

        def command(error: OSError = error) -> None:
            raise error

        sentences, first = Sentences(), record(error)
        assert sentences.filter(first) and not first.exc_info and not sentences.filter(record(error))
        with pytest.raises(SystemExit):
            ending(command, tmp_path)
        assert f"failed: {capsys.readouterr().err.strip()}" == first.getMessage()


def test_a_log_that_does_not_fit_on_the_disk_fails_no_run(small_disk: tuple[Path, Remount]) -> None:
    """What is in its buffer is written when it is closed, which hid what became of the run."""
    disk, _ = small_disk
    kept: list[str] = []
    run = SimpleNamespace(artifact_file=lambda path, name: kept.append(name))
    with pytest.raises(InputError, match="no room"), endings.recorded_log(run, disk / "logs" / "flow.log"):  # type: ignore[arg-type]
        (handler,) = [one for one in logging.getLogger(endings.RUN_LOGGERS[0]).handlers if "flow.log" in str(one)]
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        handler.stream.write("what was logged last")  # type: ignore[attr-defined]
        raise InputError("there is no room")
    assert kept == ["logs/flow.log"]


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


@pytest.mark.parametrize("is_served", [True, False])
def test_each_flow_s_page_says_why_it_failed(is_served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a task, the flow around it, and the flow that called that; a terminal has all of them."""
    monkeypatch.setenv(RUN, "a-run") if is_served else monkeypatch.delenv(RUN, raising=False)
    sentences, records = Sentences(), [record(InputError("there is no such model"))] * 3
    for k, flow_run in enumerate(("inner", "inner", "outer")):
        records[k] = copy(records[k])
        records[k].flow_run_id = flow_run
    assert [sentences.filter(one) for one in records] == [True, False, is_served]


@pytest.mark.integration
@pytest.mark.parametrize(
    "retries",
    [pytest.param("", marks=pytest.mark.slow), "retries=1, retry_condition_fn=lambda *_: False"],
    ids=["none", "refused"],
)
def test_what_a_task_fails_of_is_said_once(retries: str, tmp_path: Path) -> None:
    """Of one that may be tried again, and is not, Prefect's end state said it before, with its line ends as `\\n`."""
    code = f"""
from prefect import flow, task
from dejavu.cluster import this_machine
from dejavu.foundation.errors import InputError
from flows.endings import without_tracebacks
without_tracebacks()
@task({retries})
def trains(): raise InputError("no room\\nattempt 1")
@flow
def whole(): trains()
try: whole()
except InputError: pass
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert said.count("no room") == 1 and "failed: no room" in said, said


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


def test_a_flow_says_what_its_question_contradicts_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.full import dejavu

    def profile(*_: object) -> None:
        raise AssertionError("it measures")

    here = SimpleNamespace(cluster=this_machine(), database=tmp_path / "profiles_db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.session.session", lambda *_, **__: nullcontext(here))
    monkeypatch.setattr("flows.profiling.profile", profile)
    with pytest.raises(InputError, match=f"batch_size {TINY.batch_size} does not divide into 3 equal microbatches"):
        dejavu.fn(TINY, microbatches=[3])
    with pytest.raises(AssertionError, match="it measures"):
        dejavu.fn(TINY, microbatches=[2])


def test_a_deployment_resumes_a_training_of_its_own_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its form has the default workload where nothing is typed; as `dejavu run --resume` without `--workload`."""
    from flows import full

    monkeypatch.chdir(tmp_path)
    replace(job_of(TINY, tmp_path / ".dejavu/runs/mine"), first_step=TINY.num_steps).write()
    for named in ("last", ".dejavu/runs/mine"):
        for typed in (Workload(), TINY, Workload(seed=1)):
            for runs_deployed in (True, False):
                monkeypatch.setattr(full, "deployment", SimpleNamespace(id="d" if runs_deployed else None))
                monkeypatch.setattr(
                    full,
                    "flow_run",
                    SimpleNamespace(parameters={"workload": typed, "resume": named, "cluster": "c.yaml"}),
                )
                takes_its_own = runs_deployed and typed == Workload()
                assert full._run_name() == f"{Path(named).name if takes_its_own else 'gpt'} on c.yaml"
                if takes_its_own or typed == TINY:
                    assert "mine is complete: 8 steps are trained" in full.dejavu.fn(typed, resume=named).message
                else:
                    with pytest.raises(InputError, match="was trained with"):
                        full.dejavu.fn(typed, resume=named)


@pytest.mark.parametrize("trained", [0, 5, TINY.num_steps])
@pytest.mark.parametrize("batch_size", [TINY.batch_size, 2 * TINY.batch_size])
def test_a_run_that_is_started_again_goes_on_with_its_own_training(
    trained: int, batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Prefect's page, perhaps after its workload's file was edited; a result keeps the times that it has."""
    from flows import full
    from flows.train import train

    def begin(*_: object, **__: object) -> None:
        raise InterruptedError("nothing is in the way")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.session.session", begin)
    monkeypatch.setattr(full, "flow_run", SimpleNamespace(id="mine"))
    workload = TINY.model_copy(update={"batch_size": batch_size})
    with pytest.raises(InterruptedError):  # a new run
        full.dejavu.fn(workload)
    job = replace(job_of(TINY, tmp_path / ".dejavu/runs/mine"), first_step=trained)
    job.write()
    with pytest.raises(InterruptedError):  # as `full` calls it, which may have nothing left to train after its trials
        train.fn(".dejavu/runs/mine")
    job.result_path.write_text("{}")
    is_complete = trained == TINY.num_steps
    tell_of_page(job.folder, is_due=True)
    with pytest.raises(InterruptedError) if batch_size == TINY.batch_size else pytest.raises(InputError):
        full.dejavu.fn(workload)  # its page is made, if nothing else is left
    tell_of_page(job.folder, is_due=False)
    with pytest.raises(InputError if is_complete else InterruptedError, match=r"complete|nothing"):
        train.fn(".dejavu/runs/mine")
    with pytest.raises(InputError, match="absent has no training"):
        full.dejavu.fn(workload, resume="absent")
    with pytest.raises(InterruptedError):
        full.dejavu.fn(workload, train=False)
    if batch_size != TINY.batch_size:
        with pytest.raises(
            InputError, match=f"mine was trained with batch_size 8; wanted the same, found batch_size {batch_size}"
        ):
            full.dejavu.fn(workload)
    elif is_complete:
        ended = full.dejavu.fn(workload)
        assert isinstance(ended, State) and "mine is complete: 8 steps are trained" in str(ended.message)
    else:
        with pytest.raises(InterruptedError):
            full.dejavu.fn(workload)


DEPLOYED = """
import logging, sys
import flows.full, flows.deployed, flows.replan
from flows.endings import Sentences
for name in ("prefect.flow_runs", "prefect.engine"):
    found = [one for one in logging.getLogger(name).filters if isinstance(one, Sentences)]
    assert bool(found) == bool(sys.argv[1:]), (name, found)
"""


@pytest.mark.parametrize("deployed", [True, False])
def test_what_fails_before_a_session_is_a_sentence_in_a_deployment_s_log(deployed: bool, tmp_path: Path) -> None:
    """A parameter, a cluster file that a look reads: each was a traceback in the log of its run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path)}
    words = [sys.executable, "-c", DEPLOYED, *(["deployed"] if deployed else [])]
    if deployed:
        environment[RUN] = "00000000-0000-0000-0000-000000000000"
    done = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr


GOES_ON = """
import logging, os, sys
from prefect.logging.handlers import PrefectConsoleHandler
import flows.train
log = logging.getLogger("mine")
log.addHandler(PrefectConsoleHandler(stream=sys.stdout))
for line in range(100):
    log.warning("step %d: %s", line, "x" * 1000)
    if line == 3:
        sys.stdin.readline()
os.write(int(sys.argv[1]), b"done")
os._exit(0)
"""


def test_a_deployment_s_run_goes_on_without_its_worker(tmp_path: Path) -> None:
    """What reads its output was killed: the next line of its log ended it, and the training with it."""
    told, tells = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path), RUN: "0"}
    words = [sys.executable, "-c", GOES_ON, str(tells)]
    pipe = subprocess.PIPE
    run = subprocess.Popen(
        words, env=environment, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, pass_fds=[tells]
    )
    try:
        os.close(tells)
        assert run.stdin is not None and run.stdout is not None
        while b"step 3" not in (line := run.stdout.readline()):
            assert line, "it ended before it was told to go on"
        run.stdout.close()
        run.stdin.write(b"\n")
        run.stdin.close()
        assert run.wait(PATIENCE_SECONDS) == 0 and os.read(told, 10) == b"done"
    finally:
        run.kill()
        run.wait()
        os.close(told)


@pytest.mark.parametrize("error", [ParameterTypeError("batch_size 7"), SignatureMismatchError("unknown 'train'")])
def test_parameters_that_a_flow_does_not_take_are_a_sentence(error: Exception) -> None:
    told = record(error, "Engine execution exited with unexpected exception")
    assert Sentences().filter(told) and told.getMessage() == f"failed: {error}" and not told.exc_info


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


@pytest.mark.parametrize("page_is_due", [True, False])
@pytest.mark.parametrize("step", [TINY.num_steps - 1, TINY.num_steps])
def test_an_interrupt_of_what_is_recorded_of_a_complete_training_says_what_is_left_to_do(
    step: int, page_is_due: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flows.endings._trainings", [])
    folder = tmp_path / ".dejavu" / "runs" / "own"

    def command() -> None:
        job = job_of(TINY, folder)
        job.write()
        write_json(job.checkpoints / f"step-{step:08}" / MARKER, {"step": step})
        tell_of_page(job.folder, is_due=page_is_due)
        trains_in(folder)
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        ending(command, tmp_path)
    *_, last = capsys.readouterr().err.splitlines()
    complete = "the training is complete: .dejavu/runs/own; to write its weights to a file: dejavu export own"
    if step < TINY.num_steps:
        assert last.startswith("to resume the training: ")
    elif page_is_due:
        assert last.startswith("the training is complete; to make its page and summary: dejavu ")
        assert last.endswith(" --resume .dejavu/runs/own")
    else:
        assert last == complete


def test_a_run_whose_project_is_deleted_ends_as_it_ended(tmp_path: Path) -> None:
    """That its log is gone, too, took the place of why."""
    path, kept = tmp_path / "logs" / "flow.log", list[str]()
    run = SimpleNamespace(artifact_file=lambda path, name: kept.append(path.read_text() and name))
    with pytest.raises(InputError, match="was deleted"), endings.recorded_log(run, path):
        shutil.rmtree(path.parent)
        raise InputError("the project was deleted")
    with endings.recorded_log(run, path):
        logging.getLogger(endings.RUN_LOGGERS[0]).error("a line")
    assert kept == ["logs/flow.log"]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_training_whose_folder_is_moved_is_not_begun_anew(is_gone: bool, tmp_path: Path) -> None:
    """It has no checkpoints in a new folder; what else fails is tried again from its last one."""
    from tasks import training

    job = job_of(TINY, tmp_path / "run")
    job.write()
    if is_gone:
        (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(training.GoneError if is_gone else FileNotFoundError) as raised, training._in_its_folder(job):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert ("run was moved or deleted while its training ran; " in str(raised.value)) == is_gone
    failed = SimpleNamespace(result=lambda raise_on_failure: raised.value)
    assert training._may_succeed_again(None, None, failed) == (not is_gone)


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
    number = signal.Signals[sys.argv[1]]
    for place in sys.argv[2:]:
        endings._interrupts = endings._Interrupts()
        endings._SENTENCES.__init__()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        endings.end_at_once_when_interrupted_again()
        owner, _, name = ("prefect." + place).rpartition(".")
        owner = resolve_name(owner)
        real = getattr(owner, name)

        def interrupted(*arguments, **named):
            with patch.object(owner, name, real):
                if not endings._interrupts.came:
                    os.kill(os.getpid(), number)
                return real(*arguments, **named)

        with patch.object(owner, name, interrupted):
            print(place, file=sys.stderr, flush=True)
            try:
                endings.ending(whole, Path.cwd())
            except SystemExit as ended:
                print(ended.code, file=sys.stderr, flush=True)
    from prefect.client.orchestration import get_client
    states = {run.state_name for run in get_client(sync_client=True).read_flow_runs()}
    print(*states)
"""


def test_an_interrupt_that_a_library_drops_ends_what_begins_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do that try to import something, and go on without it whatever happens."""
    monkeypatch.setattr(endings, "_interrupts", endings._Interrupts())
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, endings._interrupts.first)
        with endings.interrupts_as_such():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except:  # noqa: E722
                pass
        with pytest.raises(KeyboardInterrupt), endings.interrupts_as_such():
            pytest.fail("it was dropped")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("number", "how", "code"), [("SIGINT", "interrupted", 130), ("SIGTERM", "ended by SIGTERM", 143)]
)
def test_a_signal_anywhere_in_prefect_s_engine_ends_the_command(
    number: str, how: str, code: int, tmp_path: Path
) -> None:
    """The engine fails in its own words at some of these places; neither they nor a traceback are shown."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_TURN)
    done = subprocess.run(
        [sys.executable, "interrupted.py", number, *PLACES_IN_THE_ENGINE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Crashed"]
    said = [line for line in done.stderr.splitlines() if "INFO" not in line]
    ends = [f"{how}; what was measured, tried and saved is kept", "the same command goes on from there", str(code)]
    assert [line for line in said if "| ERROR" not in line] == [
        line for place in PLACES_IN_THE_ENGINE for line in (place, *ends)
    ]
    assert {line.rpartition(" - ")[2] for line in said if "| ERROR" in line} <= {how}


def test_a_termination_ends_a_command_in_a_sentence_and_its_forks_at_once(tmp_path: Path) -> None:
    (tmp_path / "terminated.py").write_text(
        """
import os, signal, time
from pathlib import Path
from flows.endings import end_at_once_when_interrupted_again, ending

def command():
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

end_at_once_when_interrupted_again()
ending(command, Path.cwd())
"""
    )
    done = subprocess.run(
        [sys.executable, "terminated.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 128 + signal.SIGTERM and done.stdout == f"{-signal.SIGTERM}\n"
    assert done.stderr == (
        "ended by SIGTERM; what was measured, tried and saved is kept\nthe same command goes on from there\n"
    )


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


class _Server:
    """Prefect's, of which a run's record is deleted after some looks; it is away in between."""

    def __init__(self, looks: int) -> None:
        self.looks_left = looks

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read_flow_run(self, run: str) -> None:
        self.looks_left -= 1
        if self.looks_left == 1:
            raise OSError("it does not answer")
        if self.looks_left < 1:
            raise ObjectNotFound(OSError(run))


@pytest.mark.parametrize("looks", [1, 3])
def test_a_run_that_is_deleted_ends_as_one_that_is_cancelled(
    looks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It trained on unseen, or failed at the next task in words of Prefect's database."""
    ended, server = Queue[int](), _Server(looks)
    monkeypatch.setattr(session, "flow_run", SimpleNamespace(id="a-run"))
    monkeypatch.setattr(session, "get_client", lambda sync_client: server)
    monkeypatch.setattr(session, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.put(number))
    with session.ended_when_deleted(logging.getLogger("run")):
        assert ended.get(timeout=PATIENCE_SECONDS) == signal.SIGTERM and server.looks_left <= 0
    assert caplog.messages == ["run a-run was deleted in Prefect: this ends, as where it is cancelled"]
    server.looks_left = looks
    with session.ended_when_deleted(logging.getLogger("run")):
        pass
    assert ended.empty(), "it was over before"


def _refused(status: int) -> PrefectHTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1/api/task_runs/")
    return PrefectHTTPStatusError("refused", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("error", [_refused(409), _refused(404), ObjectNotFound(OSError("a run")), _refused(500)])
def test_a_task_that_meets_a_deleted_run_before_the_next_look_ends_as_where_it_is_cancelled(
    error: Exception, is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended as a crash, in "Client error '409 Conflict'"; so did the run whose part was deleted."""
    ended = Queue[int]()
    monkeypatch.setattr(session, "flow_run", SimpleNamespace(id="a-run"))
    monkeypatch.setattr(session, "get_client", lambda sync_client: _Server(9 if is_there else 0))
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.put(number))
    with pytest.raises(type(error)), session.ended_when_deleted(logging.getLogger("run")):
        raise error
    if isinstance(error, PrefectHTTPStatusError) and error.response.status_code == 500:
        assert ended.empty() and not caplog.messages, "that says nothing about what is there"
    else:
        assert ended.get_nowait() == signal.SIGTERM and ended.empty()
        lacks = "lacks a part in Prefect that was asked for, as after it was deleted"
        found = lacks if is_there else "was deleted in Prefect"
        assert caplog.messages == [f"run a-run {found}: this ends, as where it is cancelled"]


def test_what_prefect_fails_at_upon_a_signal_is_that_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The run that it would say it of is deleted: `dejavu run` ended in a traceback with exit code 1."""

    def command() -> None:
        try:
            raise TerminationSignal(signal=signal.SIGTERM)
        except TerminationSignal:
            raise ObjectNotFound(OSError("a run")) from OSError("404")

    monkeypatch.setattr(endings, "_interrupts", endings._Interrupts())
    with pytest.raises(SystemExit) as ended:
        ending(command, tmp_path)
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err.startswith("ended by SIGTERM; what was measured, tried and saved is kept")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"max_data": 2}, "unknown key 'max_data' in parallelism, found with 2; wanted some of max_data_parallel, "),
        ({"offload": [{"host": 1}]}, "unknown key 'host' in parallelism.offload.0, found with 1; wanted some of act"),
        ({"only": [{"tp": 2}]}, "unknown key 'tp' in parallelism.only.0, found with 2; wanted some of device_type, "),
        ({"max_data_parallel": 0}, "max_data_parallel is 0; wanted 1 or more"),
    ],
)
@pytest.mark.parametrize("flow", [full.dejavu, plan.plan])
def test_a_mistake_in_parallelism_is_a_sentence(flow: Flow[..., object], typed: object, said: str) -> None:
    """Of an unknown key Prefect said "Unexpected keyword argument", without its value or the known ones."""
    with pytest.raises(InputError) as raised:
        flow.validate_parameters({"parallelism": typed})
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("typed", [None, Parallelism(zero_levels=(1,)), {"zero_levels": [1]}])
def test_parallelism_is_taken_as_a_record_or_from_a_form(typed: object) -> None:
    taken = full.dejavu.validate_parameters({"parallelism": typed})["parallelism"]
    assert taken == (None if typed is None else Parallelism(zero_levels=(1,)))
