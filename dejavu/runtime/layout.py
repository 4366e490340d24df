"""Which rank of the world is where in the plan, and who exchanges which examples with whom.

A pipeline rank is R replicas × T tensor-parallel shards. Its replicas share every microbatch: replica r of R has
examples ⌊r·b/R⌋ to ⌊(r+1)·b/R⌋ of b. Neighbours may have other numbers of replicas (PipeDream's 3-1): each replica then
sends and receives the examples that it has in common with each of theirs.

Of context-parallel replicas each run of C shares its examples, and each has one of C parts of the sequence, in order.
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
            parts = len(grid) // self.plan.rank_configuration(rank).context_parallel
            if parts > self.microbatch_size:
                raise InputError(
                    f"pipeline rank {rank} has {parts} replicas for microbatches of {self.microbatch_size} "
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
        return self._rows(place.pipeline_rank, place.replica)

    def _rows(self, rank: int, replica: int) -> tuple[int, int]:
        b, configuration = self.microbatch_size, self.plan.rank_configuration(rank)
        group, groups = replica // configuration.context_parallel, configuration.example_parts
        return group * b // groups, (group + 1) * b // groups

    def num_parts(self, rank: int) -> int:
        """Return into how many parts the devices of a pipeline rank that share examples split the sequence."""
        return self.plan.rank_configuration(rank).sequence_parts

    def _positions(self, rank: int, replica: int, shard: int, length: int) -> tuple[int, int]:
        """Return the positions that a device has of what crosses a cut, the end not included."""
        configuration, num_parts = self.plan.rank_configuration(rank), self.num_parts(rank)
        part = replica % configuration.context_parallel
        if configuration.sequence_parallel:
            part = part * configuration.tensor_parallel + shard
        return part * length // num_parts, (part + 1) * length // num_parts

    def exchanges(self, place: Placement, other: int, length: int = 1, *, sends: bool) -> tuple[Exchange, ...]:
        """Return what the rank sends to, or receives from, the ranks of another pipeline rank, for one microbatch.

        Shards of a replica hold the same examples: shard t receives from shard t mod T of the sender. Where devices
        of a side split the sequence, each sends and receives the positions that it has in common with each of theirs.

        Args:
            length: positions of what crosses the cut; all parts are equal.
        """
        rank, grid, own = place.pipeline_rank, self.grids[other], self.rows(place)
        shards, is_split = self.grids[rank].shape[1], self.num_parts(rank) * self.num_parts(other) > 1
        giver_splits = self.plan.rank_configuration(rank if sends else other).sequence_parallel
        here = self._positions(rank, place.replica, place.shard, length)
        found = []
        for replica in range(len(grid)):
            start, stop = self._rows(other, replica)
            start, stop = max(start, own[0]) - own[0], min(stop, own[1]) - own[0]
            if start >= stop:
                continue
            for t in range(grid.shape[1]):
                giver, named = (place.shard, t % shards) if sends else (t, place.shard % grid.shape[1])
                if not giver_splits and giver != named:
                    continue  # another shard of the sender has the same, and gives it
                positions = _common(here, self._positions(other, replica, t, length))
                if positions is not None:
                    found.append(Exchange(int(grid[replica, t]), start, stop, positions if is_split else None))
        return tuple(found)


def _common(own: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    """Return the positions of both, counted from the own first one; None: there is none."""
    start, stop = max(own[0], other[0]), min(own[1], other[1])
    return (start - own[0], stop - own[0]) if start < stop else None
