"""How a proof of thousands of operators falls with workers: its parts measured here, put on W workers on paper.

The proof of `coarse` splits the range of bottlenecks. Which ranges have to be looked at follows from the gap that is
proved, not from their order, so what one worker looked at is put on W: a range waits for the one that it is half of,
and for a worker, the least bound first. The range is split into W before any is looked at, and each number of ranges
has its own proof, measured. What is known of a range is sent to its worker and back. Setting up, which each worker
does, and the search for the plan are not divided.

On paper only: plans that prices bring forth in one range speed up the next, which workers of their own would not see.
"""

from __future__ import annotations

import heapq
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.search.generated import operators
from benchmarks.search.scale import NUM_TYPES
from dejavu.plans import Problem, SearchResult
from dejavu.search._base import Incumbent
from dejavu.search.coarse import Coarse
from dejavu.search.coarse.loops import load_compiled_loops
from dejavu.search.coarse.ranges import Range
from dejavu.search.coarse.windowed import Looks, WindowedBound

SIZES = ((2_000, 128, 0.0199), (4_000, 256, 0.0199), (10_000, 1_024, 0.0199))  # operators, devices, gap to prove
QUICK: dict[str, Any] = {"sizes": ((1_000, 64, 0.05),), "budget_seconds": 10.0}
WORKERS = (1, 2, 8, 64)
NETWORK_BYTES_PER_SECOND = 1.25e9  # 10 Gbit/s
PROOF_SECONDS = 600.0  # at most
CLOSE = 1e-3  # percentage points, of gaps


@dataclass(frozen=True)
class Task:
    """A range that was looked at.

    Attributes:
        proof: by the price that it proves; one begins when the one before has ended.
        seconds: that it took, alone.
        sent_bytes: of what is known of it, which a worker is sent, and sends back of its halves.
        halves: by their numbers.
    """

    proof: float
    bound: float
    number: int
    seconds: float
    sent_bytes: int
    halves: tuple[int, ...]


class Recorded(WindowedBound):
    """The bound, which remembers what it looked at."""

    def __init__(self, problem: Problem, best: Incumbent, num_ranges: int) -> None:
        super().__init__(problem, best, num_ranges)
        self.tasks: list[Task] = []

    def split(self, at: Range, target: float, looks: Looks) -> list[Range]:
        started = time.perf_counter()
        parts = super().split(at, target, looks)
        seconds = time.perf_counter() - started
        sent = sum(len(pickle.dumps(one.known)) for one in (at, *parts))
        self.tasks.append(Task(target, at.bound, at.tie, seconds, sent, tuple(part.tie for part in parts)))
        return parts


def on_workers(tasks: Sequence[Task], workers: int) -> float:
    """Return when the last of the tasks ends, in seconds: a list schedule of one proof after the other.

    A worker takes the waiting range with the least bound. One worker sends nothing.
    """
    proofs = dict.fromkeys(task.proof for task in tasks)
    return sum(_of_one_proof([task for task in tasks if task.proof == proof], workers) for proof in proofs)


def _of_one_proof(tasks: Sequence[Task], workers: int) -> float:
    by_number, halves = {task.number: task for task in tasks}, {number for task in tasks for number in task.halves}
    ready = [(task.bound, task.number) for task in tasks if task.number not in halves]
    heapq.heapify(ready)
    ends, now = list[tuple[float, int]](), 0.0
    while ready or ends:
        while ready and len(ends) < workers:
            task = by_number[heapq.heappop(ready)[1]]
            sending = task.sent_bytes / NETWORK_BYTES_PER_SECOND if workers > 1 else 0.0
            heapq.heappush(ends, (now + task.seconds + sending, task.number))
        now, number = heapq.heappop(ends)
        for half in by_number[number].halves:
            if half in by_number:
                heapq.heappush(ready, (by_number[half].bound, half))
    return now


def table(
    *, seed: int = 0, budget_seconds: float = 52.0, sizes: Sequence[tuple[int, int, float]] = SIZES
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Each size's plan, its proof in parts, and the parts on more and more workers.

    Args:
        budget_seconds: of the search for the plan, whose own proof is not taken.
    """
    load_compiled_loops()
    rows = [row for size in sizes for row in _rows(size, seed, budget_seconds)]
    gaps = {(num_operators, num_devices): gap for num_operators, num_devices, gap in sizes}
    summary = {  # of proofs that ended
        f"{row['operators']} operators, {row['devices']} devices, {row['workers']} workers": row["times_faster"]
        for row in rows
        if row["workers"] > 1 and row["gap_percent"] <= 100.0 * gaps[row["operators"], row["devices"]] + CLOSE
    }
    return "A proof's parts on W workers, on paper from measured parts", rows, {"times_faster": summary}


def _rows(size: tuple[int, int, float], seed: int, budget_seconds: float) -> Iterator[dict[str, Any]]:
    num_operators, num_devices, gap = size
    problem = operators(seed, num_operators=num_operators, num_devices=num_devices, num_types=NUM_TYPES)
    found = Coarse(relative_gap=gap).run(problem, budget_seconds=budget_seconds, seed=seed)
    assert isinstance(found, SearchResult), found
    alone_seconds = None
    for workers in WORKERS:
        best = Incumbent(problem, "coarse", PROOF_SECONDS)
        best.offer(found.plan)
        started = time.perf_counter()
        bound = Recorded(problem, best, workers)
        set_up_seconds = time.perf_counter() - started
        proved_seconds = bound.prove(gap)
        whole_seconds = time.perf_counter() - started - set_up_seconds
        work_seconds = sum(task.seconds for task in bound.tasks)
        seconds = on_workers(bound.tasks, workers) + max(whole_seconds - work_seconds, 0.0)
        alone_seconds = alone_seconds or seconds
        yield {
            "operators": num_operators,
            "devices": num_devices,
            "gap_percent": 100.0 * (1.0 - proved_seconds / best.step_seconds),
            "plan_seconds": found.seconds,
            "workers": workers,
            "ranges": len(bound.tasks),
            "work_seconds": work_seconds,
            "most_sent_bytes": max(task.sent_bytes for task in bound.tasks),
            "set_up_seconds": set_up_seconds,
            "proof_seconds": seconds,
            "times_faster": alone_seconds / seconds,
        }
