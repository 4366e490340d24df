"""Of models of images."""

from __future__ import annotations

import torch
from torch import nn


class Classifier(nn.Module):
    """The mean over all pixels, then a score for each class."""

    def __init__(self, num_channels: int, num_classes: int) -> None:
        super().__init__()
        self.scores = nn.Linear(num_channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(x.mean(dim=(2, 3)))
        return scores
