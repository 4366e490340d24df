"""The choice of one option for each node of a graph, priced by nodes and by edges: what every solver is asked.

Nothing here knows of tensors. Alpa's integer program (Zheng et al., OSDI 2022, eq. 1) is this with a sum over both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.errors import DejavuError

Floats = NDArray[np.float64]
Pair = tuple[int, int]


class ShardingError(DejavuError):
    """There is no answer; the message says why."""


@dataclass(frozen=True, eq=False)
class ChoiceProblem:
    """Choose one option for each of N nodes so that all seconds add up to the least.

    Attributes:
        seconds: of each node, an array over its options, ≥ 0; inf: not possible.
        edges: of two nodes a < b, an array over (options of a, options of b).
        bytes: of each node, what its options hold on a device; empty: nothing.
        capacity_bytes: what all may hold together.
    """

    seconds: tuple[Floats, ...]
    edges: Mapping[Pair, Floats]
    bytes: tuple[Floats, ...] = ()
    capacity_bytes: float = np.inf

    def __post_init__(self) -> None:
        for (a, b), table in self.edges.items():
            wanted = (len(self.seconds[a]), len(self.seconds[b])) if a < b < len(self.seconds) else None
            if table.shape != wanted:
                raise ShardingError(f"the edge {a}–{b} has a table of {table.shape}; wanted {wanted}")

    @cached_property
    def neighbours(self) -> tuple[frozenset[int], ...]:
        found: list[set[int]] = [set() for _ in self.seconds]
        for a, b in self.edges:
            found[a].add(b)
            found[b].add(a)
        return tuple(map(frozenset, found))

    def price(self, chosen: Sequence[int]) -> float:
        """Return the seconds of a choice: an option's number for each node."""
        nodes = sum(float(own[k]) for own, k in zip(self.seconds, chosen, strict=True))
        return nodes + sum(float(table[chosen[a], chosen[b]]) for (a, b), table in self.edges.items())

    def held_bytes(self, chosen: Sequence[int]) -> float:
        return sum(float(own[k]) for own, k in zip(self.bytes, chosen, strict=True)) if self.bytes else 0.0

    def with_multiplier(self, seconds_per_byte: float) -> ChoiceProblem:
        """Return the problem without a limit, where each byte has a price."""
        priced = tuple(own + seconds_per_byte * held for own, held in zip(self.seconds, self.bytes, strict=True))
        return ChoiceProblem(priced, self.edges)


@dataclass(frozen=True)
class Answer:
    """What a solver found.

    Attributes:
        chosen: an option's number for each node.
        lower_bound_seconds: proved; 0: nothing is.
    """

    chosen: tuple[int, ...]
    seconds: float
    lower_bound_seconds: float = 0.0

    @property
    def gap_percent(self) -> float:
        """How much less the best answer could take at most, of this one's seconds."""
        return 100.0 * max(0.0, 1.0 - self.lower_bound_seconds / self.seconds) if self.seconds > 0 else 0.0


class Solver(Protocol):
    """What every solver does."""

    def run(self, problem: ChoiceProblem) -> Answer:
        """Return a choice and what is proved of it."""
