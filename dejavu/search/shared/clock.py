"""The clock of a search's budget: processor time, so that a busy machine does not make answers worse."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_WAITING = 10.0  # real seconds count as one where a search gets next to nothing of a processor


class SearchClock:
    """Seconds of processor time that a search's own thread has taken since the clock began.

    Other programs, other threads of this process, and waiting for another search count nothing. Where one search works
    in several threads (`coarse`'s proof beside its rounds), a thread goes on from where the others were when it first
    looked, or when it last caught up, having waited for them, and each sees its own time: threads beside each other are
    not added up. So that a search ends even where it
    is starved, a tenth of the real time counts at least.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._latest = 0.0  # what any thread has seen
        self._own = threading.local()  # not by the thread's number, which another may have after it
        self._own.began = time.thread_time()

    @property
    def elapsed_seconds(self) -> float:
        now = time.thread_time()
        with self._lock:
            if not hasattr(self._own, "began"):
                self._own.began = now - self._latest
            real = (time.perf_counter() - self._began) / _MOST_WAITING
            elapsed: float = max(now - self._own.began, real)
            self._latest = max(self._latest, elapsed)
            return elapsed

    def catch_up(self) -> None:
        """Go on from where any thread is that has looked: this one has waited for others."""
        now = time.thread_time()
        with self._lock:
            self._own.began = min(getattr(self._own, "began", now), now - self._latest)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What this thread does inside takes no time."""
        processor, real = time.thread_time(), time.perf_counter()
        yield
        with self._lock:
            self._began += time.perf_counter() - real
            if hasattr(self._own, "began"):
                self._own.began += time.thread_time() - processor


class ThreadClock:
    """Seconds of processor time of the thread that made it since then, for another thread to read.

    Of real time where the system does not tell it of another thread (macOS). After `stop` it is infinite.
    """

    def __init__(self) -> None:
        told = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if told else time.CLOCK_MONOTONIC
        self._began = time.clock_gettime(self._clock)
        self._is_stopped = False

    @property
    def elapsed_seconds(self) -> float:
        return float("inf") if self._is_stopped else time.clock_gettime(self._clock) - self._began

    def stop(self) -> None:
        self._is_stopped = True
