"""The agent of one host: it forks ranks as the launcher orders, tells how they ended, and serves the host's memory."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__

from dejavu.launch.warm.board import Board, End, Order, Probe, Run, Seat
from dejavu.launch.watchdog import Watch, Watchdog
from dejavu.launch.zygote import Forked, Zygote
from dejavu.runtime.process import ATTEMPT, die_with_parent, named_parent
from dejavu.runtime.process.failures import Failure, write_failure
from dejavu.runtime.process.own_rank import HOST
from dejavu.runtime.process.pace import PACE
from dejavu.runtime.snapshots import Memory, MemoryServer, inventory
from dejavu.runtime.snapshots.files import forget, is_writing
from dejavu.runtime.snapshots.serving import probe_seconds

WORKER, WARMING = "dejavu.runtime.worker", "dejavu.runtime.job.warming"
POLL_SECONDS = 0.02
BEAT_SECONDS = 0.25
WRITING_SECONDS = 1.0  # for ranks to complete the snapshots that they have begun
PROBES = 2  # of a link; the faster one counts
IN_MEMORY = Path("/dev/shm")
_FOLDER = "dejavu-memory-"


class WarmAgent:
    """Carries out the launcher's orders on one host.

    Args:
        memory: the folder of snapshots.
    """

    def __init__(self, seat: Seat, zygote: Zygote, memory: Path) -> None:
        self._seat, self._zygote, self._memory = seat, zygote, memory
        self._board = Board(TCPStore(seat.launcher, seat.port, is_master=False), seat.token)
        self._server = MemoryServer(memory, seat.address, seat.token)
        self._ranks: dict[int, Forked | subprocess.Popen[bytes]] = {}
        self._run: Run | None = None
        self._is_prepared = False
        self._watchdog = Watchdog(Watch(seat.folder, seat.stall_seconds, 0, ()), self._running)
        self._watchdog.start()

    def serve(self) -> None:
        """Follow orders until the last one, or until the launcher has gone."""
        number, badge = self._seat.first_order, self._seat.badge
        self._prepare()  # a host that comes later
        self._board.write(f"ready/{badge}", self._server.url)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            while True:
                order = self._board.ordered(number)
                if order is not None:
                    self._board.write(f"done/{number}/{badge}", self._obey(order))
                if isinstance(order, End):
                    return
                number += order is not None
                self._tell_ends()
                if order is None:
                    time.sleep(POLL_SECONDS)
        except RuntimeError as error:  # of the store: there is no launcher any more, or somebody else
            print(f"no launcher to obey: {error}", file=sys.stderr)
        finally:
            self._kill()
            self._server.close()

    def _beat(self) -> None:
        """Show that this host is there, also while an order takes long."""
        with suppress(RuntimeError):  # of the store: there is no launcher any more
            for beat in itertools.count():
                self._board.write(f"beat/{self._seat.badge}", beat)
                time.sleep(BEAT_SECONDS)

    def _obey(self, order: Order) -> object:
        """Carry out an order, and return the answer to it."""
        if isinstance(order, Run):
            self._start(order)
            return None
        if isinstance(order, Probe):
            return self._probe(order) if order.host == self._seat.host else None
        self._stop()
        return inventory(self._memory)

    def _probe(self, order: Probe) -> dict[str, float]:
        """Measure a message from each of the other hosts; one that does not answer is absent."""
        found = {}
        for host, url in order.urls.items():
            with suppress(OSError):
                found[host] = min(probe_seconds(url, self._seat.token) for _ in range(PROBES))
        return found

    def _prepare(self) -> None:
        """Let the zygote compute once what all ranks of the job compute alike."""
        job = Path(self._seat.folder) / "job.json"
        if not self._is_prepared and job.exists():
            self._zygote.prepare(WARMING, str(job))
            self._is_prepared = True

    def _start(self, run: Run) -> None:
        self._prepare()
        forget(self._memory, {run.attempt} | ({run.start.attempt} if run.start else set()))
        self._run = run
        own, seat = run.ranks.get(self._seat.host, ()), self._seat
        self._watchdog.watch = Watch(
            seat.folder, seat.stall_seconds, run.num_ranks, tuple((rank, stages, seat.host) for rank, stages in own)
        )
        memory = Memory(str(self._memory), seat.host, run.urls, seat.token, run.every_steps, run.copies, run.start)
        for local, (rank, _) in enumerate(own):
            places = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": run.num_ranks, ATTEMPT: run.attempt, PACE: 1}
            environment = {
                **os.environ,
                **{name: str(value) for name, value in places.items()},
                "MASTER_ADDR": seat.launcher,
                "MASTER_PORT": str(seat.port),
                HOST: seat.host,
                **memory.to_environment(),
            }
            self._ranks[rank] = self._rank([sys.executable, "-u", "-m", WORKER, run.job], environment)

    def _rank(self, words: list[str], environment: Mapping[str, str]) -> Forked | subprocess.Popen[bytes]:
        forked = self._zygote.fork(words, environment)
        return forked or subprocess.Popen(words, env=dict(environment), start_new_session=True)

    def _tell_ends(self) -> None:
        for rank, process in list(self._ranks.items()):
            code = process.poll()
            if code is None:
                continue
            assert self._run
            del self._ranks[rank]
            if code:
                stages = dict(self._run.ranks[self._seat.host])[rank]
                why = self._watchdog.reasons.get((self._run.attempt, rank), "")
                failure = Failure(self._run.attempt, rank, stages, self._seat.host, code, why)
                print(failure, file=sys.stderr, flush=True)
                write_failure(self._seat.folder, failure)
            self._board.write(f"ended/{self._run.attempt}/{rank}", code)

    def _stop(self) -> None:
        """End all ranks, when they have completed the snapshots that they had begun."""
        deadline = time.monotonic() + WRITING_SECONDS
        while is_writing(self._memory) and time.monotonic() < deadline:
            self._tell_ends()
            if not self._ranks:
                break  # who had begun has gone
            time.sleep(POLL_SECONDS / 4)
        self._kill()

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, {}
        for process in ranks.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for process in ranks.values():
            process.wait()

    def _running(self) -> tuple[int, dict[int, int]]:
        attempt = self._run.attempt if self._run else -1
        return attempt, {rank: process.pid for rank, process in self._ranks.copy().items()}


def _memory_folder() -> Path:
    """Make a folder in this host's memory, and delete those of agents that were killed."""
    root = IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
    for stale in root.glob(f"{_FOLDER}*"):
        pid = stale.name.removeprefix(_FOLDER)
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():  # ours is of one that had the same number
            shutil.rmtree(stale, ignore_errors=True)
    folder = root / f"{_FOLDER}{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder


def main() -> None:
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.update(named_parent())  # for the ranks
    seat = Seat.from_environment()
    zygote = Zygote(WORKER)  # before this process has any other thread
    memory = _memory_folder()
    try:
        zygote.wait()
        WarmAgent(seat, zygote, memory).serve()
    finally:
        zygote.end()
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    main()
