"""What stages cost: one by one (`DenseCosts`), or as sums over layers (`AdditiveCosts`).

Shape suffixes: L = layers, L1 = L + 1 cut positions (0 and L are the ends), C = stage configurations.
A stage holds layers `start` to `stop`, `stop` not included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dejavu.errors import DejavuError

Floats = NDArray[np.float64]


class PlanError(DejavuError):
    """A problem or a plan that contradicts itself; the message names the row."""


UNBOUNDED = 2**31 - 1  # microbatches in flight where memory does not bind


def _nothing() -> Floats:
    """Zeros of any shape."""
    return np.zeros((1, 1))


@dataclass(frozen=True, eq=False)
class DenseCosts:
    """The cost of every possible stage, given one by one (Alpa's form, and any small problem's).

    Attributes:
        seconds_CLL1: [c, start, stop] one microbatch, forward and backward; inf where the stage is not possible.
        once_seconds_CLL1: what the stage adds once a step: gradient synchronization and the optimizer; inf as above.
        max_in_flight_CLL1: with how many microbatches in flight the stage still fits its memory; 0: with none.
    """

    seconds_CLL1: Floats
    once_seconds_CLL1: Floats
    max_in_flight_CLL1: NDArray[np.int64]

    def __post_init__(self) -> None:
        shape = self.seconds_CLL1.shape
        if len(shape) != 3 or shape[2] != shape[1] + 1:
            raise PlanError(f"stage costs have shape {shape}; wanted (configurations, layers, layers + 1)")
        for name, table in (("seconds", self.seconds_CLL1), ("once_seconds", self.once_seconds_CLL1)):
            bad = np.argwhere(np.isnan(table) | (table < 0))
            if len(bad):
                c, start, stop = (int(i) for i in bad[0])
                raise PlanError(
                    f"{name} of configuration {c}, layers {start} to {stop} is {table[c, start, stop]}; wanted ≥ 0"
                )

    @property
    def num_layers(self) -> int:
        return self.seconds_CLL1.shape[1]

    @property
    def num_configurations(self) -> int:
        return self.seconds_CLL1.shape[0]

    def stage_seconds(self, start: int, stop: int, c: int) -> float:
        return float(self.seconds_CLL1[c, start, stop])

    def once_seconds(self, start: int, stop: int, c: int) -> float:
        return float(self.once_seconds_CLL1[c, start, stop])

    def max_in_flight(self, start: int, stop: int, c: int) -> int:
        return int(self.max_in_flight_CLL1[c, start, stop])

    def peak_bytes(self, start: int, stop: int, c: int, in_flight: int) -> float:
        """Unknown in this form: only whether it fits was given."""
        return float("nan")

    def held_bytes(self, start: int, stop: int, c: int) -> tuple[float, float]:
        """Unknown in this form, and played as nothing."""
        return 0.0, 0.0

    def dense(self) -> DenseCosts:
        return self


@dataclass(frozen=True, eq=False)
class AdditiveCosts:
    """Stage costs as sums over layers, kept as prefix sums: thousands of layers cost nothing extra.

    Attributes:
        seconds_CL: a layer's forward and backward of one microbatch under each configuration.
        once_seconds_CL: a layer's part of gradient synchronization and optimizer, once a step.
        once_latency_seconds_C: added once a step to any stage of the configuration (the collective's latency).
        fixed_bytes_CL: parameters, gradients and optimizer state of a layer on one device.
        activation_bytes_CL: what a layer keeps for one microbatch in flight on one device.
        temporary_bytes_CL: a layer's scratch; a stage needs the largest of its layers'.
        capacity_bytes_C: memory of one device.
        message_bytes_CL1: what a stage holds for messages across each of its two cuts; none if not given.
        step_bytes_CL: what the optimizer needs besides while it steps, when no activations are held; none if not given.
    """

    seconds_CL: Floats
    once_seconds_CL: Floats
    once_latency_seconds_C: Floats
    fixed_bytes_CL: Floats
    activation_bytes_CL: Floats
    temporary_bytes_CL: Floats
    capacity_bytes_C: Floats
    message_bytes_CL1: Floats = field(default_factory=_nothing)
    step_bytes_CL: Floats = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        C, L = self.seconds_CL.shape
        shapes = {"message_bytes_CL1": (C, L + 1), "step_bytes_CL": (C, L)}
        for name, shape in shapes.items():
            if getattr(self, name).shape == (1, 1):
                object.__setattr__(self, name, np.broadcast_to(getattr(self, name), shape))
        for name in (
            "seconds_CL",
            "once_seconds_CL",
            "once_latency_seconds_C",
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
            bad = np.argwhere(~np.isfinite(table) | (table < 0))
            if len(bad):
                where = tuple(int(i) for i in bad[0])
                raise PlanError(f"{name}{list(where)} is {table[where]}; wanted a finite number ≥ 0")

    @property
    def num_layers(self) -> int:
        return self.seconds_CL.shape[1]

    @property
    def num_configurations(self) -> int:
        return self.seconds_CL.shape[0]

    @cached_property
    def _prefix(self) -> dict[str, Floats]:
        names = ("seconds_CL", "once_seconds_CL", "fixed_bytes_CL", "activation_bytes_CL", "step_bytes_CL")
        return {name: np.pad(np.cumsum(getattr(self, name), axis=1), ((0, 0), (1, 0))) for name in names}

    def _sum(self, name: str, start: int, stop: int, c: int) -> float:
        prefix = self._prefix[name][c]
        return float(prefix[stop] - prefix[start])

    def stage_seconds(self, start: int, stop: int, c: int) -> float:
        return self._sum("seconds_CL", start, stop, c)

    def once_seconds(self, start: int, stop: int, c: int) -> float:
        return self._sum("once_seconds_CL", start, stop, c) + float(self.once_latency_seconds_C[c])

    def peak_bytes(self, start: int, stop: int, c: int, in_flight: int) -> float:
        """Bytes on each device of the stage while `in_flight` microbatches are held, or the optimizer steps."""
        working = float(self.temporary_bytes_CL[c, start:stop].max())
        working += in_flight * self._sum("activation_bytes_CL", start, stop, c)
        return self._always_bytes(start, stop, c) + max(working, self._sum("step_bytes_CL", start, stop, c))

    def held_bytes(self, start: int, stop: int, c: int) -> tuple[float, float]:
        """Bytes on each device of the stage: all through the step, and for each microbatch in flight."""
        working = float(self.temporary_bytes_CL[c, start:stop].max())
        return self._always_bytes(start, stop, c) + working, self._sum("activation_bytes_CL", start, stop, c)

    def _always_bytes(self, start: int, stop: int, c: int) -> float:
        messages = self.message_bytes_CL1[c, start] + self.message_bytes_CL1[c, stop]
        return self._sum("fixed_bytes_CL", start, stop, c) + float(messages)

    def max_in_flight(self, start: int, stop: int, c: int) -> int:
        free = float(self.capacity_bytes_C[c]) - self._always_bytes(start, stop, c)
        room = free - float(self.temporary_bytes_CL[c, start:stop].max())
        held = self._sum("activation_bytes_CL", start, stop, c)
        if room < 0 or free < self._sum("step_bytes_CL", start, stop, c):
            return 0
        return UNBOUNDED if held <= 0 else int(min(room // held, UNBOUNDED))

    def dense(self) -> DenseCosts:
        """The same costs stage by stage; memory grows with configurations × layers²."""
        C, L = self.seconds_CL.shape
        starts, stops = np.arange(L)[:, None], np.arange(L + 1)[None, :]
        possible = stops > starts

        def spread(name: str) -> Floats:
            prefix = self._prefix[name]
            return prefix[:, None, :] - prefix[:, :L, None]

        temporary = np.zeros((C, L, L + 1))
        for start in range(L):
            temporary[:, start, start + 1 :] = np.maximum.accumulate(self.temporary_bytes_CL[:, start:], axis=1)
        # Summed in the order of max_in_flight, so that both forms agree on what just fits.
        messages = self.message_bytes_CL1[:, :L, None] + self.message_bytes_CL1[:, None, :]
        free = self.capacity_bytes_C[:, None, None] - (spread("fixed_bytes_CL") + messages)
        room = free - temporary
        held = spread("activation_bytes_CL")
        fits = np.where(held > 0, room // np.where(held > 0, held, 1), UNBOUNDED)
        enough = possible & (room >= 0) & (free >= spread("step_bytes_CL"))
        return DenseCosts(
            seconds_CLL1=np.where(possible, spread("seconds_CL"), np.inf),
            once_seconds_CLL1=np.where(
                possible, spread("once_seconds_CL") + self.once_latency_seconds_C[:, None, None], 0.0
            ),
            max_in_flight_CLL1=np.where(enough, np.clip(fits, 0, UNBOUNDED), 0).astype(np.int64),
        )
