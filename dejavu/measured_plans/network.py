"""Measured bandwidths as polynomials of the message's size, between types of devices and inside their nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dejavu.foundation.errors import InputError

_MB, _GB = 1e6, 1e9
_SIZES_BYTES = [2.0 ** (k / 8.0) for k in range(8 * 40)]  # up to 1 TB, where polynomials are looked at
# A ring passes a chunk on in pieces, each after it was received and added: NCCL's buffer of a channel (NCCL_BUFFSIZE).
RING_PIECE_BYTES = 4 * 2.0**20


@dataclass(frozen=True)
class Bandwidth:
    """GB/s = c2 x² + c1 x + c0 at x = log2 of the MB that each pair sends, of all pairs together.

    Attributes:
        peak_bytes_per_second: never more than this; inf where unknown.
    """

    c2: float
    c1: float
    c0: float
    peak_bytes_per_second: float = math.inf

    def bytes_per_second(self, size_bytes: float) -> float:
        """Return the polynomial's bandwidth; above its top it stays there, and it may be negative for small sizes."""
        x = math.log2(size_bytes / _MB)
        if self.c2 < 0.0:
            x = min(x, -self.c1 / (2.0 * self.c2))
        return min(_GB * (self.c2 * x * x + self.c1 * x + self.c0), self.peak_bytes_per_second)

    def seconds(self, size_bytes: float) -> float:
        """Return what so many bytes from each pair take, if one pair had all bandwidth.

        A message takes no longer than a larger one: for small sizes the polynomial falls to 0 and below, where the time
        of the smallest size that it describes counts, which is then what starting a message takes.
        """
        size, seconds = self._smallest
        return seconds if size_bytes <= size else max(seconds, size_bytes / self.bytes_per_second(size_bytes))

    @cached_property
    def _smallest(self) -> tuple[float, float]:
        """The size above which the time only grows, and its seconds."""
        times = [size / rate if (rate := self.bytes_per_second(size)) > 0.0 else math.inf for size in _SIZES_BYTES]
        at = len(times) - 1
        while at and times[at - 1] <= times[at]:
            at -= 1
        return (_SIZES_BYTES[at], times[at]) if math.isfinite(times[at]) else (math.inf, math.inf)


@dataclass(frozen=True)
class Link:
    """A measured pair of device types: how many devices of each take part."""

    from_device: str
    from_count: int
    to_device: str
    to_count: int


@dataclass(frozen=True, eq=False)
class Network:
    """Bandwidths between nodes and inside them.

    Attributes:
        between: by pair; of several zones the first by name, one before two, as a plan does not say where it ran.
        within: (device type, number of devices) -> bandwidth of each device in a ring of so many.
    """

    between: Mapping[Link, Bandwidth]
    within: Mapping[tuple[str, int], Bandwidth] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.between:
            raise InputError("the network has no bandwidth between nodes; wanted one pair of device types or more")

    def message_seconds(
        self, ends: tuple[str, str], counts: tuple[int, int], part_bytes: float, notes: set[str]
    ) -> float:
        """Return how long each of min(counts) pairs takes to send so many bytes, all at the same time.

        Raises:
            InputError: the pair's bandwidth is nowhere above 0.
        """
        bandwidth = self._between(ends, counts, notes)
        pairs = min(counts) if bandwidth is not None else 1
        seconds = pairs * (bandwidth or self._inside(ends[0], min(counts))).seconds(part_bytes)
        if not math.isfinite(seconds):
            raise InputError(f"the bandwidth from {ends[0]} to {ends[1]} is 0 or less at all sizes; wanted one above 0")
        return seconds

    def ring_seconds(self, devices: Iterable[str], degree: int, size_bytes: float, notes: set[str]) -> float:
        """Return an all-reduce of so many bytes on each of the devices, `degree` rings side by side.

        2 (n − 1) chunks of 1/n of the bytes over the slowest of the ring's links, at the bandwidth of NCCL's pieces
        (Thakur et al., 2005; Patarasuk and Yuan, 2009, for the ring).
        """
        ring = list(devices)
        n = len(ring)
        if n < 2 or size_bytes <= 0.0:
            return 0.0
        links = sorted({(one, ring[(k + 1) % n]) for k, one in enumerate(ring)})
        chunk = size_bytes / n
        piece = min(chunk, RING_PIECE_BYTES)
        times = [self.message_seconds(link, (degree, degree), piece, notes) for link in links]
        return 2 * (n - 1) * (chunk / piece) * max(times)

    def gather_seconds(self, device: str, degree: int, whole_bytes: float, notes: set[str]) -> float:
        """Return what the devices of a node take to gather a message of which each has a part."""
        if degree < 2:
            return 0.0
        if not self._has_inside(device):
            notes.add(f"no bandwidth inside a node of {device}: gathering parts of messages costs nothing")
            return 0.0
        return (degree - 1) * self._inside(device, degree).seconds(whole_bytes / degree)

    def _has_inside(self, device: str) -> bool:
        return any(name == device for name, _ in self.within)

    def _inside(self, device: str, count: int) -> Bandwidth:
        known = [at for name, at in self.within if name == device]
        return self.within[device, min(known, key=lambda at: (abs(at - count), at))]

    def _between(self, ends: tuple[str, str], counts: tuple[int, int], notes: set[str]) -> Bandwidth | None:
        """Return the pair's bandwidth; None: its devices are all in one node."""
        found = self._nearest(ends, counts) or self._nearest((ends[1], ends[0]), (counts[1], counts[0]))
        if found is not None:
            return found
        if ends[0] == ends[1] and self._has_inside(ends[0]):
            notes.add(f"no bandwidth between nodes of {ends[0]}: taken as devices of one node")
            return None
        own = [one for end in sorted(set(ends)) if (one := self._nearest((end, end), counts)) is not None]
        what = f"no bandwidth from {ends[0]} to {ends[1]}"
        notes.add(f"{what}: the slower of their own" if own else f"{what}: the slowest measured")
        return min(own or self.between.values(), key=lambda one: one.bytes_per_second(RING_PIECE_BYTES))

    def _nearest(self, ends: tuple[str, str], counts: tuple[int, int]) -> Bandwidth | None:
        """Return the pair's bandwidth at these counts, or at the nearest that were measured."""
        known = [link for link in self.between if (link.from_device, link.to_device) == ends]
        if not known:
            return None

        def distance(link: Link) -> tuple[int, int]:
            return abs(link.from_count - counts[0]) + abs(link.to_count - counts[1]), link.from_count

        return self.between[min(known, key=distance)]
