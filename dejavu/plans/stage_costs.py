"""Costs of stages: one by one (`DenseCosts`), or as sums over layers (`AdditiveCosts`).

Shape suffixes: L = layers, L1 = L + 1 cut positions (0 and L are the ends), C = stage configurations.
A stage holds layers `start` to `stop`, `stop` not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.errors import DejavuError

Floats = NDArray[np.float64]


class PlanError(DejavuError):
    """A problem or a plan is inconsistent; the message names the row."""


UNBOUNDED = 2**31 - 1  # microbatches in flight where memory does not bind
SUMMED = ("seconds_CL", "per_step_seconds_CL", "fixed_bytes_CL", "activation_bytes_CL", "step_bytes_CL")


# A stage may exceed a device's memory by this much: rounding, which depends on the order of summation over layers.
HAIR = 2.0**-40
TOO_MUCH = 2.0  # times what there is; more is no worse


def _times(room: float, held: float) -> int:
    """Return how often what is held fits the room."""
    if room < 0:
        return 0
    return UNBOUNDED if held <= 0 else int(min(room // held, UNBOUNDED))


def _nothing() -> Floats:
    """Zeros of any shape."""
    return np.zeros((1, 1))


class StageBytes(NamedTuple):
    """What a stage needs on each of its devices, in bytes.

    Attributes:
        always: throughout the step.
        passing: besides, while one of its passes runs.
        in_parts: the same where it may be a part of a backward pass that runs in two.
        each: for each microbatch in flight.
        retained, waiting: for one whose backward pass runs in two parts: during the first, and between them.
        stepping: besides, while its optimizer steps, when no microbatch is in flight.
    """

    always: float = 0.0
    passing: float = 0.0
    in_parts: float = 0.0
    each: float = 0.0
    retained: float = 0.0
    waiting: float = 0.0
    stepping: float = 0.0


def rank_bytes(stages: Sequence[StageBytes], in_flight_bytes: float) -> float:
    """Return the peak bytes on each device of a pipeline rank, which runs one pass at a time, of any of its stages.

    Args:
        in_flight_bytes: the most that its microbatches in flight take at one time, of all its stages.
    """
    working = max(stage.passing for stage in stages) + in_flight_bytes
    return sum(stage.always for stage in stages) + max(working, sum(stage.stepping for stage in stages))


@dataclass(frozen=True, eq=False)
class DenseCosts:
    """The cost of every possible stage, given one by one (Alpa's form, and any small problem's).

    Attributes:
        seconds_CLL1: [c, start, stop] one microbatch, forward and backward; inf where the stage is not possible.
        per_step_seconds_CLL1: the stage's per-step work: gradient synchronization and optimizer; inf as above.
        max_in_flight_CLL1: with how many microbatches in flight the stage still fits its memory; 0: with none.
    """

    seconds_CLL1: Floats
    per_step_seconds_CLL1: Floats
    max_in_flight_CLL1: NDArray[np.int64]

    def __post_init__(self) -> None:
        shape = self.seconds_CLL1.shape
        if len(shape) != 3 or shape[2] != shape[1] + 1:
            raise PlanError(f"stage costs have shape {shape}; wanted (configurations, layers, layers + 1)")
        for name, table in (("seconds", self.seconds_CLL1), ("per_step_seconds", self.per_step_seconds_CLL1)):
            bad = np.argwhere(np.isnan(table) | (table < 0))
            if len(bad):
                c, start, stop = (int(i) for i in bad[0])
                raise PlanError(
                    f"{name} of configuration {c}, layers {start} to {stop} is {table[c, start, stop]}; wanted ≥ 0"
                )

    @property
    def num_layers(self) -> int:
        return int(self.seconds_CLL1.shape[1])

    @property
    def num_configurations(self) -> int:
        return int(self.seconds_CLL1.shape[0])

    def stage_seconds(self, start: int, stop: int, c: int) -> float:
        return float(self.seconds_CLL1[c, start, stop])

    def per_step_seconds(self, start: int, stop: int, c: int) -> float:
        return float(self.per_step_seconds_CLL1[c, start, stop])

    def max_in_flight(self, start: int, stop: int, c: int) -> int:
        return int(self.max_in_flight_CLL1[c, start, stop])

    def peak_bytes(self, start: int, stop: int, c: int, in_flight: int) -> float:
        """Return nan: in this form only whether a stage fits is known."""
        return float("nan")

    def stage_bytes(self, start: int, stop: int, c: int) -> StageBytes:
        """Return zeros: unknown in this form, and simulated as nothing."""
        return StageBytes()

    def host_share(self, start: int, stop: int, c: int, in_flight: int) -> float:
        """Return zero: unknown in this form, which knows what fits."""
        return 0.0

    def dense(self) -> DenseCosts:
        return self

    def of(self, rows: Sequence[int]) -> DenseCosts:
        """Return those of some of the configurations."""
        return DenseCosts(*(getattr(self, one.name)[rows] for one in fields(self)))


class Sums:
    """Prefix sums over layers whose differences are accurate to the last bit, however different the layers are.

    A layer of 1e9 s before layers of 1e-8 s takes all digits of an ordinary prefix sum. So each number is split into
    a multiple of a grid on which all sums of a row are exact, and a rest that is smaller than the grid: the
    differences of the first are exact, those of the second err by 1e-16 of a rest, and their sum is rounded once. So
    sums grow with the layers that they hold, and whole numbers below 2^52 are exact.

    A row is summed when it is first asked for: a plan has few configurations of hundreds, and their sums over
    thousands of layers take longer, and more memory, than all else that pricing it does.
    """

    def __init__(self, table_CL: Floats, counts_CL: NDArray[np.bool_] | None = None) -> None:
        """Of finite numbers ≥ 0; `counts_CL`: of those that count, None: all do."""
        self._table_CL, self._counts_CL = table_CL, counts_CL
        self._rows: dict[int, tuple[Floats, Floats]] = {}

    def row(self, c: int) -> tuple[Floats, Floats]:
        """Return the sums up to each cut of what is on the grid, and of the rests."""
        found = self._rows.get(c)
        if found is None:
            found = self._rows[c] = self._summed(c)
        return found

    def _summed(self, c: int) -> tuple[Floats, Floats]:
        row_L = self._table_CL[c]
        if self._counts_CL is not None:
            row_L = np.where(self._counts_CL[c], row_L, 0.0)
        _, exponent = np.frexp(row_L.sum())
        spacing = np.ldexp(1.0, max(int(exponent) - 52, -1022))  # the sum is below 2^52 of these
        on_grid_L = np.floor(row_L / spacing) * spacing
        return _upto_each_cut(on_grid_L), _upto_each_cut(row_L - on_grid_L)

    def between(self, start: int, stop: int, c: int) -> float:
        grid_L1, rest_L1 = self.row(c)
        return float((grid_L1[stop] - grid_L1[start]) + (rest_L1[stop] - rest_L1[start]))

    def all_spans(self) -> Floats:
        """Return [c, start, stop], the same floats as `between`; meaningless where stop is not after start."""
        rows = [self.row(c) for c in range(len(self._table_CL))]
        grid, rest = np.stack([grid for grid, _ in rows]), np.stack([rest for _, rest in rows])
        spans: Floats = (grid[:, None, :] - grid[:, :-1, None]) + (rest[:, None, :] - rest[:, :-1, None])
        return spans


def _upto_each_cut(row_L: Floats) -> Floats:
    sums_L1 = np.zeros(len(row_L) + 1)
    np.cumsum(row_L, out=sums_L1[1:])
    return sums_L1


@dataclass(frozen=True, eq=False)
class AdditiveCosts:
    """Stage costs as sums over layers, kept as prefix sums, so that any stage costs constant time.

    A layer whose seconds are infinite under a configuration cannot run there, and no stage with it can.

    Attributes:
        seconds_CL: a layer's forward and backward of one microbatch under each configuration; inf: not possible.
        per_step_seconds_CL: a layer's part of the per-step work (gradient synchronization and optimizer).
        per_step_latency_seconds_C: added per step to any stage of the configuration (the collective's latency).
        fixed_bytes_CL: parameters, gradients and optimizer state of a layer on one device.
        activation_bytes_CL: what a layer keeps for one microbatch in flight on one device.
        temporary_bytes_CL: a layer's scratch; a stage needs the largest of its layers'.
        capacity_bytes_C: memory of one device.
        message_bytes_CL1: what a stage holds for messages across each of its two cuts; none if not given.
        step_bytes_CL: the optimizer's temporaries while it steps, when no activations are held; none if not given.
        retained_bytes_CL, waiting_bytes_CL: as `activation_bytes_CL`, where a backward pass runs in two parts: during
            the first, which retains the graph for the second, and between them. Never less than these, given or not.
        in_parts_bytes_CL: as `temporary_bytes_CL`, during either part; never less, given or not.
        host_fixed_bytes_CL, host_activation_bytes_CL: what a layer of one device keeps in its node's memory: always,
            and for one microbatch in flight; none if not given.
        host_capacity_bytes_C: a device's part of that memory.
    """

    seconds_CL: Floats
    per_step_seconds_CL: Floats
    per_step_latency_seconds_C: Floats
    fixed_bytes_CL: Floats
    activation_bytes_CL: Floats
    temporary_bytes_CL: Floats
    capacity_bytes_C: Floats
    message_bytes_CL1: Floats = field(default_factory=_nothing)
    step_bytes_CL: Floats = field(default_factory=_nothing)
    retained_bytes_CL: Floats = field(default_factory=_nothing)
    waiting_bytes_CL: Floats = field(default_factory=_nothing)
    in_parts_bytes_CL: Floats = field(default_factory=_nothing)
    host_fixed_bytes_CL: Floats = field(default_factory=_nothing)
    host_activation_bytes_CL: Floats = field(default_factory=_nothing)
    host_capacity_bytes_C: Floats = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        C, L = self.seconds_CL.shape
        shapes: dict[str, tuple[int, ...]] = {"message_bytes_CL1": (C, L + 1), "step_bytes_CL": (C, L)}
        shapes |= {"retained_bytes_CL": (C, L), "waiting_bytes_CL": (C, L), "in_parts_bytes_CL": (C, L)}
        shapes |= {"host_fixed_bytes_CL": (C, L), "host_activation_bytes_CL": (C, L), "host_capacity_bytes_C": (C,)}
        for name, shape in shapes.items():
            if getattr(self, name).shape == (1, 1):
                given = getattr(self, name).reshape((1,) * len(shape))
                object.__setattr__(self, name, np.broadcast_to(given, shape))
        for name in (
            "seconds_CL",
            "per_step_seconds_CL",
            "per_step_latency_seconds_C",
            "fixed_bytes_CL",
            "activation_bytes_CL",
            "temporary_bytes_CL",
            "capacity_bytes_C",
            *shapes,
        ):
            table = getattr(self, name)
            wanted = shapes.get(name, (C, L) if name.endswith("CL") else (C,))
            if table.shape != wanted:
                raise PlanError(f"{name} has shape {table.shape}; wanted {wanted}")
            may_be_impossible = "seconds" in name
            bad = np.argwhere(np.isnan(table) | (table < 0) | (np.isinf(table) & (not may_be_impossible)))
            if len(bad):
                where = tuple(int(i) for i in bad[0])
                rule = "a number ≥ 0, or inf where it cannot run" if may_be_impossible else "a finite number ≥ 0"
                raise PlanError(f"{name}{list(where)} is {table[where]}; wanted {rule}")

    @property
    def num_layers(self) -> int:
        return int(self.seconds_CL.shape[1])

    @property
    def num_configurations(self) -> int:
        return int(self.seconds_CL.shape[0])

    def of(self, rows: Sequence[int]) -> AdditiveCosts:
        """Return those of some of the configurations."""
        return AdditiveCosts(*(getattr(self, one.name)[rows] for one in fields(self)))

    @cached_property
    def can_run_CL(self) -> NDArray[np.bool_]:
        """Which layers can run under which configurations."""
        every_stage = np.isfinite(self.per_step_latency_seconds_C)[:, None]
        return np.isfinite(self.seconds_CL) & np.isfinite(self.per_step_seconds_CL) & every_stage

    @cached_property
    def least_seconds_L(self) -> Floats:
        """A layer's seconds under its fastest configuration; 0 where it can run under none."""
        least = np.where(self.can_run_CL, self.seconds_CL, np.inf).min(axis=0)
        return np.where(np.isfinite(least), least, 0.0)

    @cached_property
    def room_bytes_C(self) -> Floats:
        """The memory that a stage may use: the capacity with its tolerance for rounding."""
        return self.capacity_bytes_C * (1 + HAIR)

    @cached_property
    def sums(self) -> dict[str, Sums]:
        """Prefix sums of the tables over layers, without the layers that cannot run; `blocked_CL1` counts these."""
        return {name: Sums(getattr(self, name), self.can_run_CL) for name in SUMMED}

    @cached_property
    def blocked_CL1(self) -> NDArray[np.int64]:
        """How many layers before each cut cannot run."""
        return np.pad(np.cumsum(~self.can_run_CL, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def host_shares_2CL1(self) -> Floats:
        """Sums up to each cut: the parts of a device's share of its node's memory that layers always take, and for
        one microbatch in flight."""
        if not (self.host_fixed_bytes_CL.any() or self.host_activation_bytes_CL.any()):
            return np.zeros((2, self.num_configurations, self.num_layers + 1))
        room_C1 = self.host_capacity_bytes_C[:, None] * (1 + HAIR)
        bytes_2CL = np.stack([self.host_fixed_bytes_CL, self.host_activation_bytes_CL])
        taken = bytes_2CL > 0
        with np.errstate(divide="ignore"):
            shares_2CL = np.minimum(np.where(taken, bytes_2CL, 0.0) / np.where(taken, room_C1, 1.0), TOO_MUCH)
        return np.pad(np.cumsum(shares_2CL, axis=2), ((0, 0), (0, 0), (1, 0)))

    def host_share(self, start: int, stop: int, c: int, in_flight: int) -> float:
        """Return which part of its share of the node's memory a device takes; above 1 the stage does not fit."""
        always, each = self._host_shares(start, stop, c)
        return always + in_flight * each

    def _host_shares(self, start: int, stop: int, c: int) -> tuple[float, float]:
        upto = self.host_shares_2CL1
        return float(upto[0, c, stop] - upto[0, c, start]), float(upto[1, c, stop] - upto[1, c, start])

    def _can_run(self, start: int, stop: int, c: int) -> bool:
        return bool(self.blocked_CL1[c, start] == self.blocked_CL1[c, stop])

    def _sum(self, name: str, start: int, stop: int, c: int) -> float:
        return self.sums[name].between(start, stop, c)

    def stage_seconds(self, start: int, stop: int, c: int) -> float:
        return self._sum("seconds_CL", start, stop, c) if self._can_run(start, stop, c) else float("inf")

    def per_step_seconds(self, start: int, stop: int, c: int) -> float:
        if not self._can_run(start, stop, c):
            return float("inf")
        return self._sum("per_step_seconds_CL", start, stop, c) + float(self.per_step_latency_seconds_C[c])

    def peak_bytes(self, start: int, stop: int, c: int, in_flight: int) -> float:
        """Return the peak bytes on each device of the stage, with `in_flight` microbatches or in the optimizer step."""
        found = self.stage_bytes(start, stop, c)
        return rank_bytes([found], in_flight * found.each)

    def stage_bytes(self, start: int, stop: int, c: int) -> StageBytes:
        """Return the bytes on each device of the stage."""
        own, each = slice(start, stop), self._sum("activation_bytes_CL", start, stop, c)
        passing = float(self.temporary_bytes_CL[c, own].max())
        return StageBytes(
            always=self._always_bytes(start, stop, c),
            passing=passing,
            in_parts=max(passing, float(self.in_parts_bytes_CL[c, own].max())),
            each=each,
            retained=max(each, float(self.retained_bytes_CL[c, own].sum())),
            waiting=max(each, float(self.waiting_bytes_CL[c, own].sum())),
            stepping=self._sum("step_bytes_CL", start, stop, c),
        )

    def _always_bytes(self, start: int, stop: int, c: int) -> float:
        messages = self.message_bytes_CL1[c, start] + self.message_bytes_CL1[c, stop]
        return self._sum("fixed_bytes_CL", start, stop, c) + float(messages)

    def max_in_flight(self, start: int, stop: int, c: int) -> int:
        if not self._can_run(start, stop, c):
            return 0
        free = float(self.room_bytes_C[c]) - self._always_bytes(start, stop, c)
        room = free - float(self.temporary_bytes_CL[c, start:stop].max())
        held = self._sum("activation_bytes_CL", start, stop, c)
        if room < 0 or free < self._sum("step_bytes_CL", start, stop, c):
            return 0
        host_always, host_held = self._host_shares(start, stop, c)
        return min(_times(room, held), _times(1.0 - host_always, host_held))

    def dense(self) -> DenseCosts:
        """Return the same costs stage by stage; memory grows with configurations × layers²."""
        C, L = self.seconds_CL.shape
        starts, stops = np.arange(L)[:, None], np.arange(L + 1)[None, :]
        stages = stops > starts
        can_run = self.blocked_CL1[:, None, :] == self.blocked_CL1[:, :L, None]

        def spans(name: str) -> Floats:
            return self.sums[name].all_spans()

        temporary = np.zeros((C, L, L + 1))
        for start in range(L):
            temporary[:, start, start + 1 :] = np.maximum.accumulate(self.temporary_bytes_CL[:, start:], axis=1)
        # Summed in the order of max_in_flight, so that both forms agree on what just fits.
        messages = self.message_bytes_CL1[:, :L, None] + self.message_bytes_CL1[:, None, :]
        free = self.room_bytes_C[:, None, None] - (spans("fixed_bytes_CL") + messages)
        room = free - temporary
        held = spans("activation_bytes_CL")
        fits = np.where(held > 0, room // np.where(held > 0, held, 1), UNBOUNDED)
        enough = stages & can_run & (room >= 0) & (free >= spans("step_bytes_CL"))
        if self.host_fixed_bytes_CL.any() or self.host_activation_bytes_CL.any():
            always, each = self.host_shares_2CL1[:, :, None, :] - self.host_shares_2CL1[:, :, :L, None]
            fits = np.minimum(fits, np.where(each > 0, (1.0 - always) // np.where(each > 0, each, 1), UNBOUNDED))
            enough &= always <= 1.0
        once = spans("per_step_seconds_CL") + self.per_step_latency_seconds_C[:, None, None]
        return DenseCosts(
            seconds_CLL1=np.where(stages & can_run, spans("seconds_CL"), np.inf),
            per_step_seconds_CLL1=np.where(stages, np.where(can_run, once, np.inf), 0.0),
            max_in_flight_CLL1=np.where(enough, np.clip(fits, 0, UNBOUNDED), 0).astype(np.int64),
        )
