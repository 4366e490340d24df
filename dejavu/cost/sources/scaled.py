"""Predictions of layers that were measured at another microbatch size, scaled to that measurement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dejavu.cluster import Cluster
from dejavu.cost.estimates import CostTable, EstimateGrid, is_prediction
from dejavu.cost.sources.predicted import Predicted
from dejavu.graphs.graph import Graph

SCALED = "scaled"
PASSES = ("forward", "backward")  # the optimizer's time does not depend on the microbatch


def scaled(
    table: CostTable, graph: Graph, measured: CostTable, measured_graph: Graph, cluster: Cluster, predicted: Predicted
) -> CostTable:
    """Replace each prediction of `table` whose layer `measured` knows by measured(m0) × predicted(m) / predicted(m0).

    A prediction's error at one size is mostly its error at another; the ratio of two predictions gives the growth. The
    time cannot fall as the microbatch grows, nor grow faster than the microbatch.

    Args:
        table, graph: at the microbatch size m that is asked for.
        measured, measured_graph: the same model at m0.
    """
    k = graph.microbatch_size / measured_graph.microbatch_size
    least, most = min(1.0, k), max(1.0, k)
    grids: dict[str, EstimateGrid] = {}
    for direction in PASSES:
        grid, known = table.grids[direction], measured.grids[direction]
        seconds_LD, source_LD = grid.seconds_LD.copy(), grid.source_LD.astype(object)
        found: dict[tuple[str, str], float | None] = {}
        for row, column in np.ndindex(*seconds_LD.shape):
            if not is_prediction(str(source_LD[row, column])) or is_prediction(str(known.source_LD[row, column])):
                continue
            name, layer = table.device_types[column], measured_graph.layers[row]
            if (layer.signature, name) not in found:
                guess = predicted.estimate(layer, direction, measured_graph, cluster.device_types[name])
                found[layer.signature, name] = guess.seconds if guess is not None else None
            before, base = found[layer.signature, name], float(known.seconds_LD[row, column])
            if before and base > 0:
                ratio = float(np.clip(seconds_LD[row, column] / before, least, most))
                seconds_LD[row, column], source_LD[row, column] = ratio * base, SCALED
        moved_LD = seconds_LD / np.where(grid.seconds_LD > 0, grid.seconds_LD, 1.0)
        grids[direction] = EstimateGrid(
            seconds_LD,
            np.minimum(grid.low_seconds_LD * moved_LD, seconds_LD),
            np.maximum(grid.high_seconds_LD * moved_LD, seconds_LD),
            source_LD.astype(str),
        )
    return replace(table, forward=grids["forward"], backward=grids["backward"])
