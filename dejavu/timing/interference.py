"""Whether work on a CPU core had other work beside it, and which of many timings count.

Two things slow work down, and they show in different places. Another program on the same core makes a process wait for
it: the clock runs on while its processor time does not, which then is the time that counts; caches are colder after
each wait, so passes that waited little count first. Another guest on the sibling of a virtual machine's hardware
thread shows in no counter: no steal time, and processor time counts in full. A loop of plain Python suffers most, so it
tells: on the machine of docs/log.md it takes twice as long, for a second or a few, while convolutions take 1.4 × and
matrix products 1.1 × as long.
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
DISTURBED = 1.25  # times what the loop takes, or what a piece of work takes on the clock, when nobody disturbs it


def sample_seconds() -> float:
    """What the loop takes of this core now; waiting for other programs does not count."""
    return median(_loop_seconds() for _ in range(TURNS))


def _loop_seconds() -> float:
    started, total = time.thread_time(), 0
    for number in range(LOOPS):
        total += number
    return time.thread_time() - started


class InterferenceProbe:
    """Looks before and after each piece of work on one core.

    Attributes:
        least_seconds: the fastest look so far, which is taken for one that nobody disturbed; where an earlier one on
            this host is known, the search begins with it.
    """

    def __init__(self, least_seconds: float = math.inf) -> None:
        self.least_seconds, self._before = least_seconds, 0.0

    def sample(self, seconds: float | None = None) -> float:
        """The slower look of now and the last call, so of those before and after a piece of work.

        Args:
            seconds: what the loop takes now, where another process has looked.
        """
        before, self._before = self._before, sample_seconds() if seconds is None else seconds
        self.least_seconds = min(self.least_seconds, self._before)
        return max(before, self._before)

    def slowdown(self, seconds: float) -> float:
        """Of a piece of work with this look; 1.0 where nobody disturbed it, as far as is known by now."""
        return seconds / self.least_seconds


def undisturbed(slowdowns: Sequence[float], least: int = 0) -> list[int]:
    """Which pieces of work with these slowdowns nobody disturbed; at least as many as `least`, the best ones."""
    best = set(sorted(range(len(slowdowns)), key=slowdowns.__getitem__)[:least])
    return [k for k, slowdown in enumerate(slowdowns) if k in best or slowdown <= DISTURBED]


class TimedWork(NamedTuple):
    """One piece of work, and what was beside it.

    Attributes:
        seconds: what counts: processor time where other programs may share the core, otherwise the clock's.
        stretch: seconds on the clock over seconds without waiting for other programs; 1.0: it never waited.
        slowdown: of the loop beside it (`InterferenceProbe.slowdown`).
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
        places: which ones, in order.
        disturbed_share: of these, the share that had other work beside it.
    """

    places: tuple[int, ...]
    disturbed_share: float


def counted(timings: Sequence[TimedWork], least: int = 1) -> Counted:
    """The undisturbed timings, or, where these are fewer than `least`, the better half of all.

    Other work only adds time, so of what was disturbed the fastest are nearest to what the work takes alone; a timing
    beside a slow loop is wrong by more than one that waited, which is wrong by what the wait did to caches, and comes
    after it.

    Args:
        least: so many count at least, if there are so many.
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
    """How long this process has waited for a core that it could have used; 0.0 if the kernel is mute.

    Waiting for a message is not in it, waiting while another program has the core is (`run_delay`, Linux's
    Documentation/scheduler/sched-stats). Under a CPU quota it is 0.0: pauses that the quota makes look the same, and
    are not others' work.

    Args:
        all_threads: of all threads together; those that share a core wait for each other, too. Otherwise of the calling
            one alone: where it computes, others of its process wait for it, and that disturbs nobody.
    """
    if _is_in_slices():
        return 0.0
    return sum(map(_waited_seconds, _threads() if all_threads else [Path("/proc/thread-self")]))


def _waited_seconds(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # the thread has ended, or the kernel keeps no such account
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
    """Whether a process in these control groups, or in one above them, gets a limited part of the processors.

    Args:
        groups: what `/proc/PID/cgroup` says.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder, name, unlimited = (root / "cpu", "cpu.cfs_quota_us", "-1") if controllers else (root, "cpu.max", "max")
        for above in (Path(path), *Path(path).parents):
            try:
                limit = (folder / str(above).lstrip("/") / name).read_text().split()[0]
            except (OSError, IndexError):  # the root has no such file, nor has what a container does not show
                continue
            if limit != unlimited:
                return True
    return False


def are_quiet(num_cores: int, least_look_seconds: float = math.inf) -> bool:
    """Whether this moment is one to measure in: nobody else is on the first so many cores, and none of them is slow.

    Args:
        least_look_seconds: the fastest look at a core of this host that is known.
    """
    # A process of its own: threads of this one take turns. As a plain file it imports nothing and starts at once.
    words = [sys.executable, "-I", __file__, str(num_cores)]
    seen = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    least = min(least_look_seconds, *(sample for _, sample in seen))
    return all(not TimedWork(0.0, stretch, sample / least).is_disturbed for stretch, sample in seen)


def _check(num_cores: int) -> list[tuple[float, float]]:
    """Of each core what a busy process takes on the clock over its processor time, and the median look."""
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
