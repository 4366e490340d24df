"""A model of the zoo with a loss of one's own, by whose name ranks import this file."""

from __future__ import annotations

import torch
from torch import nn

from dejavu.workload.models.gpt import GPT


class Smoothed(GPT):
    """Its loss takes the scores of all classes."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=0.1)
