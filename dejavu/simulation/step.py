"""One training step of a plan, with what its stages and its messages take.

Shape suffixes as in `_action_table` and `_loop`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.registry import named
from dejavu.plans import Plan
from dejavu.plans.schedule import SCHEDULES
from dejavu.simulation._action_table import BACKWARD, ActionTable, Integers, action_table, both_ways_table
from dejavu.simulation._loop import Costs, Floats
from dejavu.simulation._loop import simulate_actions as simulate_actions
from dejavu.simulation.result import Simulation


@dataclass(frozen=True)
class StageSeconds:
    """What one stage takes, alone on its devices, and holds.

    Attributes:
        forward_seconds, backward_seconds: one microbatch.
        per_step_seconds: gradient synchronization and optimizer, once a step.
        transfer_seconds: a message to the next stage, one way.
        backward_input_seconds, backward_weight_seconds: the two parts of a split backward pass; each half of
            `backward_seconds` where None.
        activation_bytes: held for a microbatch from the start of its forward to the end of its backward.
        retained_bytes, waiting_bytes: the same where the backward pass runs in two parts: during the first, and from
            its end to that of the second; `activation_bytes` where None.
        fixed_bytes: held all the time: weights, their gradients, the optimizer's state.
        passing_bytes: needed besides while one of its passes runs.
        stepping_bytes: needed besides while its optimizer steps, when it holds no activations.
        slices_seconds: (forward, backward) of each slice of a sequence, in order; `forward_seconds`, `backward_seconds`
            and `transfer_seconds` are the mean slice's then. Empty: all take the same.
    """

    forward_seconds: float
    backward_seconds: float
    per_step_seconds: float
    transfer_seconds: float = 0.0
    backward_input_seconds: float | None = None
    backward_weight_seconds: float | None = None
    activation_bytes: float = 0.0
    fixed_bytes: float = 0.0
    passing_bytes: float = 0.0
    stepping_bytes: float = 0.0
    retained_bytes: float | None = None
    waiting_bytes: float | None = None
    slices_seconds: tuple[tuple[float, float], ...] = ()

    def of_one_run(self, accumulate: int) -> StageSeconds:
        """Return the same for one of so many runs of the schedule in a step."""
        of_input, of_weights = (
            None if part is None else part / accumulate
            for part in (self.backward_input_seconds, self.backward_weight_seconds)
        )
        return replace(
            self,
            forward_seconds=self.forward_seconds / accumulate,
            backward_seconds=self.backward_seconds / accumulate,
            transfer_seconds=self.transfer_seconds / accumulate,
            backward_input_seconds=of_input,
            backward_weight_seconds=of_weights,
            slices_seconds=tuple((f / accumulate, b / accumulate) for f, b in self.slices_seconds),
        )

    def of_whole(self, num_slices: int) -> StageSeconds:
        """Return the same for a whole microbatch, all slices together."""
        return replace(
            self,
            forward_seconds=self.forward_seconds * num_slices,
            backward_seconds=self.backward_seconds * num_slices,
            transfer_seconds=self.transfer_seconds * num_slices,
            slices_seconds=(),
        )

    @property
    def in_flight_bytes(self) -> tuple[float, float, float]:
        """Held for a microbatch before its backward, during the first part of it, and between its two parts."""
        each, parts = self.activation_bytes, (self.retained_bytes, self.waiting_bytes)
        return (each, *(each if part is None else part for part in parts))  # type: ignore[return-value]

    @property
    def passes_seconds(self) -> tuple[float, ...]:
        """Forward, backward, its input and its weight part, and what is done once."""
        half = self.backward_seconds / 2
        parts = (self.backward_input_seconds, self.backward_weight_seconds)
        halves = (half if part is None else part for part in parts)
        return (self.forward_seconds, self.backward_seconds, *halves, self.per_step_seconds)


@dataclass(frozen=True)
class Message:
    """One microbatch's activation across a cut, or its gradient back: what it takes one way, alone on its link.

    It takes the parts in turn; while one message is received, and while its delay passes, the next is sent.

    Attributes:
        latency_seconds: passes and occupies nothing.
        wire_seconds: occupies the link.
        sender_seconds, receiver_seconds: of the two ranks' devices, which copy while they compute (on CPUs).
    """

    latency_seconds: float
    wire_seconds: float
    sender_seconds: float = 0.0
    receiver_seconds: float = 0.0


def simulate(
    plan: Plan,
    stages: Sequence[StageSeconds],
    *,
    messages: Sequence[Message] | None = None,
    devices: Sequence[Hashable] | None = None,
    links: Sequence[tuple[Hashable, Hashable]] | None = None,
) -> Simulation:
    """Simulate one step of the plan as torch's runtime takes it, stage s with `stages[s]`.

    A rank runs its actions in the listed order, one at a time, each when its input is there, and once they are done
    what its stages do once. Messages go beside that, those from one rank to another in the order in which they were
    sent; between two stages of one rank there are none. Whatever shares a device or a link gets an equal part of it.

    Where microbatches go both ways, there is a row for each of the plan's seats (`Plan.seats`), so for both copies'
    stages, and one for a cut between the two copies, at which nothing passes. What a rank does once waits for the rank
    that holds the same layers. A message of a slice takes what the mean slice's does.

    Args:
        messages: across each cut; None: the stages' `transfer_seconds`, on the wire.
        devices: where each pipeline rank sits, by any name; None: each on a device of its own.
        links: across each cut, those that activations and gradients take, by any name, the same one where both ways
            share it; None: each ordered pair of ranks has a link of its own.

    Raises:
        InputError: too few microbatches for the schedule, not one row for each stage, cut or rank, or a time or size
            that is negative or not finite.
    """
    order, S = order_of(plan), len(plan.seats)
    if messages is None:
        messages = [Message(latency_seconds=0.0, wire_seconds=stage.transfer_seconds) for stage in stages[: S - 1]]
    P = len(order.first_P1) - 1
    for name, rows, wanted in (
        ("stages", stages, S),
        ("messages", messages, S - 1),
        ("devices", devices, P),
        ("links", links, S - 1),
    ):
        if rows is not None and len(rows) != wanted:
            raise InputError(f"{name} has {len(rows)} rows for {S} stages on {P} pipeline ranks; wanted {wanted}")
    check_rows("stage", stages)
    check_rows("message across cut", messages)
    start_A, stop_A, times_M4 = simulate_actions(order, _costs(order, stages, messages, devices, links))
    if np.isnan(stop_A).any():
        raise DejavuError(f"{plan.schedule} of {S} stages and {plan.num_microbatches} microbatches waits for ever")
    if plan.both_ways:
        _wait_for_other_copy(order, start_A, stop_A)
    fixed_bytes_P, passing_bytes_P, stepping_bytes_P = np.zeros((3, P))
    np.add.at(fixed_bytes_P, order.rank_S, [stage.fixed_bytes for stage in stages])
    np.maximum.at(passing_bytes_P, order.rank_S, [stage.passing_bytes for stage in stages])
    np.add.at(stepping_bytes_P, order.rank_S, [stage.stepping_bytes for stage in stages])
    return Simulation(
        action_table=order,
        start_A=start_A,
        stop_A=stop_A,
        times_M4=times_M4,
        in_flight_bytes_S3=np.array([stage.in_flight_bytes for stage in stages], dtype=np.float64) / plan.num_slices,
        fixed_bytes_P=fixed_bytes_P + passing_bytes_P,
        stepping_bytes_P=fixed_bytes_P + stepping_bytes_P,
    )


def order_of(plan: Plan) -> ActionTable:
    """Return the actions of a plan's step.

    Raises:
        InputError: its schedule does not run so few or so many microbatches or stages.
    """
    if plan.both_ways:
        return both_ways_table(len(plan.stages), plan.num_microbatches)
    return action_table(named(SCHEDULES, plan.schedule), len(plan.stages), plan.num_microbatches, plan.num_slices)


def _wait_for_other_copy(order: ActionTable, start_A: Floats, stop_A: Floats) -> None:
    """Move what ranks do once, the last in their lists, to where both holders of a layer are done with their passes."""
    P = len(order.first_P1) - 1
    own = [np.arange(last - 2, last) for last in order.first_P1[1:]]  # a rank has a stage of each copy
    begin = [start_A[rows[0]] for rows in own]
    for rank, rows in enumerate(own):
        late = max(begin[rank], begin[P - 1 - rank]) - begin[rank]
        start_A[rows] += late
        stop_A[rows] += late


def check_rows(name: str, rows: Sequence[object]) -> None:
    """Check the numbers of records, and of tuples of tuples in them.

    Raises:
        InputError: one is negative or not finite.
    """
    for k, row in enumerate(rows):
        for field, value in vars(row).items():
            for number in chain.from_iterable(value) if isinstance(value, tuple) else (value,):
                if number is not None and not 0.0 <= number < np.inf:
                    raise InputError(f"{field} of {name} {k} is {number}; wanted a finite number ≥ 0")


def _costs(
    order: ActionTable,
    stages: Sequence[StageSeconds],
    messages: Sequence[Message],
    devices: Sequence[Hashable] | None,
    links: Sequence[tuple[Hashable, Hashable]] | None,
) -> Costs:
    """Resources are numbered devices first, then links, then the channels' delays."""
    device_P = np.arange(len(order.first_P1) - 1) if devices is None else _numbers(devices)
    D = int(device_P.max()) + 1
    before, after = device_P[order.rank_S[:-1]], device_P[order.rank_S[1:]]
    sender_K, receiver_K = (np.stack(ends, axis=1).ravel() for ends in ((before, after), (after, before)))
    link_K = D + (order.channel_K if links is None else _numbers([link for both in links for link in both]))
    delay_K = int(link_K.max(initial=D)) + 1 + order.channel_K
    parts = [(m.sender_seconds, m.wire_seconds, m.latency_seconds, m.receiver_seconds) for m in messages]
    work_A = np.array([stage.passes_seconds for stage in stages], dtype=np.float64)[order.stage_A, order.pass_A]
    if all(stage.slices_seconds for stage in stages):
        seconds_SN2 = np.array([stage.slices_seconds for stage in stages])
        passes = np.flatnonzero(order.pass_A <= BACKWARD)  # forward and backward alone are of a slice
        slice_A = order.microbatch_A[passes] % order.num_slices
        work_A[passes] = seconds_SN2[order.stage_A[passes], slice_A, order.pass_A[passes]]
    return Costs(
        work_A=work_A,
        device_P=device_P,
        work_K4=np.repeat(np.array(parts, dtype=np.float64).reshape(-1, 4), 2, axis=0),  # there and back
        resource_K4=np.stack([sender_K, link_K, delay_K, receiver_K], axis=1),
    )


def _numbers(names: Sequence[Hashable]) -> Integers:
    """Equal names, equal numbers from 0 on."""
    number: dict[Hashable, int] = {}
    return np.array([number.setdefault(name, len(number)) for name in names], dtype=np.int64)
