"""Sharding as Auto-MAP's game: one dimension of one tensor after another is split, or is not.

Shape suffixes: D = dimensions of the tensors that are decided, N = nodes of the problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dejavu.q_learning import Bools
from dejavu.q_learning import Floats as Features
from dejavu.sharding.problem import ChoiceProblem
from dejavu.sharding.solvers.flat import Integers, change, descend, flattened, scale_of
from dejavu.sharding.solvers.groups import Group, Links, group_of

WHOLE, SPLIT = 0, 1  # the two moves, and what a dimension is then
UNDECIDED = -1
# Auto-MAP's rewards: of a dimension that is split, of one that is not, of a split that conflicts.
SPLIT_REWARD, WHOLE_REWARD, CONFLICT_REWARD = 0.4, 0.1, -1.0
Reward = Literal["published", "price"]
LEAST_SAVED = 1e-12  # of the largest price: a change that saves less is none


@dataclass(frozen=True)
class Board:
    """What does not change from game to game.

    Attributes:
        decided: the nodes whose options are decided.
        groups: of each of their dimensions, what splitting it implies.
        implied: of each dimension, which dimensions that decides, and as what.
        alike: of each dimension, those that imply each other: they are left whole together.
    """

    problem: ChoiceProblem
    decided: tuple[int, ...]
    groups: tuple[Group, ...]
    implied: tuple[tuple[Integers, NDArray[np.int8]], ...]
    alike: tuple[Integers, ...]

    @classmethod
    def of(cls, problem: ChoiceProblem, links: Links, decided: Sequence[int]) -> Board:
        """Order the dimensions: the tensor with the largest group first, of a tensor the dimension with the largest."""
        asked = [(node, option) for node in decided for option in range(1, len(problem.seconds[node]))]
        groups = list(group_of(problem, links, asked))
        largest: dict[int, int] = {}
        for group in groups:
            largest[group.node] = max(largest.get(group.node, 0), len(group.nodes))
        groups.sort(key=lambda one: (-largest[one.node], one.node, -len(one.nodes)))
        of_node: dict[int, list[tuple[int, int]]] = {}
        for d, group in enumerate(groups):
            of_node.setdefault(group.node, []).append((group.option, d))
        implied = []
        for group in groups:
            pairs = [
                (d, SPLIT if own == option else WHOLE)
                for node, option in zip(group.nodes.tolist(), group.options.tolist(), strict=True)
                for own, d in of_node.get(node, ())
                if option  # a tensor that follows as whole has no split to pass on
            ]
            implied.append((np.array([d for d, _ in pairs], np.int64), np.array([to for _, to in pairs], np.int8)))
        splits = [set(which[to == SPLIT].tolist()) for which, to in implied]
        alike = [np.array([e for e in sorted(own) if d in splits[e]], np.int64) for d, own in enumerate(splits)]
        return cls(problem, tuple(decided), tuple(groups), tuple(implied), tuple(alike))


class Game:
    """One board; every game ends with all dimensions decided.

    With the reward `published` a split gives +0.4 and a whole dimension +0.1, times the dimensions that it decides; a
    split that conflicts with what is decided, or in itself, gives -1 and is not carried out. With `price` a split gives
    the logarithm of how many times cheaper the whole choice gets; a tensor that is decided already stays as it is.
    """

    def __init__(self, board: Board, reward: Reward) -> None:
        self.board, self._reward = board, reward
        self._scale = scale_of(board.problem)
        self._flat = flattened(board.problem, self._scale)
        self.begin()

    @property
    def num_dimensions(self) -> int:
        return len(self.board.groups)

    @property
    def num_features(self) -> int:
        """The state, and which dimension is asked for."""
        return 2 * self.num_dimensions

    @property
    def is_over(self) -> bool:
        return self._asked >= self.num_dimensions

    @property
    def allowed_A(self) -> Bools:
        return np.full(2, not self.is_over)

    @property
    def state(self) -> Features:
        """Return a number for each dimension, -1 undecided, 0 whole, 1 split, and a mark where the next one is."""
        place_D = np.zeros(self.num_dimensions)
        if not self.is_over:
            place_D[self._asked] = 1.0
        return np.concatenate((self.decided_D, place_D)).astype(np.float32)

    @property
    def seconds(self) -> float:
        """What the choice costs now, with every node that nothing decided whole; 0 under the published reward."""
        return self._price * self._scale

    def begin(self) -> Features:
        """Leave everything undecided."""
        self.decided_D = np.full(self.num_dimensions, UNDECIDED, np.int8)
        self.chosen_N = np.zeros(len(self.board.problem.seconds), np.int64)
        self._is_set_N = np.zeros(len(self.chosen_N), np.bool_)
        self._asked, self.score = 0, 0.0
        self._price = self._whole_price() if self._reward == "price" else 0.0
        return self.state

    def move(self, action: int) -> float:
        """Split the dimension that is asked for, or leave it whole; return the reward."""
        gained = self._split() if action == SPLIT else self._leave_whole()
        undecided = np.flatnonzero(self.decided_D[self._asked :] == UNDECIDED)
        self._asked += int(undecided[0]) if len(undecided) else self.num_dimensions - self._asked
        if self.is_over and self._reward == "price":
            gained += self._end()
        self.score += gained
        return gained

    def copy(self) -> Game:
        """Return the same position, to try moves from."""
        other = copy(self)
        other.decided_D, other.chosen_N = self.decided_D.copy(), self.chosen_N.copy()
        other._is_set_N = self._is_set_N.copy()
        return other

    def places(self) -> dict[int, int]:
        """Return what is decided of each node that was asked for: its option."""
        found = dict.fromkeys(self.board.decided, 0)
        for group, decided in zip(self.board.groups, self.decided_D, strict=True):
            if decided == SPLIT:
                found[group.node] = group.option
        return found

    def _split(self) -> float:
        group, (which, to) = self.board.groups[self._asked], self.board.implied[self._asked]
        own = self.decided_D[which]
        is_new = own == UNDECIDED
        if self._reward == "published":
            clashes = self._is_set_N[group.nodes] & (self.chosen_N[group.nodes] != group.options)
            if group.conflicts or clashes.any() or (~is_new & (own != to)).any():
                self._leave_whole()
                return CONFLICT_REWARD
            nodes, options, gained = group.nodes, group.options, SPLIT_REWARD * float(is_new.sum())
        else:
            stay = [self.board.groups[d].node for d in which[~is_new]]
            goes_M = ~np.isin(group.nodes, stay)
            nodes, options = group.nodes[goes_M], group.options[goes_M]
            gained = self._change(nodes, options)
        self.chosen_N[nodes] = options
        self._is_set_N[nodes] = True
        self.decided_D[which[is_new]] = to[is_new]
        return gained

    def _leave_whole(self) -> float:
        alike = self.board.alike[self._asked]
        alike = alike[self.decided_D[alike] == UNDECIDED]
        self.decided_D[alike] = WHOLE
        return WHOLE_REWARD * len(alike) if self._reward == "published" else 0.0

    def _change(self, nodes: Integers, options: Integers) -> float:
        before = self._price
        self._price += change(self._flat, self.chosen_N, nodes, options)
        return float(np.log(before / self._price))

    def _end(self) -> float:
        """Let every node follow its neighbours."""
        before, no_node_N = self._price, np.zeros(len(self.chosen_N), np.bool_)
        while (saved := descend(self._flat, self.chosen_N, no_node_N, LEAST_SAVED)) > 0.0:
            self._price -= saved
        return float(np.log(before / self._price))

    def _whole_price(self) -> float:
        flat = self._flat
        return float(flat.seconds_O[flat.first_N[:-1]].sum() + flat.cells_C[flat.table_E[:-1]].sum()) + LEAST_SAVED


def best_game(game: Game, width: int) -> tuple[Game, bool]:
    """Return the finished game of the highest score, and whether it is proved to be that.

    Positions with the same decisions and choices are one. Of those after as many moves only `width` go on, by their
    score; it is proved where there never were more.
    """
    positions, is_proved = {b"": game.copy()}, True
    finished: list[Game] = []
    while positions:
        after: dict[bytes, Game] = {}
        for one in positions.values():
            if one.is_over:
                finished.append(one)
                continue
            for action in (WHOLE, SPLIT):
                other = one.copy()
                other.move(action)
                key = other.decided_D.tobytes() + other.chosen_N.tobytes()
                if key not in after or after[key].score < other.score:
                    after[key] = other
        ordered = sorted(after.items(), key=lambda one: -one[1].score)
        is_proved &= len(ordered) <= width
        positions = dict(ordered[:width])
    return max(finished, key=lambda one: one.score), is_proved
