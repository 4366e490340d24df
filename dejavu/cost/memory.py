"""What one device has to hold for a layer, beside activations: weights, gradients and optimizer state."""

from __future__ import annotations

from dejavu.workload import OptimizerSettings

MOMENTS = {"adamw": 2, "sgd": 0}  # tensors as large as the weights that the optimizer keeps


def fixed_bytes(parameter_bytes: float, optimizer: OptimizerSettings) -> float:
    """Weights, one gradient of the same size, and the optimizer's moments."""
    return parameter_bytes * (2 + MOMENTS[optimizer.name])
