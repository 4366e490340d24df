"""Real competitors: what the kernel and the clocks tell beside them, and that they end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from benchmarks.competitors import an_unpredictable_one, one_for_each_core
from benchmarks.measuring import _judged
from dejavu.timing.interference import are_quiet

pytestmark = pytest.mark.integration

# One process on the first core works for two tenths of a second of its own, and says what it waited meanwhile.
WORKING = """
import os, time
from dejavu.timing.interference import TimedWork, waited_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
waited, began, busy = waited_seconds(), time.perf_counter(), time.process_time()
while time.process_time() - busy < 0.2:
    pass
own = time.process_time() - busy
print(waited_seconds() - waited, TimedWork(own, (time.perf_counter() - began) / own).is_disturbed)
"""


def test_a_competitor_on_the_core_shows_in_what_was_waited() -> None:
    with one_for_each_core():
        done = subprocess.run([sys.executable, "-c", WORKING], capture_output=True, text=True, check=True)
        assert not are_quiet(1)
    waited, is_disturbed = done.stdout.split()
    assert is_disturbed == "True"
    if Path("/proc/self/schedstat").exists():  # the kernel keeps the account
        assert float(waited) > 0.02


@pytest.mark.parametrize("competitors", [one_for_each_core, lambda: an_unpredictable_one(3)])
def test_competitors_end(competitors: Callable[[], AbstractContextManager[None]]) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyError), competitors():
        started = set(psutil.Process().children(recursive=True)) - before
        assert started
        raise KeyError
    assert not any(process.is_running() for process in started)


def test_a_run_that_was_disturbed_throughout_is_judged_by_the_plans_other_runs() -> None:
    """Both predictions are of a quiet machine: a step beside other work says nothing of either."""
    calm = {"predicted_ms": 100.0, "without_memory_ms": 90.0, "measured_ms": 100.0, "measured_disturbed_share": 0.0}
    busy = {**calm, "measured_ms": 180.0, "measured_disturbed_share": 1.0}
    assert _judged(busy, [calm, busy]) == _judged(calm, [calm, busy])
    assert _judged(calm, [calm])["helps"] and not _judged({**calm, "predicted_ms": 111.0}, [calm])["helps"]
    assert _judged(busy, [busy])["error_percent"] == pytest.approx(100 * (100 / 180 - 1))
