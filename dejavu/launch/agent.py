"""Torch's elastic agent as a child that ends when its parent ends; takes torchrun's arguments.

If the launcher asks for it, the agent records which rank ended how, and kills ranks that make no progress.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import torch.distributed.elastic.multiprocessing.api
import torch.distributed.launcher.api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.run import main

from dejavu.launch.watchdog import Watch, Watchdog
from dejavu.launch.zygote import Forked, Zygote, handler_of, module_of
from dejavu.runtime.process import ATTEMPT, die_with_parent, named_parent
from dejavu.runtime.process.failures import Failure, first_error, write_failure
from dejavu.runtime.process.heartbeat import read_beats


class WatchedAgent(LocalElasticAgent):
    """An agent that records failures, watches progress, and numbers attempts alike on every host."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.attempt = -1
        self.failed_after: int | None = None  # the last step of the previous attempt, if that failed by itself
        self.watch = Watch.from_environment()
        self.watchdog = Watchdog(self.watch, self._running) if self.watch else None
        if self.watchdog:
            self.watchdog.start()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert worker_group.store is not None
        self.attempt += 1
        if worker_group.group_rank == 0:
            worker_group.store.set(ATTEMPT, str(self.attempt))
        self.attempt = int(worker_group.store.get(ATTEMPT))  # the store belongs to this rendezvous alone
        os.environ[ATTEMPT] = str(self.attempt)  # for the ranks
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Look at exit codes before torch terminates the other ranks: it then counts those as failures too.
        ended = {local: code for local, process in self._processes().items() if (code := process.poll())}
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self.watch:
            ended = self._first(ended or self._failed(worker_group, result))
            for local_rank, exit_code in ended.items():
                self._tell(local_rank, exit_code)
            if worker_group.group_world_size == 1 and self._would_fail_again(ended):
                self._remaining_restarts = 0
        return result

    def _first(self, ended: dict[int, int]) -> dict[int, int]:
        """Return the rank that failed by itself before others failed for want of it, where it is one of this host's."""
        assert self.watch
        rank = first_error(self.watch.folder, self.attempt)
        local_rank = next((k for k, (own, _, _) in enumerate(self.watch.ranks) if own == rank), None)
        if local_rank is None or any(code < 0 for code in ended.values()):  # a signal ended the first
            return ended
        return {local_rank: ended.get(local_rank, 1)}

    def _would_fail_again(self, ended: dict[int, int]) -> bool:
        """Return whether ranks failed by themselves, not by a signal, and got no further than the attempt before."""
        assert self.watch
        if any(exit_code < 0 for exit_code in ended.values()):
            self.failed_after = None
            return False
        before = self.failed_after
        self.failed_after = max(
            (beat.step for beat in read_beats(self.watch.folder, self.attempt).values()), default=-1
        )
        return before is not None and self.failed_after <= before

    def _failed(self, worker_group: WorkerGroup, result: RunResult) -> dict[int, int]:
        local_ranks = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        codes = {local_ranks[rank]: failure.exitcode for rank, failure in result.failures.items()}
        return {local: code for local, code in codes.items() if code != -signal.SIGTERM}

    def _processes(self) -> dict[int, subprocess.Popen[bytes] | Forked]:
        """Return this host's ranks by their local rank."""
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _tell(self, local_rank: int, exit_code: int) -> None:
        assert self.watch and self.watchdog
        rank, stages, host = self.watch.ranks[local_rank]
        why = self.watchdog.reasons.get((self.attempt, rank), "")
        failure = Failure(self.attempt, rank, stages, host, exit_code, why)
        print(failure, file=sys.stderr, flush=True)
        write_failure(self.watch.folder, failure)

    def _running(self) -> tuple[int, dict[int, int]]:
        assert self.watch
        running = {local: process.pid for local, process in self._processes().items() if process.returncode is None}
        return self.attempt, {self.watch.ranks[local_rank][0]: pid for local_rank, pid in running.items()}


def _end(number: int, frame: object) -> None:
    """End by a signal before there are ranks, as Python ends: with what is to be done at the end."""
    sys.exit(128 + number)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)  # the agent ends its ranks on SIGTERM, by torch's handler
    os.environ.update(named_parent())  # for the ranks
    module = module_of(sys.argv)
    zygote = Zygote(module) if module else None  # before this process has any other thread
    signal.signal(signal.SIGTERM, _end)
    try:
        # torchrun names both there
        launcher: Any = torch.distributed.launcher.api
        processes: Any = torch.distributed.elastic.multiprocessing.api
        launcher.LocalElasticAgent = WatchedAgent
        processes.get_subprocess_handler = handler_of(zygote)
        with tempfile.TemporaryDirectory(prefix="dejavu-agent-") as aside:  # torch would leave a folder for each launch
            main([f"--log-dir={aside}", *sys.argv[1:]])
    finally:
        if zygote:
            zygote.end()
