"""What a rule other than the mean takes of a stage's replicas, besides what they send: arithmetic and memory.

Where replicas shard (ZeRO), each combines its shard: an N-th of the arithmetic, and all N gradients of an N-th of the
numbers.

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
_ADDED = 3  # numbers read and written for each that is added to a sum


def combining_seconds(
    settings: GradientSettings, configuration: StageConfiguration, gradient_bytes_L: Floats, device: DeviceType
) -> Floats:
    """Return how long each layer's gradients take to be combined: what is moved, at the memory's bandwidth."""
    numbers = NUMBERS_MOVED[settings.rule](configuration.data_parallel) / _parts(configuration)
    if settings.gathers and configuration.zero_level == 1:
        numbers += _ADDED
    return numbers * gradient_bytes_L / device.memory_bytes_per_second


def adding_seconds(
    settings: GradientSettings, configuration: StageConfiguration, gradient_bytes_L: Floats, device: DeviceType
) -> Floats:
    """Return how long each layer's gradients of a microbatch take to be added to the replicas' of those before.

    From ZeRO level 2 on they come in every microbatch. At level 1 they come once, which `combining_seconds` counts.
    """
    adds = settings.gathers and configuration.zero_level >= 2 and configuration.data_parallel > 1
    return _ADDED * adds * gradient_bytes_L / device.memory_bytes_per_second


def gathered_bytes(
    settings: GradientSettings, configuration: StageConfiguration, gradient_bytes_L: Floats, *, on_cpu: bool = False
) -> Floats:
    """Return what is held of each layer's gradients while they are combined; none where they are summed in place.

    On CPUs gloo's all-gather has a buffer of its own for all that arrives.
    """
    if not settings.gathers:
        return np.zeros_like(gradient_bytes_L)
    count = configuration.data_parallel
    most = count + _OWN_COPIES
    if on_cpu and not configuration.zero_level:
        most = max(most, 2 * count + 1)
    return most * gradient_bytes_L / _parts(configuration)


def adding_bytes(settings: GradientSettings, configuration: StageConfiguration, gradient_bytes_L: Floats) -> Floats:
    """Return what is held of each layer's gradients from the first microbatch on: all replicas' of the own shard.

    It is a part of `gathered_bytes`.
    """
    adds = settings.gathers and configuration.zero_level >= 2
    return configuration.data_parallel * adds * gradient_bytes_L / _parts(configuration)


def _parts(configuration: StageConfiguration) -> int:
    """Return among how many replicas what is combined is divided."""
    return configuration.data_parallel if configuration.zero_level else 1


def held_out_share(settings: GradientSettings, configuration: StageConfiguration) -> float:
    """Return how many microbatches of a replica each step computes of held-out examples, on average.

    Each replica computes a whole microbatch of them.
    """
    return configuration.data_parallel / settings.held_out_every if settings.rule == "zeno" else 0.0
