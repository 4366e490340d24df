"""Detect whether other programs disturbed work on a CPU core, and choose which of many timings count.

Two things slow work down, and they show in different places. Another program on the same core makes a process wait for
it: wall-clock time advances while CPU time does not, so CPU time is the measure; caches are colder after each wait, so
passes that waited little are preferred. Another guest on the sibling hyperthread of a virtual machine's core shows in
no counter: no steal time, and CPU time counts in full. A loop of plain Python suffers most, so it serves as a probe: on
the machine of docs/log.md it takes twice as long, for a second or a few, while convolutions take 1.4 × and matrix
products 1.1 × as long.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

LOOPS, TURNS = 5_000, 3  # a tenth of a millisecond each
CHECK_SECONDS = 0.1  # on each core
_LEAST = "DEJAVU_LEAST_SAMPLE_SECONDS"
DISTURBED = 1.25  # times the undisturbed duration of the loop, or of a piece of work on the wall clock


def telling(least_sample_seconds: float) -> dict[str, str]:
    """Return the variable that tells ranks which measure the fastest look at a core that is known of their host."""
    return {_LEAST: str(least_sample_seconds)}


def least_told() -> float:
    """Return what `telling` told this process, in seconds; inf: nothing."""
    return float(os.environ.get(_LEAST, math.inf))


def sample_seconds() -> float:
    """Time the probe loop on this core now; waiting for other programs does not count."""
    return median(_loop_seconds() for _ in range(TURNS))


def _loop_seconds() -> float:
    started, total = time.thread_time(), 0
    for number in range(LOOPS):
        total += number
    return time.thread_time() - started


class InterferenceProbe:
    """Times the probe loop before and after each piece of work on one core.

    Attributes:
        least_seconds: the fastest look so far, which is taken for one that nobody disturbed; where an earlier one on
            this host is known, the search begins with it.
    """

    def __init__(self, least_seconds: float = math.inf) -> None:
        self.least_seconds, self._before = least_seconds, 0.0

    def sample(self, seconds: float | None = None) -> float:
        """Sample now; return the slower of this and the last sample, those before and after a piece of work.

        Args:
            seconds: the loop's time now, where another process has sampled it.
        """
        before, self._before = self._before, sample_seconds() if seconds is None else seconds
        self.least_seconds = min(self.least_seconds, self._before)
        return max(before, self._before)

    def slowdown(self, seconds: float) -> float:
        """Return the slowdown of work with this sample; 1.0 where it was undisturbed, as far as is known by now."""
        return seconds / self.least_seconds


def undisturbed(slowdowns: Sequence[float], least: int = 0) -> list[int]:
    """Return which pieces of work with these slowdowns were undisturbed; at least `least`, the best ones."""
    best = set(sorted(range(len(slowdowns)), key=slowdowns.__getitem__)[:least])
    return [k for k, slowdown in enumerate(slowdowns) if k in best or slowdown <= DISTURBED]


class TimedWork(NamedTuple):
    """The timing of one piece of work, and how it was disturbed.

    Attributes:
        seconds: CPU time where other programs may share the core, otherwise wall-clock time.
        stretch: wall-clock seconds over seconds without waiting for other programs; 1.0: it never waited.
        slowdown: of the probe loop around it (`InterferenceProbe.slowdown`).
    """

    seconds: float
    stretch: float = 1.0
    slowdown: float = 1.0

    @property
    def is_disturbed(self) -> bool:
        return max(self.stretch, self.slowdown) > DISTURBED


class Counted(NamedTuple):
    """The timings that count.

    Attributes:
        places: their indices, in order.
        disturbed_share: the share of these that was disturbed by other work.
    """

    places: tuple[int, ...]
    disturbed_share: float


def counted(timings: Sequence[TimedWork], least: int = 1) -> Counted:
    """Select the undisturbed timings, or, where these are fewer than `least`, the better half of all.

    Other work only adds time, so the fastest disturbed timings are closest to the undisturbed time. A timing with a
    slow probe loop ranks after one that waited, which is off by less: only by the wait's effect on caches.

    Args:
        least: at least so many count, if there are so many.
    """
    order = sorted(range(len(timings)), key=lambda k: _badness(timings[k]))
    clean = sum(not one.is_disturbed for one in timings)
    number = clean if clean >= least else max(least, len(timings) // 2)
    places = tuple(sorted(order[:number]))
    disturbed = sum(timings[k].is_disturbed for k in places)
    return Counted(places, disturbed / len(places) if places else 0.0)


def _badness(one: TimedWork) -> tuple[bool, bool, float]:
    return one.is_disturbed, one.slowdown > DISTURBED, one.seconds


def waited_seconds(*, all_threads: bool = True) -> float:
    """Return how long this process was runnable but waited for a core; 0.0 if the kernel does not tell.

    Waiting for a message does not count, waiting while another program has the core does (`run_delay`, Linux's
    Documentation/scheduler/sched-stats). Under a CPU quota it is 0.0: pauses due to the quota look the same, but are
    not other programs' work.

    Args:
        all_threads: of all threads together; those that share a core wait for each other, too. Otherwise of the calling
            thread alone: while it computes, other threads of its process wait for it, which is no disturbance.
    """
    if _is_in_slices():
        return 0.0
    return sum(map(_waited_seconds, _threads() if all_threads else [Path("/proc/thread-self")]))


def _waited_seconds(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # the thread has ended, or the kernel has no such counter
        return 0.0


def _threads() -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir("/proc/self/task")]
    except OSError:
        return []


@lru_cache(maxsize=1)
def _is_in_slices() -> bool:
    try:
        return has_quota(Path("/proc/self/cgroup").read_text())
    except OSError:
        return False


def has_quota(groups: str, root: Path = Path("/sys/fs/cgroup")) -> bool:
    """Return whether a process in these control groups, or their ancestors, has a CPU quota.

    Args:
        groups: the contents of `/proc/PID/cgroup`.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder, name, unlimited = (root / "cpu", "cpu.cfs_quota_us", "-1") if controllers else (root, "cpu.max", "max")
        for above in (Path(path), *Path(path).parents):
            try:
                limit = (folder / str(above).lstrip("/") / name).read_text().split()[0]
            except (OSError, IndexError):  # the root has no such file, and a container may hide it
                continue
            if limit != unlimited:
                return True
    return False


def are_quiet(num_cores: int, least_sample_seconds: float = math.inf) -> bool:
    """Return whether the machine is quiet now: no other program on the first `num_cores` cores, and none is slow.

    Args:
        least_sample_seconds: the fastest sample of a core of this host that is known.
    """
    # A child process, because threads of this one take turns. As a plain file it imports nothing and starts at once.
    words = [sys.executable, "-I", __file__, str(num_cores)]
    seen = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    least = min(least_sample_seconds, *(sample for _, sample in seen))
    return all(not TimedWork(0.0, stretch, sample / least).is_disturbed for stretch, sample in seen)


def _check(num_cores: int) -> list[tuple[float, float]]:
    """Return for each core a busy process's wall-clock time over its CPU time, and the median sample."""
    seen = []
    for core in sorted(os.sched_getaffinity(0))[:num_cores]:
        os.sched_setaffinity(0, {core})
        looks, began, busy = list[float](), time.perf_counter(), time.thread_time()
        while time.perf_counter() - began < CHECK_SECONDS:
            looks.append(sample_seconds())
        seen.append(((time.perf_counter() - began) / (time.thread_time() - busy), median(looks)))
    return seen


if __name__ == "__main__":
    print(json.dumps(_check(int(sys.argv[1]))))
