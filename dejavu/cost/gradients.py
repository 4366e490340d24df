"""What a rule other than the mean takes of a stage's replicas once a step, besides gathering: arithmetic and memory.

Shape suffix: L = layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dejavu.cluster import DeviceType
from dejavu.plans import StageConfiguration
from dejavu.plans.stage_costs import Floats
from dejavu.workload import GradientSettings

# Numbers that a rule reads and writes for each number of one gradient, of N replicas: as `runtime.gradients.rules`
# goes over them. All rules divide each gradient by its share (2 N), look whether it is finite (N), add them up by trust
# (N), compare each with the sum (the difference is written and read: 3 N) and add them up by weights (N).
_COMMON = 8
# Sorting: N (N − 1) / 2 pairs of rows, of which the least and the largest are read and written (6). Krum: as float64
# (two numbers each) N rows are written, and all pairs of them read. Zeno: three products of rows as float64.
NUMBERS_MOVED: dict[str, Callable[[int], float]] = {
    "mean": lambda n: 0.0,
    "suspicion": lambda n: _COMMON * n,
    "median": lambda n: _COMMON * n + 3 * n * (n - 1),
    "trimmed_mean": lambda n: _COMMON * n + 3 * n * (n - 1),
    "krum": lambda n: (_COMMON - 3) * n + 3 * n + 2 * n * (n - 1),
    "zeno": lambda n: (_COMMON - 3) * n + 15 * n,
}
# Of a gradient's size, besides the N gathered: the own one as a message, the combined one in blocks and as a whole.
_OWN_COPIES = 3


def combining_seconds(
    settings: GradientSettings, configuration: StageConfiguration, gradient_bytes_L: Floats, device: DeviceType
) -> Floats:
    """Return how long each layer's gathered gradients take to be combined: what is moved, at the memory's bandwidth."""
    numbers = NUMBERS_MOVED[settings.rule](configuration.data_parallel)
    return numbers * gradient_bytes_L / device.memory_bytes_per_second


def gathered_bytes(settings: GradientSettings, configuration: StageConfiguration, gradient_bytes_L: Floats) -> Floats:
    """Return what is held of each layer's gradients while they are combined; none where they are summed in place."""
    if not settings.gathers:
        return np.zeros_like(gradient_bytes_L)
    return (configuration.data_parallel + _OWN_COPIES) * gradient_bytes_L


def held_out_share(settings: GradientSettings, configuration: StageConfiguration) -> float:
    """Return how many microbatches of a replica each step computes of held-out examples, on average.

    Each replica computes a whole microbatch of them.
    """
    return configuration.data_parallel / settings.held_out_every if settings.rule == "zeno" else 0.0
