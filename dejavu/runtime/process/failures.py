"""Ranks that ended before their training did: recorded by the agent that sees it, reported by the launcher."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from dejavu.foundation.errors import DejavuError


class LaunchError(DejavuError):
    """The ranks did not finish; the message says why, or includes the end of their log."""


class RankError(LaunchError):
    """A rank failed by itself, not by a signal: a retry would fail again."""


class DivergedError(DejavuError):
    """The loss or the trained state is no longer a number."""


# Without torchrun's own line, which only says that a rank failed.
_RANK = re.compile(r"\[rank\d+\]: ")  # torch writes it before every line
_ERROR = re.compile(r"(\[rank\d+\]: )*(?!.*ChildFailedError)[\w.]+(Error|Exception|Interrupt)\b.*")


def what_failed(what: str, said: str) -> str:
    """Describe a process that failed: the last error it wrote, and the file with all its output.

    Of several ranks it is the last of the one that failed first: the others fail because it has gone.

    Args:
        what: what failed, such as `measuring layers`.
        said: its standard error.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.fullmatch(line)]
    first_rank = next((rank[0] for line in errors if (rank := _RANK.match(line))), "")
    last = ([line for line in errors if line.startswith(first_rank)] or lines or ["no output"])[-1]
    with tempfile.NamedTemporaryFile("w", prefix="dejavu-failed-", suffix=".log", delete=False) as file:
        file.write(said)
    return f"{what} failed: {last} (full output: {file.name})"


@dataclass(frozen=True)
class Failure:
    """A rank that ended before its training did.

    Attributes:
        attempt: how often the ranks had been restarted before.
        rank, stages, host: its number in the world, what it ran, and where.
        exit_code: its own; below 0: minus the signal that ended it.
        why: what the watchdog saw before it killed the rank; empty where it was not the watchdog.
    """

    attempt: int
    rank: int
    stages: tuple[int, ...]
    host: str
    exit_code: int
    why: str = ""

    def __str__(self) -> str:
        stages = f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"
        how = f"was ended by {_signal_name(-self.exit_code)}" if self.by_signal else f"failed (exit {self.exit_code})"
        why = f": {self.why}" if self.why else ""
        return f"attempt {self.attempt}: rank {self.rank} ({stages} on {self.host}) {how}{why}"

    @property
    def by_signal(self) -> bool:
        return self.exit_code < 0


def failures_path(folder: Path | str) -> Path:
    """Return the file with one JSON line for each rank that ended before its training did."""
    return Path(folder) / "failures.jsonl"


def first_error(folder: Path | str, attempt: int) -> int | None:
    """Return the rank whose own error is the first of this attempt; None: no rank had one.

    When it ends, ranks that wait for it fail as well, and their processes may end earlier.
    """
    found = Path(folder).glob(f"error-{attempt}-*.txt")
    first = min(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if first is None else int(first.stem.rpartition("-")[2])


def write_failure(folder: Path | str, failure: Failure) -> None:
    """Append a line in one write, because several hosts may write."""
    with failures_path(folder).open("a") as file:
        file.write(json.dumps(asdict(failure)) + "\n")


def read_failures(folder: Path | str) -> list[Failure]:
    """Return what ended each attempt, in order: the ranks that a signal ended, or else the first that failed.

    The other ranks of an attempt failed because these had gone.
    """
    path = failures_path(folder)
    lines = path.read_bytes().splitlines() if path.exists() else []
    listed = [failure for line in lines if (failure := _failure_in(line)) is not None]
    return [
        failure
        for _, group in groupby(sorted(listed, key=lambda f: f.attempt), key=lambda f: f.attempt)
        for failure in _causes(list(group))
    ]


def _failure_in(line: bytes) -> Failure | None:
    """Parse a line; None: it is being written, or was cut off with its host."""
    try:
        row = json.loads(line)
        return Failure(**{**row, "stages": tuple(row["stages"])})
    except (ValueError, TypeError, KeyError):
        return None


def _causes(failures: list[Failure]) -> Iterable[Failure]:
    return [failure for failure in failures if failure.by_signal] or failures[:1]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name of their own
        return f"signal {number}"
