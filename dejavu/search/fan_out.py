"""Searches as tasks on a Dask client that is passed in, or in this process: restarts, parts of a search, variants.

A task is one `run`, so that its budget is its own. The answer does not depend on how many workers there are or which
is first: results are taken in the order in which they were asked for. How good a plan a task finds within its budget
does depend on how fast the worker is, as it would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.plans import Answer, Infeasible, NotFound, Problem, SearchResult
from dejavu.search._base import Search
from dejavu.search.exact import Exact


class Client(Protocol):
    """What is needed of `distributed.Client`."""

    def map(self, func: Callable[..., Any], *iterables: Any, pure: bool, key: str) -> list[Any]: ...

    def gather(self, futures: list[Any]) -> list[Any]: ...


def answers(tasks: Sequence[tuple[Search, Problem, int]], budget_seconds: float, client: Client | None) -> list[Answer]:
    """One answer for each (search, problem, seed), in their order.

    On a client each call has tasks of its own: the scheduler remembers none of an earlier call (pure=False). Those that
    finished on a worker that then dies are run again.
    """
    if client is None:
        return [_run(*task, budget_seconds) for task in tasks]
    columns = [list(column) for column in zip(*tasks, strict=True)]
    futures = client.map(_run, *columns, [budget_seconds] * len(tasks), pure=False, key="search")
    return client.gather(futures)


def restarts(
    search: Search, problem: Problem, seeds: Sequence[int], *, budget_seconds: float, client: Client | None = None
) -> Answer:
    """One problem searched from every seed: the cheapest plan, of equal ones the first, and the highest bound.

    Where no seed found a plan, a proof that there is none, if one of them has it.

    Raises:
        InputError: there are no seeds.
    """
    if not seeds:
        raise InputError("restarts need at least one seed")
    ended = answers([(search, problem, seed) for seed in seeds], budget_seconds, client)
    found = [answer for answer in ended if isinstance(answer, SearchResult)]
    bound = max((answer.lower_bound_seconds for answer in ended if not isinstance(answer, Infeasible)), default=0.0)
    if found:
        best = min(found, key=lambda result: result.step_seconds)
        return replace(best, lower_bound_seconds=min(bound, best.step_seconds))
    proof = next((answer for answer in ended if isinstance(answer, Infeasible)), None)
    return proof or replace(_first_miss(ended), lower_bound_seconds=bound)


def ranges(
    search: Exact,
    problem: Problem,
    num_ranges: int,
    *,
    budget_seconds: float,
    seed: int = 0,
    client: Client | None = None,
) -> Answer:
    """One exact search in parts, by ranges of the bottleneck: the cheapest plan, and the least of the parts' bounds.

    A first plan is looked for here, alone: it is every part's incumbent, and no better plan has a bottleneck above its
    price. Where there is none, that first search's answer is the answer. On one worker this takes longer than the
    search alone, because the parts do not know of each other's plans.

    Raises:
        InputError: there are no ranges.
    """
    if num_ranges < 1:
        raise InputError(f"num_ranges is {num_ranges}; wanted 1 or more")
    first = replace(search, relative_gap=1.0).run(problem, budget_seconds=budget_seconds, seed=seed)
    if not isinstance(first, SearchResult):
        return first
    edges = np.linspace(0.0, first.step_seconds, num_ranges + 1)
    edges[-1] = np.inf  # a bottleneck that is the price itself: all the rest of the step takes nothing
    parts = [
        replace(search, incumbent=first.plan, bottleneck_range_seconds=(float(low), float(high)))
        for low, high in pairwise(edges)
    ]
    ended = answers([(part, problem, seed) for part in parts], budget_seconds, client)
    found = [answer for answer in ended if isinstance(answer, SearchResult)]
    best = min([first, *found], key=lambda result: result.step_seconds)
    if len(found) < num_ranges:  # a part without an answer leaves its range open
        return replace(best, lower_bound_seconds=first.lower_bound_seconds)
    bound = max(first.lower_bound_seconds, min(result.lower_bound_seconds for result in found))
    return replace(best, lower_bound_seconds=min(bound, best.step_seconds))


def variants(
    search: Search,
    problems: Sequence[Problem],
    *,
    budget_seconds: float,
    seed: int = 0,
    client: Client | None = None,
) -> list[Answer]:
    """Several problems, of other clusters or batch sizes, each searched once."""
    return answers([(search, problem, seed) for problem in problems], budget_seconds, client) if problems else []


def _first_miss(ended: Sequence[Answer]) -> NotFound:
    miss = next(answer for answer in ended if isinstance(answer, NotFound))
    return replace(miss, reason=f"none of {len(ended)} restarts found a plan; the first: {miss.reason}")


def _run(search: Search, problem: Problem, seed: int, budget_seconds: float) -> Answer:
    """The task."""
    return search.run(problem, budget_seconds=budget_seconds, seed=seed)
