"""How commands end where the disk is at fault: one sentence that names it, nothing started, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dejavu.errors import InputError
from flows.endings import FAILURE, INPUT_ERROR, ending
from flows.room import check_room

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
