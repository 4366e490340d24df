"""Numbers that arrive while something runs: a curve, and what the ranks on this machine take."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from dejavu.track.run import Metric, Run

FLUSH_SECONDS = 10.0  # a call of MLflow's takes 0.05 s of a core that ranks use, too
SAMPLE_SECONDS = 2.0
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


@contextmanager
def sampled_ranks(run: Run) -> Iterator[None]:
    """Record processor and memory of this process's ranks, under the names that MLflow shows as system metrics.

    Per rank: `cpu_percent` of one core since the sample before, and `memory_bytes` resident; of the machine:
    `cpu_percent` of all cores and `memory_bytes` in use. Ranks on other hosts are not seen from here.
    """
    stop = threading.Event()
    sampler = threading.Thread(target=_sample, args=(run, stop), name="rank-sampler", daemon=True)
    sampler.start()
    try:
        yield
    finally:
        stop.set()
        sampler.join()


def _sample(run: Run, stop: threading.Event) -> None:
    busy_before: dict[int, tuple[float, float]] = {}
    rows: list[Metric] = []
    sent_at, number = time.monotonic(), 0
    psutil.cpu_percent()  # the first answer is about nothing
    while not stop.wait(SAMPLE_SECONDS):
        rows += [Metric(f"system/{name}", value, number, time.time()) for name, value in _now(busy_before)]
        number += 1
        if time.monotonic() - sent_at > FLUSH_SECONDS:
            run.metrics(rows)
            rows, sent_at = [], time.monotonic()
    run.metrics(rows)


def _now(busy_before: dict[int, tuple[float, float]]) -> Iterator[tuple[str, float]]:
    """Look once; `busy_before` keeps when each process was looked at, and its processor seconds then."""
    yield "cpu_percent", psutil.cpu_percent()
    yield "memory_bytes", float(psutil.virtual_memory().used)
    for process in psutil.Process().children(recursive=True):
        try:
            with process.oneshot():
                if not process.name().startswith(RANK):
                    continue
                rank = process.name().replace(" ", "_")
                times, memory_bytes = process.cpu_times(), process.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
        now, busy = time.monotonic(), times.user + times.system
        before, busy_then = busy_before.get(process.pid, (now, busy))
        busy_before[process.pid] = now, busy
        if now > before:
            yield f"{rank}/cpu_percent", 100.0 * (busy - busy_then) / (now - before)
        yield f"{rank}/memory_bytes", float(memory_bytes)
