"""The median of each coordinate (Yin et al., ICML 2018, definition 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dejavu.runtime.gradients.rules._base import Rule, sorted_rows


@dataclass(frozen=True)
class Median(Rule):
    """Take each coordinate's median, of an even number the mean of the middle two.

    Each coordinate lies among the honest replicas' while these are more than half. Where replicas' data differ, or
    gradients are skewed, it is not their mean, even if none is faulty.
    """

    def join(self, gradients_NP: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
        rows = sorted_rows(gradients_NP[weights_N > 0])
        if not rows:
            return torch.full_like(gradients_NP[0], torch.nan)
        return (rows[(len(rows) - 1) // 2] + rows[len(rows) // 2]) / 2
