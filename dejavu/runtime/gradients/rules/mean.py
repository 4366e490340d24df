"""The mean of all gradients, whatever is in them: what an all-reduce of the replicas does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dejavu.runtime.gradients.rules._base import Judgement, Rule


@dataclass(frozen=True)
class Mean(Rule):
    """Take every gradient as it is; one that is not finite makes the result so. The least variance where none is wrong.

    In a training the all-reduce does it, without gathering: this member is what the others are compared with.
    """

    def judge(self, measured: torch.Tensor, trust_N: torch.Tensor) -> Judgement:
        equal_N = torch.full_like(trust_N, 1 / len(trust_N))
        suspicion_N = measured.sqrt()
        return Judgement(equal_N + torch.where(suspicion_N.isfinite(), 0.0, torch.nan), suspicion_N, equal_N)
