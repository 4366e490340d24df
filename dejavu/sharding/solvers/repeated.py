"""Exact for layers that follow each other: of equal layers one is solved, to a table over its two cuts.

What crosses a cut is a tensor and its gradient, so a layer's table has at most four dimensions; the chain of layers is
then a shortest path. Tables that would be too large are bounds (`cut_tables`), made exact where the path needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np

from dejavu.sharding.problem import Answer, ChoiceProblem, Floats
from dejavu.sharding.solvers.cut_tables import CutTable, Effort, cheapest_way
from dejavu.sharding.solvers.elimination import ROUNDING, Elimination


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


@dataclass(frozen=True)
class Repeated:
    """Exact for layers that follow each other; what it takes hardly grows with how many are alike.

    The cheapest way through the cuts is looked for on bounds of what layers take; where it goes through a bound that is
    not settled, that is raised, and so on. A way through settled choices only that is the cheapest even where others
    cost no more than their bounds is the best. Where a cut alone has too many choices all layers are solved together.

    Attributes:
        most_cells: of a table over two cuts, and of those that make it.
        tried_cells, passes: of a bound of it. Tuned on two Llama layers on 4 × 8 devices.
        rounds: of raising bounds, at most; then all layers are solved together.
    """

    blocks: tuple[Block, ...]
    most_cells: int = 1_000_000
    otherwise: Elimination = field(default_factory=Elimination)
    tried_cells: int = 200_000
    passes: int = 20
    rounds: int = 30

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return the best choice; a memory limit is left out of account.

        Raises:
            ShardingError: no choice is possible.
        """
        edges = self._edges_inside(problem)
        tables: dict[int, CutTable] = {}
        for number, block in enumerate(self.blocks):
            if block.kind in tables:
                continue
            if prod(len(problem.seconds[node]) for node in (*block.before, *block.after)) > self.most_cells:
                return self.otherwise.run(problem)
            tables[block.kind] = self._table(problem, block, edges[number])
        own = [self._of_cut(problem, cut) for cut in (*(one.before for one in self.blocks), self.blocks[-1].after)]
        least = 0.0
        for _ in range(self.rounds):
            bound, states = cheapest_way([tables[block.kind].seconds_BA for block in self.blocks], own)
            if not np.isfinite(bound):
                break  # `otherwise` says so
            least = max(least, bound)
            asked = self._not_settled(tables, states)
            if not asked:
                return self._answer(problem, tables, states, bound)
            for kind, before, after in asked:
                tables[kind].tighten(before, after)
        answer = self.otherwise.run(problem)
        return replace(answer, lower_bound_seconds=min(answer.seconds, max(answer.lower_bound_seconds, least)))

    def _not_settled(self, tables: Mapping[int, CutTable], states: Sequence[int]) -> set[tuple[int, int, int]]:
        """Return the kinds of layers, with the choices at their cuts, of which only a bound is known."""
        through = {(block.kind, states[n], states[n + 1]) for n, block in enumerate(self.blocks)}
        return {(kind, b, a) for kind, b, a in through if not tables[kind].is_settled_BA[b, a]}

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

    def _table(self, problem: ChoiceProblem, block: Block, edges: list[tuple[int, int]]) -> CutTable:
        nodes, cuts = (*block.before, *block.after, *block.inside), (len(block.before), len(block.after))
        at = {node: k for k, node in enumerate(nodes)}
        own = {
            (min(at[a], at[b]), max(at[a], at[b])): problem.edges[a, b] if at[a] < at[b] else problem.edges[a, b].T
            for a, b in edges
        }
        outside = (np.zeros(len(problem.seconds[node])) for node in nodes[: sum(cuts)])  # counted once, by `_of_cut`
        seconds = (*outside, *(problem.seconds[node] for node in block.inside))
        effort = Effort(self.most_cells, self.tried_cells, self.passes)
        return CutTable(ChoiceProblem(seconds, own), cuts, effort, self.otherwise)

    def _answer(
        self, problem: ChoiceProblem, tables: Mapping[int, CutTable], states: Sequence[int], bound: float
    ) -> Answer:
        """Return all nodes' options on a way through the cuts."""
        chosen = [0] * len(problem.seconds)
        cuts = (*(one.before for one in self.blocks), self.blocks[-1].after)
        for nodes, state in zip(cuts, states, strict=True):
            at_cut = np.unravel_index(state, [len(problem.seconds[node]) for node in nodes]) if nodes else ()
            for node, found in zip(nodes, at_cut, strict=True):
                chosen[node] = int(found)
        for number, block in enumerate(self.blocks):
            inside = tables[block.kind].inside(states[number], states[number + 1])
            for node, option in zip(block.inside, inside, strict=True):
                chosen[node] = option
        seconds = problem.price(chosen)
        is_proved = bound >= seconds * (1.0 - ROUNDING)  # the same sum in another order
        return Answer(tuple(chosen), seconds, seconds if is_proved else max(bound, 0.0))

    def _of_cut(self, problem: ChoiceProblem, nodes: tuple[int, ...]) -> Floats:
        """Return the own seconds of each choice at a cut."""
        total = np.zeros(())
        for node in nodes:
            total = np.add.outer(total, problem.seconds[node])
        return np.asarray(total).ravel()
