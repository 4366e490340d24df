"""Suspicion-weighted gradients: Algorithm 2 of the Pipe-Déjàvu paper, after Zeno (Xie et al., ICML 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dejavu.runtime.gradients.rules._base import Judgement, Rule, largest


@dataclass(frozen=True)
class Suspicion(Rule):
    """Weight gradients by how close they are to the weighted sum g of the step, and replace the least trusted ones.

    w_i = 1/N at first; in each step g = Σ w_i g_i, s_i = ‖g_i − g‖, w_i = α / (α + s_i); the `num_suspected` of least
    weight get the mean of the others' gradients; the step is made with Σ w_i ĝ_i.

    The paper does not divide the weights by their sum. Then equal gradients have s_i = 0, w_i = 1, and each step but
    the first is N times as long; here weights sum to 1. A gradient that is not finite has the weight 0.

    Up to `num_suspected` faulty gradients of a minority move the result no further from the mean of the honest ones
    than a few times the distance of these from each other: what is far away has the largest s_i and is replaced, what
    is near may stay. Colluding replicas in the midst of the honest ones are not seen.

    Attributes:
        alpha: a distance, in the unit of the gradient's norm; the larger, the more alike the weights.
    """

    num_suspected: int = 1
    alpha: float = 1.0

    def judge(self, measured: torch.Tensor, trust_N: torch.Tensor) -> Judgement:
        suspicion_N = measured.sqrt()
        weights_N = self.alpha / (self.alpha + suspicion_N)
        weights_N = weights_N / weights_N.sum()
        replaced_N = largest(suspicion_N, self.num_suspected) | ~suspicion_N.isfinite()
        kept_N = ~replaced_N
        # Σ w_i ĝ_i, where ĝ_i of those replaced is the mean of those kept
        joined_N = (weights_N + (weights_N * replaced_N).sum() / kept_N.sum()) * kept_N
        trust_N = weights_N if bool(weights_N.isfinite().all()) else torch.full_like(trust_N, 1 / len(trust_N))
        return Judgement(joined_N, suspicion_N, trust_N)
