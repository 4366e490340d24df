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
LOOK_SECONDS = 0.5  # until all ranks are there: a short training is over before the next sample
MOST_LOOKS = 20  # of these, in vain where ranks are on other hosts
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
    sent_at, number = time.monotonic(), 0
    psutil.cpu_percent()  # the first answer is about nothing
    while not stop.wait(SAMPLE_SECONDS if ranks.are_known or number >= MOST_LOOKS else LOOK_SECONDS):
        rows += [Metric(f"system/{name}", value, number, time.time()) for name, value in _machine() + ranks.sample()]
        number += 1
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

    @property
    def are_known(self) -> bool:
        return len(self._known) >= self._num_ranks

    def sample(self) -> list[tuple[str, float]]:
        new = [] if self.are_known else self._look()
        found: list[tuple[str, float]] = []
        try:
            for process in self._known:
                with process.oneshot():
                    rank = process.name().replace(" ", "_")
                    if process not in new:
                        found.append((f"{rank}/cpu_percent", process.cpu_percent()))  # since the sample before
                    found.append((f"{rank}/memory_bytes", float(process.memory_info().rss)))
        except psutil.Error:  # it has just ended
            self._known = []
        return found

    def _look(self) -> list[psutil.Process]:
        """Look for ranks, and return the new ones."""
        now = [one for one in psutil.Process().children(recursive=True) if _is_rank(one)]
        new = [one for one in now if one not in self._known]
        for process in new:
            with contextlib.suppress(psutil.Error):
                process.cpu_percent()  # from here on its processor time is counted
        self._known += new
        return new


def _is_rank(process: psutil.Process) -> bool:
    try:
        return bool(process.name().startswith(RANK))
    except psutil.Error:
        return False
