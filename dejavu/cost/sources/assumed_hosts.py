"""How much of a plan's step is launching by hosts that nobody measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dejavu.cluster import DeviceType
from dejavu.cost.estimates import CostTable, is_prediction
from dejavu.cost.sources.launches import KNOWN_ON, launching_seconds
from dejavu.cost.sources.predicted import Predicted, layer_kernels
from dejavu.foundation.units import format_seconds
from dejavu.graphs.graph import Graph
from dejavu.plans import Plan


@dataclass(frozen=True)
class AssumedHost:
    """A pipeline rank's host whose pace is another's.

    Attributes:
        device_type: of the rank that launches longest.
        launching_seconds: what it takes to launch its layers' predicted passes in one step. Messages, collectives and
            passes that are computed twice are not counted.
    """

    device_type: str
    launching_seconds: float

    def is_most_of(self, step_seconds: float) -> bool:
        return self.launching_seconds > step_seconds / 2

    def __str__(self) -> str:
        return (
            f"Predicted for hosts that launch as fast as {KNOWN_ON}, which was measured: that takes "
            f"{format_seconds(self.launching_seconds)} of the step. `dejavu profile --measure passes` measures "
            f"{self.device_type}'s."
        )


def assumed_host(
    plan: Plan,
    graph: Graph,
    table: CostTable,
    types: Mapping[str, DeviceType],
    predicted: Predicted,
    accumulate: int = 1,
) -> AssumedHost | None:
    """Return the rank that launches longest of those whose host was not measured; None: there is none.

    Args:
        graph, table: at the plan's microbatch size.
        accumulate: how often the schedule runs in a step.
    """
    column = {name: d for d, name in enumerate(table.device_types)}
    times = accumulate * plan.num_microbatches * plan.num_slices / (2 if plan.both_ways else 1)
    found, kept = list[AssumedHost](), dict[tuple[str, str], float]()
    for own in plan.seats_of_ranks:
        name = plan.seats[own[0]].configuration.device_type
        pace = predicted.pace(types[name])
        if pace is None or pace.is_measured:
            continue
        seconds = 0.0
        for k in (k for seat in own for k in range(plan.seats[seat].start, plan.seats[seat].stop)):
            layer = graph.layers[k]
            for way in (way for way, grid in table.grids.items() if is_prediction(grid.at(k, column[name]).source)):
                key = layer.signature, way
                if key not in kept:
                    kernels = layer_kernels(layer, way, graph.dtype, predicted.optimizer)
                    kept[key] = launching_seconds(layer, way, kernels, pace)
                seconds += kept[key] * (1 if way == "optimizer" else times)
        if seconds > 0:
            found.append(AssumedHost(name, seconds))
    return max(found, key=lambda one: one.launching_seconds, default=None)
