"""Numbers that arrive while something runs: a curve, and what the ranks on this machine take."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import psutil

from dejavu.track.run import Metric, Run

FLUSH_SECONDS = 10.0  # a call of MLflow takes some 30 ms of a core that ranks use, too
SAMPLE_SECONDS = 2.0
LOOK_SECONDS = 0.25  # until all ranks are known: a short training is over before the second sample
MOST_LOOKS = 40  # so often; later, and where ranks are on other hosts, with each sample
RANK = "rank "  # what processes of ranks are called, with their number


class Curve:
    """A metric that grows step by step; sent at most every `FLUSH_SECONDS`. A step that is repeated counts once."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name
        self._seen: set[int] = set()
        self._kept: list[Metric] = []
        self._sent_at = time.monotonic()

    def add(self, step: int, value: float) -> None:
        if step in self._seen:
            return
        self._seen.add(step)
        self._kept.append(Metric(self._name, value, step, time.time()))
        if time.monotonic() - self._sent_at > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        kept, self._kept, self._sent_at = self._kept, [], time.monotonic()
        self._run.metrics(kept)


@contextlib.contextmanager
def sampled_ranks(run: Run, num_ranks: int) -> Iterator[None]:
    """Record processor and memory of this process's ranks, under the names that MLflow shows as system metrics.

    Per rank: `cpu_percent` of one core since the sample before, and `memory_bytes` resident; of the machine:
    `cpu_percent` of all cores and `memory_bytes` in use. Ranks on other hosts are not seen from here.
    """
    stop = threading.Event()
    sampler = threading.Thread(target=_sample, args=(run, num_ranks, stop), name="rank-sampler", daemon=True)
    sampler.start()
    try:
        yield
    finally:
        stop.set()
        sampler.join()


def _sample(run: Run, num_ranks: int, stop: threading.Event) -> None:
    ranks = _Ranks(num_ranks)
    rows: list[Metric] = []
    number, sent_at = 0, time.monotonic()
    due_at = sent_at + SAMPLE_SECONDS
    psutil.cpu_percent()  # the first answer is about nothing
    while not stop.wait(LOOK_SECONDS if ranks.are_awaited else SAMPLE_SECONDS):
        found = ranks.look()
        if time.monotonic() >= due_at - LOOK_SECONDS / 2:
            found += _machine() + ranks.sample()
            due_at = time.monotonic() + SAMPLE_SECONDS
        rows += [Metric(f"system/{name}", value, number, time.time()) for name, value in found]
        number += bool(found)
        if time.monotonic() - sent_at > FLUSH_SECONDS:
            run.metrics(rows)
            rows, sent_at = [], time.monotonic()
    run.metrics(rows)


def _machine() -> list[tuple[str, float]]:
    return [("cpu_percent", psutil.cpu_percent()), ("memory_bytes", float(psutil.virtual_memory().used))]


class _Ranks:
    """The ranks that this process's agent started.

    They are looked for until all are known, and again when one has ended: a look reads every process of the machine.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._known: list[psutil.Process] = []
        self._looks = 0

    @property
    def are_awaited(self) -> bool:
        """Whether the next look is worth more than a sample's pause."""
        return len(self._known) < self._num_ranks and self._looks < MOST_LOOKS

    def look(self) -> list[tuple[str, float]]:
        """Look for ranks that are missing; return the memory of those found, whose processor time counts from now."""
        if len(self._known) >= self._num_ranks:
            return []
        self._looks += 1
        now = [one for one in psutil.Process().children(recursive=True) if _is_rank(one)]
        found: list[tuple[str, float]] = []
        for process in (one for one in now if one not in self._known):
            with contextlib.suppress(psutil.Error):
                found.append(_memory(process))
                process.cpu_percent()
                self._known.append(process)
        return found

    def sample(self) -> list[tuple[str, float]]:
        """Return processor time since the sample before, and memory, of each known rank."""
        found: list[tuple[str, float]] = []
        try:
            for process in self._known:
                with process.oneshot():
                    found += [(f"{_name(process)}/cpu_percent", process.cpu_percent()), _memory(process)]
        except psutil.Error:  # it has just ended
            self._known = []
        return found


def _name(process: psutil.Process) -> str:
    return str(process.name()).replace(" ", "_")


def _memory(process: psutil.Process) -> tuple[str, float]:
    return f"{_name(process)}/memory_bytes", float(process.memory_info().rss)


def _is_rank(process: psutil.Process) -> bool:
    try:
        return bool(process.name().startswith(RANK))
    except psutil.Error:
        return False
