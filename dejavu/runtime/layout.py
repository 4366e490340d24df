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
    """Examples `start` to `stop` of a rank's own part of a microbatch, to or from another rank of the world."""

    peer: int
    start: int
    stop: int


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

    def exchanges(self, place: Placement, other: int, *, sends: bool) -> tuple[Exchange, ...]:
        """Return what the rank sends to, or receives from, the ranks of another pipeline rank, for one microbatch.

        All shards of a replica hold the same examples: shard t receives from shard t mod T of the sender.
        """
        grid, own = self.grids[other], self.rows(place)
        shards = self.grids[place.pipeline_rank].shape[1]
        found = []
        for replica in range(len(grid)):
            start, stop = self._part(replica, len(grid))
            start, stop = max(start, own[0]) - own[0], min(stop, own[1]) - own[0]
            if start >= stop:
                continue
            theirs = (
                [t for t in range(grid.shape[1]) if t % shards == place.shard]
                if sends
                else [place.shard % grid.shape[1]]
            )
            found += [Exchange(int(grid[replica, t]), start, stop) for t in theirs]
        return tuple(found)
