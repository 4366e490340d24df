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
    looked, and each sees its own time: threads beside each other are not added up. So that a search ends even where it
    is starved, a tenth of the real time counts at least.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._latest = 0.0  # what any thread has seen
        self._began_of: dict[int, float] = {threading.get_ident(): time.thread_time()}

    @property
    def elapsed_seconds(self) -> float:
        now, thread = time.thread_time(), threading.get_ident()
        with self._lock:
            if thread not in self._began_of:
                self._began_of[thread] = now - self._latest
            real = (time.perf_counter() - self._began) / _MOST_WAITING
            elapsed = max(now - self._began_of[thread], real)
            self._latest = max(self._latest, elapsed)
            return elapsed

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What this thread does inside takes no time."""
        processor, real = time.thread_time(), time.perf_counter()
        yield
        with self._lock:
            self._began += time.perf_counter() - real
            thread = threading.get_ident()
            if thread in self._began_of:
                self._began_of[thread] += time.thread_time() - processor
