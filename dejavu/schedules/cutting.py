"""The same layers for every schedule: as many stages as it wants, the slowest as fast as can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural
from dejavu.plans.cutting import fastest_cuts
from dejavu.simulation import StageSeconds

_ADDED = ("forward_seconds", "backward_seconds", "per_step_seconds", "activation_bytes", "fixed_bytes")


def cut_evenly(layers: Sequence[StageSeconds], num_stages: int) -> tuple[StageSeconds, ...]:
    """Return the layers as so many stages: a contiguous cut whose slowest stage is fastest, by dynamic programming.

    Layers' `transfer_seconds` are what crosses the cut after them; the parts of their backward pass are halves.

    Raises:
        InputError: there are fewer layers than stages.
    """
    L = len(layers)
    if not 1 <= num_stages <= L:
        what = f"{plural(L, 'layer')} in {plural(num_stages, 'stage')}"
        raise InputError(f"{what}; wanted at least one stage, and a layer for each")
    seconds_L = np.array([layer.forward_seconds + layer.backward_seconds for layer in layers])
    bounds = fastest_cuts(np.tile(seconds_L, (num_stages, 1)))
    return tuple(_together(layers[a:b]) for a, b in itertools.pairwise(bounds))


def _together(layers: Sequence[StageSeconds]) -> StageSeconds:
    added = {name: sum(getattr(layer, name) for layer in layers) for name in _ADDED}
    return StageSeconds(**added, transfer_seconds=layers[-1].transfer_seconds)
