"""One measuring or training process in a folder: real processes, ended in every way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dejavu.launch.running import status_of
from dejavu.launch.training_lock import BusyError, _busy, alone_in, holder_in
from dejavu.profiling.profiler import Profiler
from flows.__main__ import app
from flows.doctor import _training
from flows.recorded.status import status_lines, status_to_dict
from tests.waiting import PATIENCE_SECONDS

HOLD = """
import sys, time
from pathlib import Path
from dejavu.launch.training_lock import alone_in
with alone_in(Path(sys.argv[1]), "gpt on desk"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def holding(project: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder until it is told a line, or killed."""
    words = [sys.executable, "-c", HOLD, str(project)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.integration
def test_the_second_is_told_who_trains(tmp_path: Path) -> None:
    with holding(tmp_path) as other:
        found = holder_in(tmp_path)
        assert found is not None and (found.pid, found.what) == (other.pid, "gpt on desk")
        with pytest.raises(BusyError, match=rf"gpt on desk \(pid {other.pid}, since .*--wait"), alone_in(tmp_path, "x"):
            pytest.fail("both hold the folder")
        assert holder_in(tmp_path) == found  # the one who was refused took nothing away
        with alone_in(tmp_path / "another", "x"):
            pass


WORK = [("gpt on desk", False), ("dejavu backup", True), ("dejavu net on desk", False)]  # and whether it is upkeep


@pytest.mark.parametrize(("other", "is_theirs"), WORK)
@pytest.mark.parametrize("is_own", [True, False])
def test_what_is_said_of_a_folder_in_use_is_so(is_own: bool, other: str, is_theirs: bool, tmp_path: Path) -> None:
    """Commands that look after files neither measure nor train, and no time would be wrong beside them."""
    with alone_in(tmp_path, other, is_upkeep=is_theirs):
        said, holder = _busy(tmp_path, is_own), holder_in(tmp_path)
        lines, state = status_lines(status_of(tmp_path)), status_to_dict(status_of(tmp_path))["state"]
        watched = next(check for check in _training(tmp_path)).found
    assert holder is not None and holder.is_upkeep == is_theirs
    assert ("slow each other" in said) == (not is_own and not is_theirs)
    for text in (said, watched):
        assert text.startswith(f"{other} (pid ") and ("measures or trains" in text) == (not is_theirs)
    assert ("its training has not begun" in lines[0]) == (not is_theirs) == (state == "preparing")


@pytest.mark.parametrize("command", ["backup", "restore", "gc", "run"])
def test_every_command_that_is_told_to_wait_can(command: str) -> None:
    assert "--wait" in CliRunner().invoke(app, [command, "--help"]).output


@pytest.mark.integration
@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL], ids=["ended", "SIGTERM", "SIGKILL"])
def test_the_folder_is_free_however_its_holder_ends(tmp_path: Path, number: signal.Signals | None) -> None:
    with holding(tmp_path) as other:
        if number is None:
            other.communicate("\n", timeout=PATIENCE_SECONDS)
        else:
            other.send_signal(number)
            other.wait(PATIENCE_SECONDS)
        assert holder_in(tmp_path) is None
        with alone_in(tmp_path, "gpt"):
            found = holder_in(tmp_path)
            assert found is not None and found.pid == os.getpid()
    assert holder_in(tmp_path) is None


@pytest.mark.integration
def test_waiting_ends_with_the_holder(tmp_path: Path) -> None:
    said: list[str] = []
    with holding(tmp_path) as other:

        def on_wait(sentence: str) -> None:
            said.append(sentence)
            other.kill()

        with alone_in(tmp_path, "x", wait=True, on_wait=on_wait):
            assert other.poll() is not None or other.wait(PATIENCE_SECONDS)
    assert len(said) == 1 and f"waiting for gpt on desk (pid {other.pid}" in said[0]


def test_a_process_may_hold_a_folder_several_times(tmp_path: Path) -> None:
    with alone_in(tmp_path, "the command"):
        with alone_in(tmp_path, "its flow"):
            pass
        found = holder_in(tmp_path)
        assert found is not None and found.what == "the command"
    assert holder_in(tmp_path) is None


def test_a_pid_that_is_another_s_by_now_holds_nothing(tmp_path: Path) -> None:
    with alone_in(tmp_path, "x"):
        left = (tmp_path / ".dejavu" / "training.json").read_text()
    path = tmp_path / ".dejavu" / "training.json"
    for text in (left.replace('"start_seconds": ', '"start_seconds": 1'), left[:20], "", "[]", "null"):
        path.write_text(text)
        assert holder_in(tmp_path) is None
        with alone_in(tmp_path, "x"):
            assert holder_in(tmp_path) is not None


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / ".dejavu").write_text("a file where the folder should be")
    with pytest.raises(BusyError, match=r"\.dejavu cannot be written"), alone_in(tmp_path, "x"):
        pytest.fail("it was held")


def test_a_folder_that_may_not_be_written_is_a_sentence(tmp_path: Path) -> None:
    """Without root's right to write everywhere, where the tests run as root."""
    folder = tmp_path / "project"
    folder.mkdir()
    folder.chmod(0o555)
    words = [sys.executable, "-c", HOLD, str(folder)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("there is no setpriv to give up root's rights with")
        words = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override", *words]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert "held" not in done.stdout
    said = done.stderr.strip().splitlines()[-1]
    assert f"{folder}/.dejavu cannot be written (Permission denied)" in said
    assert not list(folder.iterdir())


@pytest.mark.parametrize("options", [[], ["--wait"], ["--again"]])
def test_profile_measures_alone_in_its_folder(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the flow does; not beside a training either, which the same lock keeps."""
    held: list[str] = []

    def run(self: Profiler, kinds: object, progress: object) -> str:
        holder = holder_in(tmp_path)
        assert holder is not None and holder.pid == os.getpid()
        held.append(holder.what)
        return "measured"

    monkeypatch.setattr(Profiler, "run", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: a, devices: {type: T4, count: 2}}]\nname: desk\n")
    (tmp_path / "w.yaml").write_text("model: tests.own_models:wide_stack\ndata: digits\nbatch_size: 8\n")
    ended = CliRunner().invoke(app, ["profile", "--workload", "w.yaml", *options])
    assert ended.exit_code == 0, ended.output
    assert held == ["tests.own_models:wide_stack on desk"] and "measured" in ended.output
    assert holder_in(tmp_path) is None


@pytest.mark.integration
def test_profile_is_refused_where_another_process_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: a, devices: {type: T4, count: 2}}]\n")
    (tmp_path / "w.yaml").write_text("model: tests.own_models:wide_stack\ndata: digits\nbatch_size: 8\n")
    with holding(tmp_path):
        ended = CliRunner().invoke(app, ["profile", "--workload", "w.yaml"])
    assert isinstance(ended.exception, BusyError) and "gpt on desk (pid" in str(ended.exception)
    assert not (tmp_path / "profiles_db").exists()
