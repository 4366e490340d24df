"""The problem on which compiled loops are compiled, or loaded from numba's cache, before a clock starts."""

from __future__ import annotations

import numpy as np

from dejavu.plans import Problem, StageConfiguration
from dejavu.plans.stage_costs import DenseCosts


def tiny_problem(num_layers: int = 1) -> Problem:
    """One configuration, and a device for each layer."""
    ones = np.ones((1, num_layers, num_layers + 1))
    return Problem(
        layers=("",) * num_layers,
        configurations=(StageConfiguration(""),),
        device_counts={"": num_layers},
        costs=DenseCosts(ones, ones, ones.astype(np.int64)),
        cut_bytes_L1=np.zeros(num_layers + 1),
        link_latency_seconds_CC=np.zeros((1, 1)),
        link_seconds_per_byte_CC=np.zeros((1, 1)),
        schedule="gpipe",
        num_microbatches=1,
    )
