"""Measured layers of the database, and interpolation to other microbatch sizes."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dejavu.cluster import DeviceType
from dejavu.cost.estimates import INTERPOLATED, MEASURED, CostSource, Estimate
from dejavu.cost.sources.physics import Limits, limits
from dejavu.foundation.hashing import stable_hash
from dejavu.graphs.graph import Graph, Layer
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.workload import OptimizerSettings

log = logging.getLogger("dejavu.cost")


@dataclass(frozen=True)
class Measured(CostSource):
    """Layers that were measured on exactly that type of device, with that dtype and microbatch size.

    Attributes:
        host: use only what was measured on this host (its fingerprint); None: on any.

    A row that contradicts the layer's arithmetic and traffic is not used.
    """

    database: ProfileDatabase
    optimizer: OptimizerSettings
    host: str | None = None
    _rows: dict[tuple[str, str], dict[tuple[str, str, int | None], Measurement]] = field(
        default_factory=dict, repr=False
    )
    _told: set[tuple[str, str, str]] = field(default_factory=set, repr=False)

    def estimate(self, layer: Layer, direction: str, graph: Graph, device: DeviceType) -> Estimate | None:
        subject = subject_of(layer.signature, direction, self.optimizer)
        row = self.rows(device.name, graph.dtype).get((subject, direction, graph.microbatch_size))
        if row is None:
            return None
        allowed = limits(layer, direction, graph, device, self.optimizer)
        if allowed and not allowed.hold(row.seconds):
            self._tell(row, allowed)
            return None
        return Estimate(row.seconds, *_range(row), source=MEASURED)

    def _tell(self, row: Measurement, allowed: Limits) -> None:
        """Warn of an impossible row, once for each source; it is measured again where such a device is present."""
        key = (row.subject, str(row.direction), row.device_type)
        if key not in self._told:
            self._told.add(key)
            log.warning(
                "%s: the %s pass of layer %r on %s was measured at %.3g s on %s, %s; it is not used: "
                "`dejavu profile --measure layers` measures it again",
                self.database.path,
                row.direction,
                row.name,
                row.device_type,
                row.seconds,
                f"{row.measured_at:%Y-%m-%d %H:%M}",
                allowed,
            )

    def rows(self, device_type: str, dtype: str) -> Mapping[tuple[str, str, int | None], Measurement]:
        """Return the newest row of every layer: (subject, direction, microbatch size) -> row; read once."""
        key = (device_type, dtype)
        if key not in self._rows:
            of_host = {"host_fingerprint": self.host} if self.host else {}
            found = self.database.latest(
                kind="layer", device_type=device_type, dtype=dtype, tensor_parallel=1, **of_host
            )
            self._rows[key] = {(row.subject, str(row.direction), row.microbatch_size): row for row in found}
        return self._rows[key]


@dataclass(frozen=True)
class Interpolated(CostSource):
    """Layers that were measured at a smaller and at a larger microbatch.

    Between two neighbours the time follows a power law. It cannot fall as the microbatch grows, nor grow faster than
    the microbatch: the interval spans what these two limits allow.
    """

    measured: Measured
    _curves: dict[tuple[str, str], dict[tuple[str, str], list[Measurement]]] = field(default_factory=dict, repr=False)

    def estimate(self, layer: Layer, direction: str, graph: Graph, device: DeviceType) -> Estimate | None:
        subject = subject_of(layer.family, direction, self.measured.optimizer)
        curve = self._of(device.name, graph.dtype).get((subject, direction), [])
        if direction == "optimizer":  # per step, whatever the microbatch
            return None if not curve else Estimate(curve[-1].seconds, *_range(curve[-1]), source=INTERPOLATED)
        return between(curve, graph.microbatch_size)

    def _of(self, device_type: str, dtype: str) -> dict[tuple[str, str], list[Measurement]]:
        key = (device_type, dtype)
        if key not in self._curves:
            curves: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
            for row in self.measured.rows(*key).values():
                family, direction = json.loads(row.extra or "{}").get("family"), str(row.direction)
                if family and row.microbatch_size:
                    curves[subject_of(family, direction, self.measured.optimizer), direction].append(row)
            self._curves[key] = {
                name: sorted(rows, key=lambda row: row.microbatch_size or 0) for name, rows in curves.items()
            }
        return self._curves[key]


def between(curve: Sequence[Measurement], microbatch_size: int) -> Estimate | None:
    """Interpolate between two neighbours of a curve sorted by microbatch size; None outside."""
    below = [row for row in curve if (row.microbatch_size or 0) < microbatch_size]
    above = [row for row in curve if (row.microbatch_size or 0) > microbatch_size]
    if not below or not above:
        return None
    small, large = below[-1], above[0]
    assert small.microbatch_size and large.microbatch_size
    share = math.log(microbatch_size / small.microbatch_size) / math.log(large.microbatch_size / small.microbatch_size)
    seconds = math.exp((1 - share) * math.log(small.seconds) + share * math.log(large.seconds))
    (small_low, small_high), (large_low, large_high) = _range(small), _range(large)
    least = max(small_low, large_low * microbatch_size / large.microbatch_size)
    most = min(large_high, small_high * microbatch_size / small.microbatch_size)
    return Estimate(seconds, min(least, seconds), max(most, seconds), source=INTERPOLATED)


def subject_of(signature: str, direction: str, optimizer: OptimizerSettings) -> str:
    """Return the key of a layer's pass in the database; the optimizer pass's key depends on the optimizer."""
    return stable_hash([signature, optimizer.kind]) if direction == "optimizer" else signature


def _range(row: Measurement) -> tuple[float, float]:
    """Return the 10th and 90th percentile of its repeats."""
    low = row.seconds if row.seconds_low is None else row.seconds_low
    high = row.seconds if row.seconds_high is None else row.seconds_high
    return low, high
