"""Other work beside what is measured: processes that this one starts and ends.

Run as `python -m benchmarks.competitors CORE [SEED]` it is one of them: it multiplies matrices and goes through more
memory than caches hold, all the time, or, with a seed, in bursts and pauses that nobody can foresee, each burst on a
core drawn anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from dejavu.runtime.process import die_with_parent, named_parent

WIDTH = 512  # of a square matrix; 1 MiB in float32
MEMORY_ELEMENTS = 4_000_000  # 16 MB in float32
BURST_SECONDS = (0.2, 3.0)  # the shortest and the longest, of bursts and pauses alike; drawn evenly in the logarithm
READY = "ready"


@contextmanager
def one_for_each_core() -> Iterator[None]:
    """A competitor on every core, all the time."""
    with _started([[str(core)] for core in sorted(os.sched_getaffinity(0))]):
        yield


@contextmanager
def an_unpredictable_one(seed: int) -> Iterator[None]:
    """One competitor that starts and stops, now on this core, now on that one."""
    with _started([["-1", str(seed)]]):
        yield


@contextmanager
def _started(words: Sequence[Sequence[str]]) -> Iterator[None]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **named_parent()}
    command = [sys.executable, "-m", "benchmarks.competitors"]
    processes = [
        subprocess.Popen([*command, *own], env=environment, stdout=subprocess.PIPE, text=True) for own in words
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != READY:
                raise RuntimeError(f"a competitor ended with {process.wait()} before it began")
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _work(until: float) -> None:
    matrix, memory = torch.randn(WIDTH, WIDTH), torch.randn(MEMORY_ELEMENTS)
    while time.monotonic() < until:
        torch.mm(matrix, matrix)
        memory.add_(1.0)


def _main(core: int, seed: int | None) -> None:
    die_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    print(READY, flush=True)
    if seed is None:
        os.sched_setaffinity(0, {core})
        _work(float("inf"))
    draws = np.random.default_rng(seed)
    shortest, longest = np.log(BURST_SECONDS)
    while True:
        burst, pause = np.exp(draws.uniform(shortest, longest, size=2))
        os.sched_setaffinity(0, {int(draws.choice(cores))})
        _work(time.monotonic() + burst)
        time.sleep(pause)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
