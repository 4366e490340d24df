"""What is placed: operations that pass tensors on, and the devices and links that there are.

Shape suffixes: N = operations, T = tensors, D = devices, G = groups, I = (operation, input) pairs, O = (operation,
output) pairs; N1 = N + 1, where a row's entries begin and end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import did_you_mean
from dejavu.foundation.units import format_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SHOWN_NAMES = 12  # of a cycle


@dataclass(frozen=True)
class Operation:
    """An operator, or a group of them that runs as one.

    Attributes:
        seconds: on each device; infinite where it cannot run.
        memory_bytes: what it keeps on its device for the whole step: weights, their gradients, what backward needs.
        group: operations of one group are on one device, such as those that read the same weight; empty: on its own.
    """

    name: str
    seconds: tuple[float, ...]
    memory_bytes: float = 0.0
    group: str = ""


@dataclass(frozen=True)
class Tensor:
    """What one operation writes and others read; it moves once to each device that reads it and is not the writer's."""

    producer: str
    readers: tuple[str, ...]
    size_bytes: float


@dataclass(frozen=True, eq=False)
class Devices:
    """D devices and the links between them.

    Attributes:
        latency_seconds_DD, bytes_per_second_DD: from a row's device to a column's; the diagonal is not used. Each link
            carries one message at a time in each direction, and none shares its bandwidth with another.
    """

    names: tuple[str, ...]
    memory_bytes_D: Floats
    latency_seconds_DD: Floats
    bytes_per_second_DD: Floats

    @classmethod
    def alike(
        cls, count: int, *, memory_bytes: float = math.inf, latency_seconds: float = 0.0, bytes_per_second: float
    ) -> Devices:
        """Return `count` devices of the same memory with the same link between any two."""
        shape = (count, count)
        return cls(
            tuple(f"device {d}" for d in range(count)),
            np.full(count, float(memory_bytes)),
            np.full(shape, float(latency_seconds)),
            np.full(shape, float(bytes_per_second)),
        )


