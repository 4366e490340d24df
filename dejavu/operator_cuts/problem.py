"""What is cut: operators in order as three arrays, the servers that run them, and a plan.

Shape suffixes: P = points (runs of operators between which a pipeline may be cut), S = stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural

Floats = NDArray[np.float64]

NUM_MICROBATCHES = 4  # Auto-MAP's: a batch of 64 examples in microbatches of 16
ADAM_COPIES = 4.0  # a weight, its gradient and two moments, all of one type
RADIUS = 3  # devices around a server's boundary where Auto-MAP looks for device cuts


@dataclass(frozen=True, eq=False)
class OperatorArrays:
    """A model's operators in order, as numbers for one microbatch (Auto-MAP's three arrays, and what is kept).

    Attributes:
        compute_seconds_P: forward and backward on one device; of r replicas each takes an r-th.
        weight_bytes_P: whose gradients replicas all-reduce once a batch.
        crossing_bytes_P: activations that cross a cut downstream of each point; of the last, nothing.
        held_bytes_P: kept from forward to backward; not given: as much as crosses.
        names: of the points, for people; not given: none.

    Raises:
        InputError: arrays of different lengths, none at all, or a number that is negative or not finite.
    """

    compute_seconds_P: Floats
    weight_bytes_P: Floats
    crossing_bytes_P: Floats
    held_bytes_P: Floats
    names: tuple[str, ...] = ()

    def __init__(
        self,
        compute_seconds_P: ArrayLike,
        weight_bytes_P: ArrayLike,
        crossing_bytes_P: ArrayLike,
        held_bytes_P: ArrayLike | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        given = {"compute_seconds": compute_seconds_P, "weight_bytes": weight_bytes_P}
        given |= {"crossing_bytes": crossing_bytes_P}
        given["held_bytes"] = crossing_bytes_P if held_bytes_P is None else held_bytes_P
        for name, values in given.items():
            object.__setattr__(self, f"{name}_P", _checked(name, values))
        lengths = {name: len(getattr(self, f"{name}_P")) for name in given}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise InputError(f"operator arrays: found lengths {said}; wanted one length for all")
        if names and len(names) != len(self):
            raise InputError(f"operator arrays: found {plural(len(names), 'name')}; wanted {len(self)}, one a point")
        object.__setattr__(self, "names", tuple(names))

    def __len__(self) -> int:
        return len(self.compute_seconds_P)


def _checked(name: str, values: ArrayLike) -> Floats:
    try:
        array = np.array(values, dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"operator arrays: {name} holds something that is no number; wanted numbers") from None
    if array.ndim != 1 or not len(array):
        raise InputError(f"operator arrays: {name} has shape {array.shape}; wanted one number for each point")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise InputError(
            f"operator arrays: found {name}[{bad[0]}] = {array[bad[0]]}; wanted finite numbers, none below 0"
        )
    array.setflags(write=False)
    return array


@dataclass(frozen=True)
class Servers:
    """Equal servers in a row, each with as many devices; devices are numbered through.

    Attributes:
        inside_bytes_per_second: of a device's link to others of its server, one way.
        between_bytes_per_second: of a server's network card, one way; all its devices share it.
        memory_bytes: of a device; infinite: not looked at.
    """

    count: int
    devices_each: int = 8
    inside_bytes_per_second: float = 150e9  # NVLink 2, over all six links
    between_bytes_per_second: float = 25e9 / 8
    memory_bytes: float = 16 * 2.0**30

    def __post_init__(self) -> None:
        for name in ("count", "devices_each"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"servers: found {name} = {getattr(self, name)}; wanted a whole number from 1")
        for name in ("inside_bytes_per_second", "between_bytes_per_second", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise InputError(f"servers: found {name} = {getattr(self, name)}; wanted more than 0")

    @property
    def num_devices(self) -> int:
        return self.count * self.devices_each

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Return the device cuts that part no server: before the first device of each server but the first."""
        return tuple(range(self.devices_each, self.num_devices, self.devices_each))

    def near_boundaries(self, radius: int = RADIUS) -> tuple[int, ...]:
        """Return the device cuts at most `radius` devices from a boundary."""
        near = {cut + off for cut in self.boundaries for off in range(-radius, radius + 1)}
        return tuple(sorted(near & set(self.everywhere)))

    @property
    def everywhere(self) -> tuple[int, ...]:
        """Return every device cut."""
        return tuple(range(1, self.num_devices))


CONFIGURATIONS = {"A": Servers(2), "B": Servers(3), "C": Servers(4)}  # Auto-MAP's, of eight V100 each


@dataclass(frozen=True)
class CutPlan:
    """S stages in order: which points each runs, and on which devices.

    Attributes:
        operator_cuts: the S − 1 first points of all stages but the first, rising.
        device_cuts: the S − 1 first devices of all stages but the first, rising.
    """

    operator_cuts: tuple[int, ...] = ()
    device_cuts: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class CutProblem:
    """Where to cut: operators, servers, and which cuts are allowed. Every device is used.

    Attributes:
        device_cuts: the allowed ones, rising; not given: those between servers.
        max_stages: not given: as many as microbatches, as torch's schedules want it.
        copies: bytes that a device holds for each byte of its weights.

    Raises:
        InputError: more stages are wanted than there are points, a device cut that parts nothing, or less than one
            microbatch.
    """

    arrays: OperatorArrays
    servers: Servers
    device_cuts: tuple[int, ...] | None = None
    num_microbatches: int = NUM_MICROBATCHES
    max_stages: int | None = None
    copies: float = ADAM_COPIES

    def __post_init__(self) -> None:
        if self.device_cuts is None:
            object.__setattr__(self, "device_cuts", self.servers.boundaries)
        found, wanted = self.device_cuts or (), self.servers.everywhere
        if tuple(sorted(set(found) & set(wanted))) != tuple(found):
            raise InputError(
                f"device cuts: found {list(found)}; wanted whole numbers from 1 to "
                f"{self.servers.num_devices - 1}, rising"
            )
        if self.num_microbatches < 1:
            raise InputError(f"microbatches: found {self.num_microbatches}; wanted 1 or more")
        if self.max_stages is not None and not 1 <= self.max_stages <= len(self.arrays):
            raise InputError(
                f"stages: found at most {self.max_stages} wanted of {plural(len(self.arrays), 'point')}; "
                f"wanted a number from 1 to {len(self.arrays)}"
            )
        if not self.copies > 0:
            raise InputError(f"copies of each weight: found {self.copies}; wanted more than 0")

    @cached_property
    def most_stages(self) -> int:
        """Return how many stages a plan may have."""
        wanted = self.num_microbatches if self.max_stages is None else self.max_stages
        return min(wanted, len(self.arrays), len(self.device_cuts or ()) + 1)

    @cached_property
    def positions_N(self) -> NDArray[np.int64]:
        """Return the first device, the allowed device cuts, and the number of devices."""
        return np.array([0, *(self.device_cuts or ()), self.servers.num_devices], dtype=np.int64)

    def in_flight(self, stage: int, num_stages: int) -> int:
        """Return the microbatches whose activations a stage holds at most under 1F1B; stages count from 0."""
        return min(self.num_microbatches, num_stages - stage)
