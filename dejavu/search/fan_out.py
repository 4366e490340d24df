"""Searches as tasks on a Dask client that is passed in, or in this process: restarts, parts of a search, variants.

A task is one `run`, so that its budget is its own. The answer does not depend on how many workers there are or which
is first: results are taken in the order in which they were asked for. How good a plan a task finds within its budget
does depend on how fast the worker is, as it would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from dejavu.errors import DejavuError, InputError
from dejavu.plan import InfeasibleError, Problem, SearchResult
from dejavu.search._base import Search
from dejavu.search.exact import Exact


class Client(Protocol):
    """What is needed of `distributed.Client`."""

    def map(self, func: Callable, *iterables: Any, pure: bool, key: str) -> list[Any]: ...

    def gather(self, futures: list[Any]) -> list[Any]: ...


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a task ended with.

    Attributes:
        result: None where the search found no plan.
        refusal: what it said then.
        infeasible: it said so by `InfeasibleError`; otherwise the problem was too large for it, or the time too short.
    """

    result: SearchResult | None
    refusal: str = ""
    infeasible: bool = False


def outcomes(
    tasks: Sequence[tuple[Search, Problem, int]], budget_seconds: float, client: Client | None
) -> list[Outcome]:
    """One outcome for each (search, problem, seed), in their order.

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
) -> SearchResult:
    """One problem searched from every seed: the cheapest plan, of equal ones the first, and the highest bound.

    Raises:
        InputError: there are no seeds.
        InfeasibleError: no seed found a plan.
        DejavuError: as the first seed's search did, where that was something else.
    """
    if not seeds:
        raise InputError("restarts need at least one seed")
    ended = outcomes([(search, problem, seed) for seed in seeds], budget_seconds, client)
    results = [outcome.result for outcome in ended if outcome.result is not None]
    if not results:
        kind = InfeasibleError if all(outcome.infeasible for outcome in ended) else DejavuError
        raise kind(f"none of {len(seeds)} restarts found a plan; the first: {ended[0].refusal}")
    best = min(results, key=lambda result: result.step_seconds)
    bound = max(result.lower_bound_seconds for result in results)
    return replace(best, lower_bound_seconds=min(bound, best.step_seconds))


def ranges(
    search: Exact,
    problem: Problem,
    num_ranges: int,
    *,
    budget_seconds: float,
    seed: int = 0,
    client: Client | None = None,
) -> SearchResult:
    """One exact search in parts, by ranges of the bottleneck: the cheapest plan, and the least of the parts' bounds.

    A first plan is looked for here, alone: it is every part's incumbent, and no better plan has a bottleneck above its
    price. On one worker this takes longer than the search alone, because the parts do not know of each other's plans.

    Raises:
        InputError: there are no ranges.
        InfeasibleError, DejavuError: as the search does where it finds no first plan.
    """
    if num_ranges < 1:
        raise InputError(f"num_ranges is {num_ranges}; wanted 1 or more")
    first = replace(search, relative_gap=1.0).run(problem, budget_seconds=budget_seconds, seed=seed)
    edges = np.linspace(0.0, first.step_seconds, num_ranges + 1)
    edges[-1] = np.inf  # a bottleneck that is the price itself: all the rest of the step takes nothing
    parts = [
        replace(search, incumbent=first.plan, bottleneck_range_seconds=(float(low), float(high)))
        for low, high in pairwise(edges)
    ]
    ended = outcomes([(part, problem, seed) for part in parts], budget_seconds, client)
    results = [outcome.result for outcome in ended if outcome.result is not None]
    if len(results) < num_ranges:
        raise DejavuError(next(outcome.refusal for outcome in ended if outcome.result is None))
    best = min(results, key=lambda result: result.step_seconds)
    bound = min(result.lower_bound_seconds for result in results)
    return replace(best, lower_bound_seconds=min(bound, best.step_seconds))


def variants(
    search: Search,
    problems: Sequence[Problem],
    *,
    budget_seconds: float,
    seed: int = 0,
    client: Client | None = None,
) -> list[Outcome]:
    """Several problems, of other clusters or batch sizes, each searched once; having no plan is an outcome."""
    return outcomes([(search, problem, seed) for problem in problems], budget_seconds, client) if problems else []


def _run(search: Search, problem: Problem, seed: int, budget_seconds: float) -> Outcome:
    """The task."""
    try:
        return Outcome(search.run(problem, budget_seconds=budget_seconds, seed=seed))
    except DejavuError as error:
        return Outcome(None, str(error), isinstance(error, InfeasibleError))
