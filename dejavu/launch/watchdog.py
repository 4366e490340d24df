"""Watch for ranks that make no progress: print their stacks, name and kill the stuck one, upon which all restart.

Every rank writes a heartbeat into the job's folder after each step. On every host the agent's watchdog reads those of
all ranks; only the one on the stuck rank's host kills it.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

import psutil

from dejavu.runtime.process.heartbeat import DONE, NO_STEP, Beat, heartbeats, read_beats

STALL_SECONDS = 300.0  # without a step before a rank counts as stuck; a large checkpoint takes minutes
SLOWEST_STEPS = 5.0  # and never less than so many times the slowest step seen
SETUP_SECONDS = 900.0  # the same until every rank has done a step (weights, set-up, compilation) and after the last
STACK_SECONDS = 2.0  # for a rank to write its stack: it takes milliseconds, unless the rank cannot
OTHER_HOST_SECONDS = 10.0  # for ranks of other hosts, whose watchdog may wake up later
_WATCH = "DEJAVU_WATCH"


@dataclass(frozen=True)
class Watch:
    """What an agent's watchdog watches.

    Attributes:
        folder: the job's.
        stall_seconds: see `STALL_SECONDS`.
        num_ranks: of the world.
        ranks: for each of the agent's own, in order: its number in the world, its stages, its host.
    """

    folder: str
    stall_seconds: float
    num_ranks: int
    ranks: tuple[tuple[int, tuple[int, ...], str], ...]

    def to_environment(self) -> dict[str, str]:
        return {_WATCH: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Watch | None:
        """Read what the launcher asked for; None: nothing."""
        if _WATCH not in os.environ:
            return None
        data = json.loads(os.environ[_WATCH])
        ranks = ((rank, tuple(stages), host) for rank, stages, host in data.pop("ranks"))
        return cls(**data, ranks=tuple(ranks))


class Watchdog(threading.Thread):
    """Watches from an agent's process; kills the stuck rank with SIGKILL, upon which the agent restarts all ranks.

    Args:
        running: -> (attempt, process ids of the agent's own ranks that run now, by rank).

    Attributes:
        reasons: why a rank was killed, by attempt and rank.
    """

    def __init__(self, watch: Watch, running: Callable[[], tuple[int, Mapping[int, int]]]) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.watch, self.running = watch, running
        self.reasons: dict[tuple[int, int], str] = {}
        self._beats: dict[int, Beat] = {}

    def run(self) -> None:
        known, since, slowest, stalls = -1, time.monotonic(), 0.0, 0
        poll_seconds = min(max(self.watch.stall_seconds / 10, 0.2), 5.0)
        while True:
            time.sleep(poll_seconds)
            attempt, pids = self.running()
            beats, now = read_beats(self.watch.folder, attempt), time.monotonic()
            if attempt != known or not pids:
                known, self._beats, since, slowest, stalls = attempt, beats, now, 0.0, 0
            elif beats != self._beats:
                if self._in_steps(self._beats):  # the first step, which sets up and compiles, does not count
                    slowest = max(slowest, now - since)
                self._beats, since, stalls = beats, now, 0
            else:
                steady = max(self.watch.stall_seconds, SLOWEST_STEPS * slowest)
                limit = steady if self._in_steps(beats) else max(steady, SETUP_SECONDS)
                if now - since > limit:
                    stalls += 1
                    self._act(attempt, pids, now - since, only_own=stalls > 1)
                    since = time.monotonic()

    def _in_steps(self, beats: Mapping[int, Beat]) -> bool:
        """Return whether all ranks have done a step and none has finished: the next progress is then a step."""
        return len(beats) == self.watch.num_ranks and all(NO_STEP < beat.step < DONE for beat in beats.values())

    def _act(self, attempt: int, pids: Mapping[int, int], seconds: float, *, only_own: bool) -> None:
        """Print the stacks of this host's ranks, and kill the stuck one if it is one of them.

        Args:
            only_own: another host's stuck rank was not killed there, so one of this host's is.
        """
        stacks = self._ask_for_stacks(pids)
        for rank in pids:
            said = stacks.get(rank) or "no stack: it did not answer"
            print(f"watchdog: no progress for {seconds:.1f} s; rank {rank}:\n{said}", file=sys.stderr, flush=True)
        ranks = list(pids) if only_own else list(range(self.watch.num_ranks))
        rank = min(ranks, key=lambda rank: self._order(rank, stacks))
        if rank not in pids:
            print(f"watchdog: rank {rank}, on another host, seems to be stuck", file=sys.stderr, flush=True)
            return
        self.reasons[attempt, rank] = f"no progress for {seconds:.1f} s, {self._seen(rank, pids[rank], stacks)}"
        with suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGKILL)

    def _ask_for_stacks(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Collect the stacks of all ranks, other hosts' included, without those that do not respond."""
        paths = {rank: heartbeats(self.watch.folder) / f"{rank}.stack" for rank in range(self.watch.num_ranks)}
        for rank, pid in pids.items():
            if rank in self._beats:  # before its first heartbeat a rank has no handler, and the signal would kill it
                os.truncate(paths[rank], 0)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        began = time.monotonic()
        stacks: dict[int, str] = {}
        while any(
            time.monotonic() - began < (STACK_SECONDS if rank in pids else OTHER_HOST_SECONDS)
            for rank in paths
            if rank not in stacks
        ):
            time.sleep(STACK_SECONDS / 10)
            stacks = {r: text for r, path in paths.items() if path.exists() and (text := path.read_text())}
        return stacks

    def _order(self, rank: int, stacks: Mapping[int, str]) -> tuple[bool, bool, int, int]:
        """Sort the most suspicious first: no response; not waiting for others; fewer steps done; older heartbeat."""
        beat = self._beats.get(rank)
        step, written_ns = (beat.step, beat.written_ns) if beat else (NO_STEP, 0)
        return rank in stacks, waits(stacks.get(rank, "")), step, written_ns

    def _seen(self, rank: int, pid: int, stacks: Mapping[int, str]) -> str:
        beat = self._beats.get(rank)
        at = f"its last step was {beat.step}" if beat and beat.step != NO_STEP else "it had not done a step"
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return f"its process is stopped; {at}"
        if rank not in stacks:
            return f"it did not answer; {at}"
        return f"{'it waited like the others' if waits(stacks[rank]) else 'the others waited for it'}; {at}"


def waits(stack: str) -> bool:
    """Return whether the thread that took the signal waits for another rank, judged by its current line of Python."""
    line = re.search(r'^Current thread .*\n  File "(.+)", line (\d+)', stack, re.MULTILINE)
    if line is None:
        return False
    path, number = line.groups()
    return "torch/distributed/" in path or ".wait(" in linecache.getline(path, int(number))
