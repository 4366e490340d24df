"""The pipeline runtime's overhead on a device: for every pass, and for every message at both ends."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from dejavu.cost.collectives.transfer import fit
from dejavu.graphs.graph import Graph
from dejavu.plans.priced_problem import USUAL_PARTS, PassCost
from dejavu.plans.schedule import PARTS
from dejavu.profiles import ProfileDatabase

LEAST_PARTS, MOST_PARTS = 0.2, 10.0  # of both together: of layers that do little, the runtime's work is in each


def pass_cost(database: ProfileDatabase, device_type: str) -> PassCost:
    """Return the overhead measured on such devices (`dejavu.profiling.pass_overhead`)."""
    rows = database.latest(kind="pass", device_type=device_type)  # all, so that they are checked against each other
    alone, exchanges = ([row for row in rows if row.num_ranks == number] for number in (1, 2))
    if not alone or len(exchanges) < 2:
        return PassCost()
    each, line = min(row.seconds for row in alone), fit(exchanges)
    return PassCost(each, max(line.latency_seconds - each, 0.0), line.seconds_per_byte)


def backward_parts(database: ProfileDatabase, graph: Graph, device_type: str) -> np.ndarray:
    """Return the time of each of the two parts of a layer's backward pass over the whole pass; shape (L, 2).

    Measured on such devices, at the nearest microbatch size; their sum may exceed 1. `USUAL_PARTS` elsewhere.
    """
    seconds: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in database.latest(kind="layer", device_type=device_type, dtype=graph.dtype, tensor_parallel=1):
        family = json.loads(row.extra or "{}").get("family")
        if isinstance(family, str) and row.microbatch_size:
            seconds[family][row.microbatch_size][str(row.direction)] = row.seconds
    return np.array([_parts(seconds.get(layer.family, {}), graph.microbatch_size) for layer in graph.layers])


def _parts(by_size: Mapping[int, Mapping[str, float]], microbatch_size: int) -> tuple[float, float]:
    split = {size: row for size, row in by_size.items() if {"backward", *PARTS} <= set(row)}
    if not split:
        return USUAL_PARTS
    row = split[min(split, key=lambda size: abs(math.log(size / microbatch_size)))]
    of_input, of_weights = (row[part] / row["backward"] for part in PARTS)
    if not LEAST_PARTS <= of_input + of_weights <= MOST_PARTS:  # one of the three rows is impossible
        return USUAL_PARTS
    return of_input, of_weights
