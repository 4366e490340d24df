"""The trimmed mean of each coordinate (Yin et al., ICML 2018, definition 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dejavu.runtime.gradients.rules._base import Rule, sorted_rows


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """Leave out the `num_suspected` largest and smallest of each coordinate, and take the mean of the others.

    Each coordinate lies among the honest replicas' while no more than `num_suspected` are faulty. It uses more of the
    honest gradients than the median.
    """

    num_suspected: int = 1

    def join(self, gradients_NP: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
        rows = sorted_rows(gradients_NP[weights_N > 0])
        if not rows:
            return torch.full_like(gradients_NP[0], torch.nan)
        # A gradient that is not finite is known to be faulty and is out already: so many less are to be found.
        trimmed = max(0, self.num_suspected - (len(gradients_NP) - len(rows)))
        kept = rows[trimmed : len(rows) - trimmed]
        total = kept[0]
        for row in kept[1:]:
            total = total + row
        return total / len(kept)
