"""What is done to a flow that runs, and in which phases."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

import psutil

from benchmarks.pipeline.full_disk import Filler

PHASES = {  # what the log says when it has begun
    "starting": "starting Prefect's server",
    "measuring": "for flow 'profile'",
    "searching": "for flow 'plan'",
    "trials": "for flow 'initialize'",
    "training": "step 20 of",
}
PAUSE_SECONDS = 5.0  # of a rank that is stopped, and goes on
SLOW_LINK = "20mbit"
BURST = "256kb"  # a packet of the loopback has up to 64 KiB, and one larger than the burst never passes
INTERRUPTED, FAILED = 130, 1


@dataclass(frozen=True)
class Struck:
    """The flow that a fault strikes.

    Attributes:
        process: the command, which is the first of a session of its own.
        disk: fills the disk that its project is on; None: not permitted here.
    """

    process: psutil.Popen
    disk: Filler | None
    chance: random.Random

    def ranks(self) -> list[psutil.Process]:
        return [child for child in self._children() if child.name().startswith("rank ")]

    def running(self, module: str) -> list[psutil.Process]:
        """Its processes that were started as a module, or as a fork of one."""
        found = []
        for child in self._children():
            with suppress(psutil.Error):
                if module in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def _children(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return list(self.process.children(recursive=True))
        return []


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        phases: in which it may strike.
        strike: does it; returns whether there was something to strike, once the fault needs nothing undone by itself.
        exits: codes with which the flow may end, besides 0.
    """

    phases: tuple[str, ...]
    strike: Callable[[Struck], bool]
    exits: tuple[int, ...] = ()


def _kill(found: list[psutil.Process], chance: random.Random) -> bool:
    if not found:
        return False
    with suppress(psutil.NoSuchProcess):
        chance.choice(found).kill()
    return True


def _signal(struck: Struck, number: signal.Signals, *, group: bool = False) -> bool:
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(struck.process.pid, number)
    return True


def _pause(struck: Struck) -> bool:
    found = struck.ranks()
    if found:
        rank = struck.chance.choice(found)
        rank.suspend()
        Timer(PAUSE_SECONDS, rank.resume).start()
    return bool(found)


def _slow(struck: Struck) -> bool:
    """Limit the loopback of the flow's own network namespace; the machine's is not touched."""
    own, ours = (Path(f"/proc/{pid}/ns/net").readlink() for pid in (struck.process.pid, os.getpid()))
    if own == ours:
        return False
    words = ["nsenter", f"--net=/proc/{struck.process.pid}/ns/net", "tc", "qdisc", "add", "dev", "lo", "root", "tbf"]
    done = subprocess.run([*words, "rate", SLOW_LINK, "burst", BURST, "latency", "400ms"], capture_output=True)
    return done.returncode == 0


def _fill(struck: Struck) -> bool:
    if struck.disk is not None:
        struck.disk()
    return struck.disk is not None


ANY = tuple(PHASES)
AFTER_START = ANY[1:]
FAULTS = {
    "a rank is killed": Fault(("training",), lambda s: _kill(s.ranks(), s.chance)),
    "a rank pauses": Fault(("training",), _pause),
    "the agent is killed": Fault(("training",), lambda s: _kill(s.running("dejavu.launch.agent"), s.chance)),
    "a Dask worker is killed": Fault(("trials",), lambda s: _kill(s.running("forkserver"), s.chance)),
    "the flow is killed": Fault(ANY, lambda s: _signal(s, signal.SIGKILL), (-signal.SIGKILL,)),
    "the flow is terminated": Fault(AFTER_START, lambda s: _signal(s, signal.SIGTERM), (-signal.SIGTERM, 143, FAILED)),
    "Ctrl-C": Fault(ANY, lambda s: _signal(s, signal.SIGINT, group=True), (INTERRUPTED,)),
    "the disk fills": Fault(AFTER_START, _fill, (FAILED,)),
    "links slow down": Fault(("trials", "training"), _slow),
    "Prefect's server is killed": Fault(
        AFTER_START, lambda s: _kill(s.running("flows.temporary_server"), s.chance), (FAILED,)
    ),
}
