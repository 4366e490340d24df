"""The ways in which a layer may run: on the devices of which pipeline rank, and how those are spread.

Shape suffixes: L = layers, N = strategies, S = slots, L1 = L + 1 cut positions. A slot is a place in the pipeline with
its devices: those of a running rank, or an idle device after them. A strategy is a slot and a configuration of its
devices. An assignment gives each layer its strategy (L).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dejavu.binding import Binding, Placement
from dejavu.migration.changes import ClusterNow, Seat
from dejavu.migration.problem_now import RunningProblem
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.stage_costs import AdditiveCosts, Floats, PlanError

Ints = np.ndarray


@dataclass(frozen=True)
class Slot:
    """A place in the pipeline, on devices.

    Attributes:
        placements: of its replicas and shards, in the configuration that runs.
        configurations: of the running problem, those that these devices may have; first the one that runs.
    """

    placements: tuple[Placement, ...]
    configurations: tuple[StageConfiguration, ...]

    @property
    def seats(self) -> tuple[Seat, ...]:
        return tuple((placed.device.host, placed.device.index) for placed in self.placements)


@dataclass(frozen=True, eq=False)
class Strategies:
    """What each layer costs under each strategy, and what links the slots.

    Attributes:
        slot_N: of each strategy; they are sorted by it.
        row_N: of each strategy's configuration in the running problem.
        seconds_LN: forward and backward of one microbatch, on the slot's slowest device.
        per_step_seconds_LN, per_step_latency_N: the per-step work, as in `AdditiveCosts`.
        share_LN: of a device's memory that a layer takes, as if all slots were stages.
        latency_NN, per_byte_NN: of a message, in seconds.
        cut_bytes_L1, num_microbatches: of the problem.
        running_L: the assignment that runs.
    """

    slots: tuple[Slot, ...]
    slot_N: Ints
    row_N: Ints
    seconds_LN: Floats
    per_step_seconds_LN: Floats
    per_step_latency_N: Floats
    share_LN: Floats
    latency_NN: Floats
    per_byte_NN: Floats
    cut_bytes_L1: Floats
    num_microbatches: int
    running_L: Ints

    @property
    def shape(self) -> tuple[int, int]:
        return self.seconds_LN.shape[0], self.seconds_LN.shape[1]

    @classmethod
    def of(cls, running: RunningProblem, binding: Binding, now: ClusterNow) -> Strategies:
        """List those of a running binding, at the prices of `running`."""
        slots = _slots(running, binding, now)
        problem = running.priced.problem
        costs = problem.costs
        assert isinstance(costs, AdditiveCosts), "a workload's problem has additive costs"
        slot_N = np.repeat(np.arange(len(slots)), [len(slot.configurations) for slot in slots])
        row_N = np.array([problem.index(one) for slot in slots for one in slot.configurations])
        slow_S = np.array([max(now.slowness.get(seat, 1.0) for seat in slot.seats) for slot in slots])
        in_flight_S = np.array([problem.in_flight(s, len(slots)) for s in range(len(slots))])
        held_LN = costs.fixed_bytes_CL[row_N].T + costs.activation_bytes_CL[row_N].T * in_flight_S[slot_N]
        among = np.ix_(row_N, row_N)
        return cls(
            slots=slots,
            slot_N=slot_N,
            row_N=row_N,
            seconds_LN=costs.seconds_CL[row_N].T * slow_S[slot_N],
            per_step_seconds_LN=costs.per_step_seconds_CL[row_N].T * slow_S[slot_N],
            per_step_latency_N=costs.per_step_latency_seconds_C[row_N],
            share_LN=held_LN / costs.room_bytes_C[row_N],
            latency_NN=problem.link_latency_seconds_CC[among],
            per_byte_NN=problem.link_seconds_per_byte_CC[among],
            cut_bytes_L1=problem.cut_bytes_L1,
            num_microbatches=problem.num_microbatches,
            running_L=_running(binding, slots, slot_N),
        )

    def price(self, assigned_L: Ints) -> float:
        """Price an assignment of contiguous stages, as `plans.price` does."""
        bounds = [0, *(np.flatnonzero(np.diff(assigned_L)) + 1), len(assigned_L)]
        repeats = self.num_microbatches - 1
        total, busiest = 0.0, 0.0
        for start, stop in itertools.pairwise(bounds):
            j = assigned_L[start]
            seconds = float(self.seconds_LN[start:stop, j].sum())
            once = float(self.per_step_seconds_LN[start:stop, j].sum() + self.per_step_latency_N[j])
            total, busiest = total + seconds, max(busiest, repeats * seconds + once)
        for cut in bounds[1:-1]:
            a, b = assigned_L[cut - 1], assigned_L[cut]
            link = 2.0 * float(self.latency_NN[a, b] + self.per_byte_NN[a, b] * self.cut_bytes_L1[cut])
            total, busiest = total + link, max(busiest, repeats * link)
        return total + busiest

    def neighbours(self, assigned_L: Ints) -> Iterator[Ints]:
        """Yield the assignments that are one cut away: a layer beside a cut goes to the other side."""
        for cut in np.flatnonzero(np.diff(assigned_L)) + 1:
            for place, other in ((cut - 1, cut), (cut, cut - 1)):
                changed = assigned_L.copy()
                changed[place] = assigned_L[other]
                yield changed
        last = int(self.slot_N[assigned_L[-1]])
        if last + 1 < len(self.slots):  # an idle device after the last
            changed = assigned_L.copy()
            changed[-1] = int(np.flatnonzero(self.slot_N == last + 1)[0])
            yield changed

    def plan(self, assigned_L: Ints, schedule: str) -> tuple[Plan, tuple[Placement, ...]]:
        """Return the plan of one stage a slot and where its ranks are; the stages' device types are the usual ones."""
        bounds = [0, *(int(cut) + 1 for cut in np.flatnonzero(np.diff(assigned_L))), len(assigned_L)]
        stages, placements = list[Stage](), list[Placement]()
        for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
            j = int(assigned_L[start])
            slot = self.slots[self.slot_N[j]]
            first = int(np.flatnonzero(self.slot_N == self.slot_N[j])[0])
            configuration = slot.configurations[j - first]
            stages.append(Stage(start, stop, configuration))
            for k, placed in enumerate(slot.placements):
                replica, shard = divmod(k, configuration.tensor_parallel)
                placements.append(replace(placed, pipeline_rank=rank, replica=replica, shard=shard))
        return Plan(tuple(stages), schedule, self.num_microbatches), tuple(placements)


