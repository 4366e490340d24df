"""A problem with the prices that the simulator needs in addition to the searches' input.

Shape suffixes: L = layers, C = stage configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dejavu.plans.plan import Plan, Stage
from dejavu.plans.problem import Problem
from dejavu.plans.stage_costs import HAIR, AdditiveCosts, Floats

# Of a backward pass that runs in two parts: of a matrix product each part has half, but what has no weights (attention,
# norms, activations) is the input's part alone. Measured on stages of transformer blocks: 0.57 to 0.58.
USUAL_PARTS = (0.57, 0.43)


@dataclass(frozen=True)
class PassCost:
    """The runtime's overhead, measured on CPUs, where ranks compute and communicate on the same core; 0 if unmeasured.

    Attributes:
        pass_seconds: of every pass of a microbatch through a stage.
        message_seconds, message_seconds_per_byte: of every message, once where it is sent and once where it arrives.
    """

    pass_seconds: float = 0.0
    message_seconds: float = 0.0
    message_seconds_per_byte: float = 0.0

    def times(self, count: int) -> PassCost:
        """Return the overhead of so many passes and messages."""
        return PassCost(*(count * seconds for seconds in astuple(self)))

    def of_message(self, size_bytes: float) -> float:
        """Return the device seconds of a message at each end."""
        return self.message_seconds + self.message_seconds_per_byte * size_bytes


class Away(NamedTuple):
    """What a device keeps in its node's memory and on its disks, and its parts of them."""

    host_bytes: float
    host_capacity_bytes: float
    disk_bytes: float
    disk_capacity_bytes: float

    @property
    def fits(self) -> bool:
        in_memory, on_disk = (room * (1 + HAIR) for room in (self.host_capacity_bytes, self.disk_capacity_bytes))
        return self.host_bytes <= in_memory and self.disk_bytes <= on_disk


@dataclass(frozen=True, eq=False)
class OnDisk:
    """What stages keep on the disks of their devices' node.

    Attributes:
        bytes_CL: of a layer, of one device.
        capacity_bytes_C: a device's part of the node's disks.
    """

    bytes_CL: Floats
    capacity_bytes_C: Floats

    def of(self, rows: Sequence[int]) -> OnDisk:
        """Return that of some of the configurations."""
        return OnDisk(self.bytes_CL[rows], self.capacity_bytes_C[rows])


@dataclass(frozen=True, eq=False)
class SlicePrices:
    """What each of N slices of a sequence takes (TeraPipe, Li et al., ICML 2021); their mean is the problem's.

    Attributes:
        lengths: positions of each, in order.
        forward_seconds_NCL, backward_seconds_NCL: one microbatch's, in all runs of the schedule.
    """

    lengths: tuple[int, ...]
    forward_seconds_NCL: Floats
    backward_seconds_NCL: Floats

    def of(self, rows: Sequence[int]) -> SlicePrices:
        """Return those of some of the configurations."""
        return SlicePrices(self.lengths, self.forward_seconds_NCL[:, rows], self.backward_seconds_NCL[:, rows])

    def times(self, factor: int | Floats) -> SlicePrices:
        """Return those of so many runs of the schedule, or of configurations so much slower: one number, or (C, 1)."""
        return SlicePrices(self.lengths, factor * self.forward_seconds_NCL, factor * self.backward_seconds_NCL)


