"""What the database remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

from dejavu.cluster import DeviceType
from dejavu.cost._base import PASSES, CostSource, LayerCost
from dejavu.graph import Graph, Layer
from dejavu.profiles import Measurement, ProfileDatabase, stable_hash
from dejavu.workload import OptimizerSettings


@dataclass(frozen=True)
class Measured(CostSource):
    """Layers that were measured on that very type of device, with that dtype and microbatch size."""

    database: ProfileDatabase
    optimizer: OptimizerSettings
    _rows: dict[tuple[str, str, int], dict[tuple[str, str], Measurement]] = field(default_factory=dict, repr=False)

    def layer_cost(self, layer: Layer, graph: Graph, device: DeviceType) -> LayerCost | None:
        rows = self._of(device.name, graph.dtype, graph.microbatch_size)
        found = [rows.get((subject_of(layer.signature, name, self.optimizer), name)) for name in PASSES]
        forward, backward, optimizer = found
        if forward is None or backward is None or optimizer is None:
            return None
        return LayerCost(
            forward.seconds,
            backward.seconds,
            optimizer.seconds,
            relative_error=max(_spread(forward), _spread(backward)),
            source="measured",
        )

    def _of(self, device_type: str, dtype: str, microbatch_size: int) -> dict[tuple[str, str], Measurement]:
        key = (device_type, dtype, microbatch_size)
        if key not in self._rows:
            rows = self.database.latest(
                kind="layer", device_type=device_type, dtype=dtype, microbatch_size=microbatch_size
            )
            self._rows[key] = {(row.subject, str(row.direction)): row for row in rows}
        return self._rows[key]


def subject_of(signature: str, direction: str, optimizer: OptimizerSettings) -> str:
    """Under which key a layer's pass is kept; the optimizer's own depends on which optimizer it is."""
    return stable_hash([signature, optimizer.name]) if direction == "optimizer" else signature


def _spread(row: Measurement) -> float:
    """Half the distance between the 10th and 90th percentile, as a fraction of the median."""
    if row.seconds_low is None or row.seconds_high is None:
        return 0.0
    return (row.seconds_high - row.seconds_low) / (2 * row.seconds)
