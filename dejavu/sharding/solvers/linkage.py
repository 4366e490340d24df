"""Auto-MAP's linkage groups as a heuristic, and any heuristic's answer as a presolve of an exact solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError, Solver
from dejavu.sharding.solvers.elimination import ROUNDING, Elimination
from dejavu.sharding.solvers.flat import change, descend, flattened, scale_of
from dejavu.sharding.solvers.groups import Links, linkage_groups, links_by_price
from dejavu.sharding.solvers.messages import bounds
from dejavu.sharding.solvers.pruning import Integers, pruned, without

NOTHING = 1e-12  # of the largest price: a change that saves less is none


@dataclass(frozen=True)
class Linkage:
    """Decides one tensor, propagates what that implies along the graph, and keeps it where the whole gets cheaper.

    Begins with everything whole and tries the groups of the tensors that are to be decided, the largest first; all
    other nodes follow their neighbours. Goes on while the price falls. It takes seconds for thousands of operators,
    whatever the size of exact tables, and proves nothing: the first large group that pays may hide a better one. The
    groups are Auto-MAP's; that they are kept by their price, not by a reward, is ours.

    Attributes:
        links: of the problem's edges, as `links_of` gives them; None: read off the prices.
        decided: the nodes whose options are tried, such as weights and inputs; None: all.
        sweeps: over all groups, at most.
    """

    links: Links | None = None
    decided: tuple[int, ...] | None = None
    sweeps: int = 20

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return a choice, of which nothing is proved; a memory limit is left out of account.

        Raises:
            ShardingError: the choice that it ends with is not possible; that proves nothing.
        """
        links = links_by_price(problem) if self.links is None else self.links
        decided = range(len(problem.seconds)) if self.decided is None else self.decided
        groups = linkage_groups(problem, links, decided)
        flat = flattened(problem, scale_of(problem))
        chosen_N = np.zeros(len(problem.seconds), np.int64)
        is_fixed_N = np.zeros(len(chosen_N), np.bool_)
        for _ in range(self.sweeps):
            saved = 0.0
            for group in groups:
                tried_N, is_fixed_N[:] = chosen_N.copy(), False
                tried_N[group.nodes], is_fixed_N[group.nodes] = group.options, True
                gain = -change(flat, chosen_N, group.nodes, group.options)
                gain += descend(flat, tried_N, is_fixed_N, NOTHING)
                if gain > NOTHING:
                    chosen_N, saved = tried_N, saved + gain
            is_fixed_N[:] = False
            saved += descend(flat, chosen_N, is_fixed_N, NOTHING)
            if saved <= NOTHING:
                break
        chosen = tuple(chosen_N.tolist())
        seconds = problem.price(chosen)
        if not np.isfinite(seconds):
            raise ShardingError(
                "linkage groups led to an option that is not possible; elimination proves whether any is"
            )
        return Answer(chosen, seconds)


@dataclass(frozen=True)
class Presolved:
    """A quick solver first; the exact one sees only options that may belong to a better choice.

    Exact wherever `then` is: an option is left out where another can always replace it, or where every choice that has
    it is proved to take more than the first answer. What a quick solver gains depends on how good that answer is.

    Attributes:
        passes: of messages, which give the bounds.
    """

    first: Solver
    then: Solver = field(default_factory=Elimination)
    passes: int = 60

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return the better of both answers, with the bound of the second; a memory limit is left out of account.

        Raises:
            ShardingError: no choice is possible.
        """
        smaller, options = pruned(problem)
        try:
            known = self.first.run(problem)
        except ShardingError:
            return _of_whole(problem, options, self.then.run(smaller))
        limit = known.seconds * (1.0 + ROUNDING)
        found = bounds(smaller, self.passes)
        if found.least_seconds >= known.seconds:
            return Answer(known.chosen, known.seconds, known.seconds)
        worse = [own > limit for own in found.options]
        if any(some.all() for some in worse):  # nothing is better than what is known
            return Answer(known.chosen, known.seconds, known.seconds)
        less, left = without(smaller, worse)
        options = tuple(mine[own] for mine, own in zip(options, left, strict=True))
        try:
            last = _of_whole(problem, options, self.then.run(less))
        except ShardingError:
            return Answer(known.chosen, known.seconds, min(known.seconds, max(0.0, found.least_seconds)))
        best = last if last.seconds < known.seconds else known
        proved = max(last.lower_bound_seconds, found.least_seconds, 0.0)
        return Answer(best.chosen, best.seconds, min(best.seconds, proved))


def _of_whole(problem: ChoiceProblem, options: Sequence[Integers], answer: Answer) -> Answer:
    """Return a choice of what is left as one of the whole problem's."""
    chosen = tuple(int(own[k]) for own, k in zip(options, answer.chosen, strict=True))
    return Answer(chosen, problem.price(chosen), answer.lower_bound_seconds)
