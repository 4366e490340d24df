"""Send entries in order to MLflow or, while it fails, to a file in the project, and from there to MLflow later."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from dejavu.track.server import Entry, Server, is_refusal

RETRY_SECONDS = 60.0  # while MLflow fails, one entry per this time retries it; all others go to the file at once
NEEDED = {"create", "end"}  # MLflow refuses all that is of a run that was not created; one without an end runs
HELD_IN = {"artifact": "file", "model": "folder"}  # which part of an entry is the path of what it records

log = logging.getLogger("dejavu.track")


class Recorder:
    """Applies entries in their order, now or later, and never raises because of MLflow.

    Each process that has an outage gets a folder of its own: `entries.jsonl`, copies of artifacts, and a lock that it
    holds while it lives, so that no other process sends what is still being written.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.folder = _spool(server.project)
        self._mine = self.folder / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}"
        self._lock: FileLock | None = None  # held while there is a spool of our own
        self._retry_at = 0.0
        self._unkept: list[Entry] = []  # those that are needed, and that neither took
        self._thread_lock = threading.RLock()

    @property
    def is_spooling(self) -> bool:
        return self._lock is not None

    def record(self, entry: Entry) -> None:
        """Send the entry, or keep it if MLflow fails or has not received the earlier ones yet."""
        with self._thread_lock:
            self._take_unkept()
            self._take(entry)

    def _take_unkept(self) -> None:
        waiting, self._unkept = self._unkept, []
        for one in waiting:
            self._take(one, again=True)

    def _take(self, entry: Entry, *, again: bool = False) -> None:
        if self.is_spooling and time.monotonic() >= self._retry_at:
            self._send_mine()
        if not self.is_spooling:
            try:
                self.server.apply(entry, again=again)
                return
            except Exception as error:  # MLflow's, its database's, the connection's: none may stop the flow
                if is_refusal(error):
                    log.warning("MLflow refused a %s: %s", entry["kind"], self._line(error))
                    return
                self._begin(error)
        self._keep(entry)

    def catch_up(self) -> None:
        """Send what earlier processes could not, and close the runs of those that were killed."""
        try:
            for folder in sorted(self.folder.glob("*-*")):
                with contextlib.suppress(Timeout), FileLock(folder / "lock", timeout=0):  # held: its process lives
                    self._send(folder)
            self.server.sweep_killed()
        except Exception as error:
            self._begin(error)

    def close(self) -> None:
        """Try to send a last time; what cannot be sent is sent at the next open."""
        with self._thread_lock:
            self._take_unkept()
            if self._unkept:
                log.warning("%d records are lost: neither MLflow nor %s took them", len(self._unkept), self._mine)
            if self.is_spooling and not self._send_mine():
                log.warning(
                    "MLflow at %s still fails; the next run sends the records in %s", self.server.address, self._mine
                )
            if self._lock is not None:
                self._lock.release()

    def _begin(self, error: Exception) -> None:
        log.warning(
            "MLflow at %s fails (%s); the run continues, its records are kept in %s and sent later",
            self.server.address,
            self._line(error),
            self._mine,
        )
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._lock = FileLock(self._mine / "lock", thread_local=False)

    def _keep(self, entry: Entry) -> None:
        try:
            self._mine.mkdir(parents=True, exist_ok=True)
            if self._lock is not None and not self._lock.is_locked:
                self._lock.acquire(timeout=0)
            if entry["kind"] in HELD_IN:
                held = HELD_IN[entry["kind"]]
                source = Path(entry[held])
                copy = self._mine / uuid.uuid4().hex[:8] / source.name
                copy.parent.mkdir()
                if source.is_dir():
                    shutil.copytree(source, copy)
                else:
                    shutil.copyfile(source, copy)
                entry = {**entry, held: str(copy.relative_to(self._mine))}
            with (self._mine / "entries.jsonl").open("ab") as file:
                if file.tell() and not _ends_a_line(self._mine / "entries.jsonl"):  # a full disk cut the one before
                    file.write(b"\n")
                file.write(f"{json.dumps(entry)}\n".encode())
        except OSError as error:
            if entry["kind"] in NEEDED:
                self._unkept.append(entry)
                return
            log.warning("a record is lost: neither MLflow nor %s took it: %s", self._mine, self._line(error))

    def _send_mine(self) -> bool:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        was_kept = self._mine.exists()  # where the disk was full, too, there is nothing to send
        try:
            if was_kept:
                self._send(self._mine)
        except Exception as error:
            log.debug("MLflow still fails: %s", self._line(error))
            return False
        if self._mine.exists():
            return False
        if was_kept:
            log.warning("MLflow at %s answers again and has the records that were kept", self.server.address)
        if self._lock is not None:
            self._lock.release()
        self._lock = None
        return True

    def _send(self, folder: Path) -> None:
        """Send a folder's entries and remove it; if MLflow fails on the way, all of them are sent again later."""
        path = folder / "entries.jsonl"
        try:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            entries = _entries(lines)
        except (OSError, ValueError) as error:
            log.warning("the MLflow records in %s cannot be read and are left: %s", path, self._line(error))
            return
        whole = sum(line.endswith("\n") for line in lines)  # of the last, which may be cut, nothing is expected
        if len(entries) < whole:
            log.warning(
                "%d of the %d MLflow records in %s were cut off and are lost", whole - len(entries), whole, path
            )
        made = {entry["run"] for entry in entries if entry["kind"] == "create"}
        before = {entry["run"] for entry in entries} | {entry["parent"] for entry in entries if entry.get("parent")}
        for key in before - made:
            if self.server.find(key) is None:
                log.warning("MLflow at %s has no run of the records in %s; they are left", self.server.address, folder)
                return
        for entry in entries:
            if entry["kind"] in HELD_IN:
                held = HELD_IN[entry["kind"]]
                entry = {**entry, held: str(folder / entry[held])}
            try:
                self.server.apply(entry, again=True)
            except Exception as error:
                if not is_refusal(error):
                    raise
                log.warning("MLflow refused a %s: %s", entry["kind"], self._line(error))
        shutil.rmtree(folder)

    def _line(self, error: Exception) -> str:
        """Return the error in one line of limited length."""
        text = self.server.without_login(" ".join(str(error).split())) or type(error).__name__
        return text if len(text) <= 200 else f"{text[:200]}…"


def ends_that_wait(project: Path) -> dict[str, str]:
    """Return how runs ended whose end MLflow has not got yet: by their key, the status that waits in a spool."""
    found: dict[str, str] = {}
    for path in _spool(project).glob("*-*/entries.jsonl"):
        with contextlib.suppress(OSError, ValueError):
            entries = _entries(path.read_text().splitlines(keepends=True))
            found |= {entry["run"]: entry["status"] for entry in entries if entry["kind"] == "end"}
    return found


def _spool(project: Path) -> Path:
    return project.resolve() / ".dejavu" / "mlflow-spool"


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _entries(lines: Sequence[str]) -> list[Entry]:
    """Return the entries of those lines that are whole.

    Raises:
        ValueError: there are lines, and none of them is.
    """
    found: list[Entry] = []
    why: ValueError | None = None
    for line in lines:
        try:
            found += [json.loads(line)] if line.endswith("\n") else []
        except ValueError as error:
            why = error
    if why is not None and not found:
        raise why
    return found
