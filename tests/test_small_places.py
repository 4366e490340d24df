"""Where there is no room (fault 31): one sentence with the remedy, and the doctor says it beforehand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.processes.files import write_json
from dejavu.trials import worker
from flows import service_record, services
from flows.doctor import checks
from flows.endings import INPUT_ERROR
from flows.upkeep.backup import backup
from tests.ports import free_port
from tests.test_endings import Remount
from tests.test_endings import small_disk as small_disk  # a fixture
from tests.test_services import make_project

ROOT = Path(__file__).resolve().parents[1]


def in_little_shared_memory(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a mount namespace of its own, where /dev/shm has a page."""
    shell = ["sh", "-c", 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"', "sh"]
    done = subprocess.run(
        ["unshare", "-m", *shell, sys.executable, "-m", "flows", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"a mount namespace is not permitted here: {done.stderr.strip()}")
    return done


def test_little_shared_memory_is_said_before_anything_starts_and_by_the_doctor(tmp_path: Path) -> None:
    for name in ("cluster.yaml", "prefect.yaml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for word in ("run",):
        done = in_little_shared_memory(word, folder=tmp_path)
        assert done.returncode == INPUT_ERROR and not done.stdout
        assert done.stderr.startswith(
            "/dev/shm has 4 KiB free; wanted 1 MiB or more: mount -o remount,size=1G /dev/shm"
        )
        assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob(".dejavu/*"))
    told = in_little_shared_memory("doctor", folder=tmp_path)
    assert told.returncode == 1
    assert re.search(r"✗\s+shared memory\s+4 KiB free at /dev/shm\s+mount -o remount", told.stdout)


def test_the_doctor_says_that_a_disk_is_small_or_read_only(small_disk: tuple[Path, Remount]) -> None:
    """Beforehand; what a run says there is in tests/test_endings.py."""
    disk, remount = small_disk
    found = {check.name: check for check in checks(disk)}
    assert found["disk"].ok is False and re.match(r"[23](\.\d+)? MiB free at ", found["disk"].found)
    assert "free space" in found["disk"].remedy
    remount("ro")
    found = {check.name: check for check in checks(disk)}
    assert found["Prefect home"].ok is False and "Read-only" in found["Prefect home"].found
    assert found["Prefect home"].remedy == "copy the project to a disk that can be written"


WRITES: dict[str, Callable[[Path, Path], object]] = {
    "a job": lambda path, _: write_json(path, {"steps": 3}),
    "a trial's result": lambda path, _: worker._write(path, worker.Kept([1.0])),
    "a backup": lambda path, project: backup(project, path),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_a_full_disk_does_not_take_is_named(what: str, small_disk: tuple[Path, Remount], tmp_path: Path) -> None:
    """Not the project, whose disk has room: an error of a write names no file by itself."""
    disk, path = small_disk[0], small_disk[0] / "one.tar"
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError, match="No space left on device") as raised:
        WRITES[what](path, tmp_path)
    assert raised.value.filename == str(path) and str(path) in str(raised.value)
    assert not [one for one in disk.iterdir() if one.name.startswith(".one")]


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("server", ["Prefect", "MLflow"])
def test_a_port_that_is_taken_in_mid_start_is_named(tmp_path: Path, server: str) -> None:
    """After it was found free, and before its server listens; what was started with it is ended."""
    project = make_project(tmp_path).folder
    ports = {"Prefect": int(free_port()), "MLflow": int(free_port())}
    with ExitStack() as stack:

        def say(line: str) -> None:
            if line.startswith("starting "):
                stack.enter_context(socket.create_server(("127.0.0.1", ports[server])))

        with pytest.raises(DejavuError, match=f"port {ports[server]} was taken by .* while {server} was start") as said:
            services.up(project, prefect_port=ports["Prefect"], mlflow_port=ports["MLflow"], say=say)
    assert "\n" not in str(said.value) and "`dejavu up` again" in str(said.value)
    assert service_record.recorded(project) is None
