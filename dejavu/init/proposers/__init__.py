"""Which draws are tried. To add a way to choose them: its class, and one line here."""

from __future__ import annotations

from dejavu.foundation.registry import Family
from dejavu.init.proposers._base import Probe, Proposer, Scored
from dejavu.init.proposers.adaptive import Adaptive
from dejavu.init.proposers.bayesian import Bayesian
from dejavu.init.proposers.loss_and_gradient import LossAndGradient
from dejavu.init.proposers.samples import Families, LatinHypercube, Mixed, Random, Seeds, Single

__all__ = ["PROPOSERS", "Probe", "Proposer", "Scored"]

PROPOSERS: Family[Proposer] = Family(
    "proposer",
    {
        "mixed": Mixed(),
        "single": Single(),
        "random": Random(),
        "latin_hypercube": LatinHypercube(),
        "families": Families(),
        "adaptive": Adaptive(),
        "bayesian": Bayesian(),
        "loss_and_gradient": LossAndGradient(),
        "seeds": Seeds(),
    },
    field=("trials", "proposer"),
)
