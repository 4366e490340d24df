"""Reading the examples of each step: at once where that is quick, and in a thread beside the step before where not.

Mapped tokens take microseconds to read, and handing a batch from thread to thread would cost a rank as much: it has one
core. Images that are decoded, or a person's own Dataset, take as long as a step. So reading begins at once, and goes
over to a thread when it was seen to take as long as is worth telling.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from dejavu.runtime.job import LONG_WAIT, Waited
from dejavu.timing.clock import KEPT_STEPS
from dejavu.workload import Workload
from dejavu.workload.data import Batch, dataset_of

LONG_SHARE = LONG_WAIT  # of a step: reading that takes longer goes over to a thread
STEPS_LOOKED_AT = 2  # in a row that take so long: one may have had a page to fetch
READ_AHEAD = 1  # batches that wait for their step, beside the one that is being read


class Reader:
    """Gives each step its examples, in order.

    Args:
        rows: which of a batch's examples are wanted; None: all; where there is none, nothing is read.
    """

    def __init__(self, workload: Workload, steps: Sequence[int], rows: np.ndarray | None = None) -> None:
        self._dataset, self._size, self._seed = dataset_of(workload), workload.batch_size, workload.seed
        self._steps, self._rows = deque(steps), rows
        self._thread: _Ahead | None = None
        self._num_long = 0
        self._last: tuple[float, float] = (0.0, 0.0)  # how long it was waited, and when that ended
        self._times: deque[tuple[float, float]] = deque(maxlen=KEPT_STEPS)  # waited, and the step itself
        self._num_given = 0

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Give each step, its inputs and its targets.

        Raises:
            InputError: they cannot be read.
        """
        try:
            while self._steps:
                began, step = time.perf_counter(), self._steps.popleft()
                inputs, targets = self._read(step) if self._thread is None else self._thread.next()
                self._last = (time.perf_counter() - began, time.perf_counter())
                self._num_given += 1
                yield step, inputs, targets
        finally:  # also where a step raises
            if self._thread is not None:
                self._thread.end()

    def stepped(self) -> None:
        """Take note that the step of the last batch has been computed."""
        waited, ended = self._last
        seconds = time.perf_counter() - ended
        if self._num_given > 1:  # the first step also sets things up
            self._times.append((waited, seconds))
        if self._thread is None and self._num_given > 1:
            self._num_long = self._num_long + 1 if waited > LONG_SHARE * seconds else 0
            if self._num_long >= STEPS_LOOKED_AT and self._steps:
                self._thread = _Ahead(self, list(self._steps))

    @property
    def waited(self) -> Waited | None:
        """How long the steps waited; None: there was no second one."""
        if not self._times:
            return None
        waited, computed = (sum(column) for column in zip(*self._times, strict=True))
        return Waited(waited / len(self._times), waited / (waited + computed), self._thread is not None)

    def _read(self, step: int) -> Batch:
        if self._rows is None:
            return self._dataset.batch(step, self._size, seed=self._seed)
        if not len(self._rows):
            return torch.empty(0), torch.empty(0)
        return self._dataset.part_of_batch(step, self._size, self._rows, seed=self._seed)


class _Ahead:
    """A thread that reads the batches of these steps, and waits while enough are there."""

    def __init__(self, reader: Reader, steps: Sequence[int]) -> None:
        self._found: queue.Queue[Batch | Exception] = queue.Queue(READ_AHEAD)
        self._ends = threading.Event()
        self._reader, self._steps = reader, steps
        # A daemon: a rank that fails does not wait for a read that may never end.
        self._thread = threading.Thread(target=self._run, name="reads-ahead", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        found = self._found.get()
        if isinstance(found, Exception):
            raise found
        return found

    def end(self) -> None:
        """Let the thread end: after what it is reading, if it is; nobody waits for that."""
        self._ends.set()
        with suppress(queue.Empty):
            self._found.get_nowait()  # room for what it has read

    def _run(self) -> None:
        for step in self._steps:
            if self._ends.is_set():
                return
            try:
                found: Batch | Exception = self._reader._read(step)
            except Exception as error:  # told where the step wants it
                found = error
            self._found.put(found)
            if isinstance(found, Exception):
                return
