"""Auto-MAP's linkage groups as a heuristic, and any heuristic's answer as a presolve of an exact solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError, Solver
from dejavu.sharding.solvers.elimination import ROUNDING, Elimination
from dejavu.sharding.solvers.flat import change, descend, flattened, scale_of
from dejavu.sharding.solvers.groups import Along, Group, linkage_groups, links_by_price
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

    On a mesh of several dimensions a decision is of one of them: it leaves open what is split along the others, so that
    what it implies has one answer there too.

    Attributes:
        along: what nodes say along each dimension of the mesh, as `links_along` gives it; None: read off the prices.
        decided: the nodes whose options are tried, such as weights and inputs; None: all.
        sweeps: over all groups, at most.
    """

    along: tuple[Along, ...] | None = None
    decided: tuple[int, ...] | None = None
    sweeps: int = 20

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return a choice, of which nothing is proved; a memory limit is left out of account.

        Raises:
            ShardingError: the choice that it ends with is not possible; that proves nothing.
        """
        along = (along_by_price(problem),) if self.along is None else self.along
        decided = range(len(problem.seconds)) if self.decided is None else self.decided
        groups = [(dim, group) for dim, one in enumerate(along) for group in linkage_groups(one, decided)]
        options_of = GroupOptions(along)
        flat = flattened(problem, scale_of(problem))
        chosen_N = np.zeros(len(problem.seconds), np.int64)
        is_fixed_N = np.zeros(len(chosen_N), np.bool_)
        for _ in range(self.sweeps):
            saved = 0.0
            for dim, group in groups:
                tried_N, is_fixed_N[:] = chosen_N.copy(), False
                options = options_of.group(dim, group, chosen_N)
                tried_N[group.nodes], is_fixed_N[group.nodes] = options, True
                gain = -change(flat, chosen_N, group.nodes, options)
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


class GroupOptions:
    """Which option a node takes that is told what to do along one dimension of the mesh."""

    def __init__(self, along: Sequence[Along]) -> None:
        does_ND = [np.stack(own, axis=1) for own in zip(*(one.does_N for one in along), strict=True)]
        self._told = [[_told(does_D, dim) for does_D in does_ND] for dim in range(len(along))]

    def group(self, dim: int, group: Group, chosen_N: Integers) -> Integers:
        """Return the options of a group's nodes that differ from what is chosen along one dimension, if they can."""
        told = self._told[dim]
        pairs = zip(group.nodes.tolist(), group.options.tolist(), strict=True)
        return np.array([told[node][chosen_N[node], does] for node, does in pairs], np.int64)


def _told(does_KD: Integers, dim: int) -> Integers:
    """Return for (option, what to do along the dimension) the option that does so and as little else as can be."""
    differs_KK = (does_KD[:, None, :] != does_KD[None, :, :]).sum(axis=2) - (does_KD[:, None, dim] != does_KD[:, dim])
    count = int(does_KD[:, dim].max()) + 1
    told = [np.where(does_KD[:, dim] == does, differs_KK, does_KD.shape[1]).argmin(axis=1) for does in range(count)]
    return np.stack(told, axis=1)


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


def along_by_price(problem: ChoiceProblem) -> Along:
    """Return the links of a problem of which only prices are known, as of one dimension."""
    return Along(tuple(np.arange(len(own)) for own in problem.seconds), links_by_price(problem))


def _of_whole(problem: ChoiceProblem, options: Sequence[Integers], answer: Answer) -> Answer:
    """Return a choice of what is left as one of the whole problem's."""
    chosen = tuple(int(own[k]) for own, k in zip(options, answer.chosen, strict=True))
    return Answer(chosen, problem.price(chosen), answer.lower_bound_seconds)
