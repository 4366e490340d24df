"""A cost source's answers, and the table that a plan is priced from. Every number keeps its source.

Shape suffixes: L = layers, D = device types.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.cost.memory.layers import layer_activation_bytes
from dejavu.foundation.errors import DejavuError
from dejavu.graphs.graph import Graph, Layer

PASSES = ("forward", "backward", "optimizer")
Floats = NDArray[np.float64]


class CostError(DejavuError):
    """A cost is missing or impossible; the message names the layer and the device."""


@dataclass(frozen=True)
class Estimate:
    """One number, its uncertainty, and its source.

    Attributes:
        low_seconds, high_seconds: a 90 % interval: in nine of ten cases the truth lies between them.
        source: `measured`, or the predictor's name.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    source: str


@dataclass(frozen=True)
class Fallback:
    """Operators that only the roofline could price, because no better predictor knows them.

    Attributes:
        num_operators: of that kind, in all layers.
        share: of the predicted forward and backward seconds on that device type.
    """

    kind: str
    device_type: str
    num_operators: int
    share: float

    def __str__(self) -> str:
        return f"{self.kind} × {self.num_operators} on {self.device_type}: roofline only, {self.share:.1%} of the time"


class CostSource(ABC):
    """One way to know costs; it returns None for costs it does not know."""

    @abstractmethod
    def estimate(self, layer: Layer, direction: str, graph: Graph, device: DeviceType) -> Estimate | None:
        """Estimate one of the layer's `PASSES` on one such device, without communication.

        Forward and backward are of one microbatch; the optimizer's is per step.
        """

    def fallbacks(self, graph: Graph, device: DeviceType) -> tuple[Fallback, ...]:
        """Return the operators of a graph that it can price only by the roofline."""
        return ()


@dataclass(frozen=True, eq=False)
class EstimateGrid:
    """One estimate for each layer on each type of device.

    Attributes:
        low_seconds_LD, high_seconds_LD: 90 % intervals.
        source_LD: `measured` or the predictor's name, number by number.
    """

    seconds_LD: Floats
    low_seconds_LD: Floats
    high_seconds_LD: Floats
    source_LD: NDArray[np.str_]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Estimate]]) -> EstimateGrid:
        """Make a grid of estimates by layer and device type."""

        def grid(field: str) -> NDArray[Any]:
            return np.array([[getattr(estimate, field) for estimate in row] for row in rows])

        return cls(grid("seconds"), grid("low_seconds"), grid("high_seconds"), grid("source"))

    def at(self, layer: int, device: int) -> Estimate:
        return Estimate(
            float(self.seconds_LD[layer, device]),
            float(self.low_seconds_LD[layer, device]),
            float(self.high_seconds_LD[layer, device]),
            str(self.source_LD[layer, device]),
        )


@dataclass(frozen=True, eq=False)
class CostTable:
    """What each layer costs on each type of device, in seconds; its bytes are in the graph and in `cost.memory`.

    Attributes:
        layers, device_types: the names that rows and columns stand for.
        forward, backward: one microbatch, no communication.
        optimizer: per step.
        fallbacks: operators that only the roofline knew.
    """

    layers: tuple[str, ...]
    device_types: tuple[str, ...]
    forward: EstimateGrid
    backward: EstimateGrid
    optimizer: EstimateGrid
    fallbacks: tuple[Fallback, ...] = ()

    def __post_init__(self) -> None:
        for direction, grid in self.grids.items():
            for name in ("seconds_LD", "low_seconds_LD", "high_seconds_LD"):
                table = getattr(grid, name)
                bad = np.argwhere(~np.isfinite(table) | (table < 0))
                if len(bad):
                    layer, device = bad[0]
                    raise CostError(
                        f"{name.removesuffix('_LD')} of the {direction} pass of layer {self.layers[layer]!r} on "
                        f"{self.device_types[device]!r} is {table[layer, device]}; wanted a finite number ≥ 0"
                    )

    @property
    def grids(self) -> dict[str, EstimateGrid]:
        """The three passes by name."""
        return {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer}

    @property
    def sources(self) -> NDArray[np.str_]:
        """Sources of all numbers, over all passes, layers and devices, flattened."""
        return np.concatenate([grid.source_LD.ravel() for grid in self.grids.values()])

    @property
    def num_known(self) -> int:
        """How many numbers came from measurements: of that very thing, of its neighbours, or of a training."""
        return sum(not is_prediction(str(source)) for source in self.sources)

    @property
    def num_prices(self) -> int:
        return self.sources.size

    def to_arrow(self, graph: Graph) -> pa.Table:
        """Return a row for each layer × device type, for people and for Parquet.

        The layers' bytes come from the graph: activations are of each microbatch in flight, without recomputation.
        """
        L, D = self.forward.source_LD.shape
        rows = {"layer": np.repeat(self.layers, D), "device_type": np.tile(self.device_types, L)}
        for direction, grid in self.grids.items():
            rows |= {
                f"{direction}_seconds": grid.seconds_LD.ravel(),
                f"{direction}_low_seconds": grid.low_seconds_LD.ravel(),
                f"{direction}_high_seconds": grid.high_seconds_LD.ravel(),
                f"{direction}_source": grid.source_LD.ravel(),
            }
        rows |= {
            "parameter_bytes": np.repeat([float(layer.parameter_bytes) for layer in graph.layers], D),
            "activation_bytes": np.repeat([layer_activation_bytes(layer) for layer in graph.layers], D),
            "output_bytes": np.repeat(graph.cut_bytes_L1[1:], D),
        }
        return pa.table(rows)


MEASURED, INTERPOLATED, TRAINED = "measured", "interpolated", "training"


def is_prediction(source: str) -> bool:
    """Return whether this source is a pure prediction, without a measurement of the layer or its neighbours."""
    return source not in (MEASURED, INTERPOLATED, TRAINED)