class Arrays(NamedTuple):
    """A problem for compiled loops.

    Attributes:
        input_I: the tensors that operation n reads are input_I[first_input_N1[n]:first_input_N1[n + 1]].
        output_O: those that it writes, likewise.
        message_seconds_TDD: of a tensor from one device to another.
    """

    seconds_ND: Floats
    first_input_N1: Ints
    input_I: Ints
    first_output_N1: Ints
    output_O: Ints
    producer_T: Ints
    first_reader_T1: Ints
    reader_R: Ints
    message_seconds_TDD: Floats
    group_N: Ints
    memory_G: Floats
    memory_D: Floats


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """A directed acyclic graph of operations, and the devices that it may be spread over.

    Raises:
        InputError: a name occurs twice or is not there, a number is negative or none, the operations wait for each
            other in a cycle, or one of them, or a group of them, runs and fits on no device.
    """

    operations: tuple[Operation, ...]
    tensors: tuple[Tensor, ...]
    devices: Devices

    def __post_init__(self) -> None:
        _check_devices(self.devices)
        _check_numbers(self)
        _check_names(self)
        self._check_acyclic()
        self._check_room()

    @property
    def num_devices(self) -> int:
        return len(self.devices.names)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """The position of each operation."""
        return {operation.name: n for n, operation in enumerate(self.operations)}

    @cached_property
    def group_N(self) -> Ints:
        """The group of each operation: one that names none is alone in its own."""
        names = [("", op.group) if op.group else (op.name,) for op in self.operations]
        numbers: dict[tuple[str, ...], int] = {}
        return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)

    @cached_property
    def seconds_GD(self) -> Floats:
        """What a group takes on each device, one operation after another."""
        seconds = np.zeros((self.num_groups, self.num_devices))
        np.add.at(seconds, self.group_N, self.arrays.seconds_ND)
        return seconds

    @property
    def num_groups(self) -> int:
        return int(self.group_N.max()) + 1

    @cached_property
    def arrays(self) -> Arrays:
        """The same, for compiled loops."""
        index, devices = self.index_of, self.devices
        reads: list[list[int]] = [[] for _ in self.operations]
        writes: list[list[int]] = [[] for _ in self.operations]
        readers = [sorted({index[name] for name in tensor.readers}) for tensor in self.tensors]
        for t, tensor in enumerate(self.tensors):
            writes[index[tensor.producer]].append(t)
            for n in readers[t]:
                reads[n].append(t)
        size_T = np.array([tensor.size_bytes for tensor in self.tensors], dtype=np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            carry_DD = 1.0 / devices.bytes_per_second_DD
            message_TDD = devices.latency_seconds_DD[None] + size_T[:, None, None] * carry_DD[None]
        message_TDD[:, np.arange(self.num_devices), np.arange(self.num_devices)] = 0.0
        memory_N = [operation.memory_bytes for operation in self.operations]
        return Arrays(
            np.array([operation.seconds for operation in self.operations], dtype=np.float64),
            *_rows(reads),
            *_rows(writes),
            np.array([index[tensor.producer] for tensor in self.tensors], dtype=np.int64),
            *_rows(readers),
            np.ascontiguousarray(message_TDD),
            self.group_N,
            np.bincount(self.group_N, weights=memory_N, minlength=self.num_groups).astype(np.float64),
            devices.memory_bytes_D.astype(np.float64),
        )

    @cached_property
    def _after_N(self) -> list[list[int]]:
        index = self.index_of
        after: list[set[int]] = [set() for _ in self.operations]
        for tensor in self.tensors:
            after[index[tensor.producer]] |= {index[reader] for reader in tensor.readers}
        return [sorted(found) for found in after]

    @cached_property
    def topological_N(self) -> tuple[int, ...]:
        """The operations so that each comes after those that it reads from; shorter where there is a cycle."""
        waits = [0] * len(self.operations)
        for after in self._after_N:
            for n in after:
                waits[n] += 1
        order = [n for n, count in enumerate(waits) if count == 0]
        for n in order:
            for later in self._after_N[n]:
                waits[later] -= 1
                if waits[later] == 0:
                    order.append(later)
        return tuple(order)

    def _check_acyclic(self) -> None:
        left = set(range(len(self.operations))) - set(self.topological_N)
        if not left:
            return
        # What is left waits for something that is left: going back from anywhere comes round.
        before = {later: n for n in left for later in self._after_N[n] if later in left}
        walk = [min(before)]
        while before[walk[-1]] not in walk:
            walk.append(before[walk[-1]])
        cycle = [*walk[walk.index(before[walk[-1]]) :]][::-1]
        names = [self.operations[n].name for n in (*cycle, cycle[0])]
        if len(names) > _SHOWN_NAMES:
            names = [*names[: _SHOWN_NAMES - 2], "…", *names[-2:]]
        raise InputError(
            f"operations: found a cycle, {' -> '.join(names)}; wanted none of them to wait for itself", ("operations",)
        )

    def _check_room(self) -> None:
        arrays, devices = self.arrays, self.devices
        for g in range(self.num_groups):
            members = [self.operations[n].name for n in np.flatnonzero(self.group_N == g)]
            what = f"operation {members[0]!r}" if len(members) == 1 else f"the group of {members[0]!r}"
            runs_D = np.isfinite(self.seconds_GD[g])
            if not runs_D.any():
                raise InputError(
                    f"{what}: found no device where it takes finite time; wanted one of {', '.join(devices.names)}",
                    ("operations",),
                )
            if not (runs_D & (arrays.memory_G[g] <= arrays.memory_D)).any():
                most = int(np.argmax(np.where(runs_D, arrays.memory_D, -1.0)))
                raise InputError(
                    f"{what}: found {format_bytes(arrays.memory_D[most])} on {devices.names[most]}, the largest device "
                    f"that runs it; wanted {format_bytes(arrays.memory_G[g])}, the least that would do",
                    ("operations",),
                )


def _rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return where each list begins, and all of them one after another."""
    first = np.cumsum([0, *(len(found) for found in lists)], dtype=np.int64)
    return first, np.array([x for found in lists for x in found], dtype=np.int64)


def _check_devices(devices: Devices) -> None:
    D = len(devices.names)
    if D == 0:
        raise InputError("devices: found none; wanted one or more", ("devices",))
    for name, array, shape in (
        ("memory_bytes_D", devices.memory_bytes_D, (D,)),
        ("latency_seconds_DD", devices.latency_seconds_DD, (D, D)),
        ("bytes_per_second_DD", devices.bytes_per_second_DD, (D, D)),
    ):
        if array.shape != shape:
            raise InputError(f"devices.{name}: found shape {array.shape}; wanted {shape}", ("devices", name))
        used = array if name == "memory_bytes_D" else array[~np.eye(D, dtype=bool)]
        if np.isnan(used).any() or (used < 0).any() or (name == "bytes_per_second_DD" and (used == 0).any()):
            least = "numbers above 0" if name == "bytes_per_second_DD" else "numbers from 0 on"
            raise InputError(f"devices.{name}: found {np.min(used)}; wanted {least}", ("devices", name))
        if name == "latency_seconds_DD" and np.isinf(used).any():
            raise InputError(f"devices.{name}: found {np.max(used)}; wanted finite numbers", ("devices", name))


def _check_numbers(problem: PlacementProblem) -> None:
    D = len(problem.devices.names)
    if not problem.operations:
        raise InputError("operations: found none; wanted one or more", ("operations",))
    for n, operation in enumerate(problem.operations):
        if len(operation.seconds) != D:
            raise InputError(
                f"operation {operation.name!r}: found seconds for {len(operation.seconds)} devices; wanted {D}",
                ("operations", n, "seconds"),
            )
        if not all(seconds >= 0 for seconds in operation.seconds):  # a NaN is not
            raise InputError(
                f"operation {operation.name!r}: found seconds {operation.seconds}; wanted numbers from 0 on",
                ("operations", n, "seconds"),
            )
        if not 0 <= operation.memory_bytes < math.inf:
            raise InputError(
                f"operation {operation.name!r}: found memory of {operation.memory_bytes} bytes; wanted a finite number "
                f"from 0 on",
                ("operations", n, "memory_bytes"),
            )
    for t, tensor in enumerate(problem.tensors):
        if not 0 <= tensor.size_bytes < math.inf:
            raise InputError(
                f"the tensor of {tensor.producer!r}: found {tensor.size_bytes} bytes; wanted a finite number from 0 on",
                ("tensors", t, "size_bytes"),
            )


def _check_names(problem: PlacementProblem) -> None:
    known: set[str] = set()
    for n, operation in enumerate(problem.operations):
        if operation.name in known:
            raise InputError(
                f"operations: found {operation.name!r} twice; wanted every name once", ("operations", n, "name")
            )
        known.add(operation.name)
    for t, tensor in enumerate(problem.tensors):
        for name in (tensor.producer, *tensor.readers):
            if name not in known:
                raise InputError(
                    f"tensors: found {name!r}, which is no operation{did_you_mean(name, known)}; wanted names of "
                    f"operations",
                    ("tensors", t),
                )
