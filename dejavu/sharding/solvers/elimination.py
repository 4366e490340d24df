"""Exact: options that are in no best choice are excluded, then nodes are eliminated.

Captured graphs are nearly linear: with one mesh dimension elimination alone is a matter of a second for 10,000
operators. With two, options multiply; there messages between neighbours (`messages`) give bounds of every option, and
elimination with small tables (`buckets`), on what the messages leave, a bound of all and a good choice. What exceeds
the choice is excluded, and so on, until all tables are small or nothing is excluded any more. Then a gap is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError
from dejavu.sharding.solvers.buckets import Eliminated, cells, eliminate
from dejavu.sharding.solvers.messages import bounds
from dejavu.sharding.solvers.pruning import Integers, pruned, without

ROUNDING = 1e-9


@dataclass(frozen=True)
class Elimination:
    """The best choice where tables stay small enough; else a good one, and how far it may be from the best.

    Attributes:
        most_cells: of a table of the last elimination; of 8 bytes.
        easy_cells: of all its tables; where more are needed, options are first excluded by bounds.
        tried_cells: of a table of the eliminations before.
        passes: of messages, in each of at most `rounds`.
    """

    most_cells: int = 30_000_000
    easy_cells: int = 3_000_000
    tried_cells: int = 1_000_000
    passes: int = 60
    rounds: int = 8

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return a choice; a memory limit is left out of account.

        Raises:
            ShardingError: no choice is possible.
        """
        left, best, least = _Left.of(problem), None, -np.inf
        for _ in range(self.rounds):
            if cells(left.problem)[1] <= self.easy_cells:
                break
            found = bounds(left.problem, self.passes)
            tried = eliminate(found.problem, self.tried_cells)
            least = max(least, found.least_seconds, tried.bound_seconds)
            for chosen in (found.chosen, tried.chosen):
                answer = left.answer(chosen)
                best = answer if best is None or answer.seconds < best.seconds else best
            if best is None or not np.isfinite(best.seconds):
                break
            before = left.count
            left.exclude([own > best.seconds * (1.0 + ROUNDING) for own in found.options])
            if left.count == before:
                break
        last = eliminate(left.problem, self.most_cells) if cells(left.problem)[0] <= self.most_cells else None
        return _best(left, last, best, least)


def _best(left: _Left, last: Eliminated | None, best: Answer | None, least: float) -> Answer:
    """Return the better of two answers, with what is proved: nothing that was excluded is better than the older one.

    Raises:
        ShardingError: neither is possible.
    """
    if last is not None:
        answer = left.answer(last.chosen)
        if best is None or answer.seconds <= best.seconds:
            best = answer
        least = best.seconds if last.is_exact else max(least, last.bound_seconds)
    if best is None or not np.isfinite(best.seconds):
        raise ShardingError("every choice has an option that is not possible")
    return Answer(best.chosen, best.seconds, min(max(least, 0.0), best.seconds))


class _Left:
    """A problem without the options that were excluded."""

    def __init__(self, whole: ChoiceProblem, problem: ChoiceProblem, options: Sequence[Integers]) -> None:
        self._whole, self.problem, self._options = whole, problem, list(options)

    @classmethod
    def of(cls, whole: ChoiceProblem) -> _Left:
        return cls(whole, *pruned(whole))

    @property
    def count(self) -> int:
        """Options of all nodes."""
        return sum(len(own) for own in self._options)

    def exclude(self, worse: Sequence[NDArray[np.bool_]]) -> None:
        """Leave these options out, and what nothing needs then."""
        for some in (without(self.problem, worse), None):
            problem, options = some if some is not None else pruned(self.problem)
            self._options = [mine[own] for mine, own in zip(self._options, options, strict=True)]
            self.problem = problem

    def answer(self, chosen: Sequence[int]) -> Answer:
        """Return a choice of what is left as one of the whole problem's."""
        found = tuple(int(some[k]) for some, k in zip(self._options, chosen, strict=True))
        return Answer(found, self._whole.price(found))
