"""Objects that live in forked processes: results, state that stays, errors, deaths, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import psutil
import pytest

from dejavu.foundation.processes.homes import Homes
from tests.waiting import PATIENCE_SECONDS


@dataclass
class Counter:
    """Counts its calls."""

    name: str
    calls: list[int] = field(default_factory=list)


def count(counter: Counter, add: int) -> tuple[str, int, int]:
    counter.calls.append(add)
    return counter.name, sum(counter.calls), os.getpid()


def fail(counter: Counter, why: str) -> None:
    raise KeyError(f"{counter.name}: {why}")


def die_unless_in(counter: Counter, pid: int) -> str:
    if os.getpid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)
    return counter.name


def counters(number: int) -> list[Counter]:
    return [Counter(str(k)) for k in range(number)]


def all_of(number: int, add: int) -> list[tuple[int, tuple[int]]]:
    return [(k, (add,)) for k in range(number)]


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("num_homes", [1, 2, 3, 8])
def test_results_are_in_order_and_objects_keep_what_calls_did(num_homes: int, forks: bool) -> None:
    own = counters(5)
    with Homes(own, num_homes, forks=forks) as homes:
        first = homes.each(all_of(5, 1), count)
        again = homes.each(all_of(5, 10)[::-1], count)
    assert [one[:2] for one in first] == [(str(k), 1) for k in range(5)]
    assert [one[:2] for one in again] == [(str(k), 11) for k in reversed(range(5))]
    pids = {name: pid for name, _, pid in first}
    assert pids == {name: pid for name, _, pid in again}
    if forks and num_homes > 1:
        assert os.getpid() not in pids.values()
        assert len(set(pids.values())) == homes.num_homes
        assert all(pids[str(k)] == pids[str(homes.home_of(k))] for k in range(5))
        assert [counter.calls for counter in own] == [[]] * 5
        assert not any(map(psutil.pid_exists, pids.values()))
    else:
        assert set(pids.values()) == {os.getpid()}


def test_no_objects_need_no_homes() -> None:
    with Homes[Counter]([], 4, forks=True) as homes:
        assert homes.each([], count) == []


@pytest.mark.parametrize("forks", [False, True])
def test_an_error_of_a_call_is_raised_here_and_ends_the_homes(forks: bool) -> None:
    with pytest.raises(KeyError, match="1: why"), Homes(counters(2), 2, forks=forks) as homes:
        pids = {pid for _, _, pid in homes.each(all_of(2, 1), count)} - {os.getpid()}
        homes.each([(1, ("why",))], fail)
    assert len(pids) == (2 if forks else 0)
    assert not any(map(psutil.pid_exists, pids))


def test_objects_of_a_home_that_died_go_on_here_as_they_were() -> None:
    with Homes(counters(4), 2, forks=True) as homes:
        homes.each(all_of(4, 1), count)
        assert homes.each([(0, (os.getpid(),)), (2, (os.getpid(),))], die_unless_in) == ["0", "2"]
        found = homes.each(all_of(4, 10), count)
    assert [total for _, total, _ in found] == [10, 11, 10, 11]
    assert [pid == os.getpid() for _, _, pid in found] == [True, False, True, False]


PROGRAM = """
import time
from dejavu.foundation.processes.homes import Homes
def wait(kept):
    time.sleep(600)
with Homes([1, 2], 2, forks=True) as homes:
    print(*homes._pids, flush=True)
    homes.each([(0, ()), (1, ())], wait)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_homes_end_with_the_process_that_forked_them(number: signal.Signals) -> None:
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        program.send_signal(number)
        program.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(psutil.pid_exists, pids))