def _slots(running: RunningProblem, binding: Binding, now: ClusterNow) -> tuple[Slot, ...]:
    """List the running ranks in order, and the idle devices after them."""
    every = running.priced.problem.configurations
    at = {(device.host, device.index): device for device in running.cluster.devices()}
    found, used = list[Slot](), set[Seat]()
    for rank in range(len(binding.plan.ranks)):
        own = tuple(
            replace(one, device=at[one.device.host, one.device.index])
            for one in binding.placements
            if one.pipeline_rank == rank
        )
        # A device that is slower now is of a kind of its own in the binding; its prices are its type's.
        here = replace(binding.plan.rank_configuration(rank), device_type=own[0].device.type_name)
        if here not in every:
            raise PlanError(f"the running stage on {here} is none of the running problem's")
        found.append(Slot(own, (here, *(one for one in every if one != here and _same_devices(one, here)))))
        used |= set(found[-1].seats)
    for seat, device in at.items():
        if seat not in used and seat not in now.absent:
            alone = tuple(one for one in every if one.num_devices == 1 and one.device_type == device.type_name)
            found.append(Slot((Placement(0, 0, 0, device),), alone))
    return tuple(slot for slot in found if slot.configurations)


def _running(binding: Binding, slots: tuple[Slot, ...], slot_N: Ints) -> Ints:
    """Return the running assignment: the first strategy of each running slot; layers as its ranks hold them."""
    found = np.zeros(max(stage.stop for stage in binding.plan.stages), dtype=np.int64)
    for rank, stages in enumerate(binding.plan.ranks):
        for s in stages:
            span = slice(binding.plan.stages[s].start, binding.plan.stages[s].stop)
            found[span] = int(np.flatnonzero(slot_N == rank)[0])
    return found


def _same_devices(a: StageConfiguration, b: StageConfiguration) -> bool:
    return (a.device_type, a.num_nodes, a.devices_per_node) == (b.device_type, b.num_nodes, b.devices_per_node)
