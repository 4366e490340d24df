"""A model of one's own, as examples/workloads/own_model.yaml names it."""

from __future__ import annotations

from torch import nn


def make(depth: int = 6, width: int = 256) -> nn.Sequential:
    """A deep perceptron for 8 × 8 images with 10 classes."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
    return nn.Sequential(first, *hidden, nn.Linear(width, 10))
