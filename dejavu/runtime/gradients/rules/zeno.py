"""Zeno++: gradients are accepted by the descent that they promise on held-out examples (Xie et al., ICML 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dejavu.runtime.gradients.rules._base import Judgement, Rule


@dataclass(frozen=True)
class Zeno(Rule):
    """Accept gradients that agree with v, the gradient of held-out examples, and take the mean of the accepted.

    The score of u is ⟨v, u⟩ − ρ ‖u‖², the first-order descent of the held-out loss for a unit learning rate
    (definition 3, divided by γ); u, the replica's gradient brought to the length of v, is accepted from −ε on. Any
    number of replicas may be faulty, if v is not. Where none is accepted the step's gradient is 0. Brought to the
    length of v, gradients lose their own: a clipped step.

    Attributes:
        rho: the weight ρ of the length.
        epsilon: ε, what a gradient may promise to lose and is still accepted, as a squared norm of a gradient.
    """

    rho: float = 0.002
    epsilon: float = 0.0

    def measure(self, gradients_NP: torch.Tensor, centre_P: torch.Tensor) -> torch.Tensor:
        """Return of each replica ⟨v, g⟩, ‖g‖² and ‖v‖²: (N, 3)."""
        held_out_P = centre_P.double()
        rows = []
        for row in gradients_NP:
            own_P = row.double()
            rows.append(torch.stack((held_out_P @ own_P, own_P @ own_P, held_out_P @ held_out_P)))
        return torch.stack(rows)

    def judge(self, measured: torch.Tensor, trust_N: torch.Tensor) -> Judgement:
        product_N, own_N, held_out_N = measured.unbind(dim=1)
        factor_N = torch.where((own_N > 0) & own_N.isfinite(), (held_out_N / own_N).sqrt(), 0.0)
        score_N = torch.where(own_N.isfinite(), product_N * factor_N - self.rho * held_out_N, -torch.inf)
        accepted_N = (score_N >= -self.epsilon) & (factor_N > 0)
        weights_N = factor_N * accepted_N / accepted_N.sum().clamp(min=1)
        # Of two gradients of one length, ‖u − v‖² = 2 (‖v‖² − ⟨v, u⟩).
        away_N = (2 * (held_out_N - product_N * factor_N)).clamp(min=0).sqrt()
        suspicion_N = torch.where(own_N.isfinite(), away_N, torch.inf)
        return Judgement(weights_N, suspicion_N, torch.full_like(trust_N, 1 / len(trust_N)))
