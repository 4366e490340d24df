"""Proves how fast any plan's simulated step can be, over all plans and all schedules.

The searches' bounds are about the formula (`plans.price`); what will run is what `simulate` simulates.
"""

from __future__ import annotations

from dejavu.simulation.bound._prefix_sums import RankChoices
from dejavu.simulation.bound.bounding import (
    CLOSE,
    Bounding,
    SimulatedBound,
    bounding,
    load_compiled_loops,
    simulated_lower_bound,
)
from dejavu.simulation.bound.proof import Proof

__all__ = [
    "CLOSE",
    "Bounding",
    "Proof",
    "RankChoices",
    "SimulatedBound",
    "bounding",
    "load_compiled_loops",
    "simulated_lower_bound",
]
