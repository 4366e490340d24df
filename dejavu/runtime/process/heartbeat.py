"""The heartbeat that every rank writes into the job's folder after each step."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

NO_STEP = -1
DONE = 10**12


class Heartbeat:
    """A rank's heartbeat: the last step it has done; on SIGUSR1 the rank writes its stacks to a file next to it."""

    def __init__(self, folder: Path | str, rank: int, attempt: int) -> None:
        self.path, self.attempt, self._step = heartbeats(folder) / f"{rank}.beat", attempt, NO_STEP
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stacks = self.path.with_suffix(".stack")
        stacks.unlink(missing_ok=True)
        self._stacks = stacks.open("a")  # emptied by whoever asks for a stack
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # in effect when the interpreter removes its handler at exit
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self.beat()

    def beat(self, step: int | None = None) -> None:
        """Record that the rank has done this step, or something else after the last one. Some 5 µs on a local disk."""
        self._step = step = self._step if step is None else step
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, b"%10d %15d %20d" % (self.attempt, step, time.monotonic_ns()), 0)  # of constant length
        finally:
            os.close(file)

    def close(self) -> None:
        """Record that the rank has finished and is about to exit."""
        self.beat(DONE)
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()


class Beat(NamedTuple):
    """The last heartbeat of a rank."""

    step: int
    written_ns: int
    content: str


def read_beats(folder: Path | str, attempt: int) -> dict[int, Beat]:
    """Return the last heartbeats of this attempt by rank; a rank that has not started is absent."""
    found = {}
    for path in heartbeats(folder).glob("*.beat"):
        content = path.read_text()
        words = content.split()
        if len(words) == 3 and int(words[0]) == attempt:
            found[int(path.stem)] = Beat(int(words[1]), path.stat().st_mtime_ns, content)
    return found


def last_attempt(folder: Path | str) -> int:
    """Return the newest attempt of which a rank has started; -1: none has."""
    words = (path.read_text().split() for path in heartbeats(folder).glob("*.beat"))
    return max((int(found[0]) for found in words if len(found) == 3), default=-1)


def heartbeats(folder: Path | str) -> Path:
    """Return the folder of the ranks' heartbeats and stacks."""
    return Path(folder) / "heartbeats"
