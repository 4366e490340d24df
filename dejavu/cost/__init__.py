"""Costs: f(communication, model, hardware) → (time, memory), each number with its source.

To add a cost source: its file, and one line at its place in `SOURCES`, the best first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dejavu.cluster import Cluster, DeviceType
from dejavu.cost.collectives.transfer import TransferCost, TransferCosts, transfer_cost
from dejavu.cost.estimates import (
    INTERPOLATED,
    MEASURED,
    TRAINED,
    CostError,
    CostSource,
    CostTable,
    Estimate,
    EstimateGrid,
    is_prediction,
)
from dejavu.cost.sources.measured import Interpolated, Measured
from dejavu.cost.sources.physics import LAUNCHES_SECONDS, Limits
from dejavu.cost.sources.predicted import Predicted
from dejavu.cost.trainings.stages import remember_stages
from dejavu.foundation.registry import Family
from dejavu.graphs.graph import Graph, Layer
from dejavu.profiles import ProfileDatabase
from dejavu.workload import OptimizerSettings

__all__ = [
    "MEASURED",
    "SOURCES",
    "TRAINED",
    "CostError",
    "CostSource",
    "CostTable",
    "Estimate",
    "EstimateGrid",
    "Evidence",
    "TransferCost",
    "TransferCosts",
    "cost_table",
    "is_prediction",
    "remember_stages",
    "sources",
    "transfer_cost",
]

ABSURD_RATIO = 1000.0  # a measured time that far from the prediction is a fault of its row


@dataclass(frozen=True)
class Evidence:
    """What a cost source may draw on."""

    database: ProfileDatabase
    optimizer: OptimizerSettings

    @cached_property
    def measured(self) -> Measured:
        """The layers' own measurements; two sources read them, the database is read once."""
        return Measured(self.database, self.optimizer)


# The best first: a measurement overrides a prediction. The last one prices everything from physics; by it, what the
# others say is found absurd or not.
SOURCES: Family[Callable[[Evidence], CostSource]] = Family(
    "cost source",
    {
        "measured": lambda known: known.measured,
        "interpolated": lambda known: Interpolated(known.measured),
        "predicted": lambda known: Predicted(known.database, known.optimizer),
    },
)


def sources(database: ProfileDatabase, optimizer: OptimizerSettings) -> tuple[CostSource, ...]:
    """Return all cost sources, the best first."""
    known = Evidence(database, optimizer)
    return tuple(source(known) for source in SOURCES.values())


def cost_table(graph: Graph, cluster: Cluster, known: Sequence[CostSource]) -> CostTable:
    """Price every pass of every layer on every device type, each number from the first source that knows it.

    Raises:
        CostError: no source knows it, or a measurement is absurd beside the prediction; it names layer and device.
    """
    names = tuple(cluster.device_counts)
    distinct = {layer.signature: layer for layer in graph.layers}

    def grid(direction: str) -> EstimateGrid:
        prices = {
            (signature, name): _best(layer, direction, graph, cluster.device_types[name], known)
            for signature, layer in distinct.items()
            for name in names
        }
        return EstimateGrid.of([[prices[layer.signature, name] for name in names] for layer in graph.layers])

    return CostTable(
        layers=tuple(layer.name for layer in graph.layers),
        device_types=names,
        forward=grid("forward"),
        backward=grid("backward"),
        optimizer=grid("optimizer"),
        fallbacks=tuple(
            fallback
            for name in names
            for source in known
            for fallback in source.fallbacks(graph, cluster.device_types[name])
        ),
    )


def _best(layer: Layer, direction: str, graph: Graph, device: DeviceType, known: Sequence[CostSource]) -> Estimate:
    """Return the first source's number, after checking it against physics, from which the last source predicts."""
    expected = known[-1].estimate(layer, direction, graph, device)
    limits = None if expected is None else Limits(expected.seconds)
    found = (source.estimate(layer, direction, graph, device) for source in known)
    cost = next((one for one in found if one and not (one.source == INTERPOLATED and _denied(one, limits))), None)
    if cost is None:
        size = graph.microbatch_size
        raise CostError(
            f"no cost for layer {layer.name!r} on {device.name!r} in {graph.dtype}, with microbatches of {size}: no "
            f"measurement (`dejavu profile --microbatches {size}` makes it on such a device; sizes between two that "
            f"are measured are interpolated) and no peak FLOP/s; {device.wanted_peak(graph.dtype)}"
        )
    if expected is not None:
        most = ABSURD_RATIO * max(expected.seconds, LAUNCHES_SECONDS)
        if not expected.seconds / ABSURD_RATIO <= cost.seconds <= most:
            raise CostError(
                f"the {direction} pass of layer {layer.name!r} on {device.name!r} costs {cost.seconds:.3g} s "
                f"({cost.source}), but its arithmetic and traffic take about {expected.seconds:.3g} s there; wanted a "
                f"time within a factor of {ABSURD_RATIO:g}: measure it again with `dejavu profile --again`"
            )
    return cost


def _denied(estimate: Estimate, limits: Limits | None) -> bool:
    """Return whether one of the measurements that this was interpolated from is physically impossible."""
    return limits is not None and not limits.hold(estimate.seconds)
