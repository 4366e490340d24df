"""Where groups fit at all."""

from __future__ import annotations

import numpy as np

from dejavu.placement.problem import Ints, PlacementProblem


def roomy(problem: PlacementProblem) -> Ints | None:
    """Return a device with room for each group, the largest first, where most is left; None: this finds none."""
    arrays = problem.arrays
    left_D = arrays.memory_D.copy()
    device_G = np.full(problem.num_groups, -1, dtype=np.int64)
    for g in np.argsort(-arrays.memory_G, kind="stable"):
        fits_D = np.isfinite(problem.seconds_GD[g]) & (arrays.memory_G[g] <= left_D)
        if not fits_D.any():
            return None
        d = int(np.argmax(np.where(fits_D, left_D, -1.0)))
        device_G[g] = d
        left_D[d] -= arrays.memory_G[g]
    return device_G


def fits(problem: PlacementProblem, device_G: Ints) -> bool:
    """Whether every group runs on its device and all of a device's together fit."""
    arrays = problem.arrays
    held_D = np.bincount(device_G, weights=arrays.memory_G, minlength=problem.num_devices)
    runs = np.isfinite(problem.seconds_GD[np.arange(problem.num_groups), device_G]).all()
    return bool(runs and (held_D <= arrays.memory_D).all())
