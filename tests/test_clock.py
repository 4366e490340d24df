"""The clock of the machine is set while things run (fault 25): nothing that lasts is measured by it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from dejavu.foundation.processes.start import BOOT, start_seconds, started_at
from dejavu.launch.training_lock import HOLDER, Holder, alone_in, holder_in
from dejavu.track.identity import BOOT_TAG, PID_TAG, START_TAG, has_ended, identity_tags
from flows import doctor
from flows.processes import RecordedProcess, start
from tests.test_flow import Watched, check_records, needs_two_cores
from tests.test_flow import project as project  # a fixture
from tests.waiting import PATIENCE_SECONDS

MEASURED_BEFORE = True  # what these runs measure is no matter
ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "tests" / "moving_clock.c"
# Who may ask for the time of day, and why. All else that counts seconds asks a clock that nobody sets.
DATED = {
    "dejavu/profiles/database.py": "ages of files: the file system's clock is this one",
    "dejavu/launch/training_lock.py": "since when somebody trains, for people",
    "dejavu/track/run.py": "MLflow's dates",
    "dejavu/track/live.py": "MLflow's dates",
    "flows/upkeep/backup.py": "the date of a backup",
    "flows/upkeep/cleaning.py": "ages of files: the file system's clock is this one",
    "dejavu/track/spool.py": "names of folders, in order",
    "dejavu/watching/notes.py": "when a plan was made, for people",
    "dejavu/launch/running.py": "ages of files: the file system's clock is this one",
    "flows/recorded/status.py": "ages of files, and since when somebody trains, for people",
    "flows/listening.py": "when an event was, for a program that listens",
    "tasks/events.py": "when an event was, for a program that listens",
}


WALL = {"time", "time_ns"}  # of the module `time`; `datetime.now` gives dates, which are records


def asks_the_time(tree: ast.AST) -> bool:
    """Whether it calls `time.time`, or imports it by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WALL and ast.unparse(node.value) == "time":
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "time" and WALL & {a.name for a in node.names}:
            return True
    return False


def test_no_duration_is_measured_by_the_time_of_day() -> None:
    files = [path for room in ("dejavu", "flows", "tasks", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if asks_the_time(ast.parse(path.read_text()))}
    assert found == set(DATED)


def test_dates_are_never_subtracted() -> None:
    """`datetime.now` is asked for records and for what another process has dated."""
    for room in ("dejavu", "flows", "tasks"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                    assert "datetime.now" not in ast.unparse(node), f"{path}:{node.lineno}"


def test_a_process_is_recognized_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel moves the boot time with the clock, and psutil adds it to what it says of every process.

    Nobody sets the clock of a machine that others use for a test, so this alone is done for psutil, not by it.
    """
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    kept = start("sleeper", words, cwd=tmp_path, environment=os.environ, log=tmp_path / "log")
    with alone_in(tmp_path, "gpt on desk"):
        began, boot = start_seconds(psutil.Process()), psutil.boot_time()
        for jump_seconds in (3600.0, -86400.0):
            moved = boot + jump_seconds
            monkeypatch.setattr("psutil._pslinux.boot_time", lambda moved=moved: moved)
            assert psutil.boot_time() == moved
            assert started_at(psutil.Process(), began)
            holder = holder_in(tmp_path)
            assert holder is not None and holder.pid == os.getpid()
            assert kept.find() is not None
    found = kept.find()
    assert found is not None
    found.kill()


def recognizers(folder: Path, boot: str | None) -> dict[str, bool]:
    """Say who takes this process for that of its own record, changed to this boot; None: as before boots were kept."""
    holder, tags = asdict(Holder.here("gpt on desk")), identity_tags()
    service = asdict(RecordedProcess("worker", holder["pid"], holder["start_seconds"], "none.log", holder["boot"]))
    for record, key in ((holder, "boot"), (service, "boot"), (tags, BOOT_TAG)):
        assert record.pop(key)
        if boot is not None:
            record[key] = boot
    (folder / ".dejavu").mkdir(exist_ok=True)
    (folder / ".dejavu" / HOLDER).write_text(json.dumps(holder))
    return {
        "lock": holder_in(folder) is not None,
        "services": RecordedProcess(**service).find() is not None,
        "MLflow": not has_ended(int(tags[PID_TAG]), float(tags[START_TAG]), tags.get(BOOT_TAG, "")),
        "doctor": doctor._runs(tags[PID_TAG], tags[START_TAG], tags.get(BOOT_TAG)),
    }


@pytest.mark.skipif(not BOOT.is_file(), reason="this kernel does not name its boots")
def test_a_process_of_another_boot_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a boot, servers that start with the machine have nearly the pids and times that they had before it."""
    own = BOOT.read_text().strip()
    assert start("true", ["true"], cwd=tmp_path, environment=os.environ, log=tmp_path / "log").boot == own
    assert all(recognizers(tmp_path, own).values())
    assert not any(recognizers(tmp_path, str(uuid.uuid4())).values())
    assert all(recognizers(tmp_path, None).values())
    monkeypatch.setattr("dejavu.foundation.processes.start.BOOT", tmp_path / "none")  # as on other kernels
    assert Holder.here("gpt on desk").boot == "" and Holder.here("gpt on desk").runs


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """A file that says how many seconds the clock of a process is off; those with the library read it each time."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("there is no C compiler (apt-get install gcc), or this is not Linux")
    words = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library_of(tmp_path / "clock")), str(LIBRARY), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{LIBRARY.name} cannot be compiled here: {done.stderr.strip()}")
    path = tmp_path / "clock"
    path.write_text("0")
    return path


def library_of(clock: Path) -> Path:
    return clock.with_name("moving_clock.so")


def moving(clock: Path) -> dict[str, str]:
    """Settings of a process whose clock is what the file says; clocks that nobody sets go on as they are."""
    return {"LD_PRELOAD": str(library_of(clock)), "MOVING_CLOCK": str(clock)}


def test_only_the_clock_that_is_set_moves(clock: Path) -> None:
    """Of the tests themselves: their clock moves, and a monotonic one does not."""
    ask = "import time; time.sleep(0.01); print(time.time(), time.monotonic())"
    words, said = [sys.executable, "-c", ask], []
    for offset in ("0", "3600"):
        clock.write_text(offset)
        done = subprocess.run(words, env={**os.environ, **moving(clock)}, capture_output=True, text=True, check=True)
        said.append([float(word) for word in done.stdout.split()])
    (wall, steady), (later_wall, later_steady) = said
    assert 3500 < later_wall - wall < 3700
    assert 0 < later_steady - steady < 100


@pytest.mark.integration
@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("jump", ["7200", "-7200"])
def test_a_run_goes_on_while_its_clock_jumps(project: Path, clock: Path, jump: str) -> None:
    """In mid-training, for the flow, its server, its workers and its ranks alike."""
    with Watched(project, settings=moving(clock), compare=False) as run:
        run.wait_for("step 10 of")
        clock.write_text(jump)
        assert run.process.wait(timeout=PATIENCE_SECONDS) == 0, run.log.read_text()
    found = check_records(project).data.metrics
    assert 0 < found["measured_step_seconds"] < 60
