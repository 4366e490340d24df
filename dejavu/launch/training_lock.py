"""A lock: one measuring or training process at a time in a project's folder, and who holds it.

Two would share cores and links: each would be slower than predicted, and both would remember wrong times. It is a lock
of the kernel, so it is released when its process ends, however it ends.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.processes.files import write_json
from dejavu.foundation.processes.start import boot_id, start_seconds, started_at

LOCK, HOLDER = "training.lock", "training.json"
STOPPED = "stopped"  # in a training's folder, as old as the end of the command that trained it
MEASURES = "measures or trains"
POLL_SECONDS = 0.5


class BusyError(DejavuError):
    """Somebody else measures or trains in this folder, or the folder cannot be written."""


@dataclass(frozen=True)
class Holder:
    """Who works in a folder that none may work in beside it.

    Attributes:
        what: for people, such as `gpt on desk`.
        start_seconds: when its process was started, since the machine's boot: the pid alone may have been reused.
        since_seconds: when it acquired the lock, since the epoch.
        is_upkeep: it looks after the files (`dejavu backup` and its like), and neither measures nor trains.
        training: the folder that it trains; empty: it has not begun to.
        boot: the machine's, as after another one a process may have both numbers; empty: not known.
    """

    what: str
    pid: int
    start_seconds: float
    host: str
    since_seconds: float
    is_upkeep: bool = False
    training: str = ""
    boot: str = ""

    @classmethod
    def here(cls, what: str, *, is_upkeep: bool = False) -> Holder:
        """Return this process as a holder."""
        started, host = start_seconds(psutil.Process()), socket.gethostname()
        return cls(what, os.getpid(), started, host, time.time(), is_upkeep, boot=boot_id())

    @property
    def runs(self) -> bool:
        """Return whether its process is alive; on another host this is assumed."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and started_at(process, self.start_seconds, self.boot)
        except psutil.NoSuchProcess:
            return False

    @property
    def does(self) -> str:
        """What it does in the folder, for people."""
        return "looks after the files" if self.is_upkeep else MEASURES

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_seconds).strftime("%H:%M:%S")
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"{self.what} (pid {self.pid}{where}, since {since})"


def holder_in(project: Path) -> Holder | None:
    """Return who works in this folder now; None: nobody, or nobody who has recorded it yet."""
    try:
        found = Holder(**json.loads((project / ".dejavu" / HOLDER).read_text()))
    except (OSError, ValueError, TypeError):  # no record, or its writer was killed meanwhile
        return None
    return found if found.runs else None


def record_training(project: Path, training: Path) -> None:
    """Record which training this process, which holds the project's folder, begins; it may be anywhere."""
    holder = holder_in(project)
    if holder is not None:
        write_json(project / ".dejavu" / HOLDER, asdict(replace(holder, training=str(training.resolve()))))


@contextmanager
def alone_in(
    project: Path,
    what: str,
    *,
    is_upkeep: bool = False,
    wait: bool = False,
    on_wait: Callable[[str], None] = lambda sentence: None,
) -> Iterator[None]:
    """Lock the folder against other processes that measure, train or look after the files; reentrant in a process.

    Args:
        what: is trained, or the command, for the others to read.
        is_upkeep: this neither measures nor trains.
        wait: until the folder is free.
        on_wait: called once with a sentence saying whom this waits for.

    Raises:
        BusyError: another process holds it and `wait` is not set, or the folder cannot be written.
    """
    folder = project.resolve() / ".dejavu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Any thread may release it: Prefect runs tasks in threads of its own.
        lock = FileLock(folder / LOCK, thread_local=False, is_singleton=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not wait:
                raise BusyError(_busy(project, is_upkeep)) from None
            who, does = _who(project)
            on_wait(f"waiting for {who}, which {does} in {project.resolve()}")
            lock.acquire(poll_interval=POLL_SECONDS)
    except OSError as error:
        raise BusyError(
            f"{folder} cannot be written ({error.strerror or error}): runs keep their records there; wanted a project "
            "folder that this user may write to"
        ) from error
    try:
        if lock.lock_counter == 1:
            write_json(folder / HOLDER, asdict(Holder.here(what, is_upkeep=is_upkeep)))
        yield
    finally:
        if lock.lock_counter == 1:
            holder = holder_in(project)
            with suppress(OSError):
                (folder / HOLDER).unlink()
            if holder is not None and holder.training:  # its ranks have ended, whichever way it does
                with suppress(OSError):
                    (Path(holder.training) / STOPPED).touch()
        lock.release()


def _busy(project: Path, is_upkeep: bool) -> str:
    """Say who holds the folder, why this cannot work beside it, and what to do."""
    who, does = _who(project)
    if is_upkeep or does != MEASURES:
        return (
            f"{who} {does} in {project.resolve()}, where files change meanwhile. Start again when it has ended, or "
            "with --wait to wait for it"
        )
    return (
        f"{who} {does} in {project.resolve()}: two at once would slow each other and remember wrong times. Start again "
        "when it has ended, with --wait to wait for it, or in a folder of its own"
    )


def _who(project: Path) -> tuple[str, str]:
    """Name the holder, and what it does; one that has just started may not have recorded itself yet."""
    holder = holder_in(project)
    return ("another process", MEASURES) if holder is None else (str(holder), holder.does)
