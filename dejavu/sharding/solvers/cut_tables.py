"""What a layer costs for each choice at its two cuts: exact where tables stay small, else bounds, raised where asked.

With two mesh dimensions the tables of one layer alone would have 10^10 cells. Messages and elimination with small
tables bound all choices at the cuts at once, most of them within a per mille, and some far too low: messages suit the
choices that are cheapest. With one option of one cut taken for granted they suit that one; with all four a layer is
solved in a fraction of a second. Both are done only for choices that the cheapest way through the layers asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.sharding.problem import ChoiceProblem, Floats, ShardingError, Solver
from dejavu.sharding.solvers.buckets import Rest, cells, eliminate_all_but
from dejavu.sharding.solvers.messages import bounds
from dejavu.sharding.solvers.pruning import Integers, pruned, without


class Effort(NamedTuple):
    """How hard bounds are tried for.

    Attributes:
        exact_cells: of a table of an elimination that is exact.
        tried_cells: of one that gives bounds.
        passes: of messages.
    """

    exact_cells: int
    tried_cells: int
    passes: int


class CutTable:
    """A layer's least seconds, or a bound of them, over (choices at the cut before, at the cut after).

    Attributes:
        seconds_BA: no choice of the layer takes less.
        is_settled_BA: where nothing more will be proved; that is the least, but where the solver leaves a gap.
    """

    def __init__(self, problem: ChoiceProblem, cuts: tuple[int, int], effort: Effort, solver: Solver) -> None:
        """Pose a layer.

        Args:
            problem: its nodes, first those of the cut before, then those of the cut after.
            cuts: how many nodes the cuts have.
            solver: of the layer with both cuts fixed.
        """
        self._cuts, self._effort, self._solver = tuple(range(sum(cuts))), effort, solver
        self._problem, self._options = pruned(problem, self._cuts)
        self._shape = tuple(len(own) for own in self._problem.seconds[: sum(cuts)])
        self._chosen: dict[tuple[int, ...], Sequence[int]] = {}
        self._tried: set[tuple[int, int]] = set()
        is_small = cells(self._problem, self._cuts)[0] <= effort.exact_cells
        self._rest = eliminate_all_but(self._cuts, self._problem, effort.exact_cells) if is_small else None
        table = self._rest.table if self._rest is not None else self._bounded(self._problem).table
        before = int(np.prod(self._shape[: cuts[0]], dtype=np.int64))
        self.seconds_BA = np.array(table).reshape(before, -1)
        self.is_settled_BA: NDArray[np.bool_] = np.full(self.seconds_BA.shape, is_small)

    def tighten(self, before: int, after: int) -> None:
        """Raise what is proved of one choice at the cuts, and of others like it, or settle it."""
        choice = self._at_cuts(before, after)
        new = [one for one in enumerate(choice) if one not in self._tried]
        if new:
            self._tried.update(new)
            for cut, option in new:
                self._tighten_all_with(cut, option)
            return
        fixed = self._with(dict(enumerate(choice)))
        try:
            answer = self._solver.run(fixed)
        except ShardingError:  # no choice inside is possible
            self.seconds_BA[before, after] = np.inf
        else:
            self._chosen[choice] = answer.chosen
            self.seconds_BA[before, after] = answer.lower_bound_seconds
        self.is_settled_BA[before, after] = True

    def inside(self, before: int, after: int) -> list[int]:
        """Return the options of the other nodes for a settled choice at the cuts that is possible."""
        choice = self._at_cuts(before, after)
        chosen = self._rest.chosen(choice, len(self._options)) if self._rest is not None else self._chosen[choice]
        return [int(own[k]) for own, k in zip(self._options, chosen, strict=True)][len(choice) :]

    def _at_cuts(self, before: int, after: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(before * self.seconds_BA.shape[1] + after, self._shape)))

    def _tighten_all_with(self, cut: int, option: int) -> None:
        """Bound every choice that has this option at a node of the cuts."""
        smaller, _ = pruned(self._with({cut: option}), self._cuts)
        table = self._bounded(smaller).table
        part = (*(slice(None),) * cut, slice(option, option + 1))
        known = self.seconds_BA.reshape(self._shape)[part]
        settled = self.is_settled_BA.reshape(self._shape)[part]
        known[...] = np.where(settled, known, np.maximum(known, table))

    def _with(self, fixed: dict[int, int]) -> ChoiceProblem:
        """Return the problem where some nodes have one option left; all other nodes keep theirs."""
        left_out = [np.zeros(len(own), np.bool_) for own in self._problem.seconds]
        for node, option in fixed.items():
            left_out[node][:] = True
            left_out[node][option] = False
        return without(self._problem, left_out)[0]

    def _bounded(self, problem: ChoiceProblem) -> Rest:
        found = bounds(problem, self._effort.passes)
        return eliminate_all_but(self._cuts, found.problem, self._effort.tried_cells)


def cheapest_way(tables: Sequence[Floats], own: Sequence[Floats]) -> tuple[float, list[int]]:
    """Return the least sum of a table over each two neighbouring cuts and of each cut's own, and a choice of it."""
    least, ways = own[0], list[Integers]()
    for table, at_cut in zip(tables, own[1:], strict=True):
        through = least[:, None] + table
        ways.append(through.argmin(axis=0))
        least = through.min(axis=0) + at_cut
    state = int(least.argmin())
    seconds, states = float(least[state]), [state]
    for way in reversed(ways):
        state = int(way[state])
        states.append(state)
    return seconds, states[::-1]
