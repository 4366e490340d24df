"""Which rank of the world is where in the plan, and who exchanges which examples with whom.

A pipeline rank is R replicas × T tensor-parallel shards. Its replicas share every microbatch: replica r of R has
examples ⌊r·b/R⌋ to ⌊(r+1)·b/R⌋ of b. Neighbours may have other numbers of replicas (PipeDream's 3-1): each replica then
sends and receives the examples that it has in common with each of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dejavu.binding.binding import Binding, Placement
from dejavu.foundation.errors import InputError
from dejavu.plans import Plan


@dataclass(frozen=True)
class Exchange:
    """Examples `start` to `stop` of a rank's own part of a microbatch, to or from another rank of the world.

    Attributes:
        positions: of its own part of the sequence, the end not included; None: all that it has.
    """

    peer: int
    start: int
    stop: int
    positions: tuple[int, int] | None = None


@dataclass(frozen=True)
class Layout:
    """The ranks of a binding and what they exchange.

    Attributes:
        microbatch_size: examples in a microbatch, over all replicas.
    """

    binding: Binding
    microbatch_size: int

    def __post_init__(self) -> None:
        for rank, grid in enumerate(self.grids):
            if len(grid) > self.microbatch_size:
                raise InputError(
                    f"pipeline rank {rank} has {len(grid)} replicas for microbatches of {self.microbatch_size} "
                    "examples; wanted at least one example for each: a larger batch or fewer microbatches"
                )

    @property
    def plan(self) -> Plan:
        return self.binding.plan

    @cached_property
    def grids(self) -> tuple[NDArray[np.int64], ...]:
        """For each pipeline rank, its ranks of the world by replica and shard: (R, T)."""
        found = []
        for rank in range(len(self.plan.ranks)):
            configuration = self.plan.rank_configuration(rank)
            grid = np.full((configuration.data_parallel, configuration.tensor_parallel), -1, dtype=np.int64)
            for number, placed in enumerate(self.binding.placements):
                if placed.pipeline_rank == rank:
                    grid[placed.replica, placed.shard] = number
            if (grid < 0).any():
                raise InputError(f"the binding places {int((grid >= 0).sum())} of {grid.size} devices of rank {rank}")
            found.append(grid)
        return tuple(found)

    def rows(self, place: Placement) -> tuple[int, int]:
        """Return the range of examples of every microbatch that the rank has, the end not included."""
        return self._part(place.replica, len(self.grids[place.pipeline_rank]))

    def _part(self, replica: int, num_replicas: int) -> tuple[int, int]:
        b = self.microbatch_size
        return replica * b // num_replicas, (replica + 1) * b // num_replicas

    def num_parts(self, rank: int) -> int:
        """Return into how many parts the shards of a pipeline rank split the sequence."""
        configuration = self.plan.rank_configuration(rank)
        return configuration.tensor_parallel if configuration.sequence_parallel else 1

    def exchanges(self, place: Placement, other: int, length: int = 1, *, sends: bool) -> tuple[Exchange, ...]:
        """Return what the rank sends to, or receives from, the ranks of another pipeline rank, for one microbatch.

        Shards of a replica hold the same examples: shard t receives from shard t mod T of the sender. Where the shards
        of a side split the sequence, each sends and receives the positions that it has in common with each of theirs.

        Args:
            length: positions of what crosses the cut; all parts are equal.
        """
        grid, own = self.grids[other], self.rows(place)
        shards = self.grids[place.pipeline_rank].shape[1]
        mine, theirs = self.num_parts(place.pipeline_rank), self.num_parts(other)
        found = []
        for replica in range(len(grid)):
            start, stop = self._part(replica, len(grid))
            start, stop = max(start, own[0]) - own[0], min(stop, own[1]) - own[0]
            if start >= stop:
                continue
            for t in range(grid.shape[1]):
                giver = (place.shard, t % shards, mine) if sends else (t, place.shard % grid.shape[1], theirs)
                if giver[2] == 1 and giver[0] != giver[1]:
                    continue  # another shard of the sender has the same, and gives it
                positions = _common(_positions(place.shard, mine, length), _positions(t, theirs, length))
                if positions is not None:
                    found.append(Exchange(int(grid[replica, t]), start, stop, positions if mine * theirs > 1 else None))
        return tuple(found)


def _positions(shard: int, num_parts: int, length: int) -> tuple[int, int]:
    part = shard if num_parts > 1 else 0
    return part * length // num_parts, (part + 1) * length // num_parts


def _common(own: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    """Return the positions of both, counted from the own first one; None: there is none."""
    start, stop = max(own[0], other[0]), min(own[1], other[1])
    return (start - own[0], stop - own[0]) if start < stop else None
