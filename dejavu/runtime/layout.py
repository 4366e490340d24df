"""Which rank of the world is where in the plan, and who exchanges which examples with whom.

A pipeline rank is R replicas × T tensor-parallel shards. Its replicas share every microbatch: replica r of R has
examples ⌊r·b/R⌋ to ⌊(r+1)·b/R⌋ of b. Neighbours may have other numbers of replicas (PipeDream's 3-1): each replica then
sends and receives the examples that it has in common with each of theirs.

Of context-parallel replicas each run of C shares its examples, and each has one of C parts of the sequence, a chunk
from each end (`positions.chunk_numbers`).

A training has one pipeline, or several virtual workers' (HetPipe, Park et al., USENIX ATC 2020): each has the whole
model, cut as suits its devices, and some examples of every batch. Here they make each step together: after their
backward passes all ranks that hold a layer, in whatever pipeline and replica, sum its gradients. As each loss is
weighted by its examples, the sum is one process's gradient, and all make the same step.

Chimera's two copies are two such pipelines on the same ranks, in opposite directions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.binding.binding import Binding, Placement, VirtualWorker
from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural
from dejavu.plans import Plan
from dejavu.workload import Workload
from dejavu.workload.models.modules.positions import chunk_numbers


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
        first_rank: the rank of the world that the first placement is.
        first_example: of a run's examples, the first that this pipeline has.
        copy: which of two copies of the model on the same ranks this pipeline is; None: there is one.
    """

    binding: Binding
    microbatch_size: int
    first_rank: int = 0
    first_example: int = 0
    copy: int | None = None

    def __post_init__(self) -> None:
        for rank, grid in enumerate(self.grids):
            parts = len(grid) // self.plan.rank_configuration(rank).context_parallel
            if parts > self.microbatch_size:
                examples = plural(self.microbatch_size, "example")
                raise InputError(
                    f"pipeline rank {rank} has {parts} replicas for microbatches of {examples}; "
                    "wanted at least one example for each: a larger batch or fewer microbatches"
                )

    @property
    def plan(self) -> Plan:
        return self.binding.plan

    @cached_property
    def grids(self) -> tuple[NDArray[np.int64], ...]:
        """For each pipeline rank, its ranks of the world by replica and shard: (R, T)."""
        found, numbers = list[NDArray[np.int64]](), self._numbers()
        for rank in range(len(self.plan.ranks)):
            configuration = self.plan.rank_configuration(rank)
            grid = np.full((configuration.data_parallel, configuration.tensor_parallel), -1, dtype=np.int64)
            for replica, shard in np.ndindex(grid.shape):
                grid[replica, shard] = numbers.pop((rank, replica, shard), -1)
            if (grid < 0).any():
                raise InputError(f"the binding places {int((grid >= 0).sum())} of {grid.size} devices of rank {rank}")
            found.append(grid)
        for (rank, replica, shard), number in numbers.items():
            raise InputError(
                f"the binding places {self._device(number)} as replica {replica}, shard {shard} of rank {rank}; "
                f"wanted one of the devices of the plan's {len(found)} ranks"
            )
        return tuple(found)

    def _numbers(self) -> dict[tuple[int, int, int], int]:
        """Return the ranks of the world by pipeline rank, replica and shard."""
        numbers: dict[tuple[int, int, int], int] = {}
        for number, placed in enumerate(self.binding.placements, self.first_rank):
            if (first := numbers.setdefault((placed.pipeline_rank, placed.replica, placed.shard), number)) != number:
                raise InputError(
                    f"the binding places {self._device(first)} and {self._device(number)} as replica {placed.replica}, "
                    f"shard {placed.shard} of rank {placed.pipeline_rank}; wanted one device"
                )
        return numbers

    def _device(self, number: int) -> str:
        device = self.placed(number).device
        return f"device {device.index} of {device.host}"

    def placed(self, rank: int) -> Placement:
        """Return where a rank of the world is."""
        return self.binding.placements[rank - self.first_rank]

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

    def _runs(self, rank: int, replica: int, shard: int, length: int) -> list[range]:
        """Return the positions that a device has of what crosses a cut, in the order in which it has them."""
        configuration = self.plan.rank_configuration(rank)
        count = configuration.context_parallel
        numbers = chunk_numbers(replica % count, count, length // count)
        size = length // count // len(numbers)
        runs = [range(number * size, (number + 1) * size) for number in numbers]
        if not configuration.sequence_parallel:
            return runs
        share, found = length // count // configuration.tensor_parallel, list[range]()
        for place, run in enumerate(runs):  # of all these, the positions from shard · share on
            begin = shard * share - place * size
            if own := run[max(begin, 0) : max(begin + share, 0)]:
                found.append(own)
        return found

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
        here = self._runs(rank, place.replica, place.shard, length)
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
                ends = (here, self._runs(other, replica, t, length))
                for positions in _common(*ends)[0] if sends else _common(*reversed(ends))[1]:
                    found.append(Exchange(int(grid[replica, t]), start, stop, positions if is_split else None))
        return tuple(found)


def _common(giver: list[range], taker: list[range]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the runs of positions of both, in the giver's order, counted as the giver has them, and as the taker."""
    given, taken, first = list[tuple[int, int]](), list[tuple[int, int]](), 0
    for one in giver:
        begin = 0
        for other in taker:
            start, stop = max(one.start, other.start), min(one.stop, other.stop)
            if start < stop:
                here, there, size = first + start - one.start, begin + start - other.start, stop - start
                if given and given[-1][1] == here and taken[-1][1] == there:  # goes on on both sides: one message
                    here, there, size = given.pop()[0], (last := taken.pop())[0], last[1] - last[0] + size
                given.append((here, here + size))
                taken.append((there, there + size))
            begin += len(other)
        first += len(one)
    return given, taken


class Seat(NamedTuple):
    """A rank's place in a pipeline."""

    layout: Layout
    place: Placement

    def has(self, stage: int) -> bool:
        """Return whether the rank runs this stage of the pipeline."""
        return stage in self.layout.plan.ranks[self.place.pipeline_rank]


class Holders(NamedTuple):
    """Who has the weights of layers `start` to `stop` (not included).

    Attributes:
        ranks: of the world; a row for each of the shards that split these layers, a rank of each replica in it.
    """

    start: int
    stop: int
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class World:
    """The pipelines of a training, in the order of their ranks.

    Attributes:
        layouts: one of each pipeline.
        workload: of the whole training.
    """

    layouts: tuple[Layout, ...]
    workload: Workload

    @classmethod
    def of(cls, binding: Binding, workload: Workload) -> World:
        """Lay out the ranks of a binding.

        Raises:
            InputError: a microbatch has fewer examples than its replicas, or the workers' examples are not the batch.
        """
        if workload.both_ways:
            return cls(_both_ways(binding, workload), workload)
        if not binding.workers:
            return cls((Layout(binding, workload.microbatch_size),), workload)
        found, rank, example = list[Layout](), 0, 0
        for worker, pipeline in zip(binding.workers, binding.pipelines, strict=True):
            own = workload_of(workload, worker)
            found.append(Layout(pipeline, own.microbatch_size, rank, example))
            rank, example = rank + len(pipeline.placements), example + worker.num_examples
        if example != workload.run_size:
            shares = " + ".join(str(worker.num_examples) for worker in binding.workers)
            raise InputError(f"the virtual workers have {shares} examples; wanted {workload.run_size} in all")
        return cls(tuple(found), workload)

    @property
    def is_shared(self) -> bool:
        """Whether several pipelines train together."""
        return len(self.layouts) > 1

    def number_of(self, place: Placement) -> int:
        """Return which of the pipelines a rank is in."""
        return place.worker if self.is_shared else 0

    def seats(self, place: Placement) -> list[Seat]:
        """Return where a rank sits: in its pipeline, or in both of those that go through the same ranks."""
        if not self.workload.both_ways:
            return [Seat(self.layouts[self.number_of(place)], place)]
        number = self.layouts[0].binding.placements.index(place)
        return [Seat(layout, layout.binding.placements[number]) for layout in self.layouts]

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks of each pipeline."""
        return [list(range(one.first_rank, one.first_rank + len(one.binding.placements))) for one in self.layouts]

    def workload_of(self, place: Placement) -> Workload:
        """Return what the pipeline trains that a rank is in: some examples of every batch."""
        workers = self.workers
        return workload_of(self.workload, workers[place.worker]) if workers else self.workload

    @cached_property
    def workers(self) -> tuple[VirtualWorker, ...]:
        """The virtual workers; empty: there is one pipeline."""
        if not self.is_shared:
            return ()
        sizes = [layout.microbatch_size * layout.plan.num_microbatches for layout in self.layouts]
        return tuple(VirtualWorker(one.plan, size) for one, size in zip(self.layouts, sizes, strict=True))

    @cached_property
    def holders(self) -> tuple[Holders, ...]:
        """Runs of layers that no pipeline cuts, in order, and who holds them.

        Raises:
            InputError: pipelines split one of them over different numbers of shards.
        """
        plans = [layout.plan for layout in self.layouts]
        ends = sorted({0, *(stage.stop for plan in plans for stage in plan.stages)})
        found = []
        for start, stop in itertools.pairwise(ends):
            grids = []
            for layout, plan in zip(self.layouts, plans, strict=True):
                s = next(s for s, stage in enumerate(plan.stages) if stage.start <= start < stage.stop)
                rank = next(rank for rank, stages in enumerate(plan.ranks) if s in stages)
                grids.append(layout.grids[rank])
            if len(shards := {grid.shape[1] for grid in grids}) > 1:
                raise InputError(
                    f"virtual workers split layers {start} to {stop - 1} over {' and '.join(map(str, sorted(shards)))} "
                    "tensor-parallel devices; wanted the same number in all"
                )
            ranks = (tuple(sorted(int(r) for grid in grids for r in grid[:, t])) for t in range(shards.pop()))
            found.append(Holders(start, stop, tuple(ranks)))
        return tuple(found)


def _both_ways(binding: Binding, workload: Workload) -> tuple[Layout, Layout]:
    """Lay out the copy that goes down the ranks and the one that goes up, each with half of every run's examples."""
    plan, size, last = binding.plan, workload.microbatch_size, len(binding.plan.ranks) - 1
    down = replace(binding, plan=replace(plan, num_microbatches=plan.num_microbatches // 2))
    turned = tuple(replace(placed, pipeline_rank=last - placed.pipeline_rank) for placed in binding.placements)
    up = replace(down, placements=turned)
    return Layout(down, size, copy=0), Layout(up, size, first_example=workload.run_size // 2, copy=1)


def workload_of(workload: Workload, worker: VirtualWorker) -> Workload:
    """Return what a virtual worker trains.

    Raises:
        InputError: its examples do not divide into its plan's microbatches.
    """
    if worker.num_examples < 1 or worker.num_examples % worker.plan.num_microbatches:
        raise InputError(
            f"a virtual worker has {worker.num_examples} examples of a batch in {worker.plan.num_microbatches} "
            "microbatches; wanted a number of examples that they divide"
        )
    own = {"batch_size": worker.num_examples * workload.accumulate, "num_microbatches": worker.plan.num_microbatches}
    return workload.model_copy(update=own)
