"""Arrays drawn at random, as Auto-MAP trains its agent offline: uniformly, or normally around a mean."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dejavu.operator_cuts.problem import OperatorArrays

Draw = Literal["uniform", "normal"]

# Of the order of BERT-48's and T5's points, when they are cut into 128 at a microbatch of 16.
MEAN_COMPUTE_SECONDS, MEAN_WEIGHT_BYTES, MEAN_CROSSING_BYTES = 0.05, 20e6, 60e6
DEVIATION = 0.3  # of a normal draw, as a part of its mean


def generated_arrays(draw: Draw, num_points: int, seed: int) -> OperatorArrays:
    """Draw compute, weights and activations of each point independently; the scale of each array is drawn, too."""
    rng = np.random.default_rng(seed)

    def array(mean: float) -> np.ndarray:
        scale = mean * 2.0 ** rng.uniform(-2, 2)
        if draw == "uniform":
            return rng.uniform(0.0, 2.0 * scale, num_points)
        return np.clip(rng.normal(scale, DEVIATION * scale, num_points), 0.0, None)

    return OperatorArrays(array(MEAN_COMPUTE_SECONDS), array(MEAN_WEIGHT_BYTES), array(MEAN_CROSSING_BYTES))
