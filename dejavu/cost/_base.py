"""What a cost source answers, and the table that a plan is priced from. A number never loses where it came from.

Shape suffixes: L = layers, L1 = L + 1 cut positions, D = device types.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dejavu.cluster import DeviceType
from dejavu.errors import DejavuError
from dejavu.graph import Graph, Layer

PASSES = ("forward", "backward", "optimizer")


class CostError(DejavuError):
    """A cost that is missing or cannot be true; the message names the layer and the device."""


@dataclass(frozen=True)
class Estimate:
    """One number, how sure it is, and where it came from.

    Attributes:
        low_seconds, high_seconds: a 90 % interval: in nine of ten cases the truth lies between them.
        source: `measured`, or the predictor's name.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    source: str


@dataclass(frozen=True)
class LayerCost:
    """One layer on one device, one microbatch, no communication.

    Attributes:
        optimizer_seconds: once a step, not once a microbatch.
        relative_error: about this fraction of each number may be wrong, either way.
        source: `measured`, or the predictor's name.
    """

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    relative_error: float
    source: str


class CostSource(ABC):
    """One way to know costs; it answers None where it does not."""

    @abstractmethod
    def layer_cost(self, layer: Layer, graph: Graph, device: DeviceType) -> LayerCost | None:
        """What the layer costs on one such device."""


@dataclass(frozen=True, eq=False)
class CostTable:
    """What each layer costs on each type of device, for one microbatch.

    Attributes:
        layers, device_types: the names that rows and columns stand for.
        forward_seconds_LD, backward_seconds_LD: one microbatch, no communication.
        optimizer_seconds_LD: once a step.
        relative_error_LD: about this fraction may be wrong, either way.
        source_LD: `measured` or the predictor's name, number by number.
        parameter_bytes_L, activation_bytes_L, temporary_bytes_L: activations per microbatch in flight.
        cut_bytes_L1: what crosses a cut before layer k, one microbatch.
    """

    layers: tuple[str, ...]
    device_types: tuple[str, ...]
    forward_seconds_LD: NDArray[np.float64]
    backward_seconds_LD: NDArray[np.float64]
    optimizer_seconds_LD: NDArray[np.float64]
    relative_error_LD: NDArray[np.float64]
    source_LD: NDArray[np.str_]
    parameter_bytes_L: NDArray[np.float64]
    activation_bytes_L: NDArray[np.float64]
    temporary_bytes_L: NDArray[np.float64]
    cut_bytes_L1: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name in ("forward_seconds_LD", "backward_seconds_LD", "optimizer_seconds_LD"):
            table = getattr(self, name)
            bad = np.argwhere(~np.isfinite(table) | (table < 0))
            if len(bad):
                layer, device = bad[0]
                raise CostError(
                    f"{name} of layer {self.layers[layer]!r} on {self.device_types[device]!r} is "
                    f"{table[layer, device]}; wanted a finite number ≥ 0"
                )

    @property
    def num_measured(self) -> int:
        """How many layer × device pairs were measured rather than predicted."""
        return int((self.source_LD == "measured").sum())

    @property
    def num_prices(self) -> int:
        return self.source_LD.size

    def to_arrow(self) -> pa.Table:
        """A row for each layer × device type, for people and for Parquet."""
        L, D = self.source_LD.shape
        rows = {
            "layer": np.repeat(self.layers, D),
            "device_type": np.tile(self.device_types, L),
            "forward_seconds": self.forward_seconds_LD.ravel(),
            "backward_seconds": self.backward_seconds_LD.ravel(),
            "optimizer_seconds": self.optimizer_seconds_LD.ravel(),
            "relative_error": self.relative_error_LD.ravel(),
            "source": self.source_LD.ravel(),
            "parameter_bytes": np.repeat(self.parameter_bytes_L, D),
            "activation_bytes": np.repeat(self.activation_bytes_L, D),
            "output_bytes": np.repeat(self.cut_bytes_L1[1:], D),
        }
        return pa.table(rows)
