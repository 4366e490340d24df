"""A proof's parts on W workers: one worker takes their sum, many the longest path, and no number takes less."""

from __future__ import annotations

import random

import pytest

from benchmarks.search import workers
from benchmarks.search.workers import Task, on_workers


def trees(seed: int, sent_bytes: int = 0) -> list[Task]:
    """Some proofs in turn, each of some ranges and their halves."""
    draw, tasks, number = random.Random(seed), list[Task](), 0
    for proof in range(draw.randint(1, 3)):
        open_ = list(range(number, number + draw.randint(1, 4)))
        number = open_[-1] + 1
        last = number + 30
        while open_:
            at = open_.pop(draw.randrange(len(open_)))
            halves = (number, number + 1) if draw.random() < 0.6 and number < last else ()
            number += len(halves)
            open_ += halves
            tasks.append(Task(proof, draw.random(), at, draw.random(), sent_bytes, halves))
    return tasks


def longest_path(tasks: list[Task]) -> float:
    """Of each proof, one after the other."""
    known = {task.number: task for task in tasks}

    def path(task: Task) -> float:
        return task.seconds + max((path(known[half]) for half in task.halves), default=0.0)

    return sum(max(path(one) for one in tasks if one.proof == proof) for proof in {task.proof for task in tasks})


@pytest.mark.parametrize("seed", range(20))
def test_workers_take_between_the_longest_path_and_the_sum(seed: int) -> None:
    tasks = trees(seed)
    total, path = sum(task.seconds for task in tasks), longest_path(tasks)
    assert on_workers(tasks, 1) == pytest.approx(total)
    assert on_workers(tasks, len(tasks)) == pytest.approx(path)
    for count in (2, 3, 8):
        seconds = on_workers(tasks, count)
        assert max(path, total / count) <= seconds + 1e-12
        assert seconds <= total / count + path + 1e-12, "Graham's bound of list scheduling"


def test_what_is_sent_takes_time_but_for_one_worker() -> None:
    quick, slow = trees(3), trees(3, sent_bytes=10**9)
    assert on_workers(slow, 1) == on_workers(quick, 1)
    assert on_workers(slow, 4) > on_workers(quick, 4)


def test_a_proof_of_hundreds_of_operators_is_put_on_workers() -> None:
    _, rows, _ = workers.table(sizes=((600, 48, 0.1),), budget_seconds=2.0)
    by_count = {row["workers"]: row["proof_seconds"] for row in rows}
    assert list(by_count) == list(workers.WORKERS)
    assert all(row["proof_seconds"] > 0 and row["ranges"] >= 1 for row in rows)
    assert all(0.0 <= row["gap_percent"] < 100.0 for row in rows), "no bound is above the plan"
