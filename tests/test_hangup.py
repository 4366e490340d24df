"""A terminal that is closed under a command (SIGHUP): it ends as by SIGTERM, although nobody reads what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dejavu.track import Tracker, runs
from flows import endings, foreground, service_record, services
from flows.listening import printed_as_json
from tests.ports import free_port
from tests.test_services import stand_ins as stand_ins  # a fixture
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
BY_SIGHUP = "ended by SIGHUP, as when its terminal is closed"
ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM", signal.SIGHUP: BY_SIGHUP}
IN_A_TERMINAL = """
import os, signal, sys, time
from pathlib import Path
from flows.endings import end_at_once_when_interrupted_again, ending

def command():
    os.open(os.ttyname(0), os.O_RDWR)  # makes it this session's terminal
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGHUP)  # the shell tells of it, too
        time.sleep(0.1)
        Path("cleaned up").touch()
        print("nobody reads this", end="")  # which Python would write when it ends

end_at_once_when_interrupted_again()
ending(command, Path.cwd())
"""


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set what signals do here as a command does, until the end of the test."""
    before = {number: signal.getsignal(number) for number in ENDS}
    monkeypatch.setattr(endings, "_interrupts", endings._Interrupts())
    signal.signal(signal.SIGHUP, endings._interrupts.first)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def hang_up(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(PATIENCE_SECONDS)


@pytest.mark.parametrize("is_ignored", [False, True], ids=["", "by nohup"])
def test_a_command_cleans_up_whose_terminal_is_closed(is_ignored: bool, tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(
        IN_A_TERMINAL.replace("sleep(60)", "sleep(1)") if is_ignored else IN_A_TERMINAL
    )
    ours, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "command.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL),
    )
    os.close(its)
    said = b""
    while not said.endswith(b"\n"):  # it may come in parts
        said += os.read(ours, 100)
    assert said.startswith(b"begun")
    os.close(ours)
    code = process.wait(timeout=PATIENCE_SECONDS)
    assert (tmp_path / "cleaned up").exists()
    assert is_ignored or code == 128 + signal.SIGHUP


def test_the_record_of_a_run_says_that_it_was_hung_up(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Tracker.open(tmp_path, "mine"):
        hang_up()
    (run,) = runs(tmp_path)
    assert (run.status, run.verdict) == ("KILLED", f"it was {BY_SIGHUP}")


@pytest.mark.parametrize(("number", "said"), ENDS.items())
def test_the_last_event_says_what_ended_a_run(
    number: signal.Signals, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(number, endings._interrupts.first)
    with pytest.raises(KeyboardInterrupt), printed_as_json():
        os.kill(os.getpid(), number)
        time.sleep(PATIENCE_SECONDS)
    (event,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (event["event"], event["error"]) == ("failed", said)


def test_services_in_the_foreground_end_with_their_terminal(
    stand_ins: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _ = stand_ins
    said: list[str] = []

    def say(text: str) -> None:
        if endings._interrupts.came:
            raise OSError("Input/output error")
        said.append(text)

    monkeypatch.setattr(foreground.time, "sleep", hang_up)
    start = partial(services.up, project, prefect_port=free_port(), mlflow_port=free_port())
    foreground.stay_up(project, start, None, say)
    assert said and service_record.recorded(project) is None


OF_WORKERS = """
import signal
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from dejavu.trials.clients import _start_forkserver

_start_forkserver()
for pid in (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid):
    (ignored,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line]
    print(int(ignored.split()[1], 16) >> signal.SIGHUP - 1 & 1)
"""


def test_what_trials_workers_come_from_is_ended_by_its_parent_alone() -> None:
    """Ended by the terminal, it would be started again to print tracebacks of semaphores that it does not know."""
    words = [sys.executable, "-c", OF_WORKERS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.stdout.split() == ["1", "1"], done.stderr
