"""Objects shared out among processes: each lives in one, which keeps what is computed about it from call to call.

Forked processes inherit the objects, so that nothing large is sent; results come back by pickle.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Concatenate, Generic, Self, TypeVar

from dejavu.foundation.processes.parents import PARENT, die_with_parent

Kept = TypeVar("Kept")
_R = TypeVar("_R")
_Call = tuple[int, tuple[Any, ...]]  # an object's index, further arguments

_kept: list[Any] = []  # of a forked process: all objects; it uses its own only


class Homes(Generic[Kept]):
    """Where objects live, and calls on them. A context; processes end with it, or with the process that forked them.

    Objects that follow each other live in different homes. A home that dies (out of memory) leaves its objects to this
    process, as they were when it was forked.

    Args:
        kept: the objects. A call gets one of them, of this process or of a fork, and may change it.
        num_homes: how many calls run side by side, at most.
        forks: whether homes are processes; else they are threads of this one. Only forks run Python side by side. With
            other threads that hold locks of a library which calls use, a fork may wait for ever.
    """

    def __init__(self, kept: Sequence[Kept], num_homes: int, *, forks: bool) -> None:
        self.kept = list(kept)
        self.num_homes = max(1, min(num_homes, len(self.kept)))
        self.forks = forks and self.num_homes > 1 and sys.platform == "linux"
        self._threads = ThreadPoolExecutor(self.num_homes, thread_name_prefix="home")
        self._forked = list[ProcessPoolExecutor | None]()
        self._pids = list[int]()
        if self.forks:
            self._fork()

    def home_of(self, index: int) -> int:
        """Return the number of the home where the object with this index lives."""
        return index % self.num_homes

    def each(self, calls: Sequence[_Call], function: Callable[Concatenate[Kept, ...], _R]) -> list[_R]:
        """Call the function, of a module, on the object of each index with the arguments; results in their order."""
        futures = [self._submitted(call, function) for call in calls]
        return [self._result(future, call, function) for future, call in zip(futures, calls, strict=True)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # nobody waits for what runs
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pool in (self._threads, *self._forked):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def _fork(self) -> None:
        context = get_context("fork")
        for _ in range(self.num_homes):
            pool = ProcessPoolExecutor(1, context, initializer=_move_in, initargs=(self.kept, os.getpid()))
            self._forked.append(pool)
            with warnings.catch_warnings():  # newer Pythons warn where other threads run; see `forks`
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pids.append(pool.submit(os.getpid).result())

    def _submitted(self, call: _Call, function: Callable[..., _R]) -> Future[_R]:
        index, args = call
        if self.forks and (pool := self._forked[self.home_of(index)]):
            with suppress(BrokenProcessPool):
                return pool.submit(_at_home, index, function, *args)
        return self._threads.submit(function, self.kept[index], *args)

    def _result(self, future: Future[_R], call: _Call, function: Callable[..., _R]) -> _R:
        index, args = call
        try:
            return future.result()
        except BrokenProcessPool:
            self._forked[self.home_of(index)] = None
            return function(self.kept[index], *args)


def _move_in(kept: list[Any], parent: int) -> None:
    """Begin a forked process. Ctrl-C is its parent's affair."""
    os.environ[PARENT] = str(parent)
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # threads of the parent's are not here; OpenMP would wait for them
    _kept[:] = kept


def _at_home(index: int, function: Callable[..., _R], *args: Any) -> _R:
    """Run a call where its object lives."""
    return function(_kept[index], *args)
