"""Krum: the one gradient that is closest to its nearest neighbours (Blanchard et al., NeurIPS 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dejavu.runtime.gradients.rules._base import Judgement, Rule, largest


@dataclass(frozen=True)
class Krum(Rule):
    """Take the gradient whose summed squared distance to its N − k − 2 nearest others is least, k `num_suspected`.

    With N ≥ 2k + 3 it points into the honest gradients' half-space (proposition 1). It uses one replica's examples in
    each step and drops all others': its variance is N times the mean's, also where none is faulty. Compares all pairs:
    its arithmetic grows with N².
    """

    num_suspected: int = 1

    def measure(self, gradients_NP: torch.Tensor, centre_P: torch.Tensor) -> torch.Tensor:
        count = len(gradients_NP)
        squares_NN = torch.zeros(count, count, dtype=torch.float64, device=gradients_NP.device)
        above = torch.triu_indices(count, count, 1, device=gradients_NP.device)
        squares_NN[above[0], above[1]] = torch.pdist(gradients_NP.double()).square()
        return squares_NN + squares_NN.T

    def judge(self, measured: torch.Tensor, trust_N: torch.Tensor) -> Judgement:
        finite_N = measured.diagonal().isfinite()
        # Gradients that are not finite are known: the nearest are looked for among the others.
        squares_NN = torch.where(finite_N[:, None] & finite_N, measured, torch.inf)
        nearest = max(1, min(len(trust_N) - self.num_suspected - 2, int(finite_N.sum()) - 1))
        others_NN = squares_NN.sort(dim=1).values[:, 1:]  # the first is the distance to itself
        score_N = others_NN[:, :nearest].sum(dim=1)
        chosen_N = largest(-torch.where(finite_N, score_N.nan_to_num(), torch.inf), 1) & finite_N
        weights_N = chosen_N.double() / chosen_N.sum()
        return Judgement(weights_N, score_N.sqrt(), torch.full_like(trust_N, 1 / len(trust_N)))
