"""Exact for layers that follow each other: equal layers are eliminated once, to a table over their two cuts.

What crosses a cut is a tensor and its gradient, so a layer's table has at most four dimensions; the chain of layers is
then a shortest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from dejavu.sharding.problem import Answer, ChoiceProblem, Floats
from dejavu.sharding.solvers.buckets import Rest, eliminate_all_but
from dejavu.sharding.solvers.elimination import Elimination
from dejavu.sharding.solvers.pruning import Integers, pruned


class Block(NamedTuple):
    """A layer's nodes of a problem.

    Attributes:
        kind: equal for layers whose nodes and edges are equal, one by one.
        before, after: those of its cuts, which it shares with its neighbours.
    """

    kind: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    inside: tuple[int, ...]


class _Solved(NamedTuple):
    """A kind of layer: its table over (before, after), and how to choose inside."""

    table: Floats
    rest: Rest
    options: tuple[Integers, ...]
    num_nodes: int

    def inside(self, of_cuts: Sequence[int]) -> list[int]:
        chosen = self.rest.chosen(of_cuts, self.num_nodes)
        return [int(own[k]) for own, k in zip(self.options, chosen, strict=True)][len(of_cuts) :]


@dataclass(frozen=True)
class Repeated:
    """Exact where a layer's tables are small, as with one mesh dimension; else all layers are solved together.

    Attributes:
        most_cells: of a table.
    """

    blocks: tuple[Block, ...]
    most_cells: int = 1_000_000
    otherwise: Elimination = field(default_factory=Elimination)

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return the best choice; a memory limit is left out of account.

        Raises:
            ShardingError: no choice is possible.
        """
        edges = self._edges_inside(problem)
        solved: dict[int, _Solved] = {}
        for number, block in enumerate(self.blocks):
            if block.kind in solved:
                continue
            found = self._solve(problem, block, edges[number])
            if found is None:
                return self.otherwise.run(problem)
            solved[block.kind] = found
        chosen = self._along(problem, solved)
        seconds = problem.price(chosen)
        if not np.isfinite(seconds):
            return self.otherwise.run(problem)  # which says so
        return Answer(tuple(chosen), seconds, seconds)

    def _edges_inside(self, problem: ChoiceProblem) -> list[list[tuple[int, int]]]:
        """Return each block's edges; one between the two cuts of a block is that block's."""
        of_node = {node: number for number, block in enumerate(self.blocks) for node in block.inside}
        of_cut = {node: number for number, block in enumerate(self.blocks) for node in block.after}
        found: list[list[tuple[int, int]]] = [[] for _ in self.blocks]
        for a, b in problem.edges:
            inside = [of_node[node] for node in (a, b) if node in of_node]
            number = inside[0] if inside else max(of_cut.get(node, 0) for node in (a, b))
            found[number].append((a, b))
        return found

    def _solve(self, problem: ChoiceProblem, block: Block, edges: list[tuple[int, int]]) -> _Solved | None:
        nodes = (*block.before, *block.after, *block.inside)
        cuts = len(block.before) + len(block.after)
        at = {node: k for k, node in enumerate(nodes)}
        own = {
            (min(at[a], at[b]), max(at[a], at[b])): problem.edges[a, b] if at[a] < at[b] else problem.edges[a, b].T
            for a, b in edges
        }
        outside = (np.zeros(len(problem.seconds[node])) for node in nodes[:cuts])  # counted once, by `_along`
        seconds = (*outside, *(problem.seconds[node] for node in block.inside))
        smaller, options = pruned(ChoiceProblem(seconds, own), tuple(range(cuts)))
        if prod(len(problem.seconds[node]) for node in nodes[:cuts]) > self.most_cells:
            return None
        rest = eliminate_all_but(tuple(range(cuts)), smaller, self.most_cells)
        return _Solved(rest.table, rest, options, len(nodes)) if rest.is_exact else None

    def _along(self, problem: ChoiceProblem, solved: dict[int, _Solved]) -> list[int]:
        """Return all nodes' options on the cheapest way through the cuts."""
        sizes = [[len(problem.seconds[node]) for node in block.before] for block in self.blocks]
        sizes.append([len(problem.seconds[node]) for node in self.blocks[-1].after])
        own = [self._of_cut(problem, block.before) for block in self.blocks]
        own.append(self._of_cut(problem, self.blocks[-1].after))
        least, ways = own[0], list[Integers]()
        for number, block in enumerate(self.blocks):
            table = solved[block.kind].table.reshape(len(least), -1)
            through = least[:, None] + table
            ways.append(through.argmin(axis=0))
            least = through.min(axis=0) + own[number + 1]
        state = int(least.argmin())
        states = [state]
        for way in reversed(ways):
            state = int(way[state])
            states.insert(0, state)
        chosen = [0] * len(problem.seconds)
        for number, block in enumerate(self.blocks):
            of_cuts = [
                int(one)
                for k in (number, number + 1)
                for one in (np.unravel_index(states[k], sizes[k]) if sizes[k] else ())
            ]
            found = [*of_cuts, *solved[block.kind].inside(of_cuts)]
            for node, option in zip((*block.before, *block.after, *block.inside), found, strict=True):
                chosen[node] = option
        return chosen

    def _of_cut(self, problem: ChoiceProblem, nodes: tuple[int, ...]) -> Floats:
        """Return the own seconds of each choice at a cut."""
        total = np.zeros(())
        for node in nodes:
            total = np.add.outer(total, problem.seconds[node])
        return np.asarray(total).ravel()