@dataclass(frozen=True, eq=False)
class PricedProblem:
    """A problem, and what simulating its plans needs besides.

    Attributes:
        forward_seconds_CL, backward_seconds_CL: one microbatch; their sum is the problem's seconds.
        accumulate: how often the schedule runs in a step. All that a run repeats is counted so many times in every
            number of a microbatch, of this record and its problem; so a step is one run of it.
        pass_costs: the runtime's overhead by device type; none where a type is absent.
        backward_parts_L2: by device type, the times of the input's and the weights' part of each layer's backward pass
            where they run separately, as fractions of the whole pass; `USUAL_PARTS` where a type is absent.
        on_disk: what stages keep on their node's disks; None: nothing. Searches leave its limit to the planner.
        unshared_seconds_CL3: of a whole backward pass, of its input's part and of its weights' part, what is not shared
            so: copies of weights to the device and of gradients from it, and what recomputation computes again, which
            comes first; None: nothing.
        slices: of sequences that go through the stages in slices; None: they go whole.
        gradient_bytes_L: of each layer's weights on one device alone.
    """

    problem: Problem
    forward_seconds_CL: Floats
    backward_seconds_CL: Floats
    pass_costs: Mapping[str, PassCost] = field(default_factory=dict)
    backward_parts_L2: Mapping[str, Floats] = field(default_factory=dict)
    accumulate: int = 1
    on_disk: OnDisk | None = None
    unshared_seconds_CL3: Floats | None = None
    slices: SlicePrices | None = None
    gradient_bytes_L: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def slice_lengths(self) -> tuple[int, ...]:
        """Positions of each slice of a sequence; empty: they are whole."""
        return () if self.slices is None else self.slices.lengths

    def as_run(self, plan: Plan) -> Plan:
        """Return a search's plan, whose microbatches are slices where there are any, as it is run."""
        return replace(plan, num_microbatches=self.problem.whole_microbatches, slices=self.slice_lengths)

    def of(self, rows: Sequence[int]) -> PricedProblem:
        """Return the problem with some of the configurations."""
        problem, ends = self.problem, np.ix_(rows, rows)
        return replace(
            self,
            problem=replace(
                problem,
                configurations=tuple(problem.configurations[c] for c in rows),
                costs=problem.costs.of(rows),
                link_latency_seconds_CC=problem.link_latency_seconds_CC[ends],
                link_seconds_per_byte_CC=problem.link_seconds_per_byte_CC[ends],
            ),
            forward_seconds_CL=self.forward_seconds_CL[rows],
            backward_seconds_CL=self.backward_seconds_CL[rows],
            on_disk=self.on_disk and self.on_disk.of(rows),
            unshared_seconds_CL3=None if self.unshared_seconds_CL3 is None else self.unshared_seconds_CL3[rows],
            slices=self.slices and self.slices.of(rows),
        )

    def slices_seconds(self, stage: Stage) -> tuple[tuple[float, float], ...]:
        """Return the forward and backward seconds of each slice of a sequence; empty: they are whole."""
        if self.slices is None:
            return ()
        c, span = self.problem.index(stage.configuration), slice(stage.start, stage.stop)
        both = (self.slices.forward_seconds_NCL, self.slices.backward_seconds_NCL)
        ahead_N, back_N = (table[:, c, span].sum(axis=1).tolist() for table in both)
        return tuple(zip(ahead_N, back_N, strict=True))

    def away(self, stage: Stage, in_flight: int) -> Away:
        """Return what each device of a stage keeps in its node, with so many microbatches in flight."""
        c, span, costs = self.problem.index(stage.configuration), slice(stage.start, stage.stop), self.problem.costs
        in_memory = (0.0, 0.0)
        if isinstance(costs, AdditiveCosts):
            held = costs.host_fixed_bytes_CL[c, span] + in_flight * costs.host_activation_bytes_CL[c, span]
            in_memory = float(held.sum()), float(costs.host_capacity_bytes_C[c])
        if self.on_disk is None:
            return Away(*in_memory, 0.0, 0.0)
        return Away(*in_memory, float(self.on_disk.bytes_CL[c, span].sum()), float(self.on_disk.capacity_bytes_C[c]))

    def passes_seconds(self, stage: Stage) -> tuple[float, float]:
        """Return the seconds of forward and backward of one microbatch, in all runs of the schedule."""
        c, span = self.problem.index(stage.configuration), slice(stage.start, stage.stop)
        return float(self.forward_seconds_CL[c, span].sum()), float(self.backward_seconds_CL[c, span].sum())

    def parts_seconds(self, stage: Stage) -> tuple[float, float]:
        """Return the seconds of the input's and the weights' part of a microbatch's backward pass."""
        c, span = self.problem.index(stage.configuration), slice(stage.start, stage.stop)
        of_input, of_weights = self.parts_seconds_CL2[c, span].sum(axis=0)
        return float(of_input), float(of_weights)

    @cached_property
    def parts_seconds_CL2(self) -> Floats:
        """The seconds of the input's and the weights' part of each layer's backward pass, as of `parts_seconds`."""
        shares_CL2 = np.empty((*self.backward_seconds_CL.shape, 2))
        for c, configuration in enumerate(self.problem.configurations):
            shares_CL2[c] = self.backward_parts_L2.get(configuration.device_type, USUAL_PARTS)
        with np.errstate(invalid="ignore"):  # a share of nothing of what cannot run: 0 × inf
            if self.unshared_seconds_CL3 is None:
                return self.backward_seconds_CL[:, :, None] * shares_CL2
            computed_CL1 = (self.backward_seconds_CL - self.unshared_seconds_CL3[:, :, 0])[:, :, None]
            found_CL2: Floats = computed_CL1 * shares_CL2 + self.unshared_seconds_CL3[:, :, 1:]
        return found_CL2
