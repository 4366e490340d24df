"""What a gradient step on A takes over layers |V| and strategies N, held against the claim of 2 |V| N."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from dejavu.binding import Placement
from dejavu.cluster import Device
from dejavu.migration.joint.improving import STEPS_PER_REPORT
from dejavu.migration.joint.relaxed import Variables
from dejavu.migration.joint.strategies import Slot, Strategies
from dejavu.plans import StageConfiguration

LAYERS, STRATEGIES = (64, 128, 256, 512, 1024, 2048), (4, 8, 16, 32, 64, 128)
FIXED_STRATEGIES, FIXED_LAYERS = 32, 256  # while the other one grows
REPEATS = 5
LARGE = 1 << 13  # of |V| N: from there on the arrays' own time shows beside that of calling numpy


def random_strategies(num_layers: int, num_slots: int, seed: int = 0) -> Strategies:
    """Draw strategies of one configuration a slot; they run in even stages."""
    rng, shape = np.random.default_rng(seed), (num_layers, num_slots)
    configuration = StageConfiguration("core")
    slots = tuple(
        Slot((Placement(k, 0, 0, Device("core", "g", f"h{k}", k, 0)),), (configuration,)) for k in range(num_slots)
    )
    return Strategies(
        slots=slots,
        slot_N=np.arange(num_slots),
        row_N=np.zeros(num_slots, dtype=np.int64),
        seconds_LN=rng.lognormal(0.0, 0.5, shape),
        per_step_seconds_LN=np.full(shape, 0.01),
        per_step_latency_N=np.zeros(num_slots),
        share_LN=np.full(shape, 0.1 / num_layers),
        latency_NN=np.full((num_slots, num_slots), 0.01),
        per_byte_NN=np.full((num_slots, num_slots), 1e-9),
        cut_bytes_L1=np.full(num_layers + 1, 1e6),
        num_microbatches=4 * num_slots,
        running_L=np.arange(num_layers) * num_slots // num_layers,
    )


def all_timed() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Time a step over |V| and over N, and fit both."""
    sizes = [(size, FIXED_STRATEGIES) for size in LAYERS] + [(FIXED_LAYERS, count) for count in STRATEGIES]
    rows = [_row(num_layers, num_slots) for num_layers, num_slots in sizes]
    products = np.array([row["layers"] * row["strategies"] for row in rows], dtype=float)
    seconds = np.array([row["step_us"] for row in rows])
    slope, first, r_squared = _line(products, seconds)
    summary = {
        "exponent_of_layers": _exponent([row for row in rows if row["strategies"] == FIXED_STRATEGIES], "layers"),
        "exponent_of_strategies": _exponent([row for row in rows if row["layers"] == FIXED_LAYERS], "strategies"),
        "line_r_squared": r_squared,
        "ns_for_each_layer_and_strategy": 1e3 * slope,
        "us_of_a_step_beside_that": first,
    }
    return rows, summary


def _row(num_layers: int, num_slots: int) -> dict[str, Any]:
    strategies = random_strategies(num_layers, num_slots)
    found = []
    for repeat in range(1 + REPEATS):
        variables = Variables(strategies, seed=repeat)
        began = time.thread_time()
        variables.descend(strategies, STEPS_PER_REPORT)
        found.append((time.thread_time() - began) / STEPS_PER_REPORT)
    return {"what": "gradient step", "layers": num_layers, "strategies": num_slots, "step_us": 1e6 * median(found[1:])}


def _exponent(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Fit step ~ name^exponent, over all sizes and over the large ones."""
    large = [row for row in rows if row["layers"] * row["strategies"] >= LARGE]
    found = dict[str, float]()
    for which, some in (("all", rows), ("large", large)):
        slope, _, r_squared = _line(
            np.log([float(row[name]) for row in some]), np.log([float(row["step_us"]) for row in some])
        )
        found |= {which: slope, f"{which}_r_squared": r_squared}
    return found


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return slope, intercept and R² of a line by least squares."""
    slope, first = np.polyfit(x, y, 1)
    left = ((y - slope * x - first) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    return float(slope), float(first), float(1 - left)
